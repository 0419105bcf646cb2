"""VMs move to another host while they run: what the hosts' agents do for it; ``virtman/moving.py`` has the whole of it.

libvirt moves the memory. libvirt does not know the disk (virtman/domain.py), so the disk comes by streams while the VM
runs. libvirt leaves the VM paused at the destination. QEMU opens the disk anew when the VM goes on (QEMU: the migration
capability late-block-activate). Before that the last changes arrive, which the VM made until it was paused.

A VM is at the old host until libvirt says that it went, and then at the new one, where it may still be arriving.
Neither agent ever runs what may run at the other one: that needs a person's word.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from drivers.errors import NotPossible
from virtman.errors import BadRequest, Conflict, NotSupported, UnknownVm, VirtmanError, VmMoving, VmRuns
from virtman.models import ABSENT, ANOTHER, ARRIVED, GIVEN_UP, MigrationSource
from virtman.operations import Kind
from virtman.records import ARRIVE, DESTROY, MIGRATE, Boot, VmRecord
from virtman.vms import Vms

NO_MOVES = "this host has disks of the kernel stack; VMs move to hosts of the stack chunkstore"


# At the old host


def migration_source(vms: Vms, vm: str) -> MigrationSource:
    """What goes along with a VM's disk. Raises UnknownVm, Conflict, BadRequest, NotPossible, HypervisorError."""
    _check(vms, vms.record(vm))
    return vms.machines.migration_source(vm)


def _check(vms: Vms, record: VmRecord) -> None:
    vm = record.name
    vms.require_here(record)
    if record.doing(MIGRATE):
        raise VmMoving(
            f"vm {vm!r} is being moved to {record.argument('to')} already; 'virtman migrate --abort' ends that"
        )
    if record.boot is None:
        raise Conflict(f"vm {vm!r} was never booted; 'virtman send' and 'receive' move its disk")
    if record.disks:
        raise BadRequest(f"vm {vm!r} has further disks, which do not move; detach them first: {record.disks[0]!r}")
    if not vms.vmdisks.moves_live:
        raise NotPossible(
            f"the disk of vm {vm!r} is a device of this host; only VMs of the stack chunkstore move while they run:"
            " stop it, and use 'virtman send' and 'receive'"
        )
    last = None if record.current is None else record.snapshot(record.current)
    line = [] if last is None else record.line(last)
    aside = [snapshot.name for snapshot in record.snapshots if not snapshot.temporary and snapshot not in line]
    if aside:
        raise BadRequest(
            f"the disk of vm {vm!r} did not go on from snapshot {aside[0]!r}, which would not move; delete it first"
        )
    with vms.machines.running_vm(vm) as running:
        if running is None:
            raise BadRequest(f"vm {vm!r} is off; 'virtman send' and 'receive' move its disk")


def leave(vms: Vms, vm: str, uri: str, domain: str, snapshot: str, tell: Callable[[int, int], None]) -> float:
    """Move a VM's memory to the libvirt at ``uri``, as the ``domain`` (XML) that its agent has asked for.

    ``snapshot``: the snapshot that was sent last, after which nothing but the VM may have changed its disk. ``tell``
    hears of bytes of memory moved, and in all. The VM is paused there when this returns, and gone from this host's
    libvirt. Returns for how many seconds it has stood still. Raises UnknownVm, VmMoving, Conflict, HypervisorError,
    as ``migration_source``, and as ``tell``; after an error the VM goes on here, or, if libvirt cannot tell, that is
    found out later.
    """

    def act(record: VmRecord) -> float:
        downtime = vms.machines.migrate(vm, uri, domain, tell)
        vms.step("migrate:went")
        _settle(vms, record)
        return downtime

    with vms.changing(vm) as record:
        _check(vms, record)
        _check_sent(record, snapshot)
        try:
            return vms.run(record.begin(MIGRATE, to=uri), act)
        except VirtmanError:
            if vms.record(vm).moved is None:
                raise
            return 0.0  # libvirt did not get to say that it went


def _check_sent(record: VmRecord, snapshot: str) -> None:
    """Whether the snapshot is the disk's newest, and has the disk's size. Raises Conflict."""
    last = record.snapshot(snapshot)
    if last is None or record.current != snapshot or last.size != record.size:
        raise Conflict(
            f"the disk of vm {record.name!r} got another snapshot or another size while it was sent; migrate it again"
        )


def _settle(vms: Vms, record: VmRecord) -> None:
    vms.records.put(record.name, _settled(vms, record, None))
    vms.step("migrate:settled")


def _settled(vms: Vms, record: VmRecord, _error: Exception | None) -> VmRecord:
    """A VM that runs here has not moved, and its migration is ended. A VM that is off went, unless libvirt knows
    another reason: its guest shut down, or its power was cut.
    """
    vms.machines.end_migration(record.name)
    gone = vms.machines.went(record.name) is not False
    if gone:
        vms.machines.undefine(record.name)
    return record.settled(moved=record.argument("to") if gone else None)


