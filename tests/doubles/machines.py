"""A hypervisor in memory."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from drivers.base import Device
from drivers.errors import MonitorFailed
from tests.doubles.drivers import Moment, unnoticed
from virtman.errors import HypervisorError, NotSupported, UnknownVm, VmRuns, VmSaved
from virtman.hypervisor import NO_DISKS
from virtman.models import MigrationSource
from virtman.records import Boot
from virtman.seed import Identity

HARDWARE = "pc-q35-7.2"


class RunningDouble:
    """A VM while it runs. Its QEMU knows no command."""

    def __init__(self, machines: MachinesDouble, vm: str) -> None:
        self._machines, self._vm = machines, vm

    def execute(self, command: str, arguments: Mapping[str, Any] | None = None) -> Any:
        raise MonitorFailed(command, "unknown", "CommandNotFound")

    def freeze(self) -> bool:
        """One that is held still already refuses, as QEMU's guest agent does, and is let go."""
        self._machines.moment("before machines.freeze")
        if self._vm in self._machines.frozen:
            self._machines.frozen.discard(self._vm)
        elif self._vm in self._machines.with_agents:
            self._machines.frozen.add(self._vm)
        self._machines.moment("after machines.freeze")
        return self._vm in self._machines.frozen

    def thaw(self) -> None:
        self._machines.moment("before machines.thaw")
        self._machines.frozen.discard(self._vm)

    @property
    def state(self) -> str:
        return "paused" if self._vm in self._machines.paused else "running"

    def go_on(self) -> None:
        self._machines.answer("go_on")
        self._machines.paused.discard(self._vm)
        self._machines.moment("after machines.go_on")

    def plug(self, name: str, disk: Device) -> None:
        self._machines.answer("plug")
        self._machines.plugged[self._vm].setdefault(name, disk)
        self._machines.moment("after machines.plug")

    def unplug(self, name: str, disk: Device) -> None:
        self._machines.answer("unplug")
        self._machines.plugged[self._vm].pop(name, None)
        self._machines.moment("after machines.unplug")


