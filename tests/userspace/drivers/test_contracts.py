"""The drivers of the userspace stack do what drivers have to."""

from __future__ import annotations

from drivers.attach.nbd import NbdAttach
from drivers.base import Device
from drivers.cache.qcow2 import Qcow2Cache
from drivers.export.nbd import NbdExport
from drivers.snapshot.qcow2 import Qcow2Snapshot
from tests.contracts import drivers as contracts
from tests.userspace.drivers.hosts import MIB, HostCase


class UserspaceCase(HostCase):
    """A host ``h`` without anything, an image, and two hosts that serve it."""

    def setUp(self) -> None:
        super().setUp()
        self.image, self.file = self.make_image(MIB)
        self.ups = [self.host("a"), self.host("b")]
        for up in self.ups:
            up.serve_file(self.image, self.file)
        self.parents = [up.parent for up in self.ups]
        self.h = self.host("h")


class NbdAttachTest(UserspaceCase, contracts.AttachContract):
    def make(self) -> NbdAttach:
        driver = NbdAttach(self.h.place, lost=lambda _image, _parent: None)
        self.addCleanup(driver.close)
        return driver


class Qcow2CacheTest(UserspaceCase, contracts.CacheContract):
    def setUp(self) -> None:
        super().setUp()
        self.base = self.h.attach.connect(self.image, self.parents)

    def make(self) -> Qcow2Cache:
        return Qcow2Cache(self.h.place)

    def use(self, device: Device) -> None:
        self.h.export.publish(self.image, device)
        self.assert_same(self.h.uri(self.image), self.file)

    def release(self) -> None:
        self.h.export.withdraw(self.image.name)


class NbdExportTest(UserspaceCase, contracts.ExportContract):
    def setUp(self) -> None:
        super().setUp()
        self.device = self.h.attach.origin(self.image, self.file)
        self.other = self.h.attach.connect(self.image, self.parents)

    def make(self) -> NbdExport:
        driver = NbdExport(self.h.place, died=lambda _image: None)
        self.addCleanup(driver.close)
        return driver


class Qcow2SnapshotTest(UserspaceCase, contracts.SnapshotContract):
    def setUp(self) -> None:
        super().setUp()
        self.origin = self.ups[0].export.local(self.image)

    def make(self) -> Qcow2Snapshot:
        return Qcow2Snapshot(self.h.place)
