"""VMs get other names. What a VM is to others stays: its UUID, and with it the MAC address and what cloud-init knows it
by.

During a rename the operation is in the record of the old name, and no other VM gets the new name (``Vms``). The record
moves last: once a record has the new name, all of the VM has it.
"""

from __future__ import annotations

from virtman.errors import VmExists
from virtman.operations import Kind
from virtman.records import RENAME, RENAME_BACK, VmRecord
from virtman.roles import Permit, anything
from virtman.vms import Vms


def rename(vms: Vms, vm: str, new: str, permit: Permit = anything) -> None:
    """Let a VM that is off be called ``new``. A VM that was ``vm`` before and is called so already is left alone.

    Raises UnknownVm, Forbidden, VmExists, VmRuns, VmSaved, Conflict, DriverError, HypervisorError, DomainForeign;
    after an error it is called as before, or, if that is logged, is renamed later.
    """
    if vm == new:
        raise VmExists(f"vm {vm!r} is called so already; say another name")
    with vms.holding(vm, new):
        for name in (vm, new):
            vms.resume(name)
        if _is_done(vms, vm, new):
            return
        vms.require_permitted(vm, permit)
        vms.check_free(new)
        record = vms.record(vm)
        vms.require_detached(record)
        vms.require_here(record)
        vms.require_off(record, "it gets another name")
        vms.run(record.begin(RENAME, new=new))


def _is_done(vms: Vms, vm: str, new: str) -> bool:
    """Raises VmExists, UnknownVm."""
    present = vms.records.get(new)
    if present is not None and (present.was != vm or vms.records.get(vm) is not None):
        raise VmExists(f"vm {new!r} exists; use another name")
    return present is not None


def _rename(vms: Vms, record: VmRecord) -> None:
    """Nothing is left to do of a VM that was destroyed by its new name, after a crash before the old one was gone."""
    vm, new = record.name, record.argument("new")
    if vms.records.get(new) is None and vms.vmdisks.existing() & {vm, new}:
        if record.boot is not None:
            vms.machines.rename(vm, new)
        vms.step("rename:machine")
        disk = vms.vmdisks.rename(vm, new)
        vms.step("rename:disk")
        if record.boot is not None:
            vms.machines.follow(new, disk, vms.disks_of(record))
        vms.records.put(new, record.settled(name=new, was=vm))
        vms.step("rename:known")
    vms.records.remove(vm)
    vms.step("rename:done")


def _unrename(vms: Vms, record: VmRecord, _error: Exception | None) -> VmRecord:
    """Raises DriverError if the disk has its new name: then the rename is finished later."""
    vms.vmdisks.open(record.name)
    return record.begin(RENAME_BACK, new=record.argument("new"))


def _rename_back(vms: Vms, record: VmRecord) -> None:
    if record.boot is not None:
        vms.machines.rename(record.argument("new"), record.name)
        vms.follow(record)
    vms.settle(record)


KINDS = {RENAME: Kind(_rename, _unrename), RENAME_BACK: Kind(_rename_back)}
