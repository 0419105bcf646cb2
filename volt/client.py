"""The only door to Volt for other programs.

Every method returns a model or nothing, and raises a class of ``volt.errors``. A client may be shared by threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from volt import errors
from volt.http import httpx
from volt.models import (
    AGENT_HEADER,
    NAME_PATTERN,
    Assignment,
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
    Name,
    NodeReport,
    NodeState,
    Parent,
    ProblemDocument,
    PublishRequest,
    TreeNode,
    summary,
)
from volt.tokens import read_token

if TYPE_CHECKING:
    from rich.tree import Tree

__all__ = [
    "NAME_PATTERN",
    "Assignment",
    "Child",
    "HeartbeatAnswer",
    "Host",
    "HostState",
    "Image",
    "ImageTree",
    "NodeReport",
    "NodeState",
    "Parent",
    "TreeNode",
    "VoltClient",
    "render_tree",
]


_Answer = TypeVar("_Answer", bound=BaseModel)
_NAME: TypeAdapter[str] = TypeAdapter(Name)

PROBLEMS = {problem.type(): problem for problem in errors.Problem.__subclasses__()}
"""Problem ``type`` to exception class."""

TRANSPORT_ERRORS: dict[type[Exception], type[errors.VoltError]] = {
    httpx.TimeoutException: errors.VoltTimeout,
    httpx.NetworkError: errors.VoltUnreachable,
    httpx.ProxyError: errors.VoltUnreachable,
    httpx.RemoteProtocolError: errors.VoltUnreachable,
    httpx.LocalProtocolError: errors.BadRequest,
    httpx.UnsupportedProtocol: errors.VoltUnreachable,
    httpx.InvalidURL: errors.VoltUnreachable,
    httpx.DecodingError: errors.BadAnswer,
    httpx.TooManyRedirects: errors.BadAnswer,
}
"""httpx's errors to ours. The most specific class that fits is used (its place in the exception's own ancestry)."""


def translate(error: Exception, url: str) -> errors.VoltError:
    """The error of ours for one of httpx that came of a call to ``url``."""
    for ancestor in type(error).__mro__:
        if ancestor in TRANSPORT_ERRORS:
            return TRANSPORT_ERRORS[ancestor](f"{url}: {str(error) or type(error).__name__}")
    return errors.VoltUnreachable(f"{url}: {type(error).__name__}: {error}")


def render_tree(tree: ImageTree) -> Tree:
    """The tree for rich's console."""
    from volt import treeview

    return treeview.render(tree)


