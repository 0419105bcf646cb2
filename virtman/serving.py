"""Builds, restores and removes the layers of a stack; checks images in place, and computes their digests."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path

from drivers.base import Opened
from virtman import inplace
from virtman.errors import OriginChanged, OriginMissing
from virtman.hostfiles import translate_os_errors
from virtman.imagestore import Total
from virtman.reading import digest_of
from virtman.records import ImageRecord, InPlace, Role
from virtman.stacks import Stacks

log = logging.getLogger(__name__)


def build(stacks: Stacks, record: ImageRecord, *, fresh: bool = False) -> ImageRecord:
    """Serve what the record says, whatever is there already. Returns the record, which may have changed.

    ``fresh``: drop all connections to hosts that are no parents. Raises Suspended, OriginChanged, OriginMissing,
    DriverError, NoRoom.
    """
    stacks.check_not_suspended()
    with ExitStack() as held:
        record, content = _open_content(stacks, record, held)  # first: what may not be served gets no endpoint
        stacks.source.reserve(record.name)
        admit_recorded(stacks, record)
        if content is None:
            stacks.source.ensure(record.image, record.sources, fresh=fresh)
        else:
            stacks.source.ensure_origin(record.image, content)
        if isinstance(content, Opened):
            stacks.marks[record.name] = content.mark
    return record


def admit_recorded(stacks: Stacks, record: ImageRecord) -> None:
    """Admit the children that the record names."""
    stacks.source.admit(record.name, record.assigned, record.children, serving_key=record.serving_key, new=True)


def _open_content(stacks: Stacks, record: ImageRecord, held: ExitStack) -> tuple[ImageRecord, Path | Opened | None]:
    """The content that an origin serves, and the record; no content for other hosts."""
    if record.role is Role.HOST:
        return record, None
    if record.in_place is None:
        return record, stacks.store.path(record.image)
    try:
        now, opened = held.enter_context(inplace.opened(record))
    except (OriginChanged, OriginMissing):
        remove_layers(stacks, record)
        raise
    return _lock_device(stacks, record, now, opened.fd), opened


def _lock_device(stacks: Stacks, record: ImageRecord, now: InPlace, fd: int) -> ImageRecord:
    """Have the kernel refuse writes to a device in place; the kernel cannot do so for a file.

    A publisher who may not write to the device cannot forbid others to write either.
    """
    if record.in_place is None or not record.in_place.lockable:
        return record
    with translate_os_errors(f"inspecting {now.path}"):
        writable = inplace.is_writable(now, fd)
    if not writable:
        return record
    record = record.with_in_place(locked=True)
    stacks.records.put(record.name, record)
    stacks.step("in-place:recorded")
    inplace.lock(fd)
    stacks.step("in-place:locked")
    return record


def remove_layers(stacks: Stacks, record: ImageRecord) -> ImageRecord:
    """Remove every layer, and unlock a device in place. Returns the record, which may have changed.

    Raises DriverError, after every layer was tried, and HostTrouble.
    """
    cached = record.image if record.digest is not None and record.role is Role.HOST else None
    stacks.source.drop(record.name, cached)
    stacks.readers.end(record.name)
    return unlock_device(stacks, record)


def unlock_device(stacks: Stacks, record: ImageRecord) -> ImageRecord:
    """Let others write again to a device in place that this agent locked. Returns the record."""
    stacks.marks.pop(record.name, None)
    if record.in_place is None or not record.in_place.locked:
        return record
    inplace.unlock(record.in_place)
    stacks.step("in-place:unlocked")
    record = record.with_in_place(locked=False)
    stacks.operations.note(record)
    return record


def restore(stacks: Stacks, name: str) -> None:
    """Make what the record says true, whatever is there now: after a crash, a reboot, or the death of a process.

    A stack that outlived the agent is left alone, and its parents are watched again. Raises StateDamaged,
    CoordinatorDown, and as ``build``.
    """
    with stacks.holding(name) as record:
        if record is None:
            return
        if record.operation is not None:
            stacks.operations.resume(record)
            return
        served = stacks.source.serving(name)
        built = build(stacks, record, fresh=record.unconfirmed)
        if not served:
            log.warning("image %s: was not served; its stack was built again", name)
        if built.unconfirmed:
            stacks.records.put(name, built.model_copy(update={"revision": built.assigned}))
            stacks.changed()


def check_in_place(stacks: Stacks, record: ImageRecord) -> None:
    """Stop serving an image in place that is not what was published, or serve it again.

    Raises OriginChanged, OriginMissing, DriverError, NoRoom.
    """
    try:
        with inplace.opened(record) as (_now, opened):
            if opened.mark == stacks.marks.get(record.name):
                return
    except (OriginChanged, OriginMissing):
        log.debug("image %s: the file or device in place is not as it was", record.name)
    restore(stacks, record.name)


def suspend(stacks: Stacks, name: str) -> None:
    """Stop serving an image and give nothing up: the next agent restores the stack. Raises StateDamaged, DriverError.

    Set ``Stacks.suspended`` before, else the stack may be built again at once.
    """
    with stacks.holding(name) as record:
        if record is not None:
            remove_layers(stacks, record)


def remove_orphan(stacks: Stacks, name: str) -> None:
    """Remove the layers of an image without a record."""
    with stacks.holding(name) as record:
        if record is None:
            stacks.source.drop(name, None)


def wants_digest(stacks: Stacks, record: ImageRecord) -> bool:
    """Whether the digest of an image in place is asked for and unknown, and the image is served."""
    known = record.in_place
    wanted = known is not None and known.digest and known.content is None
    return wanted and record.steady and not stacks.suspended and stacks.source.serving(record.name)


def compute_digest(stacks: Stacks, name: str) -> None:
    """Compute the digest of an image in place, which may take hours; this ends early when the image is removed.

    An image that proves to have another digest than was trusted is not served any more. Raises OriginChanged,
    OriginMissing, HostTrouble, NoRoom, DriverError.
    """
    record = stacks.records.get(name)
    if record is None or not wants_digest(stacks, record):
        return
    kind, size = inplace.kind_of_sum(record), record.image.size
    with translate_os_errors(f"writing the manifest of image {name}"), stacks.store.adding_up(kind, size) as total:
        content = _read_for_digest(stacks, record, total)
        if content is not None:
            _note_content(stacks, record, content, total)


def _read_for_digest(stacks: Stacks, record: ImageRecord, total: Total) -> str | None:
    """The digest of an image in place; None if the image is not to be read any more."""
    with stacks.readers.reading(record.name) as reader:
        now = stacks.records.get(record.name)
        if now is None or not wants_digest(stacks, now):
            return None
        with inplace.opened(record) as (found, opened):
            content = digest_of(opened.fd, found.size, total, reader)
        if content is not None:
            with inplace.opened(record):
                log.info("image %s: %s holds %s", record.name, found.path, content)  # nothing has changed meanwhile
        return content


def _note_content(stacks: Stacks, record: ImageRecord, content: str, total: Total) -> None:
    with stacks.holding(record.name) as now:
        if now is None or now.in_place is None or record.in_place is None or not wants_digest(stacks, now):
            return
        if now.digest != record.digest or inplace.differs(now.in_place, record.in_place):
            return
        known = now.with_in_place(content=content)
        with stacks.store.lock:
            total.keep()
            stacks.records.put(known.name, known)
        stacks.step("in-place:digested")
        build(stacks, known)  # raises OriginChanged if this is not what was published
