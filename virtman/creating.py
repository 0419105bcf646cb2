"""VMs' disks are made, cloned and destroyed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from drivers.base import Device
from drivers.errors import DriverError
from virtman import disks, hosting
from virtman.errors import BadSize, UnknownVm, VirtmanError, VmExists
from virtman.operations import Kind
from virtman.records import CREATE, DESTROY, ImageRecord, Snapshot, State, VmRecord
from virtman.roles import Permit, anything
from virtman.sizes import check_size
from virtman.vms import Vms
from volt.text import exact_size

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Made:
    """A disk that was made, and what its record says besides its size."""

    disk: Device
    snapshots: tuple[Snapshot, ...] = ()
    current: str | None = None


def create(vms: Vms, name: str, image: str, size: int | None) -> None:
    """Make a writable disk for a VM, of ``size`` bytes or the image's size; an existing one of these is left alone.

    Raises VmExists, BadSize, UnknownImage, CoordinatorDown, DriverError, NoRoom; after an error nothing is left, or, if
    the log says so, the rest is removed later.
    """
    with vms.holding(name):
        create_held(vms, name, image, size)


def create_held(vms: Vms, name: str, image: str, size: int | None) -> None:
    """As ``create``, for a caller that holds the VM's lock."""
    vms.resume(name)
    record = vms.records.get(name)
    if record is not None:
        _check_existing(record, image, size)
        return
    check_size(size)
    record = VmRecord(name=name, image=image, size=size, state=State.ABSENT)
    _add(vms, record.begin(CREATE), lambda stack: Made(new_disk(vms, name, stack, size)))


def receive(
    vms: Vms, name: str, image: str, size: int, snapshots: Sequence[str], make: Callable[[ImageRecord], Made]
) -> None:  # fmt: skip
    """A new VM, whose disk of ``size`` bytes ``make`` makes and fills over the image's stack.

    ``snapshots``: the names of the snapshots that it will have, by which others know meanwhile what comes. Raises
    VmExists, as ``create``, and as ``make``; after an error nothing is left.
    """
    with vms.holding(name):
        vms.resume(name)
        check_size(size)
        record = VmRecord(name=name, image=image, size=size, state=State.ABSENT).begin(CREATE, snapshots=[*snapshots])
        _add(vms, record, make, moving=True)


def clone(vms: Vms, vm: str, names: Sequence[str]) -> None:
    """VMs of these names with disks that hold what that of ``vm`` holds now; clones of it are left alone.

    Raises VmExists, and as ``disks.take``. After an error the clones that were made are whole and stay, since they may
    be in use. The next call makes the others, of what the disk holds then.
    """
    source = vms.record(vm)
    missing = [name for name in dict.fromkeys(names) if not _is_clone(vms, name, source)]
    if not missing:
        return
    with disks.temporary(vms, vm) as snapshot:
        source = vms.record(vm)  # it may have been made anew meanwhile
        for name in missing:
            _clone(vms, source, snapshot.name, name)


def _clone(vms: Vms, source: VmRecord, snapshot: str, name: str) -> None:
    with vms.holding(name):
        vms.resume(name)
        if not _is_clone(vms, name, source):
            record = VmRecord(
                name=name, image=source.image, size=None, source=source.name, source_uuid=source.uuid,
                state=State.ABSENT,
            )  # fmt: skip
            _add(vms, record.begin(CREATE), lambda _stack: Made(vms.vmdisks.clone(source.name, snapshot, name)))


def _is_clone(vms: Vms, name: str, source: VmRecord) -> bool:
    """Whether there is such a clone, whole and to stay. Raises VmExists if there is another VM of this name."""
    record = vms.records.get(name)
    if record is not None and record.source_uuid != source.uuid:
        raise VmExists(f"vm {name!r} exists, and is no clone of {source.name!r}; use another name")
    return record is not None and record.state is State.PRESENT and not record.doing(DESTROY)


