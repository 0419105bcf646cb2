"""Hosts for the drivers' tests: real storage daemons in a temporary folder, gone when the test ends."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path

import testtools

from drivers.attach.nbd import GREETING_LIMIT, GREETING_WAIT, NbdAttach
from drivers.base import Device, Image, Parent, PathState, Place
from drivers.cache.qcow2 import Qcow2Cache
from drivers.export.nbd import NbdExport
from drivers.qemu import daemon
from drivers.snapshot.qcow2 import Qcow2Disks
from tests.programs import qemu_io, require, require_root
from tests.unit.virtman.scene import folder_for

MIB = 1 << 20


class Host:
    """The drivers of one host; ``lost`` and ``died`` are what they have told."""

    def __init__(self, root: Path, name: str) -> None:
        self.name = name
        self.place = Place(state=root / name / "state", run=root / name / "run")
        self.lost: list[str] = []
        self.died: list[str] = []
        self.start()

    def start(self) -> None:
        """Make the driver objects, as an agent does when it starts."""
        self.attach = self.new_attach()
        self.cache = Qcow2Cache(self.place)
        self.export = NbdExport(self.place, died=self.died.append)
        self.snapshot = Qcow2Disks(self.place)

    def new_attach(self, greeting_wait: float = GREETING_WAIT, greeting_limit: float = GREETING_LIMIT) -> NbdAttach:
        """An attach driver that tells of lost parents in ``lost``."""
        return NbdAttach(
            self.place,
            lost=lambda _, parent: self.lost.append(parent.host),
            greeting_wait=greeting_wait,
            greeting_limit=greeting_limit,
        )

    def be_patient(self) -> None:
        """Wait for a parent as long as its agent may need to start its daemon again on a busy machine."""
        self.attach.close()
        self.attach = self.new_attach(greeting_wait=300, greeting_limit=300)

    def let_go(self) -> None:
        """End the driver objects without stopping anything, as the death of an agent does."""
        self.attach.close()
        self.export.close()

    def restart(self) -> None:
        """Make the driver objects anew over what goes on, as the next agent does."""
        self.let_go()
        self.start()

    def remove(self) -> None:
        """Stop everything that this host has, whoever made it."""
        self.let_go()
        for found in daemon.running(self.place.run / "serve").values():
            found.stop()

    @property
    def parent(self) -> Parent:
        """This host as a parent of others."""
        return Parent(self.name, self.export.address)

    def serve_file(self, image: Image, file: Path) -> None:
        """Be the image's origin."""
        self.export.publish(image, self.attach.origin(image, file))

    def open(self, image: Image, parents: Sequence[Host]) -> Device:
        """The image's device: cache over parents."""
        return self.cache.open(image, self.attach.connect(image, [parent.parent for parent in parents]))

    def join(self, image: Image, parents: Sequence[Host], *, timeout: float = 60) -> None:
        """Make the image's whole stack."""
        self.export.reserve(image.name)
        self.export.publish(image, self.open(image, parents), timeout=timeout)

    def daemon(self, image: Image) -> daemon.Daemon:
        """The image's running daemon."""
        return daemon.running(self.place.run / "serve")[image.name]

    def kill_daemon(self, image: Image) -> None:
        """kill -9 the image's daemon."""
        found = self.daemon(image)
        os.kill(found.pid, 9)
        assert found.ended(5)

    def socket(self, image: Image) -> Path:
        """Where the image is served."""
        return self.place.run / "serve" / f"{image.name}.sock"

    def uri(self, image: Image) -> str:
        """The image as this host serves it, for QEMU's tools and fio."""
        return f"nbd+unix:///{image.name}?socket={self.socket(image)}"

    def states(self, image: Image) -> list[PathState]:
        """The states of the image's paths in the order of the parents."""
        return [path.state for path in self.attach.paths(image.name)]

    def held(self, image: Image) -> int:
        """Bytes of the image in the cache."""
        return self.cache.stats(image).held_bytes


class HostCase(testtools.TestCase):
    """A folder with hosts in it."""

    def setUp(self) -> None:
        super().setUp()
        require(self, "qemu-storage-daemon", "qemu-img", "qemu-io")
        self.root = folder_for(self)

    def small_file_system(self, folder: Path, size: int, files: int = 1000) -> None:
        """Mount a file system with room for ``size`` bytes, and for ``files`` files and folders, on a folder."""
        require_root(self, "a small file system is mounted")
        require(self, "mount")
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.check_call(["mount", "-t", "tmpfs", "-o", f"size={size},nr_inodes={files + 1}", "none", str(folder)])
        self.addCleanup(subprocess.check_call, ["umount", str(folder)])

    def host(self, name: str) -> Host:
        """A host without anything yet."""
        host = Host(self.root, name)
        self.addCleanup(host.remove)
        return host

    def hosts(self, count: int) -> list[Host]:
        """``count`` hosts called h0, h1, …"""
        return [self.host(f"h{number}") for number in range(count)]

    def make_image(self, size: int = 8 * MIB, name: str = "img") -> tuple[Image, Path]:
        """An image with data, zeros in between, and the raw file it is in."""
        file = self.root / f"{name}.raw"
        chooser = random.Random(size)
        with file.open("wb") as out:
            for start in range(0, size, MIB):
                length = min(MIB, size - start)
                out.write(bytes(length) if start // MIB % 4 == 3 else chooser.randbytes(length))
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        return Image(name, size, f"sha256:{digest}"), file

    def chain(self, depth: int, size: int = 8 * MIB) -> tuple[Image, Path, list[Host]]:
        """An origin and ``depth`` hosts, each reading from the one before and then from those above."""
        image, file = self.make_image(size)
        hosts = self.hosts(depth + 1)
        hosts[0].serve_file(image, file)
        for number in range(1, depth + 1):
            hosts[number].join(image, hosts[number - 1 :: -1])
        return image, file, hosts

    def read_image(self, host: Host, image: Image, offset: int, length: int) -> None:
        """Read a range through a host."""
        qemu_io(host.uri(image), f"read {offset} {length}", options=["-r", "-f", "raw"])

    def assert_same(self, uri: str, file: Path) -> None:
        """The whole disk at ``uri`` equals the file."""
        image_opts = [] if uri.startswith("json:") else ["-f", "raw"]
        compare = ["qemu-img", "compare", *image_opts, "-F", "raw", uri, str(file)]
        done = subprocess.run(compare, capture_output=True, text=True, check=False)
        self.assertEqual(0, done.returncode, done.stdout + done.stderr)
