"""VMs get other names. What a VM is to others stays: its UUID, and with it the MAC address and what cloud-init knows it
by.

While it is under way the operation is in the record of the old name, and the new one is nobody else's (``Vms``). The
record moves last, so whoever finds the new one finds all of the VM under it.
"""

from __future__ import annotations

import logging

from drivers.base import SnapshotDriver
from drivers.errors import DriverError
from virtman.errors import VirtmanError, VmExists
from virtman.records import RENAME, Shelf, VmRecord
from virtman.roles import Permit, anything
from virtman.steps import Step, log_step
from virtman.vms import Machines, Vms

log = logging.getLogger(__name__)


class Renames:
    """Renames ``vms``."""

    def __init__(
        self,
        vms: Vms,
        shelf: Shelf[VmRecord],
        snapshots: SnapshotDriver,
        machines: Machines,
        step: Step = log_step,
    ) -> None:
        self._vms, self._shelf = vms, shelf
        self._snapshots, self._machines = snapshots, machines
        self._step = step
        vms.also_repair({RENAME: self._repair})

    def rename(self, vm: str, new: str, permit: Permit = anything) -> None:
        """Let a VM that is off be called ``new``. One that was ``vm`` before and is called so already is left alone.

        Raises UnknownVm, Forbidden, VmExists, VmRuns, VmSaved, DiskAttached, DriverError, HypervisorError,
        DomainForeign; after an error it is called as before, or, if that is logged, is renamed later.
        """
        if vm == new:
            raise VmExists(f"vm {vm!r} is called so already; say another name")
        with self._vms.holding_all((vm, new)):
            for name in (vm, new):
                self._vms.repair_held(name)
            if not self._is_done(vm, new):
                self._vms.require_permitted(vm, permit)
                self._vms.check_free(new)
                self._rename(self._vms.record(vm), new)

    def _is_done(self, vm: str, new: str) -> bool:
        """Raises VmExists, UnknownVm."""
        present = self._shelf.get(new)
        if present is not None and (present.was != vm or self._shelf.get(vm) is not None):
            raise VmExists(f"vm {new!r} exists; use another name")
        return present is not None

    def _rename(self, record: VmRecord, new: str) -> None:
        self._vms.require_detached(record)
        self._vms.require_here(record)
        self._vms.require_off(record, "it gets another name")
        renaming = record.begin(RENAME, new=new, back=False)
        self._shelf.put(record.name, renaming)
        self._step("rename:recorded")
        try:
            self._finish(renaming)
        except (VirtmanError, DriverError) as error:
            log.warning("vm %s: it was not renamed to %s: %s", record.name, new, error)
            self._go_back(record, new)
            raise

    def _repair(self, record: VmRecord) -> None:
        assert record.operation is not None  # noqa: S101
        if record.operation.arguments["back"]:
            self._undo(record)
        else:
            self._finish(record)

    def _finish(self, record: VmRecord) -> None:
        """All steps that are yet to be done: each does nothing where it was done before.

        Nothing is left to do of a VM that was destroyed by its new name, after a crash before the old one was gone.
        """
        vm, new = record.name, _new_name(record)
        if self._shelf.get(new) is None and self._snapshots.existing().names & {vm, new}:
            if record.boot is not None:
                self._machines.rename(vm, new)
            self._step("rename:machine")
            disk = self._snapshots.rename(vm, new)
            self._step("rename:disk")
            if record.boot is not None:
                self._machines.follow(new, disk, self._vms.disks_of(record))
            born = None if record.uuid else record.born or vm
            self._shelf.put(new, record.settled(name=new, was=vm, born=born))
            self._step("rename:known")
        self._shelf.remove(vm)
        self._step("rename:done")

    def _go_back(self, record: VmRecord, new: str) -> None:
        """Undo what failed, now or later. Once the disk has its new name it is finished instead, later."""
        try:
            self._snapshots.open(record.name)
            back = record.begin(RENAME, new=new, back=True)
            self._shelf.put(record.name, back)
            self._undo(back)
        except (VirtmanError, DriverError) as second:
            log.error("vm %s: undoing or finishing it is tried again later: %s", record.name, second)

    def _undo(self, record: VmRecord) -> None:
        if record.boot is not None:
            self._machines.rename(_new_name(record), record.name)
            self._machines.follow(record.name, self._snapshots.open(record.name), self._vms.disks_of(record))
        self._shelf.put(record.name, record.settled())


def _new_name(record: VmRecord) -> str:
    assert record.new_name is not None  # noqa: S101
    return record.new_name
