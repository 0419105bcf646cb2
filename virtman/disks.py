"""VMs' disks grow, and have snapshots."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from drivers.errors import BadDisk, DiskInUse, DriverError, NotPossible, SnapshotMissing
from virtman.errors import BadRequest, BadSize, UnknownSnapshot, UnknownVm, VirtmanError, VmRuns
from virtman.hypervisor import Running
from virtman.names import TEMPORARY, TRAVELLING
from virtman.operations import Kind
from virtman.records import CRASH, DROP, FROZEN, OFF, RESIZE, REVERT, TAKE, Snapshot, VmRecord
from virtman.roles import Permit, anything
from virtman.sizes import check_size
from virtman.vms import Vms
from volt.text import exact_size

log = logging.getLogger(__name__)

NOT_BEGUN = (DiskInUse, SnapshotMissing, NotPossible)
"""With one of these errors the driver refuses to revert a disk, and has changed nothing."""

REVERTED = "its disk goes back to a snapshot"


def resize(vms: Vms, vm: str, size: int, permit: Permit = anything) -> None:
    """Let a disk have ``size`` bytes; a running VM sees it at once. The size that it has is fine.

    Raises UnknownVm, Forbidden, VmMoving, VmSaved, BadSize, DriverError, HypervisorError.
    """
    check_size(size)
    with vms.changing(vm, permit) as record:
        if size < (record.size or 0):
            raise BadSize(f"vm {vm!r} has a disk of {exact_size(record.size)}, and a disk cannot be made smaller")
        if size != record.size:
            vms.run(record.begin(RESIZE, size=size))


def _resize(vms: Vms, record: VmRecord) -> None:
    with vms.running(record) as running:
        disk = vms.vmdisks.resize(record.name, record.argument("size"), running)
    vms.step("resize:resized")
    vms.settle(record, size=disk.size)


def _with_size(vms: Vms, record: VmRecord, _error: Exception | None) -> VmRecord:
    """The record with the size that the disk has."""
    return record.settled(size=vms.vmdisks.open(record.name).size)


@contextmanager
def temporary(vms: Vms, vm: str, *, gone: bool = False) -> Iterator[Snapshot]:
    """A snapshot of now that is gone afterwards, also if the agent dies meanwhile. Raises as ``take``.

    ``gone``: also of a VM that went to another host, which gets what the VM wrote last.
    """
    name = f"{TEMPORARY}{secrets.token_hex(8)}"
    vms.temporary.add(name)
    try:
        yield _keep(vms, vm, name, temporary=True, gone=gone)
    finally:
        vms.temporary.discard(name)
        _drop_leftovers_or_later(vms, vm)


def _drop_leftovers_or_later(vms: Vms, vm: str) -> None:
    try:
        with suppress(UnknownVm), vms.changing(vm, arriving=True, gone=True) as record:
            drop_leftovers(vms, record)
    except (VirtmanError, DriverError) as error:
        log.error("vm %s: a temporary snapshot is dropped later: %s", vm, error)


def take(vms: Vms, vm: str, name: str, permit: Permit = anything) -> Snapshot:
    """Keep what a disk holds now as a snapshot; one of this name that is there is left alone.

    The guest's file systems are frozen meanwhile, if an agent in it answers. Raises UnknownVm, Forbidden, VmMoving,
    VmSaved, DriverError, HypervisorError, NoRoom; after an error there is no such snapshot, or it is dropped later.
    """
    if name.startswith(TEMPORARY):
        raise BadRequest(f"snapshot name {name!r}: {TEMPORARY} is how the agent's own begin")
    return _keep(vms, vm, name, permit, temporary=False, gone=name.startswith(TRAVELLING))


def _keep(vms: Vms, vm: str, name: str, permit: Permit = anything, *, temporary: bool, gone: bool) -> Snapshot:
    with vms.changing(vm, permit, gone=gone) as record:
        if (present := record.snapshot(name)) is not None:
            return present
        vms.require_not_saved(record)
        if record.untidy == name:  # later the new snapshot would be taken for what is left of the old one
            drop_leftovers(vms, record)
        taking = vms.record(vm).begin(TAKE, snapshot=name, temporary=temporary)
        return vms.run(taking, lambda record: _take(vms, record))


def _take(vms: Vms, record: VmRecord) -> Snapshot:
    name, temporary = record.argument("snapshot"), record.argument("temporary")
    _require_snapshots(vms, record, name)
    with vms.running(record) as running, _frozen(running) as state:
        disk = vms.vmdisks.take(record.name, name, running)
        vms.step("take-snapshot:taken")
    vms.follow(record)
    snapshot = Snapshot(
        name=name, parent=record.current, size=disk.size, taken=vms.clock(), temporary=temporary,
        state=OFF if vms.user(record).boot is not None and running is None else state, id=secrets.token_hex(16),
    )  # fmt: skip
    vms.settle(record, snapshots=(*record.snapshots, snapshot), current=record.current if temporary else name)
    vms.step("take-snapshot:done")
    return snapshot


def _finish_take(vms: Vms, record: VmRecord) -> None:
    _thaw(vms, record)
    _take(vms, record)


def _untake(_vms: Vms, record: VmRecord, _error: Exception | None) -> VmRecord:
    return record.begin(DROP, snapshot=record.argument("snapshot"))


@contextmanager
def _frozen(running: Running | None) -> Iterator[str]:
    """The guest's file systems do not change meanwhile, if the guest can hold them still."""
    if running is None or not running.freeze():
        yield CRASH
        return
    try:
        yield FROZEN
    finally:
        running.thaw()


