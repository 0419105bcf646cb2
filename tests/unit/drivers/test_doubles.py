"""The doubles of the drivers do what drivers have to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testtools import TestCase

from drivers.base import Device, Image, Parent
from drivers.layered import LayeredSource
from tests.contracts import drivers as contracts
from tests.doubles.drivers import (
    ADDRESS,
    AttachDouble,
    CacheDouble,
    DevicesDouble,
    Disk,
    ExportDouble,
    Host,
    SnapshotDouble,
    SourceDouble,
    blocks_of,
    source_over,
)
from tests.unit.virtman.scene import folder_for

IMAGE = Image("img", 1 << 20, "sha256:" + "5e" * 32)
CONTENT = Device(IMAGE.size, node={"driver": "file", "filename": "/content"})


class Memory(TestCase):
    """Brings the host that all driver objects of a test are made over."""

    image = IMAGE

    def setUp(self) -> None:
        super().setUp()
        self.host = Host()


class AttachDoubleTest(Memory, contracts.AttachContract):
    def setUp(self) -> None:
        super().setUp()
        self.parents = [Parent(name, ADDRESS) for name in ("h1", "h2")]
        folder = folder_for(self)
        self.file = folder / "content"
        self.file.write_bytes(bytes(self.image.size))

    def make(self) -> AttachDouble:
        return AttachDouble(self.host, lost=lambda _image, _parent: None)


class DeviceCacheDoubleTest(Memory, contracts.DeviceCacheContract):
    """Files that say a number stand for devices."""

    def setUp(self) -> None:
        super().setUp()
        folder = folder_for(self)
        self.device, self.other, self.used = (folder / name for name in ("device", "other", "used"))
        for number, path in enumerate((self.device, self.other, self.used)):
            path.write_text(f"8:{number}")
        self.host.refused["8:2"] = "it is mounted"

    def make(self) -> DevicesDouble:
        return DevicesDouble(self.host)

    def resize(self, size: int) -> None:
        self.host.sizes["8:0"] = size

    @contextmanager
    def hold(self, path: Path) -> Iterator[None]:
        self.host.open_devices.add(path.name.removeprefix("virtman-volume-"))
        yield
        self.host.open_devices.clear()


class CacheDoubleTest(Memory, contracts.CacheContract):
    base = CONTENT

    def make(self) -> CacheDouble:
        return CacheDouble(self.host)

    def use(self, _device: Device) -> None:
        self.host.caches[self.image.key] = self.image.size

    def release(self) -> None:
        pass


class ExportDoubleTest(Memory, contracts.ExportContract):
    device = CONTENT
    other = Device(IMAGE.size, node={"driver": "file", "filename": "/other"})

    def make(self) -> ExportDouble:
        return ExportDouble(self.host, died=lambda _image: None)


class SourceDoubleTest(Memory, contracts.SourceContract):
    def setUp(self) -> None:
        super().setUp()
        self.parents = [Parent(name, ADDRESS) for name in ("h1", "h2")]
        self.file = folder_for(self) / "content"
        self.file.write_bytes(bytes(self.image.size))

    def make(self) -> LayeredSource:
        return source_over(self.host)


class MovingDoubleTest(Memory, contracts.MovingContract):
    """The origin is another host in memory."""

    def setUp(self) -> None:
        super().setUp()
        self.file = folder_for(self) / "content"
        self.file.write_bytes(os.urandom(self.image.size // 2).ljust(self.image.size, b"\0"))
        self.origin, self.child = (self.source_over(host) for host in (Host(), self.host))
        self.origin.ensure_origin(self.image, self.file)
        self.child.ensure(self.image, [Parent("origin", ADDRESS)])

    def source_over(self, host: Host) -> SourceDouble:
        host.contents[self.image.key] = self.file.read_bytes()
        return source_over(host)


class VmDiskDoubleTest(Memory, contracts.VmDiskContract, contracts.SnapshotContract):
    origin = CONTENT

    def make(self) -> SnapshotDouble:
        return SnapshotDouble(self.host)

    def write(self, device: Device, text: bytes) -> None:
        self.disk(device).writes = text.decode()

    def read(self, device: Device, length: int) -> bytes:
        assert device.path is not None
        if device.path.exists():  # of a snapshot
            return device.path.read_bytes()[:length]
        return self.disk(device).writes[:length].encode()

    def write_at(self, device: Device, offset: int, text: bytes) -> None:
        with blocks_of(self.host)("vm", device, write=True) as blocks:
            blocks.write(offset, text.ljust(512, b"\0"))

    def discard(self, device: Device, length: int) -> None:
        self.disk(device).writes = ""

    def disk(self, device: Device) -> Disk:
        assert device.path is not None
        return self.host.disks[device.path.stem]

    def test_a_disk_that_a_stranger_has_open_is_left_alone(self) -> None:
        driver = self.vm_disk()
        driver.take("vm", "snapshot", None)
        self.host.disks["vm"].stranger = True
        self.assert_others_are_told_of(driver)
