"""Chunk stores without agents: each is driven as an agent drives its own, and reads from others by TCP and TLS.

The lowest level that still is the whole data path. Tickets and manifests are made as Volt and agents make them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.chunkrows.images import image_folder
from benchmarks.errors import DiskFailed, Failed, TookTooLong
from benchmarks.figures import MIB
from benchmarks.nbdreplay import NbdDisk
from benchmarks.processes import cpu_seconds, memory
from drivers.base import Child, Image, Parent, Place, Range
from drivers.chunkstore.control import Control
from drivers.chunkstore.source import ChunkSource
from drivers.digests import PIECE, ZEROS
from drivers.errors import DriverError
from drivers.manifest import FOLDER, writing
from lab.process import attempts
from lab.tools import run
from volt.edgesecrets import serving_key, ticket

REVISION = 1
FILL_LIMIT = 3600.0
"""Seconds."""

_RECEIVED = re.compile(r"\bbytes_received:(\d+)")


class Store:
    """One host. ``limit``: bytes of its pool."""

    def __init__(self, name: str, state: Path, run_folder: Path, key: bytes, limit: int | None) -> None:
        self.name, self._key, self.state, self.run = name, key, state, run_folder
        (state / FOLDER).mkdir(parents=True)
        run_folder.mkdir()
        self.source = ChunkSource(
            Place(state=state, run=run_folder, host=name, cache_limit=limit, reserve=0), lost=_nobody, died=_nobody
        )
        self._control = Control(run_folder / "chunkd.sock")

    def stop(self) -> None:
        """End the process."""
        self.source.stop()
        self.source.shut()

    def publish(self, name: str, file: Path, children: Sequence[str]) -> Image:
        """Be an origin of a file, with its manifest."""
        image = image_of(name, file, self.state)
        self._admit(name, children)
        self.source.ensure_origin(image, file)
        return image

    def join(self, image: Image, parents: Sequence[Store], children: Sequence[str] = ()) -> None:
        """Read the image from these hosts, which admit this one."""
        self._admit(image.name, children)
        self.source.ensure(image, [parent.as_parent(image.name, self.name) for parent in parents])

    def _admit(self, image: str, children: Sequence[str]) -> None:
        self.source.reserve(image)
        keys = serving_key(self._key, image, self.name)
        self.source.admit(image, REVISION, [Child(child) for child in children], serving_key=keys, new=True)

    def as_parent(self, image: str, child: str) -> Parent:
        """This host as a parent of a child."""
        secret = ticket(serving_key(self._key, image, self.name), child, REVISION)
        return Parent(self.name, self.source.address, ticket=secret, revision=REVISION)

    def socket(self, image: Image) -> Path:
        """Where programs of this host read the image, under its name."""
        return self.run / "serve" / f"{image.name}.sock"

    def disk(self, image: Image) -> NbdDisk:
        """A connection of a program of this host."""
        return NbdDisk(self.socket(image), image.name)

    def status(self, image: Image) -> Mapping[str, Any]:
        """What the store tells of an image."""
        [found] = self._control.call("status", {"image": image.name})["images"]
        return dict(found)

    def fetched(self, image: Image) -> int:
        """Bytes of the image that parents have sent so far, each as often as it was sent."""
        return int(self.status(image)["fetched"])

    def fill(self, image: Image) -> None:
        """Have all of an image here. Raises TookTooLong."""
        self.source.fill(image, [Range(0, image.size)])
        for _ in attempts(FILL_LIMIT):
            if not self.status(image)["filling"]:
                return
        raise TookTooLong(f"{self.name} has not filled image {image.name} within {FILL_LIMIT:.0f} s")

    @property
    def pool_file_bytes(self) -> int:
        """What the pool takes of the disk."""
        return (self.state / "chunkstore/pool").stat().st_blocks * 512

    @property
    def pid(self) -> int:
        """Of the process."""
        return int((self.run / "chunkd.pid").read_text().split()[0])

    @property
    def memory(self) -> int:
        """Resident bytes of the process."""
        return memory(self.pid)["rss"]

    @property
    def cpu(self) -> float:
        """Seconds that the process has used so far."""
        return cpu_seconds(self.pid)

    @property
    def received(self) -> int:
        """Bytes that its connections to other hosts have received so far: TLS, manifests and headers included.

        Connections that have ended do not count.
        """
        said = run(["ss", "-tinpH", "state", "established"])
        return received_bytes(said, self.pid)


def received_bytes(said: str, pid: int) -> int:
    """Of the TCP connections of a process, by what ss(8) says: a line for each connection, and one of its figures."""
    total, ours = 0, False
    for line in said.splitlines():
        if not line[:1].isspace():
            ours = f"pid={pid}," in line
        if ours:
            total += sum(map(int, _RECEIVED.findall(line)))
    return total


class Stores:
    """Makes stores that trust each other; they end with ``stores``. ``folder`` is for images."""

    def __init__(self, folder: Path, run_folder: Path, stack: ExitStack) -> None:
        self.folder, self._run, self._stack = folder, run_folder, stack
        self._key = secrets.token_bytes(32)

    def start(self, name: str, limit: int | None = None) -> Store:
        """A store with an empty pool."""
        store = Store(name, self.folder / f"state-{name}", self._run / name, self._key, limit)
        self._stack.callback(store.stop)
        return store


@contextmanager
def stores() -> Iterator[Stores]:
    """Stores whose processes, states and images are gone afterwards. Raises Failed for errors of their drivers."""
    try:
        with image_folder() as folder, TemporaryDirectory(dir="/tmp", prefix="cs-") as run_folder, ExitStack() as stack:
            yield Stores(folder, Path(run_folder), stack)
    except DriverError as error:
        raise Failed(str(error)) from error


def image_of(name: str, file: Path, state: Path) -> Image:
    """A file as an image, whose manifest goes to the state folder of its origin."""
    size = file.stat().st_size
    with writing(state, size) as writer, file.open("rb") as content:
        while piece := content.read(PIECE):
            writer.add(ZEROS if piece == ZEROS else piece)
        image = Image(name, size, writer.digest())
        writer.keep()
    return image


def read_all(disk: NbdDisk, image: Image, step: int = MIB) -> None:
    """Read an image from its beginning to its end. Raises DiskFailed."""
    for offset in range(0, image.size, step):
        disk.read(offset, min(step, image.size - offset))


def read_through(store: Store, image: Image) -> None:
    """``read_all`` with a connection of its own. Raises DiskFailed."""
    with store.disk(image) as disk:
        read_all(disk, image)


def check_same(store: Store, image: Image, file: Path) -> None:
    """Raise DiskFailed if a host serves other bytes than the file has."""
    with store.disk(image) as disk, file.open("rb") as content:
        for offset in range(0, image.size, MIB):
            wanted = content.read(MIB)
            if disk.read(offset, len(wanted)) != wanted:
                raise DiskFailed(f"{store.name} serves other bytes of {image.name} at {offset}")


def _nobody(*_: str) -> None:
    """Hears of lost parents, and of processes that died: the rows see it themselves."""
