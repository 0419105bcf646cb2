"""The VMs of this host: their records and locks, and what every operation on a VM needs.

The operations themselves have modules of their own: ``creating``, ``booting``, ``disks``, ``attaching``, ``renaming``,
``migration`` and ``streams``. ``virtman/kinds.py`` has the table of all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol, TypeVar

from drivers.base import Device, VmDiskDriver
from drivers.blocks import Blocks, open_blocks
from drivers.host.locks import NamedLocks
from virtman.errors import Conflict, UnknownVm, VmExists, VmMoving, VmRuns
from virtman.hypervisor import Machines, Running
from virtman.operations import Kind, Operations
from virtman.pipe import Callers
from virtman.records import RecordStore, VmRecord
from virtman.roles import Permit, anything
from virtman.stacks import Stacks
from virtman.steps import Step, log_step

T = TypeVar("T")


class OpenBlocks(Protocol):
    """How a disk is read and written (``drivers.blocks.open_blocks``)."""

    def __call__(self, vm: str, device: Device, *, write: bool = False) -> AbstractContextManager[Blocks]:
        """The open disk."""


class Vms:
    """``records`` has the records, ``vmdisks`` makes the disks, ``machines`` runs the VMs, ``images`` has the stacks.

    ``clock`` gives seconds since 1970. ``open_blocks`` opens a disk to read and write it.
    """

    def __init__(
        self,
        records: RecordStore[VmRecord],
        vmdisks: VmDiskDriver,
        machines: Machines,
        images: Stacks,
        kinds: Mapping[str, Kind[Vms, VmRecord]],
        step: Step = log_step,
        clock: Callable[[], float] = time.time,
        opened: OpenBlocks = open_blocks,
    ) -> None:
        self.records = records
        self.vmdisks = vmdisks
        self.machines = machines
        self.images = images
        self.step = step
        self.clock = clock
        self.open_blocks = opened
        self.operations: Operations[Vms, VmRecord] = Operations("vm", records, kinds, self, step)
        self.locks = NamedLocks()
        self.temporary: set[str] = set()
        """Names of temporary snapshots that are in use."""
        self.receiving = Callers()
        """The callers of streams that are being received."""

    # Records

    def record(self, name: str) -> VmRecord:
        """A VM's record. Raises UnknownVm."""
        record = self.records.get(name)
        if record is None:
            raise UnknownVm(f"vm {name!r} is not on this host")
        return record

    def check_free(self, name: str) -> None:
        """Raises VmExists if a VM has this name, or gets it by a rename that is under way."""
        for record in self.records.all():
            if record.new_name == name:
                raise VmExists(f"vm {record.name!r} is being renamed to {name!r}; use another name, or repair it first")
        if self.records.get(name) is not None:
            raise VmExists(f"vm {name!r} exists; destroy it first or use another name")

    def orphans(self) -> frozenset[str]:
        """Disks without a record. No crash makes one, so only a person may decide to delete it."""
        return self.vmdisks.existing() - frozenset(self.records.names())

    # Operations

    def run(self, record: VmRecord, act: Callable[[VmRecord], T] | None = None) -> T:
        """Carry out the operation that the record begins (``Operations.run``)."""
        return self.operations.run(record, act)

    def settle(self, record: VmRecord, **fields: Any) -> None:
        """Write the record without its operation, and with these fields."""
        self.records.put(record.name, record.settled(**fields))

    def resume(self, name: str) -> None:
        """End an operation that was cut off. The caller holds the VM's lock (``holding``).

        Raises StateDamaged, DriverError, HypervisorError.
        """
        record = self.records.get(name)
        if record is not None and record.operation is not None:
            self.operations.resume(record)

    # Locks

    @contextmanager
    def changing(
        self, name: str, permit: Permit = anything, *, arriving: bool = False, gone: bool = False
    ) -> Iterator[VmRecord]:
        """A VM with which nothing is under way, while nothing else begins.

        Nothing is under way with the VM that its disk is attached to, either. Raises UnknownVm, Forbidden, as
        ``resume``, and VmMoving for a VM that arrives, unless ``arriving``, or that went to another host, unless
        ``gone``.
        """
        with self.holding(name):
            if (user := self._name_of_user(name)) is not None:
                self.resume(user)
            self.resume(name)
            record = self.record(name)
            if (record.arriving and not arriving) or (record.moved is not None and not gone):
                self.require_here(record)
            self.require_permitted(name, permit)
            yield record

    @contextmanager
    def holding(self, *names: str) -> Iterator[None]:
        """Hold the locks of VMs and of all that change along with them, in the order of names: so no two callers
        block."""
        while True:
            wanted = self._along_with(names)
            with ExitStack() as stack:
                for name in sorted(wanted):
                    stack.enter_context(self.locks.hold(name))
                if self._along_with(names) <= wanted:
                    yield
                    return

    @contextmanager
    def holding_if_free(self, name: str) -> Iterator[bool]:
        """As ``holding``, if no call is under way with these VMs. Gives whether the locks are held.

        A call may last as long as its caller likes, as that of a stream does.
        """
        names = self._along_with([name])
        with ExitStack() as stack:
            free = all(stack.enter_context(self.locks.hold_if_free(each)) for each in sorted(names))
            yield free and self._along_with([name]) <= names

    def _along_with(self, names: Iterable[str]) -> set[str]:
        """These names, those of the VMs that use their disks, and the new names of all that are being renamed: a repair
        writes the record of such a name.
        """
        used = {*names, *filter(None, map(self._name_of_user, names))}
        records = filter(None, map(self.records.get, used))
        return used | {record.new_name for record in records if record.new_name is not None}

    # Who uses a disk

    def _name_of_user(self, name: str) -> str | None:
        record = self.records.get(name)
        user = None if record is None else self.attached_to(record)
        return None if user is None else user.name

    def attached_to(self, record: VmRecord) -> VmRecord | None:
        """The VM that this VM's disk is attached to, or is being attached to or detached from."""
        if record.boot is not None:
            return None
        return next((other for other in self.records.all() if other.uses_disk(record.name)), None)

    def user(self, record: VmRecord) -> VmRecord:
        """The VM that uses the disk: the VM that it is attached to, or the disk's own."""
        return self.attached_to(record) or record

    @contextmanager
    def running(self, record: VmRecord) -> Iterator[Running | None]:
        """The VM that uses a disk, if it runs.

        The hypervisor is asked only of VMs that it may have. Raises HypervisorError, VmSaved.
        """
        user = self.user(record)
        if user.boot is None:
            yield None
            return
        with self.machines.running_vm(user.name) as running:
            yield running

    def disks_of(self, record: VmRecord) -> dict[str, Device]:
        """The disks that a VM uses besides its own, by name. Raises DriverError."""
        return {name: self.vmdisks.open(name) for name in record.disks}

    def follow(self, record: VmRecord) -> None:
        """Have the VM that uses a disk begin with what the disk is now. Raises HypervisorError, DriverError."""
        user = self.user(record)
        if user.boot is not None:
            self.machines.follow(user.name, self.vmdisks.open(user.name), self.disks_of(user))

    # What an operation requires

    def require_permitted(self, name: str, permit: Permit) -> None:
        """Whether a VM may be changed, and the VM that its disk is attached to. Raises Forbidden."""
        record = self.records.get(name)
        if record is not None:
            permit(record)
            if (user := self.attached_to(record)) is not None:
                permit(user)

    def require_detached(self, record: VmRecord) -> None:
        """Raises Conflict, also for a disk that a VM may have whose record cannot be read."""
        user = self.attached_to(record)
        if user is not None:
            raise Conflict(f"disk {record.name!r} is attached to vm {user.name!r}; detach it there first")
        if record.boot is None and (unreadable := self.records.unreadable()):
            raise Conflict(
                f"disk {record.name!r} may be attached to a VM whose record cannot be read: {', '.join(unreadable)};"
                " see virtman status"
            )

    def require_here(self, record: VmRecord) -> None:
        """Raises VmMoving if a VM's memory is, or may be, on another host."""
        if record.arriving:
            raise VmMoving(f"vm {record.name!r} is arriving from another host; 'virtman destroy' gives it up")
        if record.moved is not None:
            raise VmMoving(
                f"vm {record.name!r} went to {record.moved}; 'virtman migrate' again ends that, or --abort undoes it"
            )

    def require_not_saved(self, record: VmRecord) -> None:
        """Whether a disk may change, with its VM on or off; asked before the operation is recorded.

        Saved memory has what the guest has yet to write, and names the files of the disk: it fits no other disk.
        Raises VmSaved, HypervisorError.
        """
        with self.running(record):
            pass

    def require_off(self, record: VmRecord, before: str) -> None:
        """Whether the VM that uses a disk is off, as it must be ``before`` something happens.

        Raises VmRuns, VmSaved, HypervisorError.
        """
        with self.running(record) as running:
            if running is not None:
                raise VmRuns(f"vm {self.user(record).name!r} is {running.state}; stop it before {before}")
