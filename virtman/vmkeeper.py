"""Keeps VMs and devices that are read through the cache as their records say."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from virtman import disks
from virtman.devices import Devices
from virtman.errors import StateDamaged, VmSaved
from virtman.records import VmRecord
from virtman.stacks import Stacks
from virtman.vms import Vms
from virtman.workqueue import Job, Pool, WorkQueue

VM, DEVICE = "vm ", "device "
"""Keys; a name follows."""


class VmKeeper:
    """Ends what was cut off, and has the disks of ``vms`` usable once the stacks below them are served."""

    def __init__(self, vms: Vms, stacks: Stacks, queue: WorkQueue) -> None:
        self._vms, self._stacks, self._queue = vms, stacks, queue
        self._lock = threading.Lock()
        self._unopened: set[str] = set()
        """VMs whose disks may not be usable: after a reboot, say."""

    def open_all(self) -> None:
        """Have every disk opened again."""
        with self._lock:
            self._unopened |= set(self._vms.records.names())

    def opening(self) -> bool:
        """Whether a disk is being opened now. One that failed waits for its next try."""
        with self._lock:
            names = list(self._unopened)
        return any(self._queue.busy(VM + name) for name in names)

    def keys(self) -> list[str]:
        """The keys of all VMs."""
        return [VM + name for name in self._vms.records.names()]

    def needy(self) -> set[str]:
        """VMs with something to end."""
        return {vm.name for vm in self._vms.records.all() if self._unfinished(vm)}

    def _unfinished(self, record: VmRecord) -> bool:
        return record.operation is not None or bool(disks.leftovers(self._vms, record))

    def tend(self) -> None:
        """A heartbeat: have VMs looked at that may have something to end."""
        for vm in self._vms.records.all():
            if vm.operation is not None or vm.leftover:
                self._queue.wake(VM + vm.name)

    def released(self, image: str) -> None:
        """The stack of an image may be served again."""
        with self._lock:
            unopened = list(self._unopened)
        for name in unopened:
            record = self._record(name)
            if record is not None and record.image == image:
                self._queue.wake(VM + name, now=True)

    def plan(self, name: str) -> Job | None:
        """What is to be done for a VM. An operation that nobody carries out now was cut off."""
        record = self._record(name)
        if record is None:
            with self._lock:
                self._unopened.discard(name)
            return None
        if self._vms.locks.taken(name):
            return None
        if self._unfinished(record):
            return Job("repair", partial(disks.repair, self._vms, name), Pool.LONG)
        if name in self._unopened and self._stacks.serving(record.image):
            return Job("open its disk", partial(self._open, name), Pool.LONG)
        return None

    def _record(self, name: str) -> VmRecord | None:
        try:
            return self._vms.records.get(name)
        except StateDamaged:
            return None  # status tells of it

    def _open(self, name: str) -> None:
        with self._vms.holding_if_free(name) as free:  # a call that is under way opens it
            record = self._record(name)
            if free and record is not None and record.steady:
                self._vms.vmdisks.open(name)
                self._follow_if_saved(record)
        with self._lock:
            self._unopened.discard(name)

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
        self._lock = threading.Lock()
        self._unseen: set[str] = set()
        """Names of attachments that were not looked at since the last heartbeat."""

    def keys(self) -> list[str]:
        """The keys of all attachments."""
        return [DEVICE + record.name for record in self._devices.records()]

    def needy(self) -> set[str]:
        """Paths of devices with something to end."""
        return {record.device for record in self._devices.records() if not record.steady}

    def tend(self) -> None:
        """A heartbeat: have all looked at."""
        for record in self._devices.records():
            with self._lock:
                self._unseen.add(record.name)
            self._queue.wake(DEVICE + record.name)

    def removals(self) -> list[Callable[[], None]]:
        """What removes attachments without a record."""
        return [partial(self._devices.remove_stray, name) for name in sorted(self._devices.strays())]

    def plan(self, name: str) -> Job | None:
        """What is to be done for an attachment."""
        try:
            record = self._devices.find(name)
        except StateDamaged:
            return None  # status tells of it
        if record is None or self._devices.locks.taken(record.number):
            return None
        if record.operation is not None:
            return Job("repair", partial(self._devices.repair_if_free, name), Pool.LONG)
        if name in self._unseen:
            return Job("look", partial(self._look, name), Pool.LONG, on_demand=True)
        return None

    def _look(self, name: str) -> None:
        with self._lock:
            self._unseen.discard(name)
        self._devices.tend(name)
