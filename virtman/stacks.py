"""The stacks of this host: one per image, each made by the host's image source.

A stack's record is written before its first layer is made and removed after its last one is gone. Each change is an
operation of the record (virtman/records.py). Everything here is idempotent, so that repair is the same code as the
first attempt. The lock of an image is held through each operation on it; only operations on the same image wait for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from drivers.base import Child, Device, Image, ImageSource, Opened, Parent
from drivers.errors import DriverError
from drivers.host.locks import NamedLocks
from virtman import inplace
from virtman.errors import (
    ContentChanged,
    CoordinatorDown,
    HostTaken,
    ImageExists,
    ImageInUse,
    ImageUnlisted,
    OriginChanged,
    OriginMissing,
    Suspended,
    UnknownImage,
)
from virtman.hostfiles import translate_os_errors
from virtman.imagestore import ImageStore
from virtman.operations import Kind, Operations
from virtman.reading import Readers, digest_of
from virtman.records import (
    ATTACH,
    DETACH,
    PUBLISH,
    REMOVED,
    SERVED,
    ImageRecord,
    InPlace,
    RecordStore,
    Role,
    State,
)
from virtman.steps import Step, log_step
from volt.client import Assignment

log = logging.getLogger(__name__)


class Coordinator(Protocol):
    """What a stack needs of Volt."""

    def content(self, image: str) -> str:
        """The digest of what is published under the name. Raises UnknownImage, CoordinatorDown."""

    def join(self, image: str, *, moving: bool = False) -> Assignment:
        """Take this host's place in the image's tree. ``moving``: for a disk that comes from another host.

        Raises UnknownImage, ImageWithdrawn, CoordinatorDown.
        """

    def leave(self, image: str, dropped: int = -1) -> None:
        """Give the place up. ``dropped``: nothing here reads by an assignment of this revision or an older one.

        Raises CoordinatorDown, VoltRefused (it is that of the last origin).
        """

    def withdraw(self, image: str, dropped: int = -1) -> None:
        """Give the place of an origin up, and with the last one the image. Raises ImageInUse, CoordinatorDown."""

    def withdrawn(self, image: str) -> bool:
        """Whether it is withdrawn, and no host has it but its origins. Raises UnknownImage, CoordinatorDown."""

    def publish(self, image: Image) -> Assignment:
        """Announce an image whose origin is this host. Raises ImageExists, HostTaken, CoordinatorDown."""

    def report(self, image: str, dead: str) -> Assignment:
        """Say that a parent is dead and get new ones. Raises UnknownImage, CoordinatorDown."""


def published_otherwise(record: ImageRecord) -> ImageExists:
    """What is raised for an image that is to be published in place, and is a copy here, or the other way round."""
    how = "as a copy" if record.in_place is None else f"in place, from {record.in_place.path}"
    return ImageExists(f"image {record.name!r} is published here {how}: virtman unpublish {record.name} first")


def with_assignment(record: ImageRecord, assignment: Assignment, *, confirmed: bool) -> ImageRecord:
    """The record with what Volt said. ``confirmed``: the host reads from these parents now."""
    return record.model_copy(
        update={
            "size": assignment.size,
            "digest": assignment.digest,
            "slot": assignment.slot,
            "parents": tuple(Parent(p.host, p.address, p.secret) for p in assignment.parents),
            "children": tuple(Child(c.host, c.secret) for c in assignment.children),
            "assigned": assignment.revision,
            "revision": assignment.revision if confirmed else record.revision,
        }
    )


class Stacks:
    """Makes, follows, repairs and removes stacks.

    ``changed`` is called when Volt should hear of it soon;
    ``released`` with an image's name when an operation on it has ended.
    """

    def __init__(
        self,
        source: ImageSource,
        records: RecordStore[ImageRecord],
        store: ImageStore,
        volt: Coordinator,
        changed: Callable[[], None] = lambda: None,
        released: Callable[[str], None] = lambda _image: None,
        step: Step = log_step,
    ) -> None:
        self.suspended = False
        """No stack is built and nothing is looked after until the next agent starts."""
        self.content = threading.Lock()
        """Held while a record begins to refer to content, and while content that no record refers to is deleted."""
        self._source = source
        self._records = records
        self._store = store
        self._volt = volt
        self._users: list[Callable[[str], bool]] = []
        self._changed = changed
        self._released = released
        self._step = step
        self._locks = NamedLocks(released)
        self.readers = Readers()
        """Who computes the digests of images in place."""
        self._marks: dict[str, str] = {}
        """What images in place are served from, as it was opened last."""
        self.flaws: dict[str, str] = {}
        """Why images in place are not served, as of the last look."""
        self._operations: Operations[Stacks, ImageRecord] = Operations("image", records, KINDS, self, step)

    def used_by(self, asks: Callable[[str], bool]) -> None:
        """Have a function asked, too, whether something of this host needs an image."""
        self._users.append(asks)

    def _in_use(self, name: str) -> bool:
        return any(asks(name) for asks in self._users)

    def ensure(self, name: str, *, moving: bool = False) -> ImageRecord:
        """The image's stack, made if it is not there.

        An attached image needs no answer from Volt. ``moving``: for a disk that comes from another host, which gets
        the image also when it is withdrawn. Raises UnknownImage, ImageWithdrawn, CoordinatorDown, DriverError,
        NoRoom.
        """
        with self._locks.hold(name):
            record = self._records.get(name)
            if record is None:
                return self._attach(ImageRecord(name=name, role=Role.HOST, state=State.ABSENT), moving=moving)
            if record.steady:
                return record if self._source.serving(name) else self._build(record)
            if record.doing(PUBLISH):
                return self._operations.carry_out(record)
            # What is still there of a stack that was half removed can be undone only with what its record knows.
            record = self._release(record)
            return self._attach(
                record.model_copy(
                    update={"role": Role.HOST, "state": State.ABSENT, "given_up": False, "in_place": None}
                ),
                moving=moving,
            )

    def _attach(self, record: ImageRecord, *, moving: bool) -> ImageRecord:
        def act(record: ImageRecord) -> ImageRecord:
            # The endpoint exists before Volt can name it to a child: nobody waits for a parent to get ready.
            self._source.reserve(record.name)
            self._step("attach:reserved")
            assignment = self._volt.join(record.name, moving=moving)
            self._step("attach:joined")
            if record.digest not in (None, assignment.digest):
                self._source.drop(record.name, record.image)  # of other content that was half removed
                self._source.reserve(record.name)
            record = with_assignment(record, assignment, confirmed=False)
            with self.content:
                self._records.put(record.name, record)
            self._build(record)
            record = with_assignment(record, assignment, confirmed=True).settled()
            self._records.put(record.name, record)
            self._step("attach:done")
            return record

        attached = self._operations.run(record.begin(ATTACH), act)
        self._changed()
        return attached

    def add_origin(self, image: Image, in_place: InPlace | None = None) -> ImageRecord:
        """Serve an image whose content is in the store, or ``in_place``, and announce it.

        Raises ImageExists, HostTaken, DriverError, NoRoom: then it is not published. Raises CoordinatorDown: then
        nobody knows whether Volt took it, so this host goes on serving it, and announces it again when Volt answers.
        """
        with self._locks.hold(image.name):
            before = self._records.get(image.name)
            if before is not None and (before.role is Role.HOST or before.digest != image.digest):
                raise ImageExists(f"image {image.name!r} is on this host already, and not from this content")
            if before is not None:
                before = self._published_anew(before, in_place)
            if before is not None and before.doing(DETACH):
                before = self._turn_back(before)
            if before is not None and before.steady:
                return self._publish_again(before)
            record = before or ImageRecord(
                name=image.name, role=Role.ORIGIN, state=State.ABSENT, size=image.size, digest=image.digest,
                in_place=in_place,
            ).begin(PUBLISH)  # fmt: skip
            with self.content:
                self._operations.begin(record)
            return self._operations.carry_out(record)

    def _published_anew(self, record: ImageRecord, in_place: InPlace | None) -> ImageRecord:
        """The record of an origin that is published again, from what has the same digest. Raises ImageExists."""
        known = record.in_place
        if (known is None) != (in_place is None):
            raise published_otherwise(record)
        if known is not None and in_place is not None and inplace.differs(known, in_place):
            record = self._remove_layers(record)  # it may be served still, and is let go of
        wanted = record.model_copy(update={"given_up": False, "in_place": in_place})
        if wanted != record:
            self._records.put(record.name, wanted)  # before Volt may list it
        return wanted

    def _turn_back(self, record: ImageRecord) -> ImageRecord | None:
        """An origin that is half removed is to be published again: the record of that, None if it begins from nothing.

        Volt is not asked to let it go: it may refuse that, because others read the image, and is told the opposite now.
        """
        if not _volt_may_know(record):
            self._operations.carry_out(record)
            return None
        return record.settled(State.ABSENT).begin(PUBLISH).reached(SERVED)

    def finish_publish(self, record: ImageRecord) -> ImageRecord:
        """See KINDS: serve and announce. Once served, Volt may have taken the image, and others may read it."""
        record = self._build(record)
        self._step("publish:serving")
        if not _is_served(record):
            record = record.reached(SERVED)
            self._records.put(record.name, record)
        try:
            return self._announce(record)
        except HostTaken:
            raise
        except CoordinatorDown as error:
            raise CoordinatorDown(
                f"{error}; image {record.name!r} is kept and announced when Volt answers; then it can be taken back by:"
                f" virtman unpublish {record.name}"
            ) from error

    def _announce(self, record: ImageRecord) -> ImageRecord:
        assignment = self._volt.publish(record.image)
        record = with_assignment(record, assignment, confirmed=True).settled()
        self._let_in(record)  # some may have joined already
        self._records.put(record.name, record)
        self._changed()
        return record

    def _publish_again(self, record: ImageRecord) -> ImageRecord:
        """Serve and announce what was published before: whatever fails, it stays so."""
        return self._announce(self._build(record))

    def _build(self, record: ImageRecord, *, fresh: bool = False) -> ImageRecord:
        """Serve what the record says. Returns the record: it may have become another one."""
        self.check_not_suspended()
        with ExitStack() as held:
            record, content = self._content(record, held)  # first: what may not be served gets no endpoint
            self._source.reserve(record.name)
            self._let_in(record)
            if content is None:
                self._source.ensure(record.image, record.parents, fresh=fresh)
            else:
                self._source.ensure_origin(record.image, content)
            if isinstance(content, Opened):
                self._marks[record.name] = content.mark
        return record

    def _content(self, record: ImageRecord, held: ExitStack) -> tuple[ImageRecord, Path | Opened | None]:
        """What an origin serves, and its record; None if this host is none.

        What is in place and may not be served is taken away. Raises OriginChanged, OriginMissing.
        """
        if record.role is Role.HOST:
            return record, None
        if record.in_place is None:
            return record, self._store.path(record.image)
        try:
            now, opened = held.enter_context(inplace.opened(record))
        except (OriginChanged, OriginMissing) as error:
            self.flaws[record.name] = str(error)
            self._remove_layers(record)
            raise
        self.flaws.pop(record.name, None)
        return self._lock(record, now, opened.fd), opened

    def _lock(self, record: ImageRecord, now: InPlace, fd: int) -> ImageRecord:
        """Have the kernel keep others from writing to a device in place, as far as it can; a file it cannot.

        Not for who may not write to it himself: it is not his to take it from those who do.
        """
        if record.in_place is None or not record.in_place.lockable:
            return record
        with translate_os_errors(f"looking at {now.path}"):
            writable = inplace.is_writable(now, fd)
        if not writable:
            return record
        record = record.model_copy(update={"in_place": record.in_place.model_copy(update={"locked": True})})
        self._records.put(record.name, record)
        self._step("in-place:recorded")
        inplace.lock(fd)
        self._step("in-place:locked")
        return record

    def _release(self, record: ImageRecord) -> ImageRecord:
        """Nothing here reads any more what was served in place: let it be as it was."""
        self._marks.pop(record.name, None)
        known = record.in_place
        if known is None or not known.locked:
            return record
        inplace.unlock(known)
        self._step("in-place:unlocked")
        record = record.model_copy(update={"in_place": known.model_copy(update={"locked": False})})
        self._operations.note(record)
        return record

    def look(self, record: ImageRecord) -> None:
        """Have an image in place be served as long as it is what was published, and not one moment longer.

        Raises OriginChanged, OriginMissing, DriverError, NoRoom.
        """
        try:
            with inplace.opened(record) as (_now, opened):
                if opened.mark == self._marks.get(record.name):
                    return
        except (OriginChanged, OriginMissing):
            log.debug("image %s: what it is served from is not as it was", record.name)
        self.restore(record.name)

    def _let_in(self, record: ImageRecord) -> None:
        self._source.admit(record.name, record.assigned, record.children, new=True)

    def admit(self, assignment: Assignment) -> None:
        """Let the children in that Volt names now. It does not wait for who makes or changes the stack.

        Nothing happens if Volt has other content under this name: who reads what is here goes on, see ``follow``.
        """
        record = self._records.get(assignment.image)
        if record is None or record.digest != assignment.digest:
            return
        children = [Child(child.host, child.secret) for child in assignment.children]
        self._source.admit(assignment.image, assignment.revision, children)

    def follow(self, assignment: Assignment) -> None:
        """Read from the parents that Volt names now and record it, so that the next heartbeat confirms it.

        Raises ContentChanged, DriverError, NoRoom.
        """
        name = assignment.image
        with self._locks.hold(name):
            record = self._records.get(name)
            if record is None or not record.steady or assignment.revision <= record.revision:
                return
            self._follow(record, assignment)

    def _follow(self, record: ImageRecord, assignment: Assignment) -> None:
        if assignment.digest != record.digest:
            self._volt.leave(record.name)
            raise _content_changed(record)
        wanted = with_assignment(record, assignment, confirmed=False)
        self._records.put(record.name, wanted)
        self._step("follow:recorded")
        if record.role is Role.HOST:
            self.check_not_suspended()
            self._source.follow(wanted.image, wanted.parents, sure=not record.unconfirmed)
        self._let_in(wanted)
        self._records.put(record.name, with_assignment(record, assignment, confirmed=True))
        self._changed()

    def rejoin(self, name: str) -> None:
        """Volt has forgotten that this host has the image (its lease ran out, say): take a place again.

        Raises ContentChanged, ImageUnlisted, CoordinatorDown, DriverError.
        """
        with self._locks.hold(name):
            record = self._records.get(name)
            if record is None or not record.steady:
                return
            if record.role is Role.ORIGIN:
                raise ImageUnlisted(
                    f"Volt does not list this host as an origin of image {name!r} any more; publish it again, or give"
                    f" it up: virtman unpublish {name}"
                )
            try:
                content = self._volt.content(name)
            except UnknownImage as error:
                raise ImageUnlisted(f"Volt does not list image {name!r} any more; its VMs here go on") from error
            if content != record.digest:
                raise _content_changed(record)
            self._source.close(name)  # a Volt that has forgotten may count revisions anew
            self._follow(record, self._volt.join(name))

    def check_not_suspended(self) -> None:
        """Raises Suspended."""
        if self.suspended:
            raise Suspended("this host is suspended; start its agent again first")

    def suspend(self, name: str) -> None:
        """Stop serving an image without giving anything up: ``restore`` by the next agent brings the stack back.

        While ``suspended`` is not set, the stack may be built again at once. Raises StateDamaged, DriverError.
        """
        with self._locks.hold(name):
            record = self._records.get(name)
            if record is not None:
                self._remove_layers(record)

    def parent_lost(self, name: str, host: str) -> Assignment | None:
        """Have the stack let go of a parent that is dead, and tell Volt of it. Returns Volt's answer, to be followed.

        A Volt that is down is not told later: it notices by itself that a host is gone, and this one may be back.
        Raises DriverError, NoRoom.
        """
        with self._locks.hold(name):
            record = self._records.get(name)
            if record is None or not record.steady:
                return None
            # Nothing happens here unless the daemon may still wait at the lost parent's socket.
            self._build(record)
        try:
            return self._volt.report(name, host)
        except (CoordinatorDown, UnknownImage) as error:
            log.warning("image %s: parent %s lost; Volt cannot be told: %s", name, host, error)
            return None

    def settle_parents(self, record: ImageRecord) -> None:
        """Read from the parent that Volt meant, if it was left and is well again; finish a move that failed half way.

        Raises DriverError, NoRoom.
        """
        if record.role is not Role.HOST or not self._source.unsettled(record.name):
            return
        with self._locks.hold(record.name):
            now = self._records.get(record.name)
            if now is not None and now.steady:
                log.info("image %s: a parent that was left is well again", record.name)
                self._build(now)

    def restore(self, name: str) -> None:
        """Make what the record says true, whatever is there now: after a crash, a reboot, or a daemon's death.

        Raises StateDamaged, CoordinatorDown, DriverError, NoRoom.
        """
        with self._locks.hold(name):
            record = self._records.get(name)
            if record is None:
                return
            if record.operation is None:
                self._restore(record)
            else:
                self._operations.resume(record)

    def _restore(self, record: ImageRecord) -> None:
        """Build what is missing; a stack that outlived the agent is left as it is, and its parents watched again."""
        if record.name not in self.flaws and not self._source.serving(record.name):
            log.warning("image %s: not being served; starting it", record.name)
        record = self._build(record, fresh=record.unconfirmed)
        if record.unconfirmed:
            self._records.put(record.name, record.model_copy(update={"revision": record.assigned}))
            self._changed()

    def remove_if_idle(self, name: str) -> bool:
        """Remove the stack unless a VM, a child or being its origin keeps it. The cached data stay on disk."""
        with self._locks.hold(name):
            record = self._records.get(name)
            if record is None or not self.idle(record):
                return False
            self._operations.run(record if record.doing(DETACH) else record.begin(DETACH))
            return True

    def idle(self, record: ImageRecord) -> bool:
        """Whether the stack may go: it is no origin's, and nobody needs it."""
        return record.role is Role.HOST and not self.needed(record)

    def needed(self, record: ImageRecord) -> bool:
        """Whether a VM of this host or a child needs the stack."""
        return bool(record.children) or self._in_use(record.name)

    def take_back(self, name: str) -> bool:
        """Stop serving an image that is yet to be announced, once Volt has agreed; until then nothing changes. False:
        it is announced by now, or gone.

        The record does not know whether Volt has heard of the image: each call that failed may have taken effect, and
        others may read from here since. So a Volt that does not answer is no leave to stop.

        Raises ImageInUse while a VM of this host or another host reads it; CoordinatorDown, DriverError.
        """
        with self._locks.hold(name):
            record = self._records.get(name)
            if record is None or not record.doing(PUBLISH):
                return False
            if self._in_use(name):
                raise ImageInUse(f"VMs of this host read image {name!r}; destroy them first")
            try:
                self._volt.withdraw(name)
            except CoordinatorDown as error:
                raise CoordinatorDown(
                    f"{error}; image {name!r} is still served: other hosts may read it, which only Volt knows"
                ) from error
            self._operations.run(record.begin(DETACH, told=False))
            return True

    def drop_origin(self, name: str, *, given_up: bool = False) -> bool:
        """Stop serving an image that this host published and Volt no longer lists, unless a VM needs it.

        ``given_up``: then it is written down that it is to be dropped when none needs it any more (``unwanted``).
        """
        with self._locks.hold(name):
            record = self._records.get(name)
            if record is None or record.role is not Role.ORIGIN or not record.steady:
                return False
            if self._in_use(name):
                if given_up:
                    self._records.put(name, record.model_copy(update={"given_up": True}))
                return False
            self._operations.run(record.begin(DETACH, told=False))
            return True

    def let_go(self, name: str) -> bool:
        """Remove the stack of an image that is withdrawn, if nobody needs it: of an origin, if Volt still says so.

        Raises CoordinatorDown, DriverError.
        """
        with self._locks.hold(name):
            record = self._records.get(name)
            if record is None or not record.steady or self.needed(record):
                return False
            # Whoever publishes it again here waits for this, or it is withdrawn no more.
            if record.role is Role.ORIGIN and not self._withdrawn(name):
                return False
            self._operations.run(record if record.doing(DETACH) else record.begin(DETACH))
            return True

    def _withdrawn(self, name: str) -> bool:
        try:
            return self._volt.withdrawn(name)
        except UnknownImage:  # what Volt does not list may be missing in a database that was set back
            return False

    def unwanted(self, record: ImageRecord) -> bool:
        """Whether an image was given up, and no VM of this host needs it any more."""
        return record.given_up and not self._in_use(record.name)

    def finish_detach(self, record: ImageRecord) -> None:
        """See KINDS: remove the stack, then leave Volt's tree, unless Volt has no place for it."""
        if not record.leaving:
            record = self._remove_layers(record).reached(REMOVED)
            self.flaws.pop(record.name, None)
            self._operations.note(record)
            self._step("detach:removed")
        if _volt_may_know(record):
            try:
                self._leave(record)
            except CoordinatorDown as error:
                log.warning("image %s: Volt is told that we left when it is back: %s", record.name, error)
                return
        self._records.remove(record.name)
        self._step("detach:left")

    def wants_digest(self, record: ImageRecord) -> bool:
        """Whether the digest of what is served in place is asked for, and not known yet."""
        known = record.in_place
        wanted = known is not None and known.digest and known.content is None
        return wanted and record.steady and record.name not in self.flaws and not self.suspended

    def compute_digest(self, name: str) -> None:
        """Compute the digest of what is served in place, which may take hours; it ends when that is to go.

        What proves to be something else than was published is not served any more. Raises OriginChanged, OriginMissing,
        HostTrouble, NoRoom, DriverError.
        """
        with self.readers.reading(name) as reader:
            record = self._records.get(name)
            if record is None or not self.wants_digest(record):
                return
            with inplace.opened(record) as (now, opened):
                content = digest_of(opened.fd, now.size, inplace.kind_of_sum(record, now.size), reader)
            if content is None:
                return
            with inplace.opened(record):
                log.info("image %s: %s holds %s", name, now.path, content)  # nothing has changed meanwhile
        self._note_content(record, content)

    def _note_content(self, record: ImageRecord, content: str) -> None:
        with self._locks.hold(record.name):
            now = self._records.get(record.name)
            if now is None or now.in_place is None or record.in_place is None or not self.wants_digest(now):
                return
            if now.digest != record.digest or inplace.differs(now.in_place, record.in_place):
                return
            now = now.model_copy(update={"in_place": now.in_place.model_copy(update={"content": content})})
            self._records.put(now.name, now)
            self._step("in-place:digested")
            self._build(now)  # or not, if this is not what was published

    def _remove_layers(self, record: ImageRecord) -> ImageRecord:
        """Remove every layer. Returns what the record is now. Raises DriverError after all were tried.

        What was served in place is as it was before, when nothing can read it any more.
        """
        self._source.drop(record.name, record.image if record.digest is not None and record.role is Role.HOST else None)
        self.readers.end(record.name)
        return self._release(record)

    def leave_later(self, name: str) -> None:
        """Tell Volt of a stack that was removed while it was down. Raises CoordinatorDown."""
        with self._locks.hold(name):
            record = self._records.get(name)
            if record is not None and record.leaving:
                self._leave(record)
                self._records.remove(name)

    def _leave(self, record: ImageRecord) -> None:
        """Only who has been an origin may take the image with it: there may be another agent with this host's name."""
        leave = self._volt.withdraw if record.role is Role.ORIGIN else self._volt.leave
        leave(record.name, record.assigned)

    def origin(self, record: ImageRecord) -> Device:
        """What disks of VMs of an image are made on."""
        return self._source.device(record.image)

    def vm_gone(self, image: str) -> None:
        """There is one VM less of an image."""
        self._released(image)

    def serving(self, name: str) -> bool:
        """Whether the image is served right now."""
        return self._source.serving(name)

    def held(self) -> frozenset[str]:
        """Images in place whose file or device somebody here may have open."""
        names = [record.name for record in self.records() if record.in_place is not None]
        if not names:
            return frozenset()
        try:
            return (self._source.existing() | self.readers.names()) & frozenset(names)
        except DriverError as error:
            log.warning("what is served cannot be told: %s", error)
            return frozenset(names)

    def busy(self, name: str) -> bool:
        """Whether an operation on the image is under way; ``released`` tells of its end."""
        return self._locks.taken(name)

    def find(self, name: str) -> ImageRecord | None:
        """The stack's record, if there is a stack."""
        return self._records.get(name)

    def known(self, name: str) -> bool:
        """Whether there is a stack, whole or in parts."""
        return self._records.get(name) is not None

    def leave_unknown(self, name: str) -> None:
        """Volt says that this host has a place, but there is no stack: give the place up.

        Raises CoordinatorDown, VoltRefused (the image has no other origin: this may be the place of another agent).
        """
        with self._locks.hold(name):
            if self._records.get(name) is None:
                self._volt.leave(name)

    def records(self) -> list[ImageRecord]:
        """The records of all stacks."""
        return self._records.all()

    def sorted_out(self) -> tuple[list[ImageRecord], dict[str, str]]:
        """The records of all stacks, and why others cannot be read, by image."""
        return self._records.sorted_out()

    def names(self) -> frozenset[str]:
        """All images that have a record, also one that cannot be read."""
        return frozenset(self._records.names())

    def troubles(self) -> dict[str, str]:
        """Why records cannot be read, by image."""
        return self._records.unreadable()

    def strays(self) -> frozenset[str]:
        """Images with layers on the host and no record."""
        return self._source.existing() - self.names()

    def remove_stray(self, name: str) -> None:
        """Remove the layers of an image without a record."""
        with self._locks.hold(name):
            if self._records.get(name) is None:
                self._source.drop(name, None)


