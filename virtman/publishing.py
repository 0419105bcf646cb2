"""This host becomes the origin of images, and is no origin any more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from drivers.base import Image
from drivers.digests import DRAWN, draw, key_of, kind_of
from drivers.errors import DriverError
from drivers.host.locks import NamedLocks
from drivers.host.space import Room
from virtman import inplace, models, views
from virtman.convert import Content, Progress, holds
from virtman.copies import Copies
from virtman.errors import CoordinatorDown, ImageExists, ImageInUse, UnknownImage, VirtmanError
from virtman.fdpassing import Passed
from virtman.imagefile import check_size, source
from virtman.imagestore import ImageStore
from virtman.records import DETACH, PUBLISH, ImageRecord, InPlace, Role
from virtman.retained import Retained
from virtman.stacks import Stacks, published_otherwise
from virtman.steps import Step, log_step
from virtman.vms import Vms
from virtman.voltlink import VoltLink


def _quietly(_step: str, _done: int, _total: int) -> None:
    """Progress that nobody looks at."""


class Publishing:
    """Publishes files, what is served in place, and VMs' disks. ``locks``: held by name while an image is published.

    ``private``: the agent's own folders, from which nothing is published in place. ``changed`` is called when Volt
    should hear of it soon.
    """

    def __init__(
        self, stacks: Stacks, vms: Vms, copies: Copies, store: ImageStore, retained: Retained, volt: VoltLink,
        room: Room, locks: NamedLocks, private: Sequence[Path], changed: Callable[[], None], step: Step = log_step,
    ) -> None:  # fmt: skip
        self._stacks, self._vms, self._copies = stacks, vms, copies
        self._store, self._retained, self._room = store, retained, room
        self._volt = volt
        self._locks = locks
        self._placing = NamedLocks()
        """Held, by what identifies a block device, while it is published in place."""
        self._private = private
        self._changed = changed
        self._step = step

    def publish(self, name: str, file: Path | Passed, progress: Progress) -> models.Published:
        """Make this host the origin of an image with the file's content.

        Raises BadImageFile, NoRoom, ImageExists, CoordinatorDown, DriverError.
        """
        self._check_name(name)
        with source(file, self._store.folder, self._room, progress) as content:
            return self._publish(name, content, progress)

    def publish_vm(self, name: str, vm: str, progress: Progress) -> models.Published:
        """Make this host the origin of an image with what a VM's disk holds now.

        Raises as ``disks.take``, BadImageFile, NoRoom, ImageExists, CoordinatorDown.
        """
        size = self._vms.record(vm).size
        if size is not None:
            check_size(f"the disk of vm {vm}", size)
        self._check_name(name, size)
        with self._copies.vm(vm) as (content, _snapshot):
            return self._publish(name, content, progress)

    def _publish(self, name: str, content: Content, progress: Progress) -> models.Published:
        with self._locks.hold(name):
            kind = self._check_name(name, content.size)
            image = self._published_already(name, content, progress) or self._store.add(name, content, progress, kind)
            self._step("publish:stored")
            try:
                record = self._stacks.add_origin(image)
            except (VirtmanError, DriverError):
                self._retained.remove(image.key, publishing=name)
                raise
        return views.published(record)

    def _check_name(self, name: str, size: int | None = None) -> str | None:
        """Whether a copy, of ``size`` bytes, may be published under a name, as far as that is known before it is read.

        It may if it holds what is published already: what has the same size is yet to be read. Returns the kind of the
        digest of what is published, if that is known. Raises ImageExists.
        """
        here = self._stacks.find(name)
        if here is not None and here.role is Role.HOST:
            raise ImageExists(
                f"image {name!r} is on this host already, and another host published it; choose another name"
            )
        if here is not None and here.in_place is not None:
            raise published_otherwise(here)
        if here is not None and here.size is not None:
            known, digest = here.size, str(here.digest)
        else:
            try:
                listed = self._volt.image(name)
            except (UnknownImage, CoordinatorDown):  # one that does not answer decides when it does
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
        here = self._stacks.find(name)
        if here is None or here.digest is None or not (stored := self._store.path(here.image)).exists():
            return None
        if not holds(content, stored, progress):
            raise ImageExists(
                f"image {name!r} is on this host already, and not from this content; choose another name, or:"
                f" virtman unpublish {name}"
            )
        return here.image

    def publish_in_place(
        self, name: str, file: Path | Passed, trust: str | None, *, digest: bool,
        progress: Progress = _quietly,
    ) -> models.Published:  # fmt: skip
        """Make this host the origin of an image whose content stays where it is. ``trust``: the digest that it has.

        What is published so already stays so, also by another path; something else takes its place only if it is
        trusted to have the same digest. ``digest``: its sum is computed when it is served. Raises BadImageFile,
        ImageExists, CoordinatorDown, DriverError, NoRoom, HostTrouble.
        """
        with (
            self._locks.hold(name),
            inplace.to_publish(file, self._private) as (found, fd),
            self._placing.hold(found.identity),
        ):
            before = self._stacks.find(name)
            if before is not None and self._is_same(before, found, trust):
                image, wanted = before.image, (before.in_place or found).model_copy(update={"path": found.path})
            else:
                self._check_new(name, found, before, trust)
                inplace.check_free(found, fd)
                image, wanted = Image(name, found.size, trust or self._new_digest(name, found)), found
            if digest:
                wanted = wanted.model_copy(update={"digest": True})
            progress("look", found.size, found.size)  # a caller who has hung up while the file was written out ends it
            return views.published(self._stacks.add_origin(image, wanted))

    def _is_same(self, before: ImageRecord, found: InPlace, trust: str | None) -> bool:
        """Whether this is published in place already. Raises ImageExists if it is, with another digest."""
        if before.in_place is None or inplace.differs(before.in_place, found):
            return False
        if trust not in (None, before.digest):
            raise ImageExists(
                f"image {before.name!r} is published from {before.in_place.path} already, with digest {before.digest}"
            )
        return True

    def _check_new(self, name: str, found: InPlace, before: ImageRecord | None, trust: str | None) -> None:
        """Whether something may be published in place under this name, and no other one. Raises ImageExists."""
        if before is not None and (before.in_place is None or before.digest != trust or before.size != found.size):
            had = "" if before.in_place is None else f", in place, from {before.in_place.path} as it was then"
            raise ImageExists(
                f"image {name!r} is on this host already{had}, and not from this content; if this host published it:"
                f" virtman unpublish {name}"
            )
        for record in self._stacks.records():
            known = None if record.leaving or record.name == name else record.in_place
            if found.identity and known is not None and known.identity == found.identity:
                raise ImageExists(f"{found.path} is published in place already, as image {record.name!r}")

    def _new_digest(self, name: str, found: InPlace) -> str:
        """An identity for content that nobody has read. Raises ImageExists if Volt has content under this name."""
        try:
            listed = self._volt.image(name).digest
        except (UnknownImage, CoordinatorDown):  # one that does not answer decides when it does
            return draw()
        raise ImageExists(
            f"image {name!r} is published already, with digest {listed}; if {found.path} holds just that, say so:"
            f" virtman publish {name} {found.path} --in-place --trust {listed}"
        )

    def unpublish(self, name: str, *, when_unused: bool = False) -> models.Unpublished:
        """Be no origin of an image any more; without another origin it is withdrawn at Volt.

        It is served until no VM of this host needs it; ``gc`` deletes its content. Also one that is yet to be announced
        is taken back only when Volt agrees. ``when_unused``: if it has no other origin it is served until no host needs
        it, and its content goes without ``gc``. Raises UnknownImage (this host did not publish it), ImageInUse (never
        ``when_unused``), CoordinatorDown, DriverError.
        """
        with self._locks.hold(name):
            record = self._published(name)
            withdrawn = self._unpublish(name, when_unused=when_unused)
            if when_unused and not withdrawn and record.digest is not None:
                self._retained.remove(key_of(record.digest), publishing=name)
        self._changed()
        return models.Unpublished(name=name, serving=self._stacks.serving(name), withdrawn=withdrawn)

    def _unpublish(self, name: str, *, when_unused: bool) -> bool:
        """Returns whether Volt goes on listing the image with this host as its origin, as withdrawn."""
        if self._published(name).doing(PUBLISH) and self._take_back(name, when_unused=when_unused):
            return False
        record = self._published(name)
        if record.leaving:
            self._stacks.leave_later(name)
            return False
        self._volt.withdraw(name, when_unused=when_unused)
        if record.doing(DETACH):
            self._stacks.restore(name)
            return False
        if when_unused and self._volt.lists_origin(name):
            return True
        self._stacks.drop_origin(name, given_up=True)
        return False

    def _take_back(self, name: str, *, when_unused: bool) -> bool:
        """Take back what is yet to be announced, or announce it where it has to be withdrawn: somebody reads it."""
        try:
            return self._stacks.take_back(name)
        except ImageInUse:
            if not when_unused:
                raise
            self._stacks.restore(name)
            return False

    def _published(self, name: str) -> ImageRecord:
        """The record of an image that this host published. Raises UnknownImage, StateDamaged."""
        record = self._stacks.find(name)
        if record is None or record.role is not Role.ORIGIN:
            raise UnknownImage(f"image {name!r} was not published by this host")
        return record
