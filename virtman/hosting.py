"""A host attaches an image that another host published, and removes a stack again."""

from __future__ import annotations

import logging
from collections.abc import Callable

from virtman import bootsets
from virtman.errors import CoordinatorDown, UnknownImage
from virtman.following import with_assignment
from virtman.operations import Kind
from virtman.records import ATTACH, DETACH, PUBLISH, REMOVED, ImageRecord, Role, State
from virtman.serving import build, remove_layers, unlock_device
from virtman.stacks import Stacks

log = logging.getLogger(__name__)


def ensure(stacks: Stacks, name: str, *, moving: bool = False) -> ImageRecord:
    """The record of the image's stack, which is attached if there is none.

    An attached image needs no answer from Volt. ``moving``: for a disk that comes from another host, which gets
    the image even when the image is withdrawn. Raises UnknownImage, ImageWithdrawn, CoordinatorDown, DriverError,
    NoRoom.
    """
    with stacks.holding(name) as record:
        if record is None:
            return _attach(stacks, ImageRecord(name=name, role=Role.HOST, state=State.ABSENT), moving=moving)
        if record.steady:
            return record if stacks.source.serving(name) else build(stacks, record)
        if record.doing(PUBLISH):
            return stacks.operations.carry_out(record)
        # The new attach begins from the old record, so an undo still knows the content that was half removed.
        update = {"role": Role.HOST, "state": State.ABSENT, "given_up": False, "in_place": None, "parent": None}
        update |= {"hydrate": False, "hydrate_until": None, "first": "", "boot_told": False}
        return _attach(stacks, unlock_device(stacks, record).model_copy(update=update), moving=moving)


def _attach(stacks: Stacks, record: ImageRecord, *, moving: bool) -> ImageRecord:
    def act(record: ImageRecord) -> ImageRecord:
        # The endpoint exists before Volt can name it to a child: nobody waits for a parent to get ready.
        stacks.source.reserve(record.name)
        stacks.step("attach:reserved")
        assignment = stacks.volt.join(record.name, moving=moving)
        stacks.step("attach:joined")
        if record.digest not in (None, assignment.digest):
            stacks.source.drop(record.name, record.image)  # of other content that was half removed
            stacks.source.reserve(record.name)
        record = with_assignment(record, assignment, confirmed=False)
        with stacks.store.lock:
            stacks.records.put(record.name, record)
        build(stacks, record)
        bootsets.prefetch(stacks, record)
        record = with_assignment(record, assignment, confirmed=True).settled()
        stacks.records.put(record.name, record)
        stacks.step("attach:done")
        return record

    attached = stacks.operations.run(record.begin(ATTACH), act)
    stacks.changed()
    return attached


def remove_if(stacks: Stacks, name: str, allowed: Callable[[ImageRecord], bool], *, told: bool = True) -> bool:
    """Remove the stack of an image if there is one, and its record is ``allowed``. What the cache holds stays.

    ``told``: Volt may have a place for this host, to be given up. Returns whether the stack was removed.
    """
    with stacks.holding(name) as record:
        if record is None or not allowed(record):
            return False
        stacks.operations.run(record if record.doing(DETACH) else record.begin(DETACH, told=told))
        return True


def remove_if_idle(stacks: Stacks, name: str) -> bool:
    """Remove the stack unless a VM, a child or being its origin keeps it."""
    return remove_if(stacks, name, stacks.idle)


def remove_withdrawn(stacks: Stacks, name: str) -> bool:
    """Remove the stack of a withdrawn image if it is not needed: of an origin, if Volt still says so.

    Raises CoordinatorDown, DriverError.
    """

    def allowed(record: ImageRecord) -> bool:
        if not record.steady or stacks.needed(record):
            return False
        # Whoever publishes the image again here waits for this, or the image is no longer withdrawn.
        return record.role is Role.HOST or _is_withdrawn(stacks, name)

    return remove_if(stacks, name, allowed)


def _is_withdrawn(stacks: Stacks, name: str) -> bool:
    """Whether the image is withdrawn, and no host has it but its origins."""
    try:
        image = stacks.volt.image(name)
    except UnknownImage:  # an image that Volt does not list may be missing in a database that was set back
        return False
    return image.withdrawn and not image.nodes


def leave_later(stacks: Stacks, name: str) -> None:
    """Tell Volt of a stack that was removed while Volt was down. Raises CoordinatorDown."""
    with stacks.holding(name) as record:
        if record is not None and record.leaving:
            _leave(stacks, record)


def _finish_detach(stacks: Stacks, record: ImageRecord) -> None:
    """Remove the stack, then leave Volt's tree, unless Volt has no place for this host."""
    if not record.leaving:
        record = remove_layers(stacks, record).reached(REMOVED)
        stacks.operations.note(record)
        stacks.step("detach:removed")
    try:
        _leave(stacks, record)
    except CoordinatorDown as error:
        log.warning("image %s: Volt is told that we left when it is back: %s", record.name, error)


def _leave(stacks: Stacks, record: ImageRecord) -> None:
    """Leave Volt's tree. Only a former origin calls ``withdraw``, since a withdrawal may remove the image for all."""
    if record.argument("told"):
        leave = stacks.volt.withdraw if record.role is Role.ORIGIN else stacks.volt.leave
        leave(record.name, record.assigned)
    stacks.records.remove(record.name)
    stacks.step("detach:left")


def _undo_attach(_stacks: Stacks, record: ImageRecord, _error: Exception | None) -> ImageRecord:
    return record.begin(DETACH, told=True)


KINDS = {ATTACH: Kind(undo=_undo_attach), DETACH: Kind(_finish_detach, makes_room=True)}
