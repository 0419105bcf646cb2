"""Keeps VMs and devices that are read through the cache as their records say."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from virtman import disks
from virtman.devices import Devices
from virtman.errors import VmSaved
from virtman.records import VmRecord
from virtman.stacks import Stacks
from virtman.vms import Vms
from virtman.workqueue import BUSY, Job, WorkQueue

VM, DEVICE = "vm ", "device "
"""Keys; a name follows."""

OPEN, CHECK = "open its disk", "check"
"""Jobs that are asked for."""


class VmKeeper:
    """Ends operations that were cut off, and opens the disks of ``vms`` once the stacks below them are served."""

    def __init__(self, vms: Vms, stacks: Stacks, queue: WorkQueue) -> None:
        self._vms, self._stacks, self._queue = vms, stacks, queue

    def open_all(self) -> None:
        """Have every disk opened again: it may not be usable after a reboot, say."""
        for key in self.keys():
            self._queue.wake(key, ask=OPEN)

    def opening(self) -> bool:
        """Whether a disk is being opened now. One that failed waits for its next try."""
        return any(self._queue.asked(key, OPEN) and self._queue.busy(key) for key in self.keys())

    def keys(self) -> list[str]:
        return [VM + name for name in self._vms.records.names()]

    def needy(self) -> set[str]:
        """VMs with something to end."""
        return {vm.name for vm in self._vms.records.all() if self._unfinished(vm)}

    def _unfinished(self, record: VmRecord) -> bool:
        return record.operation is not None or bool(disks.leftovers(self._vms, record))

    def tend(self) -> None:
        """A heartbeat: plan for VMs that may have something to end."""
        for vm in self._vms.records.all():
            if vm.operation is not None or vm.leftover:
                self._queue.wake(VM + vm.name)

    def released(self, image: str) -> None:
        """The stack of an image may be served again."""
        for vm in self._vms.records.all():
            if vm.image == image and self._queue.asked(VM + vm.name, OPEN):
                self._queue.wake(VM + vm.name, now=True)

    def plan(self, name: str) -> Job | None:
        record = self._vms.records.get(name)
        if record is None:
            return None
        if self._vms.locks.taken(name):
            return BUSY
        if self._unfinished(record):
            return Job("repair", partial(disks.repair, self._vms, name))
        if not self._queue.asked(VM + name, OPEN):
            return None
        if not self._stacks.source.serving(record.image):
            return BUSY
        return Job(OPEN, partial(self._open, name), on_demand=True)

    def _open(self, name: str) -> None:
        with self._vms.holding_if_free(name) as free:  # a call that is under way opens it
            record = self._vms.records.get(name)
            if free and record is not None and record.steady:
                self._vms.vmdisks.open(name)
                self._follow_if_saved(record)

    def _follow_if_saved(self, record: VmRecord) -> None:
        """libvirt-guests, which comes after the agent, restores the VM with virsh."""
        if record.boot is not None:
            try:
                with self._vms.machines.running_vm(record.name):
                    pass
            except VmSaved:
                self._vms.follow(record)


class DeviceKeeper:
    """Keeps ``devices`` in order."""

    def __init__(self, devices: Devices, queue: WorkQueue) -> None:
        self._devices, self._queue = devices, queue

    def keys(self) -> list[str]:
        return [DEVICE + record.name for record in self._devices.records.all()]

    def needy(self) -> set[str]:
        """Paths of devices with something to end."""
        return {record.device for record in self._devices.records.all() if not record.steady}

    def tend(self) -> None:
        """A heartbeat: have all checked."""
        for key in self.keys():
            self._queue.wake(key, ask=CHECK)

    def removals(self) -> list[Callable[[], None]]:
        """What removes attachments without a record."""
        return [partial(self._devices.remove_orphan, name) for name in sorted(self._devices.orphans())]

    def plan(self, name: str) -> Job | None:
        record = self._devices.records.get(name)
        if record is None:
            return None
        if self._devices.locks.taken(record.number):
            return BUSY
        if record.operation is not None:
            return Job("repair", partial(self._devices.tend, name))
        if self._queue.asked(DEVICE + name, CHECK):
            return Job(CHECK, partial(self._devices.tend, name), on_demand=True)
        return None
