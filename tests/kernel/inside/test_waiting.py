"""A host's stack is removed while reads wait in it for a parent: whoever removes it does not wait for them."""

from __future__ import annotations

import hashlib
import os
import subprocess
from abc import abstractmethod

from testtools import TestCase

from drivers.attach.iscsi import IscsiAttach
from drivers.base import CacheDriver, Device, Image, Parent, Place
from drivers.cache.bcache import BcacheCache
from drivers.cache.dmcache import DmCache
from drivers.export.lio import LioExport
from drivers.snapshot.dmthin import DmThinDisks
from tests.kernel.inside import iscsi_tools
from tests.kernel.inside.folders import state_folder
from tests.patience import PATIENCE

pytestmark = iscsi_tools.RTSLIB_WARNS

IP = "127.0.0.1"
SIZE = 4 << 20
GONE = Parent("gone", f"iscsi://{IP}:1")
"""Nobody listens there."""
WAITS = 2.0
"""Seconds without an answer, after which a read counts as one that waits."""


class Waiting(TestCase):
    """A stack whose only parent is not there. All of it is gone afterwards."""

    __test__ = False

    def setUp(self) -> None:
        super().setUp()
        self.folder = state_folder(self)
        self.place = Place(self.folder, self.folder, host="host", address=IP)
        self.export = LioExport(self.place, died=self.fail)
        iscsi_tools.expect_nothing_left(self, self.export)
        self.content = os.urandom(SIZE)
        self.image = Image("image", SIZE, f"sha256:{hashlib.sha256(self.content).hexdigest()}")
        self.attach = IscsiAttach(self.place, lost=lambda _image, _parent: None)
        self.cache = self.new_cache()
        self.snapshot = DmThinDisks(self.place, step=32 << 20)
        self.addCleanup(self.remove_stack)
        self.base = self.attach.connect(self.image, [GONE])

    @abstractmethod
    def new_cache(self) -> CacheDriver:
        """The driver in the middle of the stack."""

    def remove_stack(self) -> None:
        """In the order of the agent."""
        self.attach.abandon(self.image.name)
        self.export.withdraw(self.image.name)
        self.cache.close(self.image)
        self.attach.disconnect(self.image.name)

    def waiting_reader(self, device: Device) -> subprocess.Popen[bytes]:
        """A process that reads a disk, past the page cache, into the file ``copy``."""
        argv = ["dd", f"if={device.path}", f"of={self.folder / 'copy'}", "bs=64k", "iflag=direct"]
        reader = subprocess.Popen(argv, stderr=subprocess.PIPE)
        self.addCleanup(reader.communicate)
        self.assertRaises(subprocess.TimeoutExpired, reader.wait, WAITS)
        return reader

    def test_a_read_of_the_cache_fails_and_all_goes(self) -> None:
        reader = self.waiting_reader(self.cache.open(self.image, self.base))
        self.attach.abandon(self.image.name)
        self.assertNotEqual(0, reader.wait(PATIENCE))
        self.remove_stack()

    def test_a_vms_read_waits_on_for_the_next_stack_and_holds_nobody_up(self) -> None:
        self.export.publish(self.image, self.cache.open(self.image, self.base))
        disk = self.snapshot.create("vm", self.export.local(self.image), SIZE)
        self.addCleanup(self.snapshot.delete, "vm")
        reader = self.waiting_reader(disk)
        self.remove_stack()
        self.assertRaises(subprocess.TimeoutExpired, reader.wait, WAITS)
        file = self.folder / "whole"
        file.write_bytes(self.content)
        self.export.publish(self.image, Device(SIZE, file))
        self.assertEqual(0, reader.wait(PATIENCE))
        self.assertTrue(self.content == (self.folder / "copy").read_bytes())


class BcacheTest(Waiting):
    __test__ = True

    def new_cache(self) -> CacheDriver:
        return BcacheCache(self.place, pool_size=1 << 30)


class DmCacheTest(Waiting):
    __test__ = True

    def new_cache(self) -> CacheDriver:
        return DmCache(self.place)
