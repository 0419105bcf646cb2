"""Hydration: this host keeps all of an image, as an administrator asks, and so needs no parents of it.

The record of the image says so. The reconciler has the source pin and fill the image until nothing is missing, whatever
starts again meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from drivers.base import Range
from virtman import hosting
from virtman.convert import Progress
from virtman.errors import Conflict, DriverTrouble, NotSupported, UnknownImage
from virtman.records import ImageRecord, Role
from virtman.stacks import Stacks

PIN = 24 * 3600.0
"""Seconds that what is kept may not go after an agent has said so last. The agent says so again after half of that."""

LOOK, STUCK = 0.5, 20
"""Seconds between two looks how far it is, of who waits; and after how many looks at nothing waiting is vain."""


def begin(stacks: Stacks, name: str, until: float | None = None) -> ImageRecord:
    """Have this host keep all of an image, which is attached if it is not. An origin has all of it already.

    ``until``: seconds since 1970; without it the image stays. Who asks for less than there is changes nothing. Returns
    the record. Raises NotSupported, Conflict, and as ``hosting.ensure``.
    """
    if not stacks.source.fills:
        raise NotSupported("only the stack chunkstore keeps all of an image; this host has another stack")
    with stacks.keeping(name):
        hosting.ensure(stacks, name)
        with stacks.holding(name) as record:
            if record is None or not record.steady:
                raise Conflict(f"image {name!r} is being removed; ask again")
            if record.role is Role.ORIGIN:
                return record
            if record.hydrate:
                known = record.hydrate_until
                until = None if known is None or until is None else max(known, until)
            wanted = record.model_copy(update={"hydrate": True, "hydrate_until": until})
            stacks.records.put(name, wanted)
            stacks.step("hydrate:recorded")
            return wanted


def cancel(stacks: Stacks, name: str) -> None:
    """Let what is kept of an image go again when others need the space. Raises UnknownImage, DriverError."""
    with stacks.holding(name) as record:
        if record is None:
            raise UnknownImage(f"image {name!r} is not on this host")
        if not record.hydrate:
            return
        if stacks.source.serving(name):
            stacks.source.fill(record.image, [])
        stacks.source.pin(record.image, 0)  # before the record forgets it: the pin outlives this agent
        stacks.step("hydrate:unpinned")
        stacks.records.put(name, record.model_copy(update={"hydrate": False, "hydrate_until": None, "first": ""}))


def is_wanted(stacks: Stacks, record: ImageRecord) -> bool:
    """Whether all of an image is to be here, and the image is served."""
    return record.hydrate and record.role is Role.HOST and record.steady and stacks.source.serving(record.name)


def is_whole(stacks: Stacks, record: ImageRecord) -> bool:
    """Whether all of an image is here, and stays."""
    return is_wanted(stacks, record) and stacks.source.filled(record.name).whole


def lacks(stacks: Stacks, record: ImageRecord) -> bool:
    """Whether something is missing of an image that is to be here, and is not on its way."""
    filled = stacks.source.filled(record.name)
    return is_wanted(stacks, record) and not filled.whole and not filled.goes_on


def goes_on(stacks: Stacks, record: ImageRecord) -> bool:
    """Whether what is missing is on its way from parents."""
    return is_wanted(stacks, record) and stacks.source.filled(record.name).goes_on


def may_go(stacks: Stacks, record: ImageRecord) -> bool:
    """Whether what is kept of an image is not pinned for long any more."""
    return stacks.source.filled(record.name).pinned - time.time() <= PIN / 2


def pin(stacks: Stacks, name: str) -> None:
    """Have what is kept of the image stay. Raises DriverError."""
    with stacks.holding(name) as record:
        if record is not None and is_wanted(stacks, record) and may_go(stacks, record):
            stacks.source.pin(record.image, time.time() + PIN)


def fill(stacks: Stacks, name: str, *, idle: bool = True, rate: int | None = None) -> None:
    """Begin to read what is missing. ``idle``, ``rate``: see ``ImageSource.fill``. Raises NoSpace, DriverError."""
    with stacks.holding(name) as record:
        if record is not None and lacks(stacks, record):
            stacks.source.fill(record.image, [Range(0, record.image.size)], idle=idle, rate=rate)


def pause(stacks: Stacks, name: str) -> None:
    """Read no more of what is missing, until ``fill`` says so again: it comes another way. Raises DriverError."""
    with stacks.holding(name) as record:
        if record is not None and goes_on(stacks, record):
            stacks.source.fill(record.image, [])


def wait(stacks: Stacks, name: str, trouble: Callable[[], str], tell: Progress) -> None:
    """Wait until all of an image is here. ``trouble`` says why nothing is done for that, if so.

    Raises Conflict if it is not wanted any more, DriverTrouble.
    """
    stuck = 0
    while True:
        record = stacks.records.get(name)
        if record is not None and record.role is Role.ORIGIN:
            return
        if record is None or not record.hydrate:
            raise Conflict(f"image {name!r} is not to be kept as a whole any more")
        filled = stacks.source.filled(name)
        tell("hydrate", filled.done, record.image.size)
        if is_whole(stacks, record):
            return
        stuck = stuck + 1 if trouble() else 0
        if stuck >= STUCK:
            raise DriverTrouble(trouble())
        time.sleep(LOOK)
