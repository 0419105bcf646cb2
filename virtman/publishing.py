"""This host becomes the origin of images, and is no origin any more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from drivers.base import Image
from drivers.digests import BLAKE3, DRAWN, draw, key_of, kind_of, proves_chunks
from drivers.errors import DriverError
from drivers.host.locks import NamedLocks
from virtman import inplace, models
from virtman.cleaning import remove
from virtman.convert import Content, Progress, holds, node_of
from virtman.copies import content_of_vm, device_of_image
from virtman.errors import (
    BadImageFile,
    BadRequest,
    CoordinatorDown,
    ImageExists,
    ImageInUse,
    UnknownImage,
    VirtmanError,
)
from virtman.fdpassing import Passed
from virtman.hosting import leave_later
from virtman.imagefile import Base, check_size, source
from virtman.origins import add_origin, drop_origin, not_this_content, take_back
from virtman.records import DETACH, PUBLISH, ImageRecord, InPlace, Role
from virtman.serving import restore
from virtman.steps import Step, log_step
from virtman.vms import Vms
from volt.client import Image as PublishedImage


class Publishing:
    """Publishes files, files and devices in place, and VMs' disks.

    ``private``: the agent's own folders, from which nothing is published in place.
    """

    def __init__(self, vms: Vms, private: Sequence[Path], step: Step = log_step) -> None:
        self._vms, self._stacks, self._store, self._volt = vms, vms.images, vms.images.store, vms.images.volt
        self._placing = NamedLocks()
        """Held, by what identifies a block device, while it is published in place."""
        self._private = private
        self._step = step

    def publish(
        self, name: str, file: Path | Passed, progress: Progress, parent: str | None = None
    ) -> models.Published:  # fmt: skip
        """Make this host the origin of an image with the file's content.

        ``parent``: the image that this one was made of. If the file is an overlay, this host reads from the stack of
        the parent what the file does not have, and attaches the parent for that. Raises BadImageFile, NoRoom,
        ImageExists, CoordinatorDown, DriverError; for the parent BadRequest, and as ``hosting.ensure``.
        """
        self._check_name(name)
        with (
            self._base(name, parent) as base,
            source(file, self._store.folder, self._store.room, progress, base) as content,
        ):
            return self._publish(name, content, progress, parent)

    @contextmanager
    def _base(self, name: str, parent: str | None) -> Iterator[Base | None]:
        """What reads the parent of an image to publish, whose stack stays meanwhile. Raises BadRequest, UnknownImage.

        Without an answer of Volt a parent that is not on this host counts as known.
        """
        if parent is None:
            yield None
            return
        if parent == name:
            raise BadRequest(f"image {name!r} cannot be its own parent")
        if self._stacks.records.get(parent) is None:
            with suppress(CoordinatorDown):
                self._volt.image(parent)
        with self._stacks.keeping(parent):
            yield lambda: node_of(device_of_image(self._stacks, parent))

    def publish_vm(self, name: str, vm: str, progress: Progress) -> models.Published:
        """Make this host the origin of an image with what a VM's disk holds now. Its parent is the VM's image.

        Raises as ``disks.take``, BadImageFile, NoRoom, ImageExists, CoordinatorDown.
        """
        record = self._vms.record(vm)
        if record.size is not None:
            check_size(f"the disk of vm {vm}", record.size)
        self._check_name(name, record.size)
        parent = record.image if record.image != name else None
        with content_of_vm(self._vms, vm) as (content, _snapshot):
            return self._publish(name, content, progress, parent)

    def _publish(self, name: str, content: Content, progress: Progress, parent: str | None) -> models.Published:
        with self._store.publishing.hold(name):
            kind = self._check_name(name, content.size) or BLAKE3
            image = self._published_already(name, content, progress) or self._store.add(name, content, progress, kind)
            self._step("publish:stored")
            try:
                record = add_origin(self._stacks, image, parent=parent)
            except (VirtmanError, DriverError):
                remove(self._stacks, image.key, publishing=name)
                raise
        return _published(record)

    def _check_name(self, name: str, size: int | None = None) -> str | None:
        """Refuse a copy of ``size`` bytes under the name of another image, as far as is known before the copy is read.

        Content of the same size may be the published content. Returns the kind of the published digest, if known.
        Raises ImageExists.
        """
        here = self._stacks.records.get(name)
        if here is not None and (here.role is Role.HOST or here.in_place is not None):
            raise not_this_content(here)
        if here is not None and here.size is not None:
            known, digest = here.size, str(here.digest)
        else:
            listed = self._listed(name)
            if listed is None:
                return None
            known, digest = listed.size, listed.digest
        if digest.startswith(DRAWN) or size not in (None, known):
            raise ImageExists(
                f"image {name!r} is published already, and holds something else: {known} bytes, {digest}; choose"
                " another name"
            )
        return kind_of(digest)

    def _published_already(self, name: str, content: Content, progress: Progress) -> Image | None:
        """The image that this host published under a name, which holds the same. None: there is none.

        Raises ImageExists if it holds something else.
        """
        here = self._stacks.records.get(name)
        if here is None or here.digest is None or not (stored := self._store.path(here.image)).exists():
            return None
        if not holds(content, stored, progress):
            raise not_this_content(here)
        return here.image

    def publish_in_place(
        self, name: str, file: Path | Passed, trust: str | None, progress: Progress, *, digest: bool
    ) -> models.Published:
        """Make this host the origin of an image whose content stays where it is. ``trust``: the digest of the content.

        The same object may be published again by another path; another object takes its place only if it is trusted to
        have the same digest. ``digest``: compute the sum of the content later. Raises BadImageFile, ImageExists,
        CoordinatorDown, DriverError, NoRoom, HostTrouble.
        """
        with (
            self._store.publishing.hold(name),
            inplace.to_publish(file, self._private) as (found, fd),
            self._placing.hold(found.identity),
        ):
            before = self._stacks.records.get(name)
            if before is not None and self._is_same(before, found, trust):
                image, wanted = before.image, (before.in_place or found).model_copy(update={"path": found.path})
            else:
                if before is not None and (
                    before.in_place is None or before.digest != trust or before.size != found.size
                ):
                    raise not_this_content(before)
                self._check_unpublished(name, found)
                inplace.check_free(found, fd)
                image, wanted = Image(name, found.size, trust or self._new_digest(name, found)), found
                if proves_chunks(image.digest):
                    wanted = self._proven(image, found, fd, progress)
            if digest:
                wanted = wanted.model_copy(update={"digest": True})
            progress("look", found.size, found.size)  # ends if the caller has hung up meanwhile
            return _published(add_origin(self._stacks, image, wanted))

    def _proven(self, image: Image, found: InPlace, fd: int, progress: Progress) -> InPlace:
        """Read all of what is trusted to hold an image: its children ask for the names of its chunks.

        Raises BadImageFile if it holds something else.
        """
        content = self._store.prove(fd, found.size, image.digest, progress)
        if content != image.digest:
            raise BadImageFile(f"{found.path} holds {content}, and not {image.digest}")
        return found.model_copy(update={"digest": True, "content": content})

    def _is_same(self, before: ImageRecord, found: InPlace, trust: str | None) -> bool:
        """Whether this is published in place already. Raises ImageExists if it is, with another digest."""
        if before.in_place is None or inplace.differs(before.in_place, found):
            return False
        if trust not in (None, before.digest):
            raise ImageExists(
                f"image {before.name!r} is published from {before.in_place.path} already, with digest {before.digest}"
            )
        return True

    def _check_unpublished(self, name: str, found: InPlace) -> None:
        """Raises ImageExists if a device is published in place under another name."""
        for record in self._stacks.records.all():
            known = None if record.leaving or record.name == name else record.in_place
            if found.identity and known is not None and known.identity == found.identity:
                raise ImageExists(f"{found.path} is published in place already, as image {record.name!r}")

    def _new_digest(self, name: str, found: InPlace) -> str:
        """An identity for content that nobody has read. Raises ImageExists if Volt has content under this name."""
        listed = self._listed(name)
        if listed is None:
            return draw()
        raise ImageExists(
            f"image {name!r} is published already, with digest {listed.digest}; if {found.path} holds just that, say"
            f" so: virtman publish {name} {found.path} --in-place --trust {listed.digest}"
        )

    def _listed(self, name: str) -> PublishedImage | None:
        """What Volt lists under a name; None also if Volt does not answer, and decides later."""
        try:
            return self._volt.image(name)
        except (UnknownImage, CoordinatorDown):
            return None

    def unpublish(self, name: str, *, when_unused: bool = False) -> models.Unpublished:
        """Be no origin of an image any more; without another origin Volt withdraws the image.

        The image is served until no VM of this host needs it; ``gc`` deletes the content. An image that is yet to be
        announced is taken back only when Volt agrees. ``when_unused``: the last origin serves the image until no host
        needs it, and the content goes without ``gc``. Raises UnknownImage (this host did not publish the image),
        ImageInUse (never ``when_unused``), CoordinatorDown, DriverError.
        """
        with self._store.publishing.hold(name):
            record = self._published(name)
            withdrawn = self._unpublish(name, when_unused=when_unused)
            for digest in record.digests if when_unused and not withdrawn else ():
                remove(self._stacks, key_of(digest), publishing=name)
        self._stacks.changed()
        return models.Unpublished(name=name, serving=self._stacks.source.serving(name), withdrawn=withdrawn)

    def _unpublish(self, name: str, *, when_unused: bool) -> bool:
        """Returns whether Volt goes on listing the image with this host as its origin, as withdrawn."""
        if self._published(name).doing(PUBLISH) and self._take_back(name, when_unused=when_unused):
            return False
        record = self._published(name)
        if record.leaving:
            leave_later(self._stacks, name)
            return False
        self._volt.withdraw(name, when_unused=when_unused)
        if record.doing(DETACH):
            restore(self._stacks, name)
            return False
        if when_unused and name in self._volt.origins_here():
            return True
        drop_origin(self._stacks, name, given_up=True)
        return False

    def _take_back(self, name: str, *, when_unused: bool) -> bool:
        """Take back an image that is not announced. If somebody reads it, and ``when_unused``, announce it first."""
        try:
            return take_back(self._stacks, name)
        except ImageInUse:
            if not when_unused:
                raise
            restore(self._stacks, name)
            return False

    def _published(self, name: str) -> ImageRecord:
        """The record of an image that this host published. Raises UnknownImage, StateDamaged."""
        record = self._stacks.records.get(name)
        if record is None or record.role is not Role.ORIGIN:
            raise UnknownImage(f"image {name!r} was not published by this host")
        return record


def _published(record: ImageRecord) -> models.Published:
    return models.Published(name=record.image.name, size=record.image.size, digest=record.image.digest)
