"""VMs move to another host while they run: what the hosts' agents do for it; ``virtman/moving.py`` has the whole of it.

libvirt moves the memory. It cannot move the disk, of which it does not know (virtman/domain.py), and has not to: the
destination has made it of streams while the VM ran. So libvirt leaves the VM paused there, which it can for a QEMU that
opens its disks anew when it goes on (QEMU: the migration capability late-block-activate); by then the last changes have
come, which are those that the VM made until it was paused.

A VM is at the old host until libvirt says that it went, and then at the new one, where it may still be arriving.
Neither agent ever runs what may run at the other one: that needs a person's word.
"""

from __future__ import annotations

import logging
from typing import Protocol

from drivers.base import SnapshotDriver
from drivers.errors import DriverError, NotPossible
from virtman.errors import BadRequest, NeverBooted, VirtmanError, VmMoving, VmRuns
from virtman.records import ARRIVE, MIGRATE, Shelf, VmRecord
from virtman.steps import Step, log_step
from virtman.vms import Machines, Traveller, Vms

log = logging.getLogger(__name__)


class Tell(Protocol):
    """Hears of bytes of memory that were moved, and how many there are in all."""

    def __call__(self, done: int, total: int) -> None:
        """Be told."""


class Migrations:
    """Moves ``vms`` to other hosts, and takes them in."""

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
        vms.also_repair({MIGRATE: self._settle, ARRIVE: self._arrive})

    # At the old host

    def traveller(self, vm: str) -> Traveller:
        """What goes along with a VM's disk. Raises UnknownVm, NeverBooted, BadRequest, NotPossible, HypervisorError."""
        record = self._vms.record(vm)
        self._check(record)
        return self._machines.traveller(vm)

    def _check(self, record: VmRecord) -> None:
        vm = record.name
        self._vms.require_here(record)
        if record.boot is None:
            raise NeverBooted(f"vm {vm!r} was never booted; 'virtman send' and 'receive' move its disk")
        if record.disks:
            raise BadRequest(f"vm {vm!r} has further disks, which do not move; detach them first: {record.disks[0]!r}")
        if self._snapshots.open(vm).node is None:
            raise NotPossible(
                f"the disk of vm {vm!r} is a device of this host; only VMs of the userspace stack move while they run:"
                " stop it, and use 'virtman send' and 'receive'"
            )
        last = None if record.current is None else record.point(record.current)
        line = [] if last is None else record.line(last)
        aside = [point.name for point in record.points if not point.temporary and point not in line]
        if aside:
            raise BadRequest(
                f"the disk of vm {vm!r} did not go on from snapshot {aside[0]!r}, which would not move; delete it first"
            )
        with self._machines.running_vm(vm) as running:
            if running is None:
                raise BadRequest(f"vm {vm!r} is off; 'virtman send' and 'receive' move its disk")

    def leave(self, vm: str, uri: str, domain: str, tell: Tell) -> float:
        """Move a VM's memory to the libvirt at ``uri``, as the ``domain`` (XML) that its agent has asked for.

        It is paused there when this returns, and gone from this host's libvirt. Returns for how many seconds it had
        stood still by then. Raises UnknownVm, VmMoving, HypervisorError, and as ``traveller``; after an error the VM
        goes on here, or, if libvirt cannot tell, that is found out later.
        """
        with self._vms.changing(vm) as record:
            self._check(record)
            migrating = record.begin(MIGRATE, to=uri)
            self._shelf.put(vm, migrating)
            self._step("migrate:recorded")
            try:
                downtime = self._machines.migrate(vm, uri, domain, tell)
            except VirtmanError as error:
                log.warning("vm %s: it did not move to %s: %s", vm, uri, error)
                self._settle_or_later(migrating)
                if self._vms.record(vm).moved is None:
                    raise
                downtime = 0.0  # libvirt did not get to say that it went
            else:
                self._step("migrate:went")
                self._settle(migrating)
            return downtime

    def _settle_or_later(self, record: VmRecord) -> None:
        try:
            self._settle(record)
        except (VirtmanError, DriverError) as second:
            log.error("vm %s: where it is, is found out later: %s", record.name, second)

    def _settle(self, record: VmRecord) -> None:
        """A VM that still runs here has not moved; that it is being moved is ended. One that is off went."""
        assert record.operation is not None  # noqa: S101
        self._machines.end_migration(record.name)
        with self._machines.running_vm(record.name) as running:
            gone = running is None
        if gone:
            self._machines.undefine(record.name)
        self._shelf.put(record.name, record.settled(moved=str(record.operation.arguments["to"]) if gone else None))
        self._step("migrate:settled")

    def abort(self, vm: str) -> None:
        """End a migration: one that is under way fails; a VM that went may be started here again.

        Whoever says so of one that went has destroyed it there. Raises UnknownVm, BadRequest, HypervisorError.
        """
        record = self._vms.record(vm)
        if record.doing(MIGRATE):
            self._machines.end_migration(vm)
            return
        with self._vms.changing(vm) as record:
            if record.moved is None:
                raise BadRequest(f"vm {vm!r} is not being moved")
            self._shelf.put(vm, record.settled(moved=None))

    # At the new host

    def expect(self, vm: str, traveller: Traveller) -> str:
        """Make ready for a VM whose disk is here. Returns the domain (XML) that libvirt is to make of it.

        Asked again, it answers the same. Raises UnknownVm, VmRuns, DiskAttached, NotPossible, HypervisorError.
        """
        with self._vms.changing(vm, arriving=True) as record:
            if record.boot is not None and not record.arriving:
                raise VmRuns(f"vm {vm!r} was booted on this host; destroy it before another one of this name comes")
            self._vms.require_detached(record)
            disk = self._snapshots.open(vm)
            if disk.node is None:
                raise NotPossible("this host has disks of the kernel stack; VMs move to hosts of the userspace stack")
            self._shelf.put(vm, record.settled(boot=traveller.boot, arriving=True, uuid=traveller.uuid))
            self._step("arrive:expected")
            return self._machines.expect(vm, disk, traveller)

    def arrive(self, vm: str) -> None:
        """Let a VM go on that has come, with all that its disk has. One that has arrived is left alone.

        Raises UnknownVm, VmMoving if its memory is not here, HypervisorError.
        """
        with self._vms.changing(vm, arriving=True) as record:
            if not record.arriving:
                return
            with self._machines.running_vm(vm) as running:
                if running is None:
                    raise VmMoving(f"vm {vm!r} has not come: libvirt does not have its memory here")
            self._shelf.put(vm, record.begin(ARRIVE))
            self._step("arrive:recorded")
            self._arrive(record)

    def _arrive(self, record: VmRecord) -> None:
        """From the first time that it goes on, nothing but the VM writes to its disk."""
        with self._machines.running_vm(record.name) as running:
            if running is not None:
                running.go_on()
        self._step("arrive:goes on")
        self._machines.follow(record.name, self._snapshots.open(record.name))
        self._shelf.put(record.name, record.settled(arriving=False))
        self._step("arrive:done")
