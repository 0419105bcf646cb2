"""Volt as this host sees it: every call is in this host's name, and its errors are the agent's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

from drivers.base import Image
from virtman.errors import (
    CoordinatorDown,
    HostTaken,
    ImageExists,
    ImageInUse,
    ImageWithdrawn,
    UnknownImage,
    VirtmanError,
    VoltRefused,
)
from volt import errors as volt_errors
from volt.client import (
    Assignment,
    Deployment,
    DeploymentRequest,
    HeartbeatAnswer,
    Host,
    ImageTree,
    NodeReport,
    TransferReport,
    VoltClient,
)
from volt.client import Image as PublishedImage

T = TypeVar("T")

ERRORS: dict[type[volt_errors.VoltError], type[VirtmanError]] = {
    volt_errors.HostTaken: HostTaken,
    volt_errors.ImageUnknown: UnknownImage,
    volt_errors.ImageConflict: ImageExists,
    volt_errors.HostHasNode: ImageExists,
    volt_errors.ImageInUse: ImageInUse,
    volt_errors.ImageWithdrawn: ImageWithdrawn,
}
"""Volt's refusals that have a class of their own here."""


class VoltLink:
    """One host's calls to Volt. ``address`` is where its children reach it; ``place`` its site and rack; ``methods``:
    those by which it can get whole images."""

    def __init__(
        self, client: VoltClient, host: str, address: str, place: str = "", methods: Sequence[str] = ()
    ) -> None:  # fmt: skip
        self._client = client
        self._host = host
        self._address, self._place, self._methods = address, place, methods

    def heartbeat(
        self, nodes: list[NodeReport], kept: Sequence[str] = (), needed: Sequence[str] = (),
        transfers: Sequence[TransferReport] = (),
    ) -> HeartbeatAnswer:  # fmt: skip
        """Tell Volt what this host has, the digests of what it keeps besides, and images that it may need besides.

        ``transfers``: how far it is in deployments. Raises CoordinatorDown.
        """
        told = (nodes, kept, needed, self._address, self._place, transfers, self._methods)
        return self._call(lambda: self._client.heartbeat(self._host, *told))

    def deploy(self, wanted: DeploymentRequest) -> Deployment:
        """Bring a whole image to hosts. Raises UnknownImage, ImageWithdrawn, VoltRefused, CoordinatorDown."""
        return self._call(lambda: self._client.deploy(wanted))

    def deployments(self) -> list[Deployment]:
        """All deployments, the newest first, without their hosts. Raises CoordinatorDown."""
        return self._call(self._client.deployments)

    def deployment(self, number: int) -> Deployment:
        """Raises VoltRefused, CoordinatorDown."""
        return self._call(lambda: self._client.deployment(number))

    def cancel_deployment(self, number: int) -> None:
        """Raises VoltRefused, CoordinatorDown."""
        self._call(lambda: self._client.cancel_deployment(number))

    def join(self, image: str, *, moving: bool = False) -> Assignment:
        """Take this host's place in the image's tree. ``moving``: for a disk that comes from another host.

        Raises UnknownImage, ImageWithdrawn, CoordinatorDown.
        """
        return self._call(lambda: self._client.join(image, self._host, moving=moving))

    def leave(self, image: str, dropped: int = -1) -> None:
        """Give the place up; an image or host that Volt does not know has none.

        ``dropped``: the host reads by no assignment of this revision or an older one any more.

        Raises CoordinatorDown, VoltRefused (the place is that of the last origin, for which there is ``withdraw``).
        """

        def act() -> None:
            try:
                self._client.leave(image, self._host, dropped)
            except volt_errors.OriginNeeded as error:
                raise VoltRefused(
                    f"Volt lists this host, {self._host}, as the only origin of image {image!r}, and this agent has"
                    f" nothing of it: remove the image: volt images remove {image}"
                ) from error

        with contextlib.suppress(UnknownImage):
            self._call(act)

    def withdraw(self, image: str, dropped: int = -1, *, when_unused: bool = False) -> None:
        """Give up the place of an origin, as ``leave``. Raises ImageInUse, CoordinatorDown.

        An image that loses its last origin so is withdrawn: nobody could serve it. So this is for who has the content.
        ``when_unused``: its last origin stays as long as it is needed (``withdrawn``), in place of an ImageInUse.
        Another origin leaves. Volt awaits this host, whose VMs may need the image, until it does not report the image.
        """

        def act() -> None:
            try:
                self._client.leave(image, self._host, dropped, needed=when_unused)
            except volt_errors.OriginNeeded:
                self._client.remove_image(image, when_unused=when_unused)

        with contextlib.suppress(UnknownImage):
            self._call(act)

    def publish(self, image: Image, parent: str | None = None) -> Assignment:
        """Announce an image whose origin is this host. ``parent``: the image that this one was made of, if known.

        Raises ImageExists, HostTaken, CoordinatorDown.
        """
        self._call(lambda: self._client.publish(image.name, image.size, image.digest, self._host, parent))
        return self.join(image.name)

    def report(self, image: str, dead: str) -> Assignment:
        """Say that a parent is dead and get new ones. Raises UnknownImage, CoordinatorDown."""
        return self._call(lambda: self._client.report_dead(image, self._host, dead))

    def hosts(self) -> list[Host]:
        """All registered hosts. Raises CoordinatorDown."""
        return self._call(self._client.hosts)

    def images(self) -> list[PublishedImage]:
        """All published images. Raises CoordinatorDown."""
        return self._call(self._client.images)

    def origins_here(self) -> set[str]:
        """The images that are published with this host as an origin. Raises CoordinatorDown."""
        return {image.name for image in self.images() if self._host in image.origins}

    def image(self, image: str) -> PublishedImage:
        """What is published under the name. Raises UnknownImage, CoordinatorDown."""
        return self._call(lambda: self._client.image(image))

    def boot_set(self, image: str) -> list[list[int]]:
        """What VMs read first, as ranges with their ends. Raises UnknownImage, CoordinatorDown."""
        return self._call(lambda: self._client.boot_set(image)).ranges

    def add_boot_set(self, image: str, ranges: Sequence[Sequence[int]]) -> None:
        """Tell what VMs of this host have read first. Raises UnknownImage, CoordinatorDown."""
        self._call(lambda: self._client.add_boot_set(image, ranges))

    def tree(self, image: str) -> ImageTree:
        return self._call(lambda: self._client.tree(image))

    def close(self) -> None:
        self._client.close()

    def _call(self, call: Callable[[], T]) -> T:
        try:
            try:
                return call()
            except volt_errors.HostUnknown:
                self._register()
                return call()
        except volt_errors.VoltError as error:
            raise translated(error) from error

    def register(self) -> None:
        """Tell Volt this host's address, place and methods, which may have changed. Raises CoordinatorDown."""
        self._call(self._register)

    def _register(self) -> None:
        self._client.register(self._host, self._address, self._place, self._methods)


def translated(error: volt_errors.VoltError) -> VirtmanError:
    """The agent's error for one of Volt, in Volt's words."""
    refused = isinstance(error, volt_errors.Problem) and error.status < 500
    return ERRORS.get(type(error), VoltRefused if refused else CoordinatorDown)(f"Volt: {error}")