def abort(vms: Vms, vm: str) -> None:
    """End a migration that is under way, which fails; one whose memory has gone is left as it is.

    It is written down where the VM is when this returns. Raises UnknownVm, BadRequest, HypervisorError.
    """
    under_way = vms.record(vm).doing(MIGRATE)
    if under_way:
        vms.machines.end_migration(vm)
    with vms.changing(vm, gone=True) as record:
        if not under_way and record.moved is None:
            raise BadRequest(f"vm {vm!r} is not being moved")


def take_back(vms: Vms, vm: str, uri: str) -> None:
    """Let a VM that went to ``uri`` be started here again. Whoever says so has destroyed it there.

    Raises UnknownVm, BadRequest if it did not go there.
    """
    with vms.changing(vm, gone=True) as record:
        if record.moved != uri:
            raise BadRequest(f"vm {vm!r} did not go to {uri}")
        vms.settle(record, moved=None)


def finish(vms: Vms, vm: str, uri: str) -> None:
    """Destroy what is left of a VM that goes on at ``uri``. Raises UnknownVm, VmMoving, DriverError."""
    with vms.changing(vm, gone=True) as record:
        if record.moved != uri:
            raise VmMoving(f"vm {vm!r} did not go to {uri}; it is left as it is")
        vms.run(record.begin(DESTROY))


# At the new host


def check(vms: Vms, source: MigrationSource) -> None:
    """Whether a VM can come, before anything of it does. Raises NotSupported, HypervisorError."""
    if not vms.vmdisks.moves_live:
        raise NotSupported(NO_MOVES)
    vms.machines.check(source)


def expect(vms: Vms, vm: str, source: MigrationSource) -> str:
    """Make ready for a VM whose disk is here. Returns the domain (XML) that libvirt is to make of it.

    Asked again, it answers the same. Raises UnknownVm, VmRuns, Conflict, NotPossible, HypervisorError.
    """
    if not vms.vmdisks.moves_live:
        raise NotPossible(NO_MOVES)
    with vms.changing(vm, arriving=True, gone=True) as record:
        if _is_own(record):
            raise VmRuns(f"vm {vm!r} was booted on this host; destroy it before another one of this name comes")
        vms.require_detached(record)
        disk = vms.vmdisks.open(vm)
        boot = Boot(memory=source.memory, cpus=source.cpus, network=source.network)
        vms.settle(record, boot=boot, uuid=str(source.uuid), arriving=True, whole=False)
        vms.step("arrive:expected")
        return vms.machines.expect(vm, disk, source)


def give_up(vms: Vms, vm: str, snapshots: Collection[str]) -> str:
    """Destroy what has come of a VM with one of these snapshots, unless it goes on here already.

    Returns one of ``ABSENT``, ``GIVEN_UP``, ``ARRIVED``, ``ANOTHER``; the last two are left alone. Raises Conflict,
    DriverError, HypervisorError.
    """
    came = vms.records.get(vm)
    if came is None:
        return ABSENT
    if not any(came.snapshot(name) or name in came.coming for name in snapshots):
        return ANOTHER  # no look under its lock: another call may hold that for long
    vms.receiving.end(vm, f"vm {vm!r} was given up while it came")
    try:
        with vms.changing(vm, arriving=True, gone=True) as record:
            if not any(record.snapshot(name) for name in snapshots):
                return ANOTHER
            if _is_own(record):
                return ARRIVED
            vms.require_detached(record)
            vms.run(record.begin(DESTROY))
    except UnknownVm:
        return ABSENT
    return GIVEN_UP


def _is_own(record: VmRecord) -> bool:
    """Whether a VM is this host's own, and does not only arrive."""
    return record.boot is not None and not record.arriving


def arrive(vms: Vms, vm: str) -> None:
    """Let a VM go on that has come, with all that its disk has. A VM that has arrived is left alone.

    Raises UnknownVm, Conflict, VmMoving if its memory or what it wrote last is not here, HypervisorError.
    """
    with vms.changing(vm, arriving=True, gone=True) as record:
        if not record.arriving:
            if record.boot is None:
                raise Conflict(f"vm {vm!r} does not come from another host, and was never booted here")
            return
        if not record.whole:
            raise VmMoving(f"vm {vm!r} has not come: its disk does not have what it wrote last")
        with vms.machines.running_vm(vm) as running:
            if running is None:
                raise VmMoving(f"vm {vm!r} has not come: libvirt does not have its memory here")
        vms.run(record.begin(ARRIVE))


def _arrive(vms: Vms, record: VmRecord) -> None:
    """From the first time that it goes on, nothing but the VM writes to its disk."""
    with vms.machines.running_vm(record.name) as running:
        if running is not None:
            running.go_on()
    vms.step("arrive:goes on")
    vms.machines.follow(record.name, vms.vmdisks.open(record.name))
    vms.settle(record, arriving=False)
    vms.step("arrive:done")


KINDS = {MIGRATE: Kind(_settle, _settled), ARRIVE: Kind(_arrive)}
