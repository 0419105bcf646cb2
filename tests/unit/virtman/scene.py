"""One host with its agent's parts, over doubles; the agent can be cut off anywhere and made anew."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from testtools import TestCase

from drivers.base import Image, Place
from drivers.digests import draw
from drivers.errors import DriverError
from drivers.host import space
from tests.doubles.drivers import DevicesDouble, Host, SnapshotDouble, blocks_of, number_in, source_over
from tests.doubles.machines import MachinesDouble
from tests.doubles.transfer import ContentDouble, TransferDouble
from tests.doubles.volt import VoltDouble, digest_of, link_to
from tests.patience import wait_until
from virtman.devices import Devices
from virtman.errors import NoRoom
from virtman.imagestore import ImageStore
from virtman.inplace import to_publish
from virtman.kinds import IMAGE_KINDS, VM_KINDS
from virtman.records import Boot, DeviceRecord, ImageRecord, InPlace, Record, RecordStore, Role, VmRecord
from virtman.stacks import Stacks
from virtman.transferring import Transfers
from virtman.upkeep import Upkeep
from virtman.vms import Vms
from virtman.workqueue import WorkQueue

NOW = 1_700_000_000.0
"""Seconds since 1970."""
MIB = 1 << 20
BOOT = Boot(memory=64, cpus=1, network="none")
TROUBLE = DriverError("the device is on fire")


class Cut(BaseException):
    """The agent is killed here. No clean-up of the agent's may catch it."""


class Room:
    """``left``: how many records fit on the disk; None if it is not full."""

    left: int | None = None


R = TypeVar("R", bound=Record)


def damage(records: RecordStore[R], name: str, content: bytes = b"{") -> None:
    """Have a record be what an agent finds that starts when something else is in the file."""
    records._path(name).write_bytes(content)
    records._records.pop(name, None)
    records._load(name)


class SmallShelf(RecordStore[R]):
    """Records on a disk that may be full."""

    def __init__(self, folder: Path, kind: type[R], room: Room) -> None:
        super().__init__(folder, kind)
        self._room = room

    def put(self, name: str, record: R) -> None:
        """Write the record, if there is room."""
        if self._room.left == 0:
            raise NoRoom("no space left to write down what is done; make room there")
        if self._room.left is not None:
            self._room.left -= 1
        super().put(name, record)


