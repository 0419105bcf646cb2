"""VMs use the disks of others besides their own: of VMs that were never booted, and so are nothing but a disk.

The record of the VM that uses a disk names it. While it does, the disk is changed as a part of that VM
(``Vms.changing``), and can neither be booted, nor get another name, nor be destroyed.
"""

from __future__ import annotations

from drivers.errors import DriverError
from virtman.errors import BadRequest, Conflict
from virtman.operations import Kind
from virtman.records import ATTACH_DISK, DETACH_DISK, VmRecord
from virtman.vms import Vms


def attach(vms: Vms, vm: str, disk: str) -> None:
    """Let a VM use a disk besides its own, at once if it runs; a disk that it has already is fine.

    Raises UnknownVm, Conflict, BadRequest, VmSaved, DriverError, HypervisorError; after an error the
    VM does not have the disk, or, if that is logged, gives it back later.
    """
    with vms.holding(vm, disk):
        for name in (vm, disk):
            vms.resume(name)
        record = vms.record(vm)
        if disk in record.disks:
            _plug(vms, record, disk)  # into a VM that others have started meanwhile
            return
        _check(vms, record, vms.record(disk))
        vms.run(record.begin(ATTACH_DISK, disk=disk))


def _check(vms: Vms, record: VmRecord, disk: VmRecord) -> None:
    vms.require_here(record)
    if record.boot is None:
        raise Conflict(f"vm {record.name!r} was never booted; a disk is attached to a VM that was")
    if disk.boot is not None:
        raise BadRequest(f"{disk.name!r} is a VM that was booted; what is attached is a disk of 'virtman create'")
    vms.require_detached(disk)
    vms.require_not_saved(record)


def _attach(vms: Vms, record: VmRecord) -> None:
    disk = record.argument("disk")
    settled = record.settled(disks=(*record.disks, disk))
    _plug(vms, record, disk)
    vms.step("attach-disk:plugged")
    vms.follow(settled)
    vms.step("attach-disk:followed")
    vms.records.put(record.name, settled)
    vms.step("attach-disk:done")


def _plug(vms: Vms, record: VmRecord, disk: str) -> None:
    with vms.running(record) as running:
        if running is not None:
            running.plug(disk, vms.vmdisks.open(disk))


def _unattach(_vms: Vms, record: VmRecord, _error: Exception | None) -> VmRecord:
    return record.begin(DETACH_DISK, disk=record.argument("disk"), had=False)


def detach(vms: Vms, vm: str, disk: str) -> None:
    """Take a disk away from a VM, at once if it runs; a disk that it does not have is fine.

    Its guest is not asked. Raises UnknownVm, VmSaved, DriverError, HypervisorError; after an error the VM has the disk
    still, or gives it up later.
    """
    with vms.changing(vm) as record:
        if disk not in record.disks:
            vms.record(disk)
            return
        rest = tuple(name for name in record.disks if name != disk)
        vms.run(record.model_copy(update={"disks": rest}).begin(DETACH_DISK, disk=disk, had=True))


def _detach(vms: Vms, record: VmRecord) -> None:
    disk = record.argument("disk")
    with vms.running(record) as running:
        if running is not None:
            running.unplug(disk, vms.vmdisks.open(disk))
    record = record.reached("unplugged")
    vms.operations.note(record)
    vms.step("detach-disk:unplugged")
    vms.follow(record)
    vms.step("detach-disk:followed")
    vms.settle(record)
    vms.step("detach-disk:done")


def _undetach(_vms: Vms, record: VmRecord, _error: Exception | None) -> VmRecord | None:
    """A VM that has not given its disk up keeps it."""
    assert record.operation is not None  # noqa: S101
    if record.operation.done or not record.argument("had"):
        return None
    return record.settled(disks=(*record.disks, record.argument("disk")))


KINDS = {
    ATTACH_DISK: Kind(_attach, _unattach, gives_up=(DriverError,)),
    DETACH_DISK: Kind(_detach, _undetach),
}
