"""VMs use the disks of others besides their own: of those that were never booted, and so are nothing but a disk.

The record of the VM that uses a disk names it. While it does, the disk is changed as a part of that VM
(``Vms.changing``), and can neither be booted, nor get another name, nor be destroyed.
"""

from __future__ import annotations

import logging

from drivers.base import SnapshotDriver
from drivers.errors import DriverError
from virtman.errors import BadRequest, HostTrouble, NeverBooted, NoRoom, VirtmanError
from virtman.records import ATTACH_DISK, DETACH_DISK, Shelf, VmRecord
from virtman.steps import Step, log_step
from virtman.vms import Machines, Vms

log = logging.getLogger(__name__)


class Attachments:
    """Attaches disks to ``vms``."""

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
        vms.also_repair({ATTACH_DISK: self._repair_attach, DETACH_DISK: self._detach})

    def attach(self, vm: str, disk: str) -> None:
        """Let a VM use a disk besides its own, at once if it runs; one that it has already is fine.

        Raises UnknownVm, NeverBooted, BadRequest, DiskAttached, VmSaved, DriverError, HypervisorError; after an error
        it does not have the disk, or, if that is logged, gives it back later.
        """
        with self._vms.holding_all((vm, disk)):
            for name in (vm, disk):
                self._vms.repair_held(name)
            record = self._vms.record(vm)
            if disk in record.disks:
                self._plug(record, disk)  # into one that others have started meanwhile
                return
            self._check(record, self._vms.record(disk))
            attaching = record.begin(ATTACH_DISK, disk=disk)
            self._shelf.put(vm, attaching)
            self._step("attach-disk:recorded")
            try:
                self._attach(attaching)
            except (VirtmanError, DriverError) as error:
                log.warning("vm %s: disk %s was not attached: %s", vm, disk, error)
                self._undo(record.begin(DETACH_DISK, disk=disk))
                raise

    def _check(self, record: VmRecord, disk: VmRecord) -> None:
        self._vms.require_here(record)
        if record.boot is None:
            raise NeverBooted(f"vm {record.name!r} was never booted; a disk is attached to a VM that was")
        if disk.boot is not None:
            raise BadRequest(f"{disk.name!r} is a VM that was booted; what is attached is a disk of 'virtman create'")
        self._vms.require_detached(disk)
        self._vms.require_not_saved(record)

    def _attach(self, record: VmRecord) -> None:
        """All steps that are yet to be done: each does nothing where it was done before."""
        disk = _disk(record)
        settled = record.settled(disks=(*record.disks, disk))
        self._plug(record, disk)
        self._step("attach-disk:plugged")
        self._follow(settled)
        self._step("attach-disk:followed")
        self._shelf.put(record.name, settled)
        self._step("attach-disk:done")

    def _plug(self, record: VmRecord, disk: str) -> None:
        with self._vms.running(record) as running:
            if running is not None:
                running.plug(disk, self._snapshots.open(disk))

    def _follow(self, settled: VmRecord) -> None:
        self._machines.follow(settled.name, self._snapshots.open(settled.name), self._vms.disks_of(settled))

    def _repair_attach(self, record: VmRecord) -> None:
        try:
            self._attach(record)
        except DriverError as error:  # nobody was told that it is attached
            log.warning("vm %s: a disk that was being attached is detached: %s", record.name, error)
            self._undo(record.begin(DETACH_DISK, disk=_disk(record)))

    def _undo(self, detaching: VmRecord) -> None:
        try:
            self._shelf.put(detaching.name, detaching)
        except (NoRoom, HostTrouble) as second:
            log.error("vm %s: %s", detaching.name, second)
            self._shelf.remember(detaching.name, detaching)
        try:
            self._detach(detaching)
        except (VirtmanError, DriverError) as second:
            log.error("vm %s: giving disk %s back is tried again later: %s", detaching.name, _disk(detaching), second)

    def detach(self, vm: str, disk: str) -> None:
        """Take a disk away from a VM, at once if it runs; one that it does not have is fine.

        Its guest is not asked. Raises UnknownVm, VmSaved, DriverError, HypervisorError; after an error the VM has it
        still, or gives it up later.
        """
        with self._vms.changing(vm) as record:
            if disk not in record.disks:
                self._vms.record(disk)
                return
            rest = tuple(name for name in record.disks if name != disk)
            detaching = record.model_copy(update={"disks": rest}).begin(DETACH_DISK, disk=disk)
            self._shelf.put(vm, detaching)
            self._step("detach-disk:recorded")
            try:
                self._unplug(detaching)
            except (VirtmanError, DriverError) as error:
                log.warning("vm %s: disk %s was not detached: %s", vm, disk, error)
                self._keep(record)
                raise
            self._give_up(detaching)

    def _unplug(self, record: VmRecord) -> None:
        disk = _disk(record)
        with self._vms.running(record) as running:
            if running is not None:
                running.unplug(disk, self._snapshots.open(disk))

    def _detach(self, record: VmRecord) -> None:
        self._unplug(record)
        self._give_up(record)

    def _give_up(self, record: VmRecord) -> None:
        self._step("detach-disk:unplugged")
        self._follow(record)
        self._step("detach-disk:followed")
        self._shelf.put(record.name, record.settled())
        self._step("detach-disk:done")

    def _keep(self, record: VmRecord) -> None:
        """The VM has the disk still; the error that led here is the one to raise."""
        try:
            self._shelf.put(record.name, record)
        except (NoRoom, HostTrouble) as second:
            log.error("vm %s: detaching a disk is tried again later: %s", record.name, second)


def _disk(record: VmRecord) -> str:
    assert record.operation is not None  # noqa: S101
    return str(record.operation.arguments["disk"])