class MachinesDouble:
    """VMs that a hypervisor knows; ``running`` has the disk that each one writes to, ``files`` who has a seed.

    ``with_agents``: VMs in whose guests an agent runs; ``frozen``: those that it holds still now; ``defined``: the disk
    that each one begins with when it is started again by others. ``plugged`` and ``with_disks``: the same of the disks
    that they use besides, by name.
    """

    def __init__(self) -> None:
        self.moment: Moment = unnoticed
        self.failing: dict[str, Exception] = {}
        """What a call ("start") raises until it is taken out again."""
        self.running: dict[str, Device] = {}
        self.files: set[str] = set()
        self.with_agents: set[str] = set()
        self.frozen: set[str] = set()
        self.defined: dict[str, Device] = {}
        self.plugged: dict[str, dict[str, Device]] = {}
        self.with_disks: dict[str, dict[str, Device]] = {}
        self.saved: dict[str, Device] = {}
        """Those whose memory is saved, with the disk that they had then."""
        self.paused: set[str] = set()
        """Those whose memory has come, and that do not go on yet."""
        self.others: dict[str, MachinesDouble] = {}
        """Those of other hosts, by their URIs."""
        self.gone: dict[str, bool | None] = {}
        """Whether those that do not run were moved; None: nobody knows any more."""
        self.expected: dict[str, tuple[Device, MigrationSource]] = {}
        """Those whose memory is to come."""
        self.unfollowed: set[str] = set()
        """Those that got another name, and would begin with what had the old one."""
        self.uuids: dict[str, str] = {}
        self._machines: dict[str, Boot] = {}
        self._seeds: dict[str, bytes] = {}
        self._ended: set[str] = set()
        """Those whose move was to end."""

    def start(self, identity: Identity, disk: Device, boot: Boot, disks: Mapping[str, Device] = NO_DISKS) -> None:
        self.answer("start")
        vm = identity.vm
        if (vm in self.saved or vm in self.running) and identity.ssh_keys is not None:
            self._check_runs_as(boot, identity)
        if vm in self.saved:
            del self.saved[vm]
            self.running[vm] = disk
        elif vm not in self.running:
            self.uuids.setdefault(vm, identity.uuid)
            self.files.add(vm)
            if identity.ssh_keys is not None or vm not in self._seeds:
                self._seeds[vm] = _seed(identity)
            self.moment("within machines.start")
            self.running[vm], self._machines[vm] = disk, boot
            self.gone.pop(vm, None)
            self.unfollowed.discard(vm)
            self.defined[vm] = disk
            self.plugged[vm], self.with_disks[vm] = dict(disks), dict(disks)
        self.moment("after machines.start")
        if "start's answer" in self.failing:
            raise self.failing["start's answer"]

    def _check_runs_as(self, boot: Boot, identity: Identity) -> None:
        given = identity.ssh_keys or identity.user_data
        if self._machines[identity.vm] != boot or (given and self._seeds[identity.vm] != _seed(identity)):
            raise VmRuns(f"vm {identity.vm!r} runs")

    def edit(self, vm: str, boot: Boot) -> None:
        """Somebody changes the machine that a VM has when it is started next."""
        self._machines[vm] = boot

    def save(self, vm: str) -> None:
        """Somebody has the hypervisor save the memory of a VM that runs."""
        self.saved[vm] = self.running.pop(vm)

    def _require_not_saved(self, vm: str) -> None:
        if vm in self.saved:
            raise VmSaved(f"vm {vm!r} is saved")

    def machine(self, vm: str) -> Boot | None:
        self.answer("machine")
        return self._machines[vm] if vm in self.defined else None

    @contextmanager
    def running_vm(self, vm: str) -> Iterator[RunningDouble | None]:
        self.answer("running_vm")
        self._require_not_saved(vm)
        yield RunningDouble(self, vm) if vm in self.running else None

    def stop(self, vm: str, *, force: bool) -> None:
        self.answer("stop")
        if vm not in self.defined:
            raise UnknownVm(vm)
        if not force:
            self._require_not_saved(vm)
        self.running.pop(vm, None)
        self.saved.pop(vm, None)
        self.plugged.pop(vm, None)
        self.frozen.discard(vm)
        self.paused.discard(vm)

    def follow(self, vm: str, disk: Device, disks: Mapping[str, Device] = NO_DISKS) -> None:
        self.answer("follow")
        if vm in self.defined:
            self.defined[vm], self.with_disks[vm] = disk, dict(disks)
            self.unfollowed.discard(vm)

    def rename(self, vm: str, new: str) -> None:
        self.answer("rename")
        if vm in self.running:
            raise VmRuns(f"vm {vm!r} runs")
        self._require_not_saved(vm)
        if vm in self.defined and new not in self.defined:
            self.unfollowed.discard(vm)
            self.unfollowed.add(new)
        tables: list[dict[str, Any]] = [self.defined, self.with_disks, self.uuids, self._machines, self._seeds]
        for known in tables:
            if vm in known and new not in known:
                known[new] = known.pop(vm)
        if vm in self.files:
            self.files.remove(vm)
            self.files.add(new)
        self.moment("after machines.rename")

    def migration_source(self, vm: str) -> MigrationSource:
        self.answer("migration_source")
        if vm not in self.defined:
            raise UnknownVm(vm)
        seed = base64.b64encode(self._seeds[vm]).decode()
        return MigrationSource(
            uuid=UUID(self.uuids[vm]), **self._machines[vm].model_dump(), seed=seed, hardware=HARDWARE
        )

    def check(self, migration_source: MigrationSource) -> None:
        self.answer("check")
        if migration_source.hardware != HARDWARE:
            raise NotSupported(f"{migration_source.hardware} is not known")

    def expect(self, vm: str, disk: Device, migration_source: MigrationSource) -> str:
        self.answer("expect")
        self.files.add(vm)
        self._seeds[vm] = base64.b64decode(migration_source.seed)
        self.expected[vm] = disk, migration_source
        self.moment("after machines.expect")
        return f"{migration_source.uuid} {migration_source.seed}"

    def come(self, vm: str) -> None:
        """The memory of one that is expected comes: it is there, and paused."""
        disk, migration_source = self.expected.pop(vm)
        self.running[vm] = self.defined[vm] = disk
        self.plugged[vm], self.with_disks[vm] = {}, {}
        self._machines[vm] = Boot(**migration_source.model_dump(include={"memory", "cpus", "network"}))
        self.uuids[vm] = str(migration_source.uuid)
        self.paused.add(vm)

    def migrate(self, vm: str, uri: str, domain: str, tell: Callable[[int, int], None]) -> float:
        """What comes is the VM that the other one expects."""
        self.answer("migrate")
        self._ended.discard(vm)
        tell(0, 1)
        if vm in self._ended:
            raise HypervisorError("it was ended")
        if vm not in self.running:
            raise HypervisorError("it went off")
        self.others[uri].come(vm)
        del self.running[vm]
        self.gone[vm] = True
        self.moment("after machines.migrate")
        if "migrate's answer" in self.failing:
            raise self.failing["migrate's answer"]
        return 0.5

    def end_migration(self, vm: str) -> None:
        self.answer("end_migration")
        self._ended.add(vm)
        self.moment("after machines.end_migration")

    def went(self, vm: str) -> bool | None:
        self.answer("went")
        if vm not in self.defined:
            return None
        return False if vm in self.running or vm in self.saved else self.gone.get(vm, False)

    def undefine(self, vm: str) -> None:
        self.answer("undefine")
        self.defined.pop(vm, None)
        self.uuids.pop(vm, None)

    def remove(self, vm: str) -> None:
        self.answer("remove")
        self.running.pop(vm, None)
        tables: list[dict[str, Any]] = [
            self.defined, self.plugged, self.with_disks, self.uuids, self.gone, self.expected, self._seeds, self.saved,
        ]  # fmt: skip
        for known in tables:
            known.pop(vm, None)
        for those in (self.paused, self.unfollowed):
            those.discard(vm)
        self.files.discard(vm)
        self.moment("after machines.remove")

    def answer(self, call: str) -> None:
        """A call may be cut off here, or fail."""
        self.moment(f"before machines.{call}")
        if call in self.failing:
            raise self.failing[call]


def _seed(identity: Identity) -> bytes:
    return repr((identity.ssh_keys or [], identity.user_data)).encode()
