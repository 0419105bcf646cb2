"""The VMs of this host: their private disks, and that the hypervisor runs them.

Each change is an operation of the VM's record (virtman/records.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from drivers.base import Device, Monitor, SnapshotDriver
from drivers.errors import DriverError
from virtman.errors import (
    BadSize,
    DiskAttached,
    HostTrouble,
    HypervisorAbsent,
    NeverBooted,
    NoRoom,
    StateDamaged,
    StateNewer,
    UnknownVm,
    VirtmanError,
    VmExists,
    VmMoving,
    VmRuns,
    VmSaved,
)
from virtman.locks import NamedLocks
from virtman.models import LARGEST_DISK
from virtman.records import BOOT, CREATE, DESTROY, Boot, ImageRecord, Point, Shelf, State, VmRecord
from virtman.roles import Permit, anything
from virtman.steps import Step, log_step
from volt.text import exact_size

log = logging.getLogger(__name__)

SECTOR = 512
NO_DISKS: Mapping[str, Device] = {}


class Running(Monitor, Protocol):
    """A VM while the hypervisor has a process for it: it runs, or is paused, say."""

    @property
    def state(self) -> str:
        """What the hypervisor calls its state: ``running``, ``paused`` and so on. Raises HypervisorError."""

    def freeze(self) -> bool:
        """Have the guest write its file systems down and hold them still; False if no agent in it does so.

        Raises HypervisorError: it may be held still.
        """

    def thaw(self) -> None:
        """Let the guest go on; one that was not held still, or in which no agent runs, is left alone.

        Raises HypervisorError: it may be held still.
        """

    def go_on(self) -> None:
        """Let a VM that is paused run. Raises HypervisorError."""

    def plug(self, name: str, disk: Device) -> None:
        """Let the VM use another disk; one that it has is left alone. Raises HypervisorError, DriverError."""

    def unplug(self, name: str, disk: Device) -> None:
        """Take such a disk away from the VM, whose guest is not asked; one that it does not have is fine.

        Raises HypervisorError, DriverError.
        """


@dataclass(frozen=True)
class Traveller:
    """What goes along with the disk of a VM that moves: UUID, machine, the content of its seed, and QEMU's name of the
    machine that it emulates.
    """

    uuid: str
    boot: Boot
    seed: bytes
    hardware: str


class Machines(Protocol):
    """What VMs need of the hypervisor."""

    def start(
        self,
        vm: str,
        disk: Device,
        boot: Boot,
        ssh_keys: list[str] | None,
        user_data: str | None,
        *,
        uuid: str | None = None,
        born: str | None = None,
        disks: Mapping[str, Device] = NO_DISKS,
    ) -> None:
        """Define and start the VM. A running one is left alone; without ``ssh_keys`` it keeps the seed that it has.

        A VM whose memory is saved goes on with that memory, and with the machine that it had then.
        ``uuid``: of a VM that the hypervisor does not have; one that it has keeps what it has. Without one it is made
        of the name ``born``, or of the VM's own, and is always the same.
        ``disks``: those that it uses besides its own, by name.
        Raises HypervisorError, HypervisorAbsent (nothing was asked of it), DomainForeign, BadRequest; VmRuns if it
        runs with another machine than ``boot``, or with other keys or user data than those that are given.
        """

    def machine(self, vm: str) -> Boot | None:
        """The machine of the VM of this name that is ours, if the hypervisor has one. Raises HypervisorError."""

    def running_vm(self, vm: str) -> AbstractContextManager[Running | None]:
        """The VM of this name that is ours, if it runs. Raises HypervisorError, VmSaved."""

    def stop(self, vm: str, *, force: bool) -> None:
        """Shut the VM down, or with ``force`` cut its power, whatever is asked of it at this moment.

        A stopped one is left alone. Saved memory is as good as that of a running VM: ``force`` throws it away.
        Raises HypervisorError, UnknownVm if the hypervisor does not have it, VmSaved.
        """

    def follow(self, vm: str, disk: Device, disks: Mapping[str, Device] = NO_DISKS) -> None:
        """Have the VM begin with these disks when others than the agent start it again. Raises HypervisorError."""

    def rename(self, vm: str, new: str) -> None:
        """Have the VM, which is off, under another name, its UUID being the same; ``follow`` is to come next.

        What has the new name already is left alone. Raises HypervisorError, DomainForeign, VmRuns, VmSaved.
        """

    def traveller(self, vm: str) -> Traveller:
        """What goes along with the VM's disk. Raises HypervisorError, UnknownVm, HostTrouble."""

    def check(self, traveller: Traveller) -> None:
        """Whether a VM can come. Raises HypervisorError, NotSupported."""

    def expect(self, vm: str, disk: Device, traveller: Traveller) -> str:
        """Make ready for a VM that comes. Returns its domain (XML). Raises HypervisorError, DomainForeign."""

    def migrate(self, vm: str, uri: str, domain: str, tell: Callable[[int, int], None]) -> float:
        """Move the VM's memory to the libvirt at ``uri``, where it is paused then. Returns seconds that it stood still.

        ``tell`` hears of bytes moved, and in all; what it raises ends the move. Raises HypervisorError: it goes on
        here, if libvirt says so.
        """

    def went(self, vm: str) -> bool | None:
        """Whether the VM does not run here because its memory was moved; None if that is not known any more.

        Raises HypervisorError.
        """

    def end_migration(self, vm: str) -> None:
        """Have what ``migrate`` does end, with an error; with nothing to end it is fine. Raises HypervisorError."""

    def undefine(self, vm: str) -> None:
        """Forget a VM that is off, and keep its files. Raises HypervisorError."""

    def remove(self, vm: str) -> None:
        """Stop the VM, and forget it with all that was made for it, saved memory too. Nothing there is fine.

        Raises HypervisorError.
        """