def _add(vms: Vms, record: VmRecord, make: Callable[[ImageRecord], Made], *, moving: bool = False) -> None:
    """Have a disk made over its image's stack. ``moving``: the disk comes from another host."""

    def act(record: VmRecord) -> None:
        stack = hosting.ensure(vms.images, record.image, moving=moving)
        vms.step("create:attached")
        made = make(stack)
        vms.step("create:disk")
        vms.settle(record, size=made.disk.size, snapshots=made.snapshots, current=made.current)
        vms.step("create:done")

    vms.check_free(record.name)
    present = vms.images.records.get(record.image) is not None
    try:
        vms.run(record, act)
    except (VirtmanError, DriverError):
        if not present:
            _remove_stack(vms, record.image)
        raise


def _remove_stack(vms: Vms, image: str) -> None:
    """Remove the stack that a create made for nothing; the create's error is the one to raise."""
    try:
        hosting.remove_if_idle(vms.images, image)
    except (VirtmanError, DriverError) as second:
        log.error("image %s: removing its stack failed too; it is tried again: %s", image, second)


def new_disk(vms: Vms, name: str, stack: ImageRecord, size: int | None) -> Device:
    """A disk over its image's stack. Raises BadSize, DriverError."""
    least = stack.image.size
    if size is not None and size < least:
        raise BadSize(
            f"{exact_size(size)} are less than the {exact_size(least)} of image {stack.name!r}:"
            " a disk cannot be smaller than its image"
        )
    return vms.vmdisks.create(name, vms.images.source.device(stack.image), size or least)


def _check_existing(record: VmRecord, image: str, size: int | None) -> None:
    if record.image != image or size not in (None, record.size):
        raise VmExists(
            f"vm {record.name!r} exists, of image {record.image!r} with {exact_size(record.size)};"
            " destroy it first or use another name"
        )


def destroy(vms: Vms, name: str, permit: Permit = anything) -> None:
    """Remove a VM and its disk for good, and end what is being received for it. Disks of others that it uses stay.

    Its power is cut at once: what another operation awaits of the VM may never come, from a parent that is gone, say.
    Raises UnknownVm, Forbidden, Conflict, StateDamaged, DriverError, HypervisorError.
    """
    vms.require_permitted(name, permit)
    if vms.receiving.end(name, f"vm {name!r} was destroyed while it was received"):
        with suppress(UnknownVm):  # a new VM is gone with its stream
            _destroy_now(vms, name, permit)
    else:
        _destroy_now(vms, name, permit)


def _destroy_now(vms: Vms, name: str, permit: Permit) -> None:
    record = vms.record(name)
    vms.require_permitted(name, permit)  # what ended may have taken long
    if record.boot is not None and record.moved is None:
        _cut_power(vms, name)
    with vms.holding(name):
        record = vms.record(name)
        vms.require_permitted(name, permit)
        if (new := record.new_name) is not None:  # its disk may have the new name
            vms.resume(name)
            if vms.records.get(name) is None and vms.records.get(new) is None:
                return
            record = vms.record(name)
        vms.require_detached(record)
        vms.run(record.begin(DESTROY))


def _cut_power(vms: Vms, name: str) -> None:
    try:
        vms.machines.stop(name, force=True)
    except VirtmanError as error:  # it is tried again when nothing else is under way
        log.info("vm %s: its power is cut later: %s", name, error)


def _destroy(vms: Vms, record: VmRecord) -> None:
    if record.boot is not None:
        vms.machines.remove(record.name)
    vms.step("destroy:stopped")
    vms.vmdisks.delete(record.name)
    vms.step("destroy:deleted")
    vms.records.remove(record.name)
    vms.images.released(record.image)
    vms.step("destroy:done")


def _uncreate(_vms: Vms, record: VmRecord, _error: Exception | None) -> VmRecord:
    return record.begin(DESTROY)


KINDS = {CREATE: Kind(undo=_uncreate), DESTROY: Kind(_destroy, makes_room=True)}
