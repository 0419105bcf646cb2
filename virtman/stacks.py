"""The stacks of this host: one per image, made of attach, cache and export.

A stack's record is written before its first layer is made and removed after its last one is gone. Everything here is
idempotent, so that repair is the same code as the first attempt. The lock of an image is held through each operation on
it; nothing else waits for it but operations on the same image.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from drivers.base import Child, Image, Parent
from drivers.errors import DriverError
from virtman.admission import Admission
from virtman.errors import CoordinatorDown, ImageExists, Suspended, VirtmanError
from virtman.hostdrivers import HostDrivers
from virtman.imagestore import ImageStore
from virtman.locks import NamedLocks
from virtman.records import ChildRecord, ImagePhase, ImageRecord, ParentRecord, Role, Shelf
from virtman.steps import Step, log_step
from volt.client import Assignment

log = logging.getLogger(__name__)


class Coordinator(Protocol):
    """What a stack needs of Volt."""

    def join(self, image: str) -> Assignment:
        """Take this host's place in the image's tree. Raises UnknownImage, CoordinatorDown."""

    def leave(self, image: str, dropped: int = -1) -> None:
        """Give the place up. ``dropped``: nothing here reads by an assignment of this revision or an older one.

        Raises CoordinatorDown.
        """

    def publish(self, image: Image) -> Assignment:
        """Announce an image whose origin is this host. Raises ImageExists, CoordinatorDown."""

    def report(self, image: str, dead: str) -> Assignment:
        """Say that a parent is dead and get new ones. Raises UnknownImage, CoordinatorDown."""


def with_assignment(record: ImageRecord, assignment: Assignment, *, confirmed: bool) -> ImageRecord:
    """The record with what Volt said. ``confirmed``: the host reads from these parents now."""
    return record.model_copy(
        update={
            "size": assignment.size,
            "digest": assignment.digest,
            "slot": assignment.slot,
            "parents": tuple(ParentRecord(host=p.host, address=p.address, secret=p.secret) for p in assignment.parents),
            "children": tuple(ChildRecord(host=c.host, secret=c.secret) for c in assignment.children),
            "assigned": assignment.revision,
            "revision": assignment.revision if confirmed else record.revision,
        }
    )


class Stacks:
    """Makes, follows, repairs and removes stacks. ``in_use`` tells whether a VM of this host needs an image."""

    def __init__(
        self,
        drivers: HostDrivers,
        shelf: Shelf[ImageRecord],
        store: ImageStore,
        volt: Coordinator,
        in_use: Callable[[str], bool],
        step: Step = log_step,
    ) -> None:
        self._suspended = False
        self.content = threading.Lock()
        """Held while a record begins to refer to content, and while content that no record refers to is deleted."""
        self._drivers = drivers
        self._shelf = shelf
        self._store = store
        self._volt = volt
        self._in_use = in_use
        self._step = step
        self._locks = NamedLocks()
        self._admission = Admission(drivers.export)

    def ensure(self, name: str) -> ImageRecord:
        """The image's stack, made if it is not there. Raises UnknownImage, CoordinatorDown, DriverError.

        An attached image needs no answer from Volt.
        """
        with self._locks.hold(name):
            record = self._shelf.get(name)
            if record is not None and record.phase is ImagePhase.ATTACHED:
                if not self._drivers.export.serving(name):
                    self._build(record)
                return record
            return self._attach(name)

    def _attach(self, name: str) -> ImageRecord:
        # What is still there of a stack that was half removed can be undone only with what its record knows.
        before = self._shelf.get(name)
        record = (before or ImageRecord(name=name, role=Role.HOST, phase=ImagePhase.ATTACHING)).model_copy(
            update={"role": Role.HOST, "phase": ImagePhase.ATTACHING}
        )
        self._shelf.put(name, record)
        self._step("attach:recorded")
        try:
            # The endpoint exists before Volt can name it to a child: nobody waits for a parent to get ready.
            self._drivers.export.reserve(name)
            self._step("attach:reserved")
            assignment = self._volt.join(name)
            self._step("attach:joined")
            record = with_assignment(record, assignment, confirmed=False)
            with self.content:
                self._shelf.put(name, record)
            self._build(record)
            record = with_assignment(record, assignment, confirmed=True)
            record = record.model_copy(update={"phase": ImagePhase.ATTACHED})
            self._shelf.put(name, record)
            self._step("attach:done")
        except (VirtmanError, DriverError) as error:
            log.warning("image %s: attach failed: %s", name, error)
            self._detach_after(record, error)
            raise
        return record

    def _detach_after(self, record: ImageRecord, error: Exception) -> None:
        """Undo a failed attach or publish; what fails here is logged, the first error is the caller's to raise."""
        try:
            self._detach(record)
        except (VirtmanError, DriverError) as second:
            log.error("image %s: undoing after %r failed too: %s", record.name, str(error), second)

    def add_origin(self, image: Image) -> ImageRecord:
        """Serve an image whose content is in the store, and announce it.

        Raises ImageExists, CoordinatorDown, DriverError.
        """
        with self._locks.hold(image.name):
            before = self._shelf.get(image.name)
            if before is not None and (before.role is Role.HOST or before.digest != image.digest):
                raise ImageExists(f"image {image.name!r} is on this host already, and not from this content")
            record = before or ImageRecord(
                name=image.name, role=Role.ORIGIN, phase=ImagePhase.ATTACHING, size=image.size, digest=image.digest
            )
            with self.content:
                self._shelf.put(image.name, record)
            self._step("publish:recorded")
            try:
                self._build(record)
                self._step("publish:serving")
                assignment = self._volt.publish(image)
                record = with_assignment(record, assignment, confirmed=True)
                record = record.model_copy(update={"phase": ImagePhase.ATTACHED})
                self._let_in(record)  # some may have joined already
                self._shelf.put(image.name, record)
            except (VirtmanError, DriverError) as error:
                self._undo_publish(before, record, error)
                raise
            return record

    def _undo_publish(self, before: ImageRecord | None, record: ImageRecord, error: Exception) -> None:
        """Volt is told as well: it may have taken the image, though its answer never came."""
        log.warning("image %s: publish failed: %s", record.name, error)
        if before is not None:
            self._shelf.put(record.name, before)
        else:
            self._detach_after(record, error)

    def _build(self, record: ImageRecord, *, replace: bool = False) -> None:
        if self._suspended:
            raise Suspended("this host is suspended; start its agent again first")
        self._drivers.export.reserve(record.name)
        self._let_in(record)
        image = record.image
        if record.role is Role.ORIGIN:
            device = self._drivers.attach.origin(image, self._store.path(image))
        else:
            base = self._drivers.attach.connect(image, record.parent_list())
            self._step("attach:connected")
            device = self._drivers.cache.open(image, base)
            self._step("attach:cached")
        with self._admission.unchanged(record.name):
            self._drivers.export.publish(image, device, replace=replace)
        self._step("attach:published")

    def _let_in(self, record: ImageRecord) -> None:
        self._admission.open(record.name, record.assigned, record.child_list())

    def admit(self, assignment: Assignment) -> None:
        """Let the children in that Volt names now. It does not wait for who makes or changes the stack.

        Nothing happens if Volt has other content under this name: who reads what is here goes on, see ``_follow``.
        """
        record = self._shelf.get(assignment.image)
        if record is None or record.digest != assignment.digest:
            return
        children = [Child(child.host, child.secret) for child in assignment.children]
        self._admission.update(assignment.image, assignment.revision, children)

    def follow(self, assignment: Assignment) -> None:
        """Read from the parents that Volt names now and record it, so that the next heartbeat confirms it."""
        name = assignment.image
        with self._locks.hold(name):
            record = self._shelf.get(name)
            if record is None or record.phase is not ImagePhase.ATTACHED or assignment.revision <= record.revision:
                return
            self._follow(record, assignment)

    def _follow(self, record: ImageRecord, assignment: Assignment) -> None:
        if assignment.digest != record.digest:
            # The name was published again with other content. The VMs here go on with what their image's cache holds.
            log.error("image %s: Volt has other content under this name now; this host leaves its tree", record.name)
            self._volt.leave(record.name)
            return
        wanted = with_assignment(record, assignment, confirmed=False)
        self._shelf.put(record.name, wanted)
        self._step("follow:recorded")
        if record.role is Role.HOST:
            moved = self._drivers.attach.update(wanted.image, wanted.parent_list())
            if moved or record.unconfirmed:
                log.info("image %s: dropping the old parents of revision %d", record.name, record.revision)
                self._build(wanted, replace=True)
        self._let_in(wanted)
        self._shelf.put(record.name, with_assignment(record, assignment, confirmed=True))

    def rejoin(self, name: str) -> None:
        """Volt has forgotten that this host has the image (its lease ran out, say): take a place again."""
        with self._locks.hold(name):
            record = self._shelf.get(name)
            if record is None or record.phase is not ImagePhase.ATTACHED:
                return
            if record.role is Role.ORIGIN:
                log.warning("image %s: Volt does not list it any more; publish it again, or remove it by gc", name)
                return
            self._admission.close(name)  # a Volt that has forgotten may count revisions anew
            self._follow(record, self._volt.join(name))

    def suspend(self, name: str) -> None:
        """Stop serving without giving anything up: ``restore`` by the next agent brings the stack back.

        From now on no stack is built here, whatever asks for it.
        """
        self._suspended = True
        with self._locks.hold(name):
            record = self._shelf.get(name)
            if record is not None:
                self._remove_layers(record)

    def parent_lost(self, image: Image, parent: Parent) -> None:
        """Have the stack let go of a parent that is dead, tell Volt of it, and follow its answer."""
        with self._locks.hold(image.name):
            record = self._shelf.get(image.name)
            if record is None or record.phase is not ImagePhase.ATTACHED:
                return
            # Nothing happens here unless the daemon may still wait at the lost parent's socket.
            self._build(record)
        try:
            self.follow(self._volt.report(image.name, parent.host))
        except CoordinatorDown as error:
            log.warning("image %s: parent %s lost; Volt cannot be told: %s", image.name, parent.host, error)

    def restore(self, name: str) -> None:
        """Make what the record says true, whatever is there now: after a crash, a reboot, or a daemon's death."""
        with self._locks.hold(name):
            record = self._shelf.get(name)
            if record is None:
                return
            if record.phase is ImagePhase.ATTACHED:
                self._restore(record)
            else:
                self._detach(record)

    def _restore(self, record: ImageRecord) -> None:
        """Build what is missing; a stack that outlived the agent is left as it is, and its parents watched again."""
        if not self._drivers.export.serving(record.name):
            log.warning("image %s: not being served; starting it", record.name)
        self._build(record, replace=record.unconfirmed)
        if record.unconfirmed:
            self._shelf.put(record.name, record.model_copy(update={"revision": record.assigned}))

    def remove_if_idle(self, name: str) -> bool:
        """Remove the stack unless a VM, a child or being its origin keeps it. The cached data stay on disk."""
        with self._locks.hold(name):
            record = self._shelf.get(name)
            if record is None or record.role is Role.ORIGIN or record.children or self._in_use(name):
                return False
            self._detach(record)
            return True

    def idle(self, record: ImageRecord) -> bool:
        """Whether nothing on this host and no child needs the stack."""
        return record.role is Role.HOST and not record.children and not self._in_use(record.name)

    def drop_origin(self, name: str) -> bool:
        """Stop serving an image that this host published and Volt no longer lists, unless a VM needs it."""
        with self._locks.hold(name):
            record = self._shelf.get(name)
            if record is None or record.role is not Role.ORIGIN or self._in_use(name):
                return False
            self._shelf.put(name, record.model_copy(update={"phase": ImagePhase.DETACHING}))
            self._remove_layers(record)
            self._shelf.remove(name)
            return True

    def _detach(self, record: ImageRecord) -> None:
        record = record.model_copy(update={"phase": ImagePhase.DETACHING})
        self._shelf.put(record.name, record)
        self._step("detach:recorded")
        self._remove_layers(record)
        self._shelf.put(record.name, record.model_copy(update={"phase": ImagePhase.LEAVING}))
        self._step("detach:removed")
        try:
            self._volt.leave(record.name, record.assigned)
        except CoordinatorDown as error:
            log.warning("image %s: Volt is told that we left when it is back: %s", record.name, error)
            return
        self._shelf.remove(record.name)
        self._step("detach:left")

    def _remove_layers(self, record: ImageRecord) -> None:
        """Remove every layer, going on after an error; raises the first and logs all."""
        self._admission.close(record.name)
        acts: list[Callable[[], None]] = [
            lambda: self._drivers.attach.abandon(record.name),
            lambda: self._drivers.export.withdraw(record.name),
            lambda: self._drivers.attach.disconnect(record.name),
        ]
        if record.digest is not None and record.role is Role.HOST:
            acts.insert(2, lambda: self._drivers.cache.close(record.image))
        errors = []
        for act in acts:
            try:
                act()
            except DriverError as error:
                log.error("image %s: while removing its stack: %s", record.name, error)
                errors.append(error)
            self._step("detach:layer")
        if errors:
            raise errors[0]

    def leave_later(self, name: str) -> None:
        """Tell Volt of a stack that was removed while it was down."""
        with self._locks.hold(name):
            record = self._shelf.get(name)
            if record is not None and record.phase is ImagePhase.LEAVING:
                self._volt.leave(name, record.assigned)
                self._shelf.remove(name)

    def serving(self, name: str) -> bool:
        """Whether the image is served right now."""
        return self._drivers.export.serving(name)

    def find(self, name: str) -> ImageRecord | None:
        """The stack's record, if there is a stack."""
        return self._shelf.get(name)

    def known(self, name: str) -> bool:
        """Whether there is a stack, whole or in parts."""
        return self._shelf.get(name) is not None

    def leave_unknown(self, name: str) -> None:
        """Volt says that this host has a place, but there is no stack: give the place up."""
        with self._locks.hold(name):
            if self._shelf.get(name) is None:
                self._volt.leave(name)

    def records(self) -> list[ImageRecord]:
        """The records of all stacks."""
        return self._shelf.all()

    def damaged(self) -> list[str]:
        """Images whose record cannot be read."""
        return self._shelf.damaged()

    def strays(self) -> frozenset[str]:
        """Images with layers on the host and no record."""
        found = self._drivers.export.existing().names | self._drivers.attach.existing().names
        return found - frozenset(self._shelf.names())

    def remove_stray(self, name: str) -> None:
        """Remove the layers of an image without a record."""
        with self._locks.hold(name):
            if self._shelf.get(name) is None:
                self._admission.close(name)
                self._drivers.attach.abandon(name)
                self._drivers.export.withdraw(name)
                self._drivers.attach.disconnect(name)