@dataclass(frozen=True)
class Made:
    """A disk that was made, and what is to be written down of it besides its size."""

    disk: Device
    points: tuple[Point, ...] = ()
    current: str | None = None


class Ensure(Protocol):
    """How an image's stack is had (``Stacks.ensure``)."""

    def __call__(self, name: str, *, moving: bool = False) -> ImageRecord:
        """The stack. ``moving``: for a disk that comes from another host."""


class Vms:
    """Creates, boots and destroys VMs. ``ensure`` makes an image's stack; ``origin`` is what its snapshots are on.

    ``gone`` is called with an image's name when there is one VM less of it.
    """

    def __init__(
        self,
        shelf: Shelf[VmRecord],
        snapshots: SnapshotDriver,
        ensure: Ensure,
        origin: Callable[[ImageRecord], Device],
        machines: Machines,
        step: Step = log_step,
        gone: Callable[[str], None] = lambda _image: None,
    ) -> None:
        self._shelf = shelf
        self._snapshots = snapshots
        self._ensure = ensure
        self._origin = origin
        self._machines = machines
        self._step = step
        self._gone = gone
        self.locks = NamedLocks()
        self._repairing = NamedLocks()
        """Taken before ``locks``: repairs of a VM wait for each other, and for nobody else."""
        self._repairs: dict[str, Callable[[VmRecord], None]] = {
            CREATE: self._destroy,
            DESTROY: self._destroy,
            BOOT: self._repair_boot,
        }
        self._untidy: Callable[[VmRecord], bool] = lambda _record: False
        self._tidy: Callable[[VmRecord], None] = lambda _record: None

    def also_repair(
        self,
        repairs: Mapping[str, Callable[[VmRecord], None]],
        untidy: Callable[[VmRecord], bool] | None = None,
        tidy: Callable[[VmRecord], None] | None = None,
    ) -> None:
        """Have somebody else carry out these kinds of operations, and tidy up where ``untidy`` says so."""
        self._repairs |= repairs
        self._untidy, self._tidy = untidy or self._untidy, tidy or self._tidy

    @contextmanager
    def changing(self, name: str, *, arriving: bool = False) -> Iterator[VmRecord]:
        """A VM with which nothing is under way, and nothing else is begun. Raises UnknownVm, and as ``repair``.

        Nor is anything with the VM that its disk is attached to. Raises VmMoving for one that arrives, unless
        ``arriving``.
        """
        with self._holding(name) as user:
            if user is not None:
                self.repair_held(user)
            self.repair_held(name)
            record = self.record(name)
            if record.arriving and not arriving:
                self.require_here(record)
            yield record

    @contextmanager
    def _holding(self, name: str) -> Iterator[str | None]:
        """Hold the lock of a VM, and that of the one that its disk is attached to, whose name this is."""
        while True:
            user = self._name_of_user(name)
            with self.holding_all({name, user or name}):
                if user == self._name_of_user(name):
                    yield user
                    return

    @contextmanager
    def holding_all(self, names: Iterable[str]) -> Iterator[None]:
        """Hold the locks of several VMs, always in the same order: others want some of them, too.

        Of one that is being renamed its new name's, too: who repairs that writes the record of the new name.
        """
        asked = set(names)
        while True:
            wanted = asked | self._new_names(asked)
            with ExitStack() as stack:
                for name in sorted(wanted):
                    stack.enter_context(self.locks.hold(name))
                if self._new_names(asked) <= wanted:
                    yield
                    return

    def _new_names(self, names: Iterable[str]) -> set[str]:
        records = filter(None, map(self._shelf.get, names))
        return {record.new_name for record in records if record.new_name is not None}

    def _name_of_user(self, name: str) -> str | None:
        record = self._shelf.get(name)
        user = None if record is None else self.attached_to(record)
        return None if user is None else user.name

    def attached_to(self, record: VmRecord) -> VmRecord | None:
        """The VM that this one's disk is attached to, or is being attached to or detached from."""
        if record.boot is not None:
            return None
        return next((other for other in self._shelf.all() if other.uses_disk(record.name)), None)

    def require_permitted(self, name: str, permit: Permit) -> None:
        """Whether a VM may be changed, and the one that its disk is attached to; nobody's may be. Raises Forbidden."""
        record = self._shelf.get(name)
        if record is not None:
            permit(record)
            if (user := self.attached_to(record)) is not None:
                permit(user)

    def require_detached(self, record: VmRecord) -> None:
        """Raises DiskAttached, also for a disk that a VM may have whose record cannot be read."""
        user = self.attached_to(record)
        if user is not None:
            raise DiskAttached(f"disk {record.name!r} is attached to vm {user.name!r}; detach it there first")
        if record.boot is None and (unreadable := self._shelf.unreadable()):
            raise DiskAttached(
                f"disk {record.name!r} may be attached to a VM whose record cannot be read: {', '.join(unreadable)};"
                " see virtman status"
            )

    def require_here(self, record: VmRecord) -> None:
        """Raises VmMoving if a VM's memory is, or may be, anywhere else."""
        if record.arriving:
            raise VmMoving(f"vm {record.name!r} is arriving from another host; 'virtman destroy' gives it up")
        if record.moved is not None:
            raise VmMoving(
                f"vm {record.name!r} went to {record.moved}; 'virtman migrate' again ends that, or --abort undoes it"
            )

    @contextmanager
    def running(self, record: VmRecord) -> Iterator[Running | None]:
        """The VM that uses a disk, if it runs: the VM that the disk is attached to, or the disk's own.

        The hypervisor is asked only of VMs that it may have. Raises HypervisorError, VmSaved.
        """
        user = self.attached_to(record) or record
        if user.boot is None:
            yield None
            return
        with self._machines.running_vm(user.name) as running:
            yield running

    def require_not_saved(self, record: VmRecord) -> None:
        """Whether a disk may change, with its VM on or off: before it is written down that it does, and so is to end.

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
                user = self.attached_to(record) or record
                raise VmRuns(f"vm {user.name!r} is {running.state}; stop it before {before}")

    def disks_of(self, record: VmRecord) -> dict[str, Device]:
        """The disks that a VM uses besides its own, by name. Raises DriverError."""
        return {name: self._snapshots.open(name) for name in record.disks}

    def create(self, name: str, image: str, size: int | None) -> Path:
        """A writable disk for a VM, of ``size`` bytes or the image's size. Returns its path.

        Asked again with the same image and size, it returns the existing disk. Raises VmExists, BadSize, UnknownImage,
        CoordinatorDown, DriverError, NoRoom; after an error nothing is left.
        """
        with self.holding_all([name]):
            return self._create(name, image, size)

    def _create(self, name: str, image: str, size: int | None) -> Path:
        self.repair_held(name)
        record = self._shelf.get(name)
        if record is not None:
            return self._existing(record, image, size)
        check_size(size)
        record = VmRecord(name=name, image=image, size=size, state=State.ABSENT).begin(CREATE)

        return _path(self._add(record, lambda stack: Made(self._new_disk(name, stack, size))))

    def _new_disk(self, name: str, stack: ImageRecord, size: int | None) -> Device:
        return self._snapshots.create(name, self._origin(stack), _disk_size(stack, size))

    def receive(
        self, name: str, image: str, size: int, points: Sequence[str],
        fill: Callable[[ImageRecord, Callable[[], Device]], Made],
    ) -> None:  # fmt: skip
        """A new VM whose disk is filled before the VM is there; ``fill`` calls for the disk, of ``size`` bytes.

        ``points``: the names of those that it will have, by which others know meanwhile what comes.

        Raises VmExists, as ``create``, and as ``fill``; after an error nothing is left.
        """
        with self.holding_all([name]):
            self.repair_held(name)
            check_size(size)
            record = VmRecord(name=name, image=image, size=size, state=State.ABSENT).begin(CREATE, points=[*points])
            self._add(record, lambda stack: fill(stack, lambda: self._new_disk(name, stack, size)), moving=True)

    def clone(self, source: VmRecord, point: str, name: str) -> None:
        """Another VM, whose disk holds what a point of the source's keeps. A clone of it of this name is left alone.

        Raises VmExists if there is another VM of this name, and as ``create``; after an error nothing is left.
        """
        with self.holding_all([name]):
            self.repair_held(name)
            if not self.is_clone(name, source):
                record = VmRecord(
                    name=name, image=source.image, size=None, source=source.name, source_uuid=source.uuid,
                    state=State.ABSENT,
                )  # fmt: skip
                self._add(record.begin(CREATE), lambda _stack: Made(self._snapshots.clone(source.name, point, name)))

    def is_clone(self, name: str, source: VmRecord) -> bool:
        """Whether there is such a clone, whole and to stay. Raises VmExists if there is another VM of this name."""
        record = self._shelf.get(name)
        if record is not None and not _is_of(record, source):
            raise VmExists(f"vm {name!r} exists, and is no clone of {source.name!r}; use another name")
        return record is not None and record.state is State.PRESENT and not record.doing(DESTROY)

    def _add(self, record: VmRecord, make: Callable[[ImageRecord], Made], *, moving: bool = False) -> Device:
        """Write down that the VM is being made, have its disk made over its image's stack, and settle it.

        ``moving``: the disk comes from another host.
        """
        self.check_free(record.name)
        record = record.model_copy(update={"uuid": str(uuid4())})
        self._shelf.put(record.name, record)
        try:
            return self._make(record, make, moving=moving)
        except (VirtmanError, DriverError) as error:
            log.warning("vm %s: create failed: %s", record.name, error)
            self._undo(record)
            raise

    def check_free(self, name: str) -> None:
        """Raises VmExists if there is a VM of this name, or one is about to get it, whose record is yet to come."""
        for record in self._shelf.all():
            if record.new_name == name:
                raise VmExists(f"vm {record.name!r} is being renamed to {name!r}; use another name, or repair it first")
        if self._shelf.get(name) is not None:
            raise VmExists(f"vm {name!r} exists; destroy it first or use another name")

    def _make(self, record: VmRecord, make: Callable[[ImageRecord], Made], *, moving: bool = False) -> Device:
        self._step("create:recorded")
        stack = self._ensure(record.image, moving=moving)
        self._step("create:attached")
        made = make(stack)
        self._step("create:snapshot")
        settled = record.settled(size=made.disk.size, points=made.points, current=made.current)
        self._shelf.put(record.name, settled)
        self._step("create:done")
        return made.disk

    def _existing(self, record: VmRecord, image: str, size: int | None) -> Path:
        if record.image != image or size not in (None, record.size):
            raise VmExists(
                f"vm {record.name!r} exists, of image {record.image!r} with {exact_size(record.size)};"
                " destroy it first or use another name"
            )
        return _path(self._snapshots.open(record.name))

    def _undo(self, record: VmRecord) -> None:
        try:
            self._destroy(record)
        except (VirtmanError, DriverError) as second:
            log.error("vm %s: undoing failed too; it is tried again later: %s", record.name, second)

    def boot(
        self, name: str, image: str, size: int | None, boot: Boot, ssh_keys: list[str] | None, user_data: str | None
    ) -> None:
        """Start a VM, creating its disk if needed. One that runs so already is left alone.

        Raises as ``create`` and ``Machines.start``.
        After an error all is as it was before; what cannot be undone now is undone later.
        """
        with self.holding_all([name]):
            self.repair_held(name)
            self._boot(name, image, size, boot, ssh_keys, user_data)

    def _boot(
        self, name: str, image: str, size: int | None, boot: Boot, ssh_keys: list[str] | None, user_data: str | None
    ) -> None:
        before = self.find(name)
        self._create(name, image, size)
        record = self.record(name)
        if before is not None:  # nobody can have a disk that was just made
            self.require_detached(record)
        self.require_here(record)
        machine = None if record.boot is None else record.boot.model_dump(mode="json")
        booting = record.begin(BOOT, new=before is None, before=machine).model_copy(update={"boot": boot})
        try:
            self._shelf.put(name, booting)
            self._step("boot:recorded")
            self._machines.start(
                name, self._snapshots.open(name), boot, ssh_keys, user_data,
                uuid=record.uuid, born=record.born, disks=self.disks_of(record),
            )  # fmt: skip
        except (VirtmanError, DriverError) as error:
            self._undo_boot(record if before is None else before, booting, error)
            raise
        self._step("boot:started")
        self._settle_boot(booting)

    def start(self, name: str) -> None:
        """Start a VM again as it was booted before, or as others have changed it since; one that runs is left alone.

        Raises UnknownVm, NeverBooted, and as ``boot``.
        """
        with self.holding_all([name]):
            self._repair_to_start(name)
            record = self.record(name)
            if record.boot is None:
                raise NeverBooted(f"vm {name!r} was never booted, so nothing is known of its machine; use virtman boot")
            machine = self._machines.machine(name) or record.boot
            self._boot(name, record.image, None, machine, None, None)

    def _repair_to_start(self, name: str) -> None:
        """Finish what did not end, a destroy say. Some of it cannot end before the VM goes on with its saved memory."""
        try:
            self.repair_held(name)
        except VmSaved:
            record = self.record(name)
            if record.boot is None:  # it is the memory of the VM that the disk is attached to
                raise
            self._machines.start(name, self._snapshots.open(name), record.boot, None, None)
            self.repair_held(name)

    def _settle_boot(self, booting: VmRecord) -> None:
        """The VM runs; that this could not be written down is mended by the repair of a boot."""
        try:
            self._shelf.put(booting.name, booting.settled())
        except (NoRoom, HostTrouble) as error:
            log.warning("vm %s: runs, and its boot is noted later: %s", booting.name, error)

    def _undo_boot(self, record: VmRecord, booting: VmRecord, error: Exception) -> None:
        """Go back to ``record``, or to no VM if the disk was made for this boot.

        The hypervisor may have the VM, though it said otherwise or nothing: while that is not known, neither the
        record of the machine nor the disk may go.
        """
        log.warning("vm %s: boot failed: %s", booting.name, error)
        untouched = isinstance(error, HypervisorAbsent | VmRuns | NoRoom | HostTrouble)
        try:
            if booting.operation is not None and booting.operation.arguments["new"]:
                self._destroy(record if untouched else booting)
                return
            if record.boot is None and not untouched:
                self._machines.remove(record.name)
            self._shelf.put(record.name, record)
        except (VirtmanError, DriverError) as second:
            log.error("vm %s: undoing the boot failed too; it is tried again later: %s", booting.name, second)

    def _repair_boot(self, record: VmRecord) -> None:
        if (machine := self._machines.machine(record.name)) is not None:
            self._shelf.put(record.name, record.settled(boot=machine))
            return
        arguments = record.operation.arguments if record.operation is not None else {}
        if arguments.get("new"):
            self._destroy(record)
            return
        before = arguments.get("before")
        self._machines.remove(record.name)  # of its files, if there are any
        self._shelf.put(record.name, record.settled(boot=before and Boot.model_validate(before)))

    def destroy(self, name: str, permit: Permit = anything) -> None:
        """Remove a VM and its disk for good.

        Raises UnknownVm, Forbidden, DiskAttached, StateNewer, DriverError, HypervisorError.

        Disks of others that it uses stay.

        Its power is cut at once: what another operation awaits of it may never come, from a parent that is gone, say.
        """
        record = self.record(name)
        self._understand(record)
        self.require_permitted(name, permit)
        if record.boot is not None and record.moved is None:
            self._cut_power(name)
        with self.holding_all([name]):
            record = self.record(name)
            self.require_permitted(name, permit)
            if (new := record.new_name) is not None:  # its disk may have it by now
                self.repair_held(name)
                if self._shelf.get(name) is None and self._shelf.get(new) is None:
                    return
                record = self.record(name)
            self.require_detached(record)
            self._destroy(record)

    def _cut_power(self, name: str) -> None:
        try:
            self._machines.stop(name, force=True)
        except VirtmanError as error:  # it is tried again when nothing else is under way
            log.info("vm %s: its power is cut later: %s", name, error)

    def _destroy(self, record: VmRecord) -> None:
        if not record.doing(DESTROY):
            try:
                self._shelf.put(record.name, record.begin(DESTROY))
            except (NoRoom, HostTrouble) as error:  # destroying makes room; cut off now, it can be asked for again
                log.warning("vm %s: being destroyed without a note of it: %s", record.name, error)
        self._step("destroy:recorded")
        if record.boot is not None:
            self._machines.remove(record.name)
        self._step("destroy:stopped")
        self._snapshots.delete(record.name)
        self._step("destroy:deleted")
        self._shelf.remove(record.name)
        self._gone(record.image)
        self._step("destroy:done")

    def repair(self, name: str) -> None:
        """Finish or undo an operation that was cut off. Raises StateNewer, DriverError, HypervisorError."""
        with self._holding(name):
            self._repair(name)

    def repair_if_free(self, name: str) -> bool:
        """As ``repair``, if no call is under way with the VM, which may last as long as its caller likes.

        What is left of such a call is seen to when it ends. Returns whether the VM was free.
        """
        names = self._needed(name)
        with ExitStack() as stack:
            for each in sorted(names):
                stack.enter_context(self._repairing.hold(each))
            free = all(stack.enter_context(self.locks.hold_if_free(each)) for each in sorted(names))
            if not free or not self._needed(name) <= names:  # somebody was busy with it until now
                log.info("vm %s: a call is under way: it is left alone", name)
                return False
            self._repair(name)
        return True

    def _needed(self, name: str) -> set[str]:
        """The names whose locks a repair of a VM needs, as ``_holding`` takes them."""
        names = {name, self._name_of_user(name) or name}
        return names | self._new_names(names)

    def _repair(self, name: str) -> None:
        self.repair_held(name)
        record = self._shelf.get(name)
        if record is not None and self._untidy(record):
            self._tidy(record)

    def repair_held(self, name: str) -> None:
        """Finish or undo an operation of a VM whose lock the caller holds (``holding_all``). Raises as ``repair``."""
        record = self._shelf.get(name)
        if record is None or record.operation is None:
            return
        self._understand(record)
        log.warning("vm %s: an operation did not end: %s", name, record.operation.kind)
        self._repairs[record.operation.kind](record)

    def unfinished(self, name: str) -> bool:
        """Whether an operation of a VM did not end, and repair could end it, or has left something to be freed."""
        try:
            record = self._shelf.get(name)
        except (StateDamaged, StateNewer):
            return False
        if record is None or record.operation is None:
            return record is not None and self._untidy(record)
        return record.operation.kind in self._repairs

    def _understand(self, record: VmRecord) -> None:
        if record.operation is not None and record.operation.kind not in self._repairs:
            raise StateNewer(
                f"vm {record.name!r}: this release does not know the operation {record.operation.kind!r} that did not"
                " end; it is left as it is: start the release that began it"
            )

    def reopen(self, name: str) -> None:
        """Make a ready disk usable, if it is not any more after a reboot. Raises DriverError.

        One that a call is under way with is left alone: that call opens it.
        """
        with self._repairing.hold(name), self.locks.hold_if_free(name) as free:
            if free and self.find(name) is not None:
                self._snapshots.open(name)

    def find(self, name: str) -> VmRecord | None:
        """A VM's record, if there is one and nothing is under way with it."""
        record = self._shelf.get(name)
        return record if record is not None and record.steady else None

    def record(self, name: str) -> VmRecord:
        """A VM's record. Raises UnknownVm."""
        record = self._shelf.get(name)
        if record is None:
            raise UnknownVm(f"vm {name!r} is not on this host")
        return record

    def records(self) -> list[VmRecord]:
        """The records of all VMs, by name."""
        return self._shelf.all()

    def sorted_out(self) -> tuple[list[VmRecord], dict[str, str]]:
        """The records of all VMs, by name, and why others cannot be read: their VMs may need any image."""
        return self._shelf.sorted_out()

    def device(self, name: str) -> Device:
        """A VM's disk. Raises UnknownVm, DriverError."""
        self.record(name)
        return self._snapshots.open(name)

    def uses(self, image: str) -> bool:
        """Whether a VM of this host, ready or half made, needs the image, or may need it for all that is known."""
        records, unreadable = self.sorted_out()
        return any(record.image == image for record in records) or bool(unreadable)

    def troubles(self) -> dict[str, str]:
        """Why records are left alone, by VM: they cannot be read, or are of a newer release."""
        found = self._shelf.unreadable()
        for record in self.records():
            try:
                self._understand(record)
            except StateNewer as error:
                found[record.name] = str(error)
        return found

    def strays(self) -> frozenset[str]:
        """Disks without a record. No crash makes one, so nobody but a person may decide to delete it."""
        return self._snapshots.existing().names - frozenset(self._shelf.names())


def _path(device: Device) -> Path:
    if device.path is None:
        raise ValueError(f"a snapshot has a path: {device}")
    return device.path


def check_size(size: int | None) -> None:
    """Raises BadSize."""
    if size is not None and (size <= 0 or size % SECTOR or size > LARGEST_DISK):
        raise BadSize(
            f"a disk of {exact_size(size)} is not possible: the size is a positive multiple of {SECTOR} bytes, at most"
            f" {exact_size(LARGEST_DISK)}"
        )


def _is_of(record: VmRecord, source: VmRecord) -> bool:
    """Whether the record is that of a clone of a source, whose name another VM may have had before."""
    if record.source_uuid is not None and source.uuid is not None:
        return record.source_uuid == source.uuid
    return record.source in {source.name, source.was} - {None} and record.image == source.image


def _disk_size(stack: ImageRecord, size: int | None) -> int:
    least = stack.image.size
    if size is not None and size < least:
        raise BadSize(
            f"{exact_size(size)} are less than the {exact_size(least)} of image {stack.name!r}:"
            " a disk cannot be smaller than its image"
        )
    return size or least
