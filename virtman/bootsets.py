"""Boot sets: what VMs of other hosts read first of an image is read here before a VM of this host asks for it."""

from __future__ import annotations

import logging

from drivers.base import Range
from drivers.errors import DriverError
from virtman.errors import CoordinatorDown, UnknownImage, VoltRefused
from virtman.records import ImageRecord
from virtman.stacks import Stacks

log = logging.getLogger(__name__)


def prefetch(stacks: Stacks, record: ImageRecord) -> None:
    """Begin to read what Volt knows of boots of an image that was attached just now. No error stops the attaching."""
    if not stacks.source.fills:
        return
    try:
        known = stacks.volt.boot_set(record.name)
        if known:
            stacks.source.fill(record.image, [Range(begin, end - begin) for begin, end in known])
    except (CoordinatorDown, UnknownImage, DriverError) as error:
        log.info("image %s: what VMs read first is not fetched before they do: %s", record.name, error)


def is_complete(stacks: Stacks, record: ImageRecord) -> bool:
    """Whether Volt is to hear what VMs of this host have read first."""
    return record.steady and not record.boot_told and stacks.source.filled(record.name).boot_set


def tell(stacks: Stacks, name: str) -> None:
    """Tell Volt what VMs of this host have read first, once for each image. Raises CoordinatorDown, DriverError."""
    record = stacks.records.get(name)
    if record is None or not is_complete(stacks, record):
        return
    ranges = stacks.source.boot_set(name)
    try:
        if ranges and stacks.volt.image(name).digest == record.digest:
            stacks.volt.add_boot_set(name, [[each.offset, each.offset + each.length] for each in ranges])
    except (UnknownImage, VoltRefused) as error:  # Volt is older, say
        log.info("image %s: what its VMs read first is not told: %s", name, error)
    with stacks.holding(name) as now:
        if now is not None and now.digest == record.digest:
            stacks.records.put(name, now.model_copy(update={"boot_told": True}))
