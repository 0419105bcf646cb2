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
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Protocol

from drivers.base import SnapshotDriver
from drivers.errors import DriverError, NotPossible
from virtman.errors import (
    BadRequest,
    DiskChanged,
    NeverBooted,
    UnknownVm,
    VirtmanError,
    VmMoving,
    VmRuns,
)
from virtman.models import ABSENT, ANOTHER, ARRIVED, GIVEN_UP
from virtman.records import ARRIVE, DESTROY, MIGRATE, Shelf, VmRecord
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
        interrupt: Callable[[str, str], object],
        step: Step = log_step,
    ) -> None:
        """``interrupt`` ends what is being received for a VM, and says why (``Streams.interrupt``)."""
        self._vms, self._shelf = vms, shelf
        self._snapshots, self._machines = snapshots, machines
        self._interrupt, self._step = interrupt, step
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
        if record.operation is not None and record.doing(MIGRATE):
            where = record.operation.arguments["to"]
            raise VmMoving(f"vm {vm!r} is being moved to {where} already; 'virtman migrate --abort' ends that")
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

    def leave(self, vm: str, uri: str, domain: str, point: str, tell: Tell) -> float:
        """Move a VM's memory to the libvirt at ``uri``, as the ``domain`` (XML) that its agent has asked for.

        ``point``: the snapshot that was sent last, after which nothing but the VM may have changed its disk. The VM is
        paused there when this returns, and gone from this host's libvirt. Returns for how many seconds it had stood
        still by then. Raises UnknownVm, VmMoving, DiskChanged, HypervisorError, as ``traveller``, and as ``tell``;
        after an error the VM goes on here, or, if libvirt cannot tell, that is found out later.
        """
        with self._vms.changing(vm) as record:
            self._check(record)
            _check_sent(record, point)
            uuid = self._machines.traveller(vm).uuid  # of a VM of an earlier release its record has none
            migrating = record.model_copy(update={"uuid": uuid}).begin(MIGRATE, to=uri)
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
        """A VM that still runs here has not moved; that it is being moved is ended. One that is off went, if libvirt
        does not say otherwise: its guest may have shut down, or somebody have cut its power.
        """
        assert record.operation is not None  # noqa: S101
        self._machines.end_migration(record.name)
        gone = self._machines.went(record.name) is not False
        if gone:
            self._machines.undefine(record.name)
        self._shelf.put(record.name, record.settled(moved=str(record.operation.arguments["to"]) if gone else None))
        self._step("migrate:settled")

    def abort(self, vm: str) -> None:
        """End a migration that is under way, which fails; one whose memory has gone is left as it is.

        It is written down where the VM is when this returns. Raises UnknownVm, BadRequest, HypervisorError.
        """
        under_way = self._vms.record(vm).doing(MIGRATE)
        if under_way:
            self._machines.end_migration(vm)
        with self._vms.changing(vm) as record:
            if not under_way and record.moved is None:
                raise BadRequest(f"vm {vm!r} is not being moved")

    def take_back(self, vm: str, uri: str) -> None:
        """Let a VM that went to ``uri`` be started here again. Whoever says so has destroyed it there.

        Raises UnknownVm, BadRequest if it did not go there.
        """
        with self._vms.changing(vm) as record:
            if record.moved != uri:
                raise BadRequest(f"vm {vm!r} is not one that went to {uri}")
            self._shelf.put(vm, record.settled(moved=None))

    def finish(self, vm: str, uri: str) -> None:
        """Destroy what is left of a VM that goes on at ``uri``. Raises UnknownVm, VmMoving, DriverError."""
        with self._vms.changing(vm) as record:
            if record.moved != uri:
                raise VmMoving(f"vm {vm!r} is not one that went to {uri}; it is left as it is")
            self._shelf.put(vm, record.begin(DESTROY))
        self._destroy(vm)

    def _destroy(self, vm: str) -> None:
        """Carry out what is written down already: a repair that has done it meanwhile is as good."""
        self._step("migration:destroying")
        with suppress(UnknownVm):
            self._vms.destroy(vm)

    # At the new host

    def check(self, traveller: Traveller) -> None:
        """Whether a VM can come, before anything of it does. Raises NotSupported, HypervisorError."""
        self._machines.check(traveller)

    def expect(self, vm: str, traveller: Traveller) -> str:
        """Make ready for a VM whose disk is here. Returns the domain (XML) that libvirt is to make of it.

        Asked again, it answers the same. Raises UnknownVm, VmRuns, DiskAttached, NotPossible, HypervisorError.
        """
        with self._vms.changing(vm, arriving=True) as record:
            if _goes_on(record):
                raise VmRuns(f"vm {vm!r} was booted on this host; destroy it before another one of this name comes")
            self._vms.require_detached(record)
            disk = self._snapshots.open(vm)
            if disk.node is None:
                raise NotPossible("this host has disks of the kernel stack; VMs move to hosts of the userspace stack")
            self._shelf.put(vm, record.settled(boot=traveller.boot, uuid=traveller.uuid, arriving=True, whole=False))
            self._step("arrive:expected")
            return self._machines.expect(vm, disk, traveller)

    def give_up(self, vm: str, points: Collection[str]) -> str:
        """Destroy what has come of a VM with one of these snapshots, unless it goes on here already.

        Returns one of ``ABSENT``, ``GIVEN_UP``, ``ARRIVED``, ``ANOTHER``; the last two are left alone. Raises
        DiskAttached, DriverError, HypervisorError.
        """
        came = self._shelf.get(vm)
        if came is None:
            return ABSENT
        if not any(came.point(name) or name in came.coming for name in points):
            return ANOTHER  # no look under its lock: another call may hold that for long
        self._interrupt(vm, f"vm {vm!r} was given up while it came")
        try:
            with self._vms.changing(vm, arriving=True) as record:
                if not any(record.point(name) for name in points):
                    return ANOTHER
                if _goes_on(record):
                    return ARRIVED
                self._vms.require_detached(record)
                self._shelf.put(vm, record.begin(DESTROY))  # now nobody lets it go on any more
        except UnknownVm:
            return ABSENT
        self._destroy(vm)
        return GIVEN_UP

    def arrive(self, vm: str) -> None:
        """Let a VM go on that has come, with all that its disk has. One that has arrived is left alone.

        Raises UnknownVm, NeverBooted, VmMoving if its memory or what it wrote last is not here, HypervisorError.
        """
        with self._vms.changing(vm, arriving=True) as record:
            if not record.arriving:
                if record.boot is None:
                    raise NeverBooted(f"vm {vm!r} does not come from another host, and was never booted here")
                return
            if not record.whole:
                raise VmMoving(f"vm {vm!r} has not come: its disk does not have what it wrote last")
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


def _goes_on(record: VmRecord) -> bool:
    """Whether a VM is this host's own, not one that only comes."""
    return record.boot is not None and not record.arriving


def _check_sent(record: VmRecord, point: str) -> None:
    """Whether the disk went on from that snapshot, in its size: nobody else's came after it. Raises DiskChanged."""
    last = record.point(point)
    if last is None or record.current != point or last.size != record.size:
        raise DiskChanged(
            f"the disk of vm {record.name!r} got another snapshot or another size while it was sent; migrate it again"
        )
