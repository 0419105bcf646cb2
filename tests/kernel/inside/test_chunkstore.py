"""The chunk store on disks that fail: whatever they do, VMs read on, and nobody gets a wrong byte.

And the kernel's own client of NBD, which Debian's nbd-client starts.
"""

from __future__ import annotations

import random
import subprocess
from dataclasses import replace
from pathlib import Path

from drivers.chunkstore.control import Control
from drivers.host.command import run
from tests.kernel.inside.baddisk import BadDisk
from tests.kernel.inside.filesystems import fill, small_file_system
from tests.kernel.inside.logwrites import LoggedDisk
from tests.userspace.drivers.chunkhosts import MIB, ChunkHost, ChunkHostCase

CHUNK = 64 << 10
DISK = 4 * MIB
CUTS = 6
"""Each takes ten seconds under emulation; chunkd/src/pool/tests.rs has a thousand of another kind."""


class FailingDiskTest(ChunkHostCase):
    def setUp(self) -> None:
        super().setUp()
        self.image, self.file = self.make_image()
        self.top, self.child = self.host("top"), self.host("child")
        self.top.serve_file(self.image, self.file, "child")

    def join_with(self, volume: Path) -> None:
        """Have the child attach the image, with this volume alone."""
        join_with(self.child, volume)
        self.child.join(self.image, [self.top])

    def assert_right(self) -> None:
        """All of the image as small reads in order get it."""
        copy = self.root / "copy"
        argv = ["qemu-img", "dd", "-f", "raw", "-O", "raw", "bs=4096", f"if={self.child.uri(self.image)}"]
        run([*argv, f"of={copy}"])
        self.assertTrue(copy.read_bytes() == self.file.read_bytes(), "a read got wrong bytes")

    def fetched(self) -> int:
        status = Control(self.child.place.run / "chunkd.sock").call("status", {"image": self.image.name})
        return int(status["images"][0]["fetched"])

    def test_a_chunk_in_a_bad_sector_is_fetched_again(self) -> None:
        bad = BadDisk(self, self.root)
        self.join_with(bad.folder / "pool")
        self.addCleanup(self.child.remove)
        self.assert_right()
        before = self.fetched()
        run(["sync"])
        drop_caches()
        bad.spoil(bad.folder / "pool", 2 * CHUNK)  # the first slot, behind the header and the entries
        self.assert_right()
        self.assertEqual(CHUNK, self.fetched() - before)

    def test_reads_go_on_while_the_file_system_of_the_pool_is_full(self) -> None:
        small = small_file_system(self, self.root, "64M")
        self.child.place = replace(self.child.place, reserve=0)
        self.child.restart()
        self.join_with(small / "pool")
        self.addCleanup(self.child.remove)
        fill(small, but=2 * MIB)
        for _ in range(2):
            self.assert_right()
        self.assertLess(self.child.source.held(self.image).held_bytes, 3 * MIB)

    def test_what_a_disk_lost_is_fetched_again(self) -> None:
        disk = Mapped(self, self.root)
        self.join_with(disk.path)
        self.addCleanup(self.child.remove)
        disk.lose_writes()
        self.assert_right()
        before = self.fetched()
        run(["blockdev", "--flushbufs", str(disk.path)])
        drop_caches()
        self.assert_right()
        self.assertGreater(self.fetched(), before, "the disk has lost what it was given")


class PowerCutTest(ChunkHostCase):
    def test_what_a_power_cut_left_of_the_pool_is_right_or_fetched_again(self) -> None:
        images = [self.make_image(size, f"img{size // MIB}") for size in (2 * MIB, 3 * MIB)]
        top, child = self.host("top"), self.host("child")
        disk = LoggedDisk(self, self.root, DISK)
        join_with(child, disk.path)
        for image, file in images:
            top.serve_file(image, file, "child", "after")
            child.join(image, [top])
            self.assert_same(child.uri(image), file)  # the second one takes the places of the first
            run(["sync"])
        child.remove()
        writes = disk.writes()
        chooser = random.Random(len(writes))
        for number in range(CUTS):
            after = ChunkHost(self.root / str(number), "after", self.key)
            self.addCleanup(after.remove)
            volume = after.place.state / "chunkstore/pool"
            volume.parent.mkdir(parents=True, exist_ok=True)
            disk.cut_off(writes, chooser, volume)
            after.place = replace(after.place, cache_limit=DISK)
            after.restart()
            for image, file in images:
                after.join(image, [top])
                self.assert_same(after.uri(image), file)
            after.remove()
            volume.unlink()


class KernelClientTest(ChunkHostCase):
    def test_the_kernels_client_reads_an_image_over_several_connections(self) -> None:
        image, file = self.make_image()
        host = self.host("top")
        host.serve_file(image, file)
        run(["modprobe", "nbd", "nbds_max=1"])
        self.addCleanup(run, ["modprobe", "--remove", "--wait=60000", "nbd"])
        run(["udevadm", "settle"])  # udev has a new device open for a moment, and then it counts as in use
        server = host.place.run / "serve" / f"{image.name}.sock"
        run(["nbd-client", "-unix", str(server), "-name", image.key, "-connections", "2", "/dev/nbd0"])
        self.addCleanup(subprocess.run, ["nbd-client", "-d", "/dev/nbd0"], check=True)
        self.assertEqual(str(image.size), run(["blockdev", "--getsize64", "/dev/nbd0"]).stdout.strip())
        run(["cmp", "/dev/nbd0", str(file)])


def join_with(host: ChunkHost, volume: Path) -> None:
    """Have a host's pool be this volume."""
    host.source.group.add_volume(volume)
    host.source.group.remove_volume(host.place.state / "chunkstore/pool")


def drop_caches() -> None:
    """Have the kernel forget what it need not write: what is read afterwards comes from the disk (proc(5))."""
    Path("/proc/sys/vm/drop_caches").write_text("1")


class Mapped:
    """A disk by device-mapper that can begin to lose what is written to it, and says nothing of that."""

    NAME, SIZE = "test-pool", 64 * MIB

    def __init__(self, case: ChunkHostCase, folder: Path) -> None:
        self._file = folder / "disk"
        run(["truncate", "--size", str(self.SIZE), str(self._file)])
        self._loop = run(["losetup", "--find", "--show", str(self._file)]).stdout.strip()
        case.addCleanup(run, ["losetup", "--detach", self._loop])
        run(["dmsetup", "create", self.NAME, "--table", self._table("linear", "")])
        case.addCleanup(run, ["dmsetup", "remove", "--retry", self.NAME])
        self.path = Path("/dev/mapper", self.NAME)

    def lose_writes(self) -> None:
        """Linux: Documentation/admin-guide/device-mapper/dm-flakey.rst."""
        run(["dmsetup", "suspend", self.NAME])
        run(["dmsetup", "reload", self.NAME, "--table", self._table("flakey", "0 1 1 drop_writes")])
        run(["dmsetup", "resume", self.NAME])

    def _table(self, kind: str, options: str) -> str:
        return f"0 {self.SIZE // 512} {kind} {self._loop} 0 {options}".strip()
