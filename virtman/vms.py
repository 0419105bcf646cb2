"""The VMs' private disks on this host."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from drivers.base import Device, SnapshotDriver
from drivers.errors import DriverError
from virtman.errors import BadSize, UnknownVm, VirtmanError, VmExists
from virtman.locks import NamedLocks
from virtman.records import Boot, ImageRecord, Shelf, VmPhase, VmRecord
from virtman.steps import Step, log_step

log = logging.getLogger(__name__)

SECTOR = 512
LARGEST = 1 << 60


class Machines(Protocol):
    """What destroying a VM needs of the hypervisor."""

    def remove(self, vm: str) -> None:
        """Stop the VM, and forget it with all that was made for it. Nothing there is fine."""


class Vms:
    """Creates and destroys disks. ``ensure`` makes an image's stack; ``origin`` is what its snapshots are made on."""

    def __init__(
        self,
        shelf: Shelf[VmRecord],
        snapshots: SnapshotDriver,
        ensure: Callable[[str], ImageRecord],
        origin: Callable[[ImageRecord], Device],
        machines: Machines,
        step: Step = log_step,
    ) -> None:
        self._shelf = shelf
        self._snapshots = snapshots
        self._ensure = ensure
        self._origin = origin
        self._machines = machines
        self._step = step
        self.locks = NamedLocks()

    def create(self, name: str, image: str, size: int | None) -> Path:
        """A writable disk for a VM, of ``size`` bytes or the image's size. Returns its path.

        Asked again with the same image and size, it returns the existing disk. Raises VmExists, BadSize, UnknownImage,
        CoordinatorDown, DriverError; after an error nothing is left.
        """
        with self.locks.hold(name):
            return self.create_held(name, image, size)

    def create_held(self, name: str, image: str, size: int | None) -> Path:
        """``create`` for a caller that holds the VM's lock."""
        record = self._shelf.get(name)
        if record is not None and record.phase is VmPhase.READY:
            return self._existing(record, image, size)
        _check_size(size)
        if record is not None:
            self._destroy(record)  # its disk is another VM's, or half of one: a create or destroy did not end
        record = VmRecord(name=name, image=image, size=size, phase=VmPhase.CREATING)
        self._shelf.put(name, record)
        self._step("create:recorded")
        try:
            stack = self._ensure(image)
            self._step("create:attached")
            wanted = _disk_size(stack, size)
            device = self._snapshots.create(name, self._origin(stack), wanted)
            self._step("create:snapshot")
        except (VirtmanError, DriverError) as error:
            log.warning("vm %s: create failed: %s", name, error)
            self._undo(name)
            raise
        self._shelf.put(name, record.model_copy(update={"size": wanted, "phase": VmPhase.READY}))
        self._step("create:done")
        return _path(device)

    def _existing(self, record: VmRecord, image: str, size: int | None) -> Path:
        if record.image != image or size not in (None, record.size):
            raise VmExists(
                f"vm {record.name!r} exists, of image {record.image!r} with {record.size} bytes;"
                " destroy it first or use another name"
            )
        return _path(self._snapshots.open(record.name))

    def _undo(self, name: str) -> None:
        try:
            self._snapshots.delete(name)
            self._shelf.remove(name)
        except DriverError as second:
            log.error("vm %s: undoing the create failed too; repair will finish it: %s", name, second)

    def destroy(self, name: str) -> None:
        """Remove a VM and its disk for good. Raises UnknownVm, DriverError, HypervisorError."""
        with self.locks.hold(name):
            record = self._shelf.get(name)
            if record is None:
                raise UnknownVm(f"vm {name!r} is not on this host")
            self._destroy(record)

    def _destroy(self, record: VmRecord) -> None:
        self._shelf.put(record.name, record.model_copy(update={"phase": VmPhase.DESTROYING}))
        self._step("destroy:recorded")
        if record.boot is not None:
            self._machines.remove(record.name)
        self._step("destroy:stopped")
        self._snapshots.delete(record.name)
        self._step("destroy:deleted")
        self._shelf.remove(record.name)
        self._step("destroy:done")

    def repair(self, name: str) -> None:
        """Undo a create and finish a destroy that were cut off. Raises DriverError, HypervisorError."""
        with self.locks.hold(name):
            record = self._shelf.get(name)
            if record is None or record.phase is VmPhase.READY:
                return
            log.warning("vm %s: was cut off while %s", name, record.phase)
            self._destroy(record)

    def reopen(self, name: str) -> None:
        """Make a ready disk usable, if it is not any more after a reboot. Raises DriverError."""
        with self.locks.hold(name):
            if self.find(name) is not None:
                self._snapshots.open(name)

    def undo_boot(self, name: str, before: VmRecord | None) -> None:
        """Go back, for a caller that holds the VM's lock, to what there was before a boot that failed.

        The hypervisor has been left as it was before.
        """
        try:
            if before is None:
                self._destroy(self.record(name).model_copy(update={"boot": None}))
            else:
                self._shelf.put(name, before)
        except (VirtmanError, DriverError) as second:
            log.error("vm %s: undoing the boot failed too; repair will finish it: %s", name, second)

    def find(self, name: str) -> VmRecord | None:
        """A VM's record, if there is one whose disk is ready."""
        record = self._shelf.get(name)
        return record if record is not None and record.phase is VmPhase.READY else None

    def set_boot(self, name: str, boot: Boot) -> None:
        """Record, for a caller that holds the VM's lock, that libvirt may know the VM from now on."""
        self._shelf.put(name, self.record(name).model_copy(update={"boot": boot}))

    def record(self, name: str) -> VmRecord:
        """A VM's record. Raises UnknownVm."""
        record = self._shelf.get(name)
        if record is None:
            raise UnknownVm(f"vm {name!r} is not on this host")
        return record

    def records(self) -> list[VmRecord]:
        """The records of all VMs, by name."""
        return self._shelf.all()

    def device(self, name: str) -> Device:
        """A VM's disk. Raises UnknownVm, DriverError."""
        self.record(name)
        return self._snapshots.open(name)

    def uses(self, image: str) -> bool:
        """Whether a VM of this host, ready or half made, needs the image, or may need it for all that is known."""
        return any(record.image == image for record in self.records()) or bool(self._shelf.damaged())

    def damaged(self) -> list[str]:
        """VMs whose record cannot be read."""
        return self._shelf.damaged()

    def strays(self) -> frozenset[str]:
        """Disks without a record. No crash makes one, so nobody but a person may decide to delete it."""
        return self._snapshots.existing().names - frozenset(self._shelf.names())


def _path(device: Device) -> Path:
    if device.path is None:
        raise ValueError(f"a snapshot has a path: {device}")
    return device.path


def _check_size(size: int | None) -> None:
    if size is not None and (size <= 0 or size % SECTOR or size > LARGEST):
        raise BadSize(
            f"a disk of {size} bytes is not possible: the size is a positive multiple of {SECTOR}, at most {LARGEST}"
        )


def _disk_size(stack: ImageRecord, size: int | None) -> int:
    least = stack.image.size
    if size is not None and size < least:
        raise BadSize(
            f"{size} bytes are less than the {least} bytes of image {stack.name!r}:"
            " a disk cannot be smaller than its image"
        )
    return size or least
