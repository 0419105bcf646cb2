"""The only door to Volt for other programs.

Every method returns a model or nothing, and raises a class of ``volt.errors``. A client may be shared by threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from volt import errors
from volt.deploymodels import (
    Deployment,
    DeploymentHost,
    DeploymentLeg,
    DeploymentList,
    DeploymentRequest,
    TransferReport,
    TransferState,
    TransferTask,
    TransferTerms,
)
from volt.fields import AGENT_HEADER, Name
from volt.http import httpx
from volt.models import (
    Assignment,
    BootSet,
    Child,
    DeadParentReport,
    HeartbeatAnswer,
    HeartbeatRequest,
    Host,
    HostList,
    HostRequest,
    HostState,
    Image,
    ImageList,
    ImageTree,
    JoinRequest,
    NodeReport,
    NodeState,
    Parent,
    ProblemDocument,
    PublishRequest,
    TreeNode,
    summary,
)
from volt.tokens import read_token

__all__ = [
    "Assignment",
    "BootSet",
    "Child",
    "Deployment",
    "DeploymentHost",
    "DeploymentLeg",
    "DeploymentRequest",
    "HeartbeatAnswer",
    "Host",
    "HostState",
    "Image",
    "ImageTree",
    "NodeReport",
    "NodeState",
    "Parent",
    "TransferReport",
    "TransferState",
    "TransferTask",
    "TransferTerms",
    "TreeNode",
    "VoltClient",
]


TIMEOUT = 5.0
"""Seconds for each wait for the network, of clients that are made without a timeout of their own."""

_Answer = TypeVar("_Answer", bound=BaseModel)
_NAME: TypeAdapter[str] = TypeAdapter(Name)


class VoltClient:
    """Volt at ``url``; ``timeout`` in seconds bounds each wait for the network; ``TIMEOUT`` by default.

    ``agent``: the id of the agent whose calls these are, 32 hexadecimal digits. All calls for a host raise HostTaken
    while another agent has the host's name.
    """

    def __init__(self, url: str, token_file: Path | None = None, timeout: float | None = None, agent: str = "") -> None:
        """Read the token file; nothing is sent yet. Raises VoltError."""
        self._url = url
        timeout = TIMEOUT if timeout is None else timeout
        headers = {"Authorization": f"Bearer {read_token(token_file)}"} if token_file else {}
        if agent:
            headers[AGENT_HEADER] = agent
        # Volt is in the local network; a proxy of the environment is for other networks.
        self._http = httpx.Client(base_url=_checked_url(url), headers=headers, timeout=timeout, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def register(
        self, host: str, address: str, place: str | None = None, methods: Sequence[str] | None = None
    ) -> Host:  # fmt: skip
        """Register a host or refresh it. It keeps its places in the trees, unless it is in another ``place`` now.

        ``methods``: see HeartbeatRequest.
        """
        told = {"address": address, "place": place, "methods": None if methods is None else list(methods)}
        return self._call(Host, "PUT", f"/v1/hosts/{_name(host)}", HostRequest, **told)

    def hosts(self) -> list[Host]:
        """All registered hosts, by name."""
        return self._call(HostList, "GET", "/v1/hosts").hosts

    def remove_host(self, host: str) -> None:
        """Remove a host from all trees and delete it, if it is registered. Raises OriginNeeded."""
        self._send("DELETE", f"/v1/hosts/{_name(host)}")

    def heartbeat(
        self,
        host: str,
        nodes: list[NodeReport],
        kept: Sequence[str] = (),
        needed: Sequence[str] = (),
        address: str | None = None,
        place: str | None = None,
        transfers: Sequence[TransferReport] = (),
        methods: Sequence[str] = (),
    ) -> HeartbeatAnswer:
        """Report the host's images and learn what changed; the arguments are those of HeartbeatRequest.

        Raises HostUnknown: register, then join the images again.
        """
        path = f"/v1/hosts/{_name(host)}/heartbeat"
        told = {"nodes": nodes, "kept": list(kept), "needed": list(needed)}
        told |= {"address": address, "place": place, "transfers": list(transfers), "methods": list(methods)}
        return self._call(HeartbeatAnswer, "POST", path, HeartbeatRequest, **told)

    def publish(self, name: str, size: int, digest: str, origin: str, parent: str | None = None) -> Image:
        """Publish an image whose whole content ``origin`` serves from its own copy, or add one more origin.

        ``parent``: the image that this one was made of. An origin that knows none leaves what another one has said.

        Raises ImageConflict, HostHasNode, HostUnknown.
        """
        fields = {"name": name, "size": size, "digest": digest, "origin": origin, "parent": parent}
        return self._call(Image, "POST", "/v1/images", PublishRequest, **fields)

    def images(self) -> list[Image]:
        """All published images, by name."""
        return self._call(ImageList, "GET", "/v1/images").images

    def image(self, name: str) -> Image:
        """One image. Raises ImageUnknown."""
        return self._call(Image, "GET", f"/v1/images/{_name(name)}")

    def remove_image(self, name: str, *, when_unused: bool = False) -> None:
        """Remove an image that only its origins have. Raises ImageUnknown, ImageInUse with the other hosts.

        ``when_unused``: withdraw the image, also when it is in use. No further host gets it, except for a disk that
        moves, and the image goes when no host needs it.
        """
        self._send("DELETE", f"/v1/images/{_name(name)}", when_unused=when_unused)

    def join(self, image: str, host: str, *, moving: bool = False) -> Assignment:
        """Get a place in the image's tree: the same one when asked again, under a new revision.

        ``moving``: for a disk of the image that comes from another host. Only such a host gets a withdrawn image anew.

        Raises ImageUnknown, ImageWithdrawn, HostUnknown.
        """
        path = f"/v1/images/{_name(image)}/nodes"
        return self._call(Assignment, "POST", path, JoinRequest, host=host, moving=moving)

    def leave(self, image: str, host: str, dropped: int = -1, *, needed: bool = False) -> None:
        """Give up the host's place in the image's tree, if it has one. Raises OriginNeeded.

        ``dropped``: the host no longer reads by any assignment up to this revision. It can then join like a new host.

        ``needed``: the host may have VMs that need the image. The image stays until a heartbeat of the host neither
        reports nor needs it.
        """
        self._send("DELETE", f"/v1/images/{_name(image)}/nodes/{_name(host)}", dropped=dropped, needed=needed)

    def boot_set(self, image: str) -> BootSet:
        """What VMs read of the image while they boot; no ranges if no host has told. Raises ImageUnknown."""
        return self._call(BootSet, "GET", f"/v1/images/{_name(image)}/boot-set")

    def add_boot_set(self, image: str, ranges: Sequence[Sequence[int]]) -> None:
        """Tell what VMs of a host have read first, to be merged into what is known. Raises ImageUnknown."""
        content = BootSet(ranges=[list(each) for each in ranges]).model_dump_json()
        self._send("PUT", f"/v1/images/{_name(image)}/boot-set", content)

    def tree(self, image: str) -> ImageTree:
        """The image's tree. Raises ImageUnknown."""
        return self._call(ImageTree, "GET", f"/v1/images/{_name(image)}/tree")

    def deploy(self, wanted: DeploymentRequest) -> Deployment:
        """Bring a whole image to hosts. Raises ImageUnknown, ImageWithdrawn, HostUnknown, BadRequest."""
        return self._call(Deployment, "POST", "/v1/deployments", DeploymentRequest, **wanted.model_dump())

    def deployments(self) -> list[Deployment]:
        """All deployments, the newest first, without their hosts."""
        return self._call(DeploymentList, "GET", "/v1/deployments").deployments

    def deployment(self, number: int) -> Deployment:
        """One deployment. Raises DeploymentUnknown."""
        return self._call(Deployment, "GET", f"/v1/deployments/{number}")

    def cancel_deployment(self, number: int) -> None:
        """End a deployment; hosts that have all of the image keep it. Raises DeploymentUnknown."""
        self._send("DELETE", f"/v1/deployments/{number}")

    def report_dead(self, image: str, reporter: str, dead: str) -> Assignment:
        """Report that a parent does not answer; returns the reporter's new assignment.

        Raises NodeUnknown, ImageUnknown.
        """
        path = f"/v1/images/{_name(image)}/reports"
        return self._call(Assignment, "POST", path, DeadParentReport, reporter=reporter, dead=dead)

    def _call(
        self, answer: type[_Answer], method: str, path: str, request: type[BaseModel] | None = None, /, **fields: Any
    ) -> _Answer:
        try:
            content = request.model_validate(fields).model_dump_json() if request else None
        except ValidationError as error:
            raise errors.BadRequest(summary(error)) from error
        response = self._send(method, path, content)
        try:
            return answer.model_validate_json(response.content)
        except ValidationError as error:
            raise errors.VoltError(f"{method} {path}: {summary(error)}") from error

    def _send(self, method: str, path: str, content: str | None = None, **query: str | int | bool) -> httpx.Response:
        headers = {"Content-Type": "application/json"} if content is not None else {}
        try:
            response = self._http.request(method, path, content=content, headers=headers, params=query)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise errors.VoltUnreachable(f"{self._url}: {str(error) or type(error).__name__}") from error
        if not response.is_success:
            raise _problem(response)
        return response


def _checked_url(url: str) -> httpx.URL:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise errors.VoltError(f"{url!r} is not a URL of Volt: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise errors.VoltError(f"{url!r} is not a URL of Volt: it must be http://HOST:PORT or https://HOST:PORT")
    return parsed


def _name(value: str) -> str:
    """The value, if it is a name: a slash or a dot would change the path that it is put in."""
    try:
        return _NAME.validate_python(value)
    except ValidationError as error:
        raise errors.BadRequest(f"{value!r} is not a name: {summary(error)}") from error


def _problem(response: httpx.Response) -> errors.VoltError:
    """The problem that Volt answered with."""
    try:
        document = ProblemDocument.model_validate_json(response.content)
    except ValidationError:
        document = None
    if document is None or not document.type.startswith(errors.TYPE_PREFIX):
        return errors.VoltError(f"{response.request.method} {response.request.url}: status {response.status_code}")
    problem = errors.KINDS.get(document.type, errors.Problem)(document.detail, tuple(document.hosts))
    problem.status = document.status
    return problem
