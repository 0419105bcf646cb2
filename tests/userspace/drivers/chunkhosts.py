"""Hosts with a chunk store each, for the drivers' tests; all of it is gone when the test ends."""

from __future__ import annotations

import random
import secrets
import subprocess
from pathlib import Path

import testtools

from drivers.base import Child, Image, Parent, PathState, Place
from drivers.chunkstore.source import ChunkSource
from drivers.digests import draw
from lab.process import kill_and_wait
from tests.patience import wait_until
from tests.programs import require
from tests.unit.virtman.scene import folder_for
from volt.edgesecrets import serving_key, ticket

MIB = 1 << 20


class ChunkHost:
    """One host; ``lost`` and ``died`` are what its source has told."""

    def __init__(self, root: Path, name: str, key: bytes) -> None:
        self.name, self.key = name, key
        self.place = Place(state=root / name / "state", run=root / name / "run", host=name)
        self.lost: list[tuple[str, str]] = []
        self.died: list[str] = []
        self.source = self.new_source()

    def new_source(self) -> ChunkSource:
        """A source over what is there, as an agent makes it when it starts."""
        lost = lambda image, host: self.lost.append((image, host))  # noqa: E731
        return ChunkSource(self.place, lost=lost, died=self.died.append)

    def restart(self) -> ChunkSource:
        """Another source, as the next agent has it."""
        self.source.shut()
        self.source = self.new_source()
        return self.source

    def kill(self) -> None:
        """kill -9 the process that serves, and wait until it is dead: what it bound is free, or the next one's."""
        kill_and_wait(self.pid)

    @property
    def pid(self) -> int:
        """Of the process that serves."""
        return int((self.place.run / "chunkd.pid").read_text().split()[0])

    def remove(self) -> None:
        self.source.stop()
        self.source.shut()

    def admit(self, image: str, children: list[str], revision: int = 1) -> None:
        """Let hosts read."""
        keys = serving_key(self.key, image, self.name)
        self.source.admit(image, revision, [Child(child) for child in children], serving_key=keys, new=True)

    def serve_file(self, image: Image, file: Path, *children: str) -> None:
        """Be the image's origin."""
        self.source.reserve(image.name)
        self.admit(image.name, list(children))
        self.source.ensure_origin(image, file)

    def as_parent(self, image: str, child: str, revision: int = 1) -> Parent:
        """This host as a parent of a child."""
        secret = ticket(serving_key(self.key, image, self.name), child, revision)
        return Parent(self.name, self.source.address, ticket=secret, revision=revision)

    def join(self, image: Image, parents: list[ChunkHost], *children: str) -> None:
        """Read the image from these hosts."""
        self.source.reserve(image.name)
        self.admit(image.name, list(children))
        self.source.ensure(image, [parent.as_parent(image.name, self.name) for parent in parents])

    def uri(self, image: Image) -> str:
        """The image as this host serves it, for QEMU's tools and libnbd's."""
        return f"nbd+unix:///{image.key}?socket={self.place.run}/serve/{image.name}.sock"

    def states(self, image: Image) -> list[PathState]:
        """The states of the image's paths in the order of the parents."""
        return [path.state for path in self.source.paths(image.name)]

    def wait_held(self, image: Image, size: int) -> None:
        """Wait until so many bytes of the image are kept: the process answers its readers before that."""
        wait_until(lambda: self.source.held(image).held_bytes == size, f"{size} bytes of {image.name} are kept")


class ChunkHostCase(testtools.TestCase):
    """A folder with hosts in it."""

    def setUp(self) -> None:
        super().setUp()
        require(self, "qemu-img")
        self.root = folder_for(self)
        self.key = secrets.token_bytes(32)

    def host(self, name: str) -> ChunkHost:
        """A host without anything yet."""
        host = ChunkHost(self.root, name, self.key)
        self.addCleanup(host.remove)
        return host

    def make_image(self, size: int = 8 * MIB, name: str = "img") -> tuple[Image, Path]:
        """An image with data, zeros in between, and the raw file it is in."""
        file = self.root / f"{name}.raw"
        chooser = random.Random(size)
        with file.open("wb") as out:
            for start in range(0, size, MIB):
                length = min(MIB, size - start)
                out.write(bytes(length) if start // MIB % 4 == 3 else chooser.randbytes(length))
        return Image(name, size, draw()), file

    def assert_same(self, uri: str, file: Path) -> None:
        """The whole disk at ``uri`` equals the file."""
        compare = ["qemu-img", "compare", "-f", "raw", "-F", "raw", uri, str(file)]
        done = subprocess.run(compare, capture_output=True, text=True, check=False)
        self.assertEqual(0, done.returncode, done.stdout + done.stderr)