def _volt_may_know(record: ImageRecord) -> bool:
    """Whether Volt may have a place for what is being removed."""
    return record.operation is not None and bool(record.operation.arguments.get("told", True))


def _is_served(record: ImageRecord) -> bool:
    """Whether an image that is being published was served, so that Volt may have taken it."""
    return record.operation is not None and record.operation.done == SERVED


def _unattach(_stacks: Stacks, record: ImageRecord, _error: Exception | None) -> ImageRecord:
    return record.begin(DETACH)


_DECIDED = (ImageExists, UnknownImage, HostTaken)
"""Volt refuses the image."""


def _unpublish(_stacks: Stacks, record: ImageRecord, error: Exception | None) -> ImageRecord | None:
    refused = isinstance(error, _DECIDED) or not _is_served(record)
    return record.begin(DETACH, told=False) if refused else None


KINDS = {
    ATTACH: Kind(undo=_unattach),
    PUBLISH: Kind(Stacks.finish_publish, _unpublish, gives_up=_DECIDED),
    DETACH: Kind(Stacks.finish_detach, makes_room=True),
}


def _content_changed(record: ImageRecord) -> ContentChanged:
    return ContentChanged(
        f"Volt has other content under the name {record.name!r} now: this host left its tree, and its VMs of the old"
        " content go on with what its cache holds; destroy them, then virtman gc, to get the new content"
    )