def _thaw(vms: Vms, record: VmRecord) -> None:
    """Thaw a guest whose freezer could not: the agent was killed, or libvirt."""
    with vms.running(record) as running:
        if running is not None:
            running.thaw()


def revert(vms: Vms, vm: str, name: str, permit: Permit = anything) -> None:
    """Let the disk of a VM that is off hold what a snapshot keeps; what was written since is gone.

    Raises UnknownVm, UnknownSnapshot, Forbidden, VmMoving, VmRuns, VmSaved, DriverError, HypervisorError.
    """
    with vms.changing(vm, permit) as record:
        require(record, name)
        vms.require_off(record, REVERTED)
        vms.run(record.begin(REVERT, snapshot=name), lambda record: _revert(vms, record))


def _revert(vms: Vms, record: VmRecord) -> None:
    name = record.argument("snapshot")
    _require_snapshots(vms, record, name)
    disk = vms.vmdisks.revert(record.name, name)
    vms.step("revert:reverted")
    vms.follow(record)
    vms.settle(record, size=disk.size, current=name)
    vms.step("revert:done")


def _finish_revert(vms: Vms, record: VmRecord) -> None:
    """A crash cut the revert off. If a program uses the disk meanwhile, what the program writes is kept."""
    vms.require_off(record, REVERTED)
    _revert(vms, record)


def _unrevert(vms: Vms, record: VmRecord, error: Exception | None) -> VmRecord | None:
    """Once the driver has begun, a revert is finished."""
    return _with_size(vms, record, error) if isinstance(error, (VmRuns, *NOT_BEGUN)) else None


def drop(vms: Vms, vm: str, name: str, permit: Permit = anything) -> None:
    """Forget a snapshot. What others need of it stays.

    Raises UnknownVm, UnknownSnapshot, Forbidden, VmMoving, VmSaved, HypervisorError; DriverError: if the snapshot is
    gone then, and only its space is not free yet, that is tried again later.
    """
    with vms.changing(vm, permit, gone=name.startswith(TRAVELLING)) as record:
        require(record, name)
        vms.run(record.begin(DROP, snapshot=name), lambda record: _drop(vms, record))


def _drop(vms: Vms, record: VmRecord) -> None:
    name = record.argument("snapshot")
    _free(vms, record, name)
    vms.records.put(record.name, record.without(name).settled(untidy=None))
    vms.step("delete-snapshot:done")


def _finish_drop(vms: Vms, record: VmRecord) -> None:
    _thaw(vms, record)  # it may be the undoing of a snapshot
    _drop(vms, record)


def _undrop(vms: Vms, record: VmRecord, _error: Exception | None) -> VmRecord:
    """The snapshot is still there, or its space is freed later: no start of the VM waits for that."""
    name = record.argument("snapshot")
    stays = record.snapshot(name) is not None and name in vms.vmdisks.snapshots(record.name)
    return record.settled() if stays else record.without(name).settled(untidy=name)


def _require_snapshots(vms: Vms, record: VmRecord, name: str) -> None:
    """A driver that has lost its snapshots would free what they keep. ``name`` may come or go. Raises BadDisk."""
    named = {snapshot.name for snapshot in record.snapshots if not snapshot.temporary and snapshot.name != name}
    if lost := named - vms.vmdisks.snapshots(record.name):
        raise BadDisk(
            f"VM {record.name}: its disk does not know snapshot {min(lost)!r} any more, so it is left as it is;"
            " bring back its files from a backup, or destroy the VM"
        )


def _free(vms: Vms, record: VmRecord, name: str) -> None:
    _require_snapshots(vms, record, name)
    with vms.running(record) as running:
        vms.vmdisks.drop(record.name, name, running)
    vms.step("delete-snapshot:dropped")
    vms.follow(record)


def leftovers(vms: Vms, record: VmRecord) -> list[str]:
    """Names of unused snapshots: the agent's temporary ones, and a deleted one whose space is not free yet."""
    own = [snapshot.name for snapshot in record.snapshots if snapshot.temporary and snapshot.name not in vms.temporary]
    return [*own, *([] if record.untidy is None else [record.untidy])]


def drop_leftovers(vms: Vms, record: VmRecord) -> None:
    """Drop such snapshots of a VM whose lock the caller holds. Raises DriverError, HypervisorError."""
    names = leftovers(vms, record)
    for name in names:
        _free(vms, record, name)
        record = record.without(name)
    if names:
        vms.settle(record, untidy=None)


def repair(vms: Vms, vm: str) -> bool:
    """End an operation that was cut off, and drop unused snapshots, unless a call is under way with the VM.

    Such a call drops its own. Returns whether the VM was free. Raises StateDamaged, DriverError,
    HypervisorError.
    """
    with vms.holding_if_free(vm) as free:
        if free:
            vms.resume(vm)
            record = vms.records.get(vm)
            if record is not None:
                drop_leftovers(vms, record)
        return free


def require(record: VmRecord, name: str) -> Snapshot:
    """The snapshot of this name. Raises UnknownSnapshot."""
    snapshot = record.snapshot(name)
    if snapshot is None or snapshot.temporary:
        known = ", ".join(snapshot.name for snapshot in record.snapshots if not snapshot.temporary) or "none"
        raise UnknownSnapshot(f"vm {record.name!r} has no snapshot {name!r}; it has: {known}")
    return snapshot


KINDS = {
    RESIZE: Kind(_resize, _with_size, gives_up=(DriverError,)),
    TAKE: Kind(_finish_take, _untake, gives_up=(DriverError,)),
    REVERT: Kind(_finish_revert, _unrevert, gives_up=(VmRuns, *NOT_BEGUN)),
    DROP: Kind(_finish_drop, _undrop, gives_up=(DriverError,)),
}
