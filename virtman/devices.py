"""Devices of others that VMs read through this host's cache: attached, tended, and detached.

A device is known by its number, which is the same whatever path leads to it. An attachment has a random name,
and a record from before the first act until after the last one. It ends with the host: after a reboot a record tells
that there was one, until it is detached or the same path is attached anew. What is there of attachments of this boot is
what the driver finds: an agent that starts takes it over as it is.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from drivers.base import DeviceCache
from drivers.cachemodels import CachedDevice
from drivers.errors import DeviceInUse, DeviceRefused
from drivers.host.blockdev import BOOT_ID
from drivers.host.locks import NamedLocks
from virtman.errors import BadDevice, DiskBusy, NoVolumes
from virtman.fdpassing import Passed
from virtman.operations import Kind, Operations
from virtman.records import ATTACH_DEVICE, DETACH_DEVICE, DeviceRecord, RecordStore, State
from virtman.steps import Step, log_step

log = logging.getLogger(__name__)

LOST, ATTACHING, LEAVING = "lost", "attaching", "leaving"
"""States of a device besides those of drivers/base.py: it was attached before the host was started; it is to go, and
its storage does not let it."""


def number_in(path: Path) -> str:
    """The number of the block device that a path leads to, nothing if it leads to none."""
    try:
        found = path.stat()
    except OSError:
        return ""
    return f"{os.major(found.st_rdev)}:{os.minor(found.st_rdev)}" if stat.S_ISBLK(found.st_mode) else ""


class Devices:
    """``driver``: what caches devices on this host, None if nothing does, and ``without`` why.

    ``number_in``: as the function of this module.
    """

    def __init__(
        self,
        records: RecordStore[DeviceRecord],
        driver: DeviceCache | None,
        without: str,
        step: Step = log_step,
        number_in: Callable[[Path], str] = number_in,
    ) -> None:
        self.records, self._maybe, self._without, self._step = records, driver, without, step
        self._number_in = number_in
        self.locks = NamedLocks()
        """By the numbers of devices."""
        self._boot = BOOT_ID.read_text().strip()
        self._operations: Operations[Devices, DeviceRecord] = Operations("device", records, KINDS, self, step)

    @property
    def _driver(self) -> DeviceCache:
        if self._maybe is None:
            raise NoVolumes(self._without)
        return self._maybe

    def attach(self, path: Path, passed: Passed | None = None) -> DeviceRecord:
        """Have a device read through the cache. A device that is attached already gets its present size.

        ``passed``: the device as the caller has opened it. Raises NoVolumes, BadDevice, DriverError, NoRoom: then it is
        not attached, or, if that is logged, given back later; what was attached before stays.
        """
        driver = self._driver
        device, number = path, self._number_of(path)
        if passed is not None:
            device = passed.path
            self._check(passed, number)
        with self.locks.hold(number):
            record = self._of_number(number)
            if record is not None and not record.steady:
                self._operations.resume(record)
                record = self.records.get(record.name)
            try:
                if record is not None:
                    driver.attach_device(record.name, device)
                    return record
                return self._attach(path, device, number)
            except DeviceRefused as error:
                raise BadDevice(f"{path} is not read through the cache: {error}") from error

    def _number_of(self, path: Path) -> str:
        if number := self._number_in(path):
            return number
        raise BadDevice(f"{path} is not read through the cache: there is no such block device")

    def _check(self, passed: Passed, number: str) -> None:
        """Whether a caller has opened the device of this number, and may write it. Raises BadDevice."""
        if self._number_in(passed.path) != number:
            raise BadDevice(f"{passed.name} is not read through the cache: what was opened is another device")
        if not passed.writable:
            raise BadDevice(f"{passed.name} is not read through the cache: it was not opened for reading and writing")

    def _attach(self, path: Path, device: Path, number: str) -> DeviceRecord:
        def act(record: DeviceRecord) -> DeviceRecord:
            made = self._driver.attach_device(record.name, device)
            self._step("attach-device:attached")
            settled = record.settled(path=str(made.path), size=made.size)
            self.records.put(record.name, settled)
            self._step("attach-device:done")
            return settled

        record = DeviceRecord(
            name=secrets.token_hex(8), state=State.ABSENT, device=str(path), number=number, boot=self._boot
        )  # fmt: skip
        settled = self._operations.run(record.begin(ATTACH_DEVICE), act)
        for old in self.records.all():  # what the path led to before the host was started
            if old.device == str(path) and self._lost(old) and old.steady:
                self.records.remove(old.name)
        return settled

    def undo_attach(self, record: DeviceRecord, _error: Exception | None) -> None:
        """See KINDS: no caller knows of the attachment. Raises DriverError."""
        self._driver.detach_device(record.name)
        self._step("undo-attach-device:detached")
        self.records.remove(record.name)

    def detach(self, path: Path, *, force: bool = False) -> None:
        """Detach a device, by its own path or the one that was handed out. One that is not attached is fine.

        ``force``: also while a program has the path open, which gets errors. Raises NoVolumes, DiskBusy, and nothing
        has changed; DriverError: then it is detached later.
        """
        _ = self._driver
        record = self._called(path)
        if record is None:
            return
        with self.locks.hold(record.number):
            found = self.records.get(record.name)
            if found is None:
                return
            try:
                self._operations.run(found.begin(DETACH_DEVICE, force=force or _by_force(found)))
            except DeviceInUse as error:
                raise DiskBusy(f"{found.device} is in use: {error}") from error

    def finish_detach(self, record: DeviceRecord) -> None:
        """See KINDS. Raises DriverError."""
        self._driver.detach_device(record.name, force=_by_force(record))
        self._step("detach-device:detached")
        self.records.remove(record.name)
        self._step("detach-device:done")

    def _called(self, path: Path) -> DeviceRecord | None:
        """The record of what a path means: what is handed out, the device, or what was once called so."""
        records, number = self.records.all(), self._number_in(path)
        here, before = ([r for r in records if self._lost(r) is lost] for lost in (False, True))
        by_number = (r for r in here if number and number in (r.number, self._number_in(Path(r.path))))
        by_path = (r for r in (*here, *before) if str(path) in (r.device, r.path))
        return next(by_number, None) or next(by_path, None)

    def _of_number(self, number: str) -> DeviceRecord | None:
        return next((r for r in self.records.all() if r.number == number and not self._lost(r)), None)

    def _lost(self, record: DeviceRecord) -> bool:
        """Whether the host was started since it was attached."""
        return record.boot != self._boot

    # What the agent does unasked

    def tend(self, name: str) -> None:
        """Finish or undo what was cut off, or have the device read by way of the cache, if it can be now.

        A call that is under way with the device has precedence. Raises StateDamaged, DriverError.
        """
        record = self.records.get(name)
        if record is None:
            return
        with self.locks.hold_if_free(record.number) as free:
            record = self.records.get(name)
            if not free or record is None:
                return
            if record.operation is not None:
                self._operations.resume(record)
            elif not self._lost(record):
                self._driver.tend_device(name)

    def orphans(self) -> frozenset[str]:
        """Attachments on the host without a record."""
        if self._maybe is None:
            return frozenset()
        return self._maybe.existing_devices() - frozenset(self.records.names())

    def remove_orphan(self, name: str) -> None:
        """Remove an attachment without a record, unless its path is open. Raises DriverError."""
        if self.records.get(name) is None:
            self._driver.detach_device(name)

    # What is told

    def listed(self) -> dict[str, CachedDevice]:
        """What is recorded, and what the driver knows of it, by attachments. Raises DriverError."""
        known = {} if self._maybe is None else {device.device: device for device in self._maybe.devices()}
        found = {}
        for record in self.records.all():
            device = known.get(record.name) or CachedDevice(
                device=record.name, path=record.path, size=record.size, state=LOST
            )
            state = device.state
            if record.operation is not None:
                state = LEAVING if record.doing(DETACH_DEVICE) else ATTACHING
            found[record.name] = device.model_copy(update={"device": record.device, "state": state})
        return found


def _by_force(record: DeviceRecord) -> bool:
    return record.doing(DETACH_DEVICE) and bool(record.argument("force"))


def _stays_attached(_devices: Devices, record: DeviceRecord, error: Exception | None) -> DeviceRecord | None:
    """A device whose path is open stays as it was. Storage that does not answer is asked again."""
    return record.settled() if isinstance(error, DeviceInUse) else None


KINDS = {
    ATTACH_DEVICE: Kind(undo=Devices.undo_attach),
    DETACH_DEVICE: Kind(Devices.finish_detach, _stays_attached, gives_up=(DeviceInUse,), makes_room=True),
}
