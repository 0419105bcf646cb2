"""The doubles of the drivers do what drivers have to."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from testtools import TestCase

from drivers.base import Device, Image, Parent
from tests.contracts import drivers as contracts
from tests.doubles.drivers import ADDRESS, AttachDouble, CacheDouble, ExportDouble, Host, SnapshotDouble

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
        folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, folder)
        self.file = folder / "content"
        self.file.write_bytes(bytes(self.image.size))

    def make(self) -> AttachDouble:
        return AttachDouble(self.host, lost=lambda _image, _parent: None)


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


class SnapshotDoubleTest(Memory, contracts.SnapshotContract):
    origin = CONTENT

    def make(self) -> SnapshotDouble:
        return SnapshotDouble(self.host)