class VoltClient:
    """Volt at ``url``; ``timeout`` in seconds bounds each wait for the network.

    ``agent``: the id of the agent whose calls these are, 32 hexadecimal digits. All calls of a host raise
    ``errors.HostTaken`` while another agent has the host's name.
    """

    def __init__(self, url: str, token_file: Path | None = None, timeout: float = 5.0, agent: str = "") -> None:
        """Read the token file; nothing is sent yet.

        Raises:
            errors.TokenFileUnusable: the token file is missing, empty, or readable by everyone.
            errors.BadUrl: the URL is none of HTTP.
        """
        self._url = url
        headers = {"Authorization": f"Bearer {read_token(token_file)}"} if token_file else {}
        if agent:
            headers[AGENT_HEADER] = agent
        try:
            parts = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise errors.BadUrl(
                f"{url!r} is not a URL of Volt, http://HOST:PORT or https://HOST:PORT: {error}"
            ) from error
        if parts.scheme not in ("http", "https") or not parts.host:
            raise errors.BadUrl(f"{url!r} is not a URL of Volt: it must be http://HOST:PORT or https://HOST:PORT")
        # The coordinator is inside: a proxy of the environment is for the world outside.
        self._http = httpx.Client(base_url=parts, headers=headers, timeout=timeout, trust_env=False)

    def __enter__(self) -> Self:
        """Use the client and close it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connections."""
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def register(self, host: str, address: str) -> Host:
        """Register a host or refresh it; keeps its places in the trees."""
        return self._call(Host, "PUT", f"/v1/hosts/{_name(host)}", HostRequest, address=address)

    def hosts(self) -> list[Host]:
        """All registered hosts, by name."""
        return self._call(HostList, "GET", "/v1/hosts").hosts

    def remove_host(self, host: str) -> None:
        """Take a host out of all trees and forget it; nothing happens if it is not there.

        Raises:
            errors.OriginNeeded: it is the only origin of an image.
        """
        self._send("DELETE", f"/v1/hosts/{_name(host)}")

    def heartbeat(
        self,
        host: str,
        nodes: list[NodeReport],
        kept: Sequence[str] = (),
        needed: Sequence[str] = (),
        address: str | None = None,
    ) -> HeartbeatAnswer:
        """Say what the host has, and the digests of what it ``kept`` without a stack; learn what changed.

        ``needed``: images that it may need besides, since it has records of them that it cannot use now.
        ``address``: the host's address, which corrects the address that Volt has.

        Raises:
            errors.HostUnknown: register, then join again.
        """
        path = f"/v1/hosts/{_name(host)}/heartbeat"
        told = {"nodes": nodes, "kept": list(kept), "needed": list(needed), "address": address}
        return self._call(HeartbeatAnswer, "POST", path, HeartbeatRequest, **told)

    def publish(self, name: str, size: int, digest: str, origin: str) -> Image:
        """Publish an image whose whole content ``origin`` serves from its own copy, or add one more origin.

        Raises:
            errors.ImageConflict: the name is taken by other content.
            errors.HostHasNode: the origin reads this image from the tree: leave first.
            errors.HostUnknown: the origin is not registered.
        """
        return self._call(
            Image, "POST", "/v1/images", PublishRequest, name=name, size=size, digest=digest, origin=origin
        )

    def images(self) -> list[Image]:
        """All published images, by name."""
        return self._call(ImageList, "GET", "/v1/images").images

    def image(self, name: str) -> Image:
        """One image.

        Raises:
            errors.ImageUnknown: no such image.
        """
        return self._call(Image, "GET", f"/v1/images/{_name(name)}")

    def remove_image(self, name: str, *, when_unused: bool = False) -> None:
        """Withdraw an image that no host but its origins has.

        ``when_unused``: withdraw it in any case. No further host gets it, but for a disk that moves, and it goes when
        it is not needed any more.

        Raises:
            errors.ImageUnknown: no such image.
            errors.ImageInUse: the hosts that still have it are in ``hosts``; never ``when_unused``.
        """
        self._send("DELETE", f"/v1/images/{_name(name)}{'?when_unused=true' if when_unused else ''}")

    def join(self, image: str, host: str, *, moving: bool = False) -> Assignment:
        """A place in the image's tree, the same one when asked again, under a new revision.

        ``moving``: for a disk of the image that comes from another host.

        Raises:
            errors.ImageUnknown: no such image.
            errors.ImageWithdrawn: it is withdrawn, and the host has not got it; never for a disk that is ``moving``.
            errors.HostUnknown: the host is not registered.
        """
        path = f"/v1/images/{_name(image)}/nodes"
        return self._call(Assignment, "POST", path, JoinRequest, host=host, moving=moving)

    def leave(self, image: str, host: str, dropped: int = -1, *, needed: bool = False) -> None:
        """Give the place up; nothing happens if there is none.

        ``needed``: the host may have VMs that need the image; the image stays until it reports that it has none of it.

        ``dropped``: the host reads by no assignment of this revision or an older one any more. It can then come back
        like a new host.

        Raises:
            errors.OriginNeeded: the host is the image's last origin.
        """
        query = f"dropped={dropped}{'&needed=true' if needed else ''}"
        self._send("DELETE", f"/v1/images/{_name(image)}/nodes/{_name(host)}?{query}")

    def tree(self, image: str) -> ImageTree:
        """The image's tree.

        Raises:
            errors.ImageUnknown: no such image.
        """
        return self._call(ImageTree, "GET", f"/v1/images/{_name(image)}/tree")

    def report_dead(self, image: str, reporter: str, dead: str) -> Assignment:
        """Say that a parent does not answer; returns the reporter's parents from now on.

        Raises:
            errors.NodeUnknown: the reporter has no place in the tree.
            errors.ImageUnknown: no such image.
        """
        return self._call(
            Assignment, "POST", f"/v1/images/{_name(image)}/reports", DeadParentReport, reporter=reporter, dead=dead
        )

    def _call(
        self, answer: type[_Answer], method: str, path: str, request: type[BaseModel] | None = None, **fields: Any
    ) -> _Answer:
        try:
            content = request.model_validate(fields).model_dump_json() if request else None
        except ValidationError as error:
            raise errors.BadRequest(summary(error)) from error
        response = self._send(method, path, content)
        try:
            return answer.model_validate_json(response.content)
        except ValidationError as error:
            raise errors.BadAnswer(f"{method} {path}: {summary(error)}") from error

    def _send(self, method: str, path: str, content: str | None = None) -> httpx.Response:
        headers = {"Content-Type": "application/json"} if content is not None else {}
        try:
            response = self._http.request(method, path, content=content, headers=headers)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise translate(error, self._url) from error
        if not response.is_success:
            raise _problem(response)
        return response


def _name(value: str) -> str:
    """The value, if it is a name: a slash or a dot would change the path that it is put in."""
    try:
        return _NAME.validate_python(value)
    except ValidationError as error:
        raise errors.BadRequest(f"{value!r} is not a name: {summary(error)}") from error


def _problem(response: httpx.Response) -> errors.VoltError:
    """What Volt refused, in its own words; a Problem where it is of a kind that only a later version knows."""
    try:
        document = ProblemDocument.model_validate_json(response.content)
    except ValidationError:
        document = None
    if document is None or not document.type.startswith(errors.TYPE_PREFIX):
        return errors.BadAnswer(f"{response.request.method} {response.request.url}: status {response.status_code}")
    problem = PROBLEMS.get(document.type, errors.Problem)(document.detail, tuple(document.hosts))
    problem.status = document.status
    return problem
