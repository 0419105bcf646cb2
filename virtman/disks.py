"""VMs' disks grow, and points in time of them are kept: for people, snapshots.

Each change is an operation of the VM's record (virtman/records.py) that repair finishes. One that fails is taken back
at once, and what that leaves is dropped later; only going back to a point is not taken back once the driver began it.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from drivers.base import SnapshotDriver
from drivers.errors import BadDisk, DiskInUse, DriverError, NotPossible, PointMissing
from virtman.errors import BadRequest, BadSize, HostTrouble, NoRoom, UnknownSnapshot, VirtmanError, VmRuns
from virtman.names import MOMENT, TRAVELLING
from virtman.records import CRASH, DROP, FROZEN, OFF, RESIZE, REVERT, TAKE, Point, Shelf, VmRecord
from virtman.roles import Permit, anything
from virtman.steps import Step, log_step
from virtman.vms import Machines, Running, Vms, check_size
from volt.text import exact_size

log = logging.getLogger(__name__)

NOT_BEGUN = (DiskInUse, PointMissing, NotPossible)
"""With one of these errors the driver refuses to revert a disk, and has changed nothing."""


class Disks:
    """Changes of the disks of ``vms``. ``clock`` gives seconds since 1970."""

    def __init__(
        self,
        vms: Vms,
        shelf: Shelf[VmRecord],
        snapshots: SnapshotDriver,
        machines: Machines,
        step: Step = log_step,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._vms = vms
        self._shelf = shelf
        self._snapshots = snapshots
        self._machines = machines
        self._step = step
        self._clock = clock
        repairs = {
            RESIZE: self._repair_resize,
            TAKE: self._repair_take,
            REVERT: self._repair_revert,
            DROP: self._repair_drop,
        }
        vms.also_repair(repairs, self._is_untidy, self._tidy)
        self._moments: set[str] = set()
        """Names of temporary points that are in use."""

    @contextmanager
    def _changing(self, vm: str, permit: Permit = anything, *, went: bool = False) -> Iterator[VmRecord]:
        """A VM whose disk may change now. Raises as ``Vms.changing``, Forbidden, and VmMoving for one that went.

        Unless ``went``: it is for a point that the disk of one that went is still sent by.
        """
        with self._vms.changing(vm) as record:
            self._vms.require_permitted(vm, permit)
            if not went:
                self._vms.require_here(record)
            yield record

    def resize(self, vm: str, size: int, permit: Permit = anything) -> None:
        """Let a disk have ``size`` bytes; a running VM sees it at once. The size that it has is fine.

        Raises UnknownVm, Forbidden, VmMoving, VmSaved, BadSize, DriverError, HypervisorError.
        """
        check_size(size)
        with self._changing(vm, permit) as record:
            if size < (record.size or 0):
                raise BadSize(f"vm {vm!r} has a disk of {exact_size(record.size)}, and a disk cannot be made smaller")
            if size == record.size:
                return
            self._shelf.put(vm, record.begin(RESIZE, size=size))
            self._step("resize:recorded")
            try:
                self._resize(record, size)
            except (VirtmanError, DriverError) as error:
                log.warning("vm %s: its disk did not get %d bytes: %s", vm, size, error)
                self._settle_size(record)
                raise

    def _resize(self, record: VmRecord, size: int) -> None:
        with self._vms.running(record) as running:
            disk = self._snapshots.resize(record.name, size, running)
        self._step("resize:resized")
        self._shelf.put(record.name, record.settled(size=disk.size))

    def _settle_size(self, record: VmRecord) -> None:
        """Write down what size the disk has now; the error that led here is the one to raise."""
        try:
            self._shelf.put(record.name, record.settled(size=self._snapshots.open(record.name).size))
        except (VirtmanError, DriverError) as second:
            log.error("vm %s: its size is settled later: %s", record.name, second)

    def _repair_resize(self, record: VmRecord) -> None:
        try:
            self._resize(record, int(_argument(record, "size")))
        except DriverError as error:
            log.warning("vm %s: its disk keeps its size: %s", record.name, error)
            self._settle_size(record)

    @contextmanager
    def moment(self, vm: str, *, went: bool = False) -> Iterator[Point]:
        """A point of now that is gone afterwards, also if the agent dies meanwhile. Raises as ``take``.

        ``went``: also of a VM that went to another host, which gets what it wrote last.
        """
        name = f"{MOMENT}{secrets.token_hex(8)}"
        self._moments.add(name)
        try:
            yield self._keep(vm, name, temporary=True, went=went)
        finally:
            self._moments.discard(name)
            self._let_go(vm)

    def _let_go(self, vm: str) -> None:
        """Drop temporary points that nobody uses; what fails is tried again later."""
        try:
            self._vms.repair(vm)
        except (VirtmanError, DriverError) as error:
            log.error("vm %s: a temporary snapshot is dropped later: %s", vm, error)

    def take(self, vm: str, name: str, permit: Permit = anything) -> Point:
        """Keep what a disk holds now as a point; one of this name that is there is left alone.

        The guest's file systems are frozen meanwhile, if an agent in it answers. Raises UnknownVm, Forbidden,
        VmMoving, VmSaved, DriverError, HypervisorError, NoRoom; after an error there is no such point, or it is dropped
        later.
        """
        if name.startswith(MOMENT):
            raise BadRequest(f"snapshot name {name!r}: {MOMENT} is how the agent's own begin")
        return self._keep(vm, name, permit, temporary=False, went=name.startswith(TRAVELLING))

    def _keep(self, vm: str, name: str, permit: Permit = anything, *, temporary: bool, went: bool) -> Point:
        with self._changing(vm, permit, went=went) as record:
            if (present := record.point(name)) is not None:
                return present
            self._vms.require_not_saved(record)
            if record.untidy == name:
                self._tidy(record)  # of an old one: later the new one would be taken for what is left of that
            taking = self._vms.record(vm).begin(TAKE, point=name, temporary=temporary)
            self._shelf.put(vm, taking)
            self._step("take:recorded")
            try:
                return self._take(taking)
            except (VirtmanError, DriverError) as error:
                log.warning("vm %s: snapshot %s failed: %s", vm, name, error)
                self._undo_take(taking, name)
                raise

    def _take(self, record: VmRecord) -> Point:
        name = _argument(record, "point")
        self._require_points(record, name)
        with self._vms.running(record) as running, _held_still(running) as state:
            disk = self._snapshots.take(record.name, name, running)
            self._step("take:taken")
        self.follow(record)
        how = OFF if self._user(record).boot is not None and running is None else state
        temporary = record.operation is not None and bool(record.operation.arguments["temporary"])
        point = Point(
            name=name, parent=record.current, size=disk.size, taken=self._clock(), state=how, temporary=temporary,
            id=secrets.token_hex(16),
        )  # fmt: skip
        current = record.current if temporary else name
        self._shelf.put(record.name, record.settled(points=(*record.points, point), current=current))
        self._step("take:done")
        return point

    def _repair_take(self, record: VmRecord) -> None:
        self._let_go_on(record)
        try:
            self._take(record)
        except DriverError as error:  # nobody was told that it is there
            log.warning("vm %s: a snapshot that was cut off is not taken: %s", record.name, error)
            self._undo_take(record, _argument(record, "point"))

    def _let_go_on(self, record: VmRecord) -> None:
        """Thaw a guest that who froze it could not thaw: the agent was killed, or libvirt."""
        with self._vms.running(record) as running:
            if running is not None:
                running.thaw()

    def _undo_take(self, record: VmRecord, name: str) -> None:
        dropping = record.begin(DROP, point=name)
        try:
            self._shelf.put(record.name, dropping)
        except (NoRoom, HostTrouble) as second:
            log.error("vm %s: %s", record.name, second)
            self._shelf.remember(record.name, dropping)
        try:
            self._let_go_on(dropping)
            self._drop(dropping)
        except (VirtmanError, DriverError) as second:
            log.error("vm %s: undoing snapshot %s failed too; it is tried again later: %s", record.name, name, second)

    def clone(self, vm: str, names: Sequence[str]) -> None:
        """VMs of these names with disks that hold what that of ``vm`` holds now; clones of it are left alone.

        Raises VmExists, and as ``take``. After an error those that were made are whole and stay: somebody may have them
        in use already. Asked again it makes the others, of what the disk holds then.
        """
        source = self._vms.record(vm)
        missing = [name for name in dict.fromkeys(names) if not self._vms.is_clone(name, source)]
        if not missing:
            return
        with self.moment(vm) as point:
            source = self._vms.record(vm)  # it may have been made anew meanwhile
            for name in missing:
                self._vms.clone(source, point.name, name)

    def revert(self, vm: str, name: str, permit: Permit = anything) -> None:
        """Let the disk of a VM that is off hold what a point keeps; what was written since is gone.

        Raises UnknownVm, UnknownSnapshot, Forbidden, VmMoving, VmRuns, VmSaved, DriverError, HypervisorError.
        """
        with self._changing(vm, permit) as record:
            require(record, name)
            self._vms.require_off(record, "its disk goes back to a snapshot")
            self._shelf.put(vm, record.begin(REVERT, point=name))
            self._step("revert:recorded")
            try:
                self._revert(record.begin(REVERT, point=name))
            except NOT_BEGUN:
                self._shelf.put(vm, record)
                raise

    def _revert(self, record: VmRecord) -> None:
        name = _argument(record, "point")
        self._require_points(record, name)
        disk = self._snapshots.revert(record.name, name)
        self._step("revert:reverted")
        self.follow(record)
        self._shelf.put(record.name, record.settled(size=disk.size, current=name))
        self._step("revert:done")

    def _repair_revert(self, record: VmRecord) -> None:
        """Nobody was told that it is done. If somebody uses the disk by now, what he writes is not thrown away."""
        try:
            self._vms.require_off(record, "its disk goes back to a snapshot")
            self._revert(record)
        except (VmRuns, *NOT_BEGUN) as error:
            log.warning("vm %s: it does not go back to a snapshot: %s", record.name, error)
            self._settle_size(record)

    def drop(self, vm: str, name: str, permit: Permit = anything) -> None:
        """Forget a point. What others need of it stays.

        Raises UnknownVm, UnknownSnapshot, Forbidden, VmMoving, VmSaved, HypervisorError; DriverError: if the point is
        gone then, and only its space is not free yet, that is tried again later.
        """
        with self._changing(vm, permit, went=name.startswith(TRAVELLING)) as record:
            require(record, name)
            dropping = record.begin(DROP, point=name)
            self._shelf.put(vm, dropping)
            self._step("drop:recorded")
            try:
                self._drop(dropping)
            except (VirtmanError, DriverError):
                self._settle_drop(record, name)
                raise

    def _drop(self, record: VmRecord) -> None:
        name = _argument(record, "point")
        self._free(record, name)
        self._shelf.put(record.name, record.without(name).settled(untidy=None))
        self._step("drop:done")

    def _repair_drop(self, record: VmRecord) -> None:
        """Nobody has to wait for the space that a point took: neither a start of the VM, nor what else is repaired."""
        self._let_go_on(record)  # it may be a taking that failed
        try:
            self._drop(record)
        except DriverError as error:
            log.warning("vm %s: %s", record.name, error)
            self._settle_drop(record, _argument(record, "point"))

    def _require_points(self, record: VmRecord, name: str) -> None:
        """A driver that has lost its points would free what they keep. ``name`` may come or go. Raises BadDisk."""
        named = {point.name for point in record.points if not point.temporary and point.name != name}
        if lost := named - self._snapshots.points(record.name):
            raise BadDisk(
                f"VM {record.name}: its disk does not know snapshot {min(lost)!r} any more, so it is left as it is;"
                " bring back its files from a backup, or destroy the VM"
            )

    def _free(self, record: VmRecord, name: str) -> None:
        self._require_points(record, name)
        with self._vms.running(record) as running:
            self._snapshots.drop(record.name, name, running)
        self._step("drop:dropped")
        self.follow(record)

    def _settle_drop(self, record: VmRecord, name: str) -> None:
        """After a failure: the point is still there, or it is gone, or nobody's, and its space is to be freed."""
        try:
            stays = record.point(name) is not None and name in self._snapshots.points(record.name)
            self._shelf.put(record.name, record if stays else record.without(name).settled(untidy=name))
        except (VirtmanError, DriverError) as second:
            log.error("vm %s: snapshot %s is settled later: %s", record.name, name, second)

    def _is_untidy(self, record: VmRecord) -> bool:
        return record.untidy is not None or bool(self._left_behind(record))

    def _left_behind(self, record: VmRecord) -> list[str]:
        return [point.name for point in record.points if point.temporary and point.name not in self._moments]

    def _tidy(self, record: VmRecord) -> None:
        for name in filter(None, [record.untidy, *self._left_behind(record)]):
            self._free(record, name)
            record = record.without(name)
        self._shelf.put(record.name, record.settled(untidy=None))

    def follow(self, record: VmRecord) -> None:
        """Have the VM that uses the disk begin with what that is now. Raises HypervisorError, DriverError."""
        user = self._user(record)
        if user.boot is not None:
            self._machines.follow(user.name, self._snapshots.open(user.name), self._vms.disks_of(user))

    def _user(self, record: VmRecord) -> VmRecord:
        """The VM that uses the disk: the one that it is attached to, or the disk's own."""
        return self._vms.attached_to(record) or record


@contextmanager
def _held_still(running: Running | None) -> Iterator[str]:
    """The guest's file systems do not change meanwhile, if it can be had."""
    if running is None or not running.freeze():
        yield CRASH
        return
    try:
        yield FROZEN
    finally:
        running.thaw()


def require(record: VmRecord, name: str) -> Point:
    """The snapshot of this name. Raises UnknownSnapshot."""
    point = record.point(name)
    if point is None or point.temporary:
        known = ", ".join(point.name for point in record.points if not point.temporary) or "none"
        raise UnknownSnapshot(f"vm {record.name!r} has no snapshot {name!r}; it has: {known}")
    return point


def _argument(record: VmRecord, name: str) -> str:
    """An argument of the operation under way."""
    if record.operation is None:
        raise ValueError(f"{record.name}: no operation is under way")
    return str(record.operation.arguments[name])