class Scene:
    """``host``, ``volt`` and ``machines`` outlive the agent; ``stacks`` and ``vms`` do not."""

    def __init__(self, test: TestCase) -> None:
        self.test = test
        self.folder = folder_for(test)
        self.host = Host()
        self.volt = VoltDouble()
        self.machines = MachinesDouble()
        self.moments: list[str] = []
        self._cut_at: int | None = None
        self.changes = 0
        """How often Volt should have heard of something soon."""
        self.released: Callable[[str], None] = lambda _image: None
        for world in (self.host, self.volt, self.machines):
            world.moment = self.moment
        self.room = Room()
        self.start()

    def fill_up(self, after: int = 0) -> None:
        """The disk with the records is full after so many more have been written."""
        self.room.left = after

    def make_room(self) -> None:
        """The disk with the records is not full any more."""
        self.room.left = None

    def start(self) -> None:
        """Make the agent's parts, over what is there."""
        self.store = ImageStore(self.folder, space.Room(self.folder))
        self.image_shelf = SmallShelf(self.folder / "records" / "images", ImageRecord, self.room)
        self.vm_shelf = SmallShelf(self.folder / "records" / "vms", VmRecord, self.room)
        self.stacks = Stacks(
            source_over(self.host, self.moment), self.image_shelf, self.vm_shelf, self.store, link_to(self.volt),
            IMAGE_KINDS, changed=self._count_change, released=lambda image: self.released(image), step=self.moment,
        )  # fmt: skip
        self.vms = Vms(
            self.vm_shelf, SnapshotDouble(self.host), self.machines, self.stacks, VM_KINDS, self.moment,
            clock=lambda: NOW, opened=blocks_of(self.host),
        )  # fmt: skip
        self.transfers = Transfers(
            Place(self.folder, self.folder), ContentDouble(), {"udpcast": TransferDouble}, self._count_change
        )
        self.device_shelf = SmallShelf(self.folder / "records" / "devices", DeviceRecord, self.room)
        self.devices = Devices(
            self.device_shelf, DevicesDouble(self.host), "no volumes", self.moment, number_in=number_in
        )

    def _count_change(self) -> None:
        self.changes += 1

    def moment(self, what: str) -> None:
        """Hear of a moment at which the agent may be cut off, and cut it off if it is the one."""
        self.moments.append(what)
        if len(self.moments) == self._cut_at:
            raise Cut(what)

    def cut(self, operation: Callable[[Scene], object], number: int) -> str | None:
        """Cut the agent off at the numbered moment of the operation. Returns the moment; None if it ended before."""
        self.moments, self._cut_at = [], number
        try:
            operation(self)
        except Cut as cut:
            return str(cut)
        finally:
            self._cut_at = None
        return None

    def restart(self) -> None:
        """The agent starts again and repairs."""
        self.start()
        self.repair()

    def repair(self) -> None:
        """What an agent does when it starts, until nothing can be done at once. Raises VirtmanError."""
        upkeep = Upkeep(self.stacks, self.vms, None, self.devices, self.transfers, math.inf)
        self.released = upkeep.released
        upkeep.queue.start()
        try:
            upkeep.repair()
            upkeep.queue.settle(upkeep.places.keys())
        finally:
            self.troubles = upkeep.queue.troubles()
            upkeep.queue.stop()

    def record(self, image: str = "debian") -> ImageRecord:
        """The record of an image that is here."""
        record = self.image_shelf.get(image)
        assert record is not None
        return record

    def check(self, test: TestCase) -> None:
        """What is on the host and at Volt is what the records say, and the records say that all is whole."""
        images = {record.name: record for record in self.stacks.records.all()}
        test.assertEqual([], [name for name, record in images.items() if not record.steady], "unsteady images")
        test.assertEqual([], [vm.name for vm in self.vms.records.all() if not vm.steady], "unsteady VMs")
        read = {name: record for name, record in images.items() if record.role is Role.HOST}
        test.assertEqual(set(images), set(self.host.served), "what is served")
        test.assertEqual(set(images), self.host.endpoints, "endpoints")
        test.assertEqual(set(read), set(self.host.routes), "routes")
        test.assertEqual({record.image.key for record in read.values()}, self.host.open_caches, "open caches")
        test.assertEqual(set(images), set(self.volt.places), "places in Volt's trees")
        test.assertEqual({vm.name for vm in self.vms.records.all()}, set(self.host.disks), "disks")
        devices = self.devices.records.all()
        test.assertEqual([], [device.name for device in devices if not device.steady], "unsteady devices")
        test.assertEqual({device.name for device in devices}, set(self.host.devices), "devices")
        test.assertEqual(set(), self.host.half_devices, "devices that are attached by half")
        test.assertEqual({vm.name for vm in self.vms.records.all() if vm.boot}, set(self.machines.running), "machines")
        test.assertEqual(set(self.machines.running), self.machines.files, "seeds")
        test.assertEqual(set(), self.machines.unfollowed, "machines with the files of another name")
        for name, record in images.items():
            self._check_stack(test, name, record)
        for vm in self.vms.records.all():
            self._check_disk(test, vm)
        test.assertEqual([], [path for path in self.folder.rglob(".*") if path.is_file()], "torn files")

    def _check_disk(self, test: TestCase, vm: VmRecord) -> None:
        disk = self.host.disks[vm.name]
        test.assertEqual(
            (vm.size, {p.name: p.size for p in vm.snapshots}), (disk.size, disk.sizes()), f"disk of {vm.name}"
        )
        test.assertIsNone(vm.untidy)
        test.assertNotIn(vm.name, self.machines.frozen)
        if vm.boot:
            begins_with = self.machines.defined[vm.name].node
            test.assertEqual(self.vms.vmdisks.open(vm.name).node, begins_with, "what it begins with")
        test.assertEqual(set(vm.disks), set(self.machines.plugged.get(vm.name, {})), f"disks of {vm.name}")
        test.assertEqual(self.vms.disks_of(vm), self.machines.with_disks.get(vm.name, {}), "what it is defined with")

    def _check_stack(self, test: TestCase, name: str, record: ImageRecord) -> None:
        node = self.host.served[name].node
        assert node is not None
        test.assertEqual(record.image.key, node["key"], f"content served as {name}")
        test.assertEqual(set(record.parents[:1]), self.host.reading[name], f"parents of {name}")
        test.assertFalse(record.unconfirmed)

    def check_empty(self, test: TestCase) -> None:
        """Nothing of any VM or image is left."""
        self.check(test)
        test.assertEqual({}, self.host.leftovers())
        test.assertEqual([], self.image_shelf.names() + self.vm_shelf.names())

    def put_content(self, name: str) -> Image:
        """An image whose content is in the store, as a publish finds it."""
        image = Image(name, 1 << 20, digest_of(name))
        self.store.path(image).write_bytes((b"content of " + name.encode()).ljust(image.size))
        return image

    def put_in_place(self, name: str) -> tuple[Image, InPlace]:
        """An image, and where it is: as a publish in place finds it."""
        file = self.folder / f"{name}.raw"
        file.write_bytes(f"content of {name}".encode().ljust(1 << 20))
        with to_publish(file, []) as (found, _fd):
            return Image(name, found.size, draw()), found


def await_quiet(queue: WorkQueue) -> None:
    """Wait until nothing is under way, and nothing is due."""

    def quiet() -> bool:
        with queue._changed:  # at one moment: a key that is done may have woken one that was not busy before
            return not any(map(queue._busy, queue._entries))

    wait_until(quiet)


def folder_for(test: TestCase) -> Path:
    """A folder of the test's own, with a short path (unix sockets)."""
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="vm-"))
    test.addCleanup(shutil.rmtree, folder, ignore_errors=True)
    return folder
