"""The hypervisor starts VMs."""

from __future__ import annotations

import logging

from virtman import creating
from virtman.errors import (
    Conflict,
    HostTrouble,
    HypervisorAbsent,
    HypervisorError,
    NoRoom,
    VmRuns,
    VmSaved,
)
from virtman.operations import Kind
from virtman.records import BOOT, DESTROY, Boot, VmRecord
from virtman.seed import Identity
from virtman.vms import Vms

log = logging.getLogger(__name__)


class _NotStarted(HypervisorError):
    """The hypervisor does not have a VM whose boot was cut off."""


def boot(
    vms: Vms, name: str, image: str, size: int | None, how: Boot, ssh_keys: list[str] | None, user_data: str | None
) -> None:
    """Start a VM, creating its disk if needed. A VM that runs so already is left alone.

    Raises as ``create`` and ``Machines.start``. After an error all is as it was before; what cannot be undone now is
    undone later.
    """
    with vms.holding(name):
        vms.resume(name)
        before = vms.records.get(name)
        creating.create_held(vms, name, image, size)
        _boot(vms, vms.record(name), how, ssh_keys, user_data, new=before is None)


def _boot(
    vms: Vms, record: VmRecord, how: Boot, ssh_keys: list[str] | None, user_data: str | None, *, new: bool = False
) -> None:
    """``new``: the disk was made for this boot, so it is attached to no VM."""
    if not new:
        vms.require_detached(record)
    vms.require_here(record)
    identity = Identity(record.name, record.uuid, ssh_keys, user_data)

    def act(booting: VmRecord) -> None:
        vms.machines.start(identity, vms.vmdisks.open(record.name), how, vms.disks_of(record))
        vms.step("boot:started")
        vms.operations.note(booting.settled())  # it runs: an error now would be a lie

    machine = None if record.boot is None else record.boot.model_dump(mode="json")
    vms.run(record.begin(BOOT, new=new, before=machine).model_copy(update={"boot": how}), act)


def start(vms: Vms, name: str) -> None:
    """Start a VM again as it was booted before, or as others have changed it since; a VM that runs is left alone.

    Raises UnknownVm, Conflict, and as ``boot``.
    """
    with vms.holding(name):
        _resume_to_start(vms, name)
        record = vms.record(name)
        if record.boot is None:
            raise Conflict(f"vm {name!r} was never booted, so nothing is known of its machine; use virtman boot")
        _boot(vms, record, vms.machines.machine(name) or record.boot, None, None)


def stop(vms: Vms, name: str, *, force: bool) -> None:
    """Shut a VM down; with ``force`` cut its power. Raises UnknownVm, VmMoving, VmSaved, HypervisorError."""
    vms.require_here(vms.record(name))
    vms.machines.stop(name, force=force)


def _resume_to_start(vms: Vms, name: str) -> None:
    """End what was cut off. Some operations cannot end before the VM goes on with its saved memory."""
    try:
        vms.resume(name)
    except VmSaved:
        record = vms.record(name)
        if record.boot is None:  # it is the memory of the VM that the disk is attached to
            raise
        vms.machines.start(Identity(name, record.uuid), vms.vmdisks.open(name), record.boot)
        vms.resume(name)


def _finish_boot(vms: Vms, record: VmRecord) -> None:
    """A boot that was cut off has happened if the hypervisor has the VM."""
    machine = vms.machines.machine(record.name)
    if machine is None:
        raise _NotStarted(f"libvirt does not have vm {record.name!r}")
    vms.settle(record, boot=machine)


def _unboot(vms: Vms, record: VmRecord, error: Exception | None) -> VmRecord:
    """Go back to what there was before: to no VM if the disk was made for this boot.

    The hypervisor may have the VM, though it said otherwise or nothing. While that is not known, neither the record of
    the machine nor the disk may go.
    """
    before = record.argument("before")
    settled = record.settled(boot=before and Boot.model_validate(before))
    untouched = isinstance(error, HypervisorAbsent | VmRuns | NoRoom | HostTrouble)
    if record.argument("new"):
        return (settled if untouched else record).begin(DESTROY)
    if isinstance(error, _NotStarted) or (before is None and not untouched):
        vms.machines.remove(record.name)  # of its files, if there are any
    return settled


KINDS = {BOOT: Kind(_finish_boot, _unboot, gives_up=(_NotStarted,))}
