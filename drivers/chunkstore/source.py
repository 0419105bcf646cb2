"""An image source in one process: virtman-chunkd reads from parents, keeps what it read, and serves.

Each image has a link to the socket of programs of this host, so a VM's disk names the image's own path. The links also
tell which images have something here.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drivers.base import (
    BlockNode,
    CacheStats,
    Child,
    Device,
    Died,
    Filled,
    Image,
    LostParent,
    Opened,
    Parent,
    PathState,
    PathStatus,
    Place,
    Range,
    Taken,
)
from drivers.chunkstore.control import StoreDown
from drivers.chunkstore.pool import ChunkPool
from drivers.chunkstore.process import VMS, Process
from drivers.door import door
from drivers.errors import BadAddress, BadDisk, DriverError, NoParents
from drivers.host.watch import Watch
from drivers.names import checked
from drivers.needs import VIRTMAN_CHUNKD, Needs

log = logging.getLogger(__name__)

RECONNECT_DELAY = 86400
"""Seconds a QEMU holds its requests while the process is away. A lost process is not an error, so: long."""

OPEN_TIMEOUT = 30
"""Seconds a QEMU keeps trying when it opens a socket where nobody listens."""

FRESH = 0.5
"""Seconds that what the process has told of its images is believed."""

_QUICK = 2.0
"""Seconds that the process gets to tell how its images are."""

_LONG = 3600.0
"""Seconds that a call may take that reads from a parent, or uses a pipe."""

_SCHEME = "nbds://"


@door
class ChunkSource:
    """Its calls: see ``ImageSource``."""

    needs = Needs(tools=(VIRTMAN_CHUNKD,))
    fills = True

    def __init__(
        self, place: Place, *, lost: LostParent, died: Died, step: Callable[[str], None] = lambda _step: None
    ) -> None:
        self._host, self._limits = place.host, place.limits
        self._step, self._lost, self._image_died = step, lost, died
        self._process = Process(place, self._tell, self._died)
        self._links = self._process.vms.parent
        self._call = self._process.call
        self.group = ChunkPool(place, self._process)
        self._lock = threading.Lock()
        self._images: dict[str, dict[str, Any]] = {}
        """By name, what the process told last."""
        self._told = -FRESH
        self._closed = threading.Event()
        Watch("chunkstore-events", self._hear, self._closed).start()

    @property
    def address(self) -> str:
        return self._process.address

    def reserve(self, image: str) -> None:
        self._process.ensure()
        link = self._link(image)
        if not link.is_symlink():
            link.unlink(missing_ok=True)  # a socket of 0.3
            link.symlink_to(VMS)

    def ensure(self, image: Image, parents: Sequence[Parent], *, fresh: bool = False) -> None:  # noqa: ARG002
        """Connections to hosts that are no parents always end. Raises BadAddress, NoParents, StoreRefused."""
        if not parents:
            raise NoParents(image.name)
        self._serve(image, {"parents": [self._parent(image, parent) for parent in parents]}, None)

    def ensure_origin(self, image: Image, content: Path | Opened) -> None:
        if isinstance(content, Opened):
            self._serve_content(image, content.fd, content.mark)
            return
        with content.open("rb", buffering=0) as file:
            self._serve_content(image, file.fileno(), "copy")

    def _link(self, image: str) -> Path:
        return self._links / f"{checked(image)}.sock"

    def _serve_content(self, image: Image, fd: int, mark: str) -> None:
        if (size := os.lseek(fd, 0, os.SEEK_END)) != image.size:
            raise BadDisk(f"the content of image {image.name} has {size} bytes, and not {image.size}")
        self._serve(image, {"mark": mark}, fd)

    def _serve(self, image: Image, more: dict[str, object], file: int | None) -> None:
        self.reserve(image.name)
        spec = {"name": image.name, "key": image.key, "size": image.size, "digest": image.digest, **more}
        self._call("serve", spec, file=file)
        self._told = -FRESH
        self._step("attach:published")

    def _parent(self, image: Image, parent: Parent) -> dict[str, str | bool]:
        if not parent.address.startswith(_SCHEME):
            raise BadAddress(f"host {parent.host} is at {parent.address}, and this host reads by {_SCHEME} only")
        if not parent.ticket:
            raise NoParents(image.name, f"Volt gives no tickets for {parent.host}: it is older than 0.4.0")
        return {
            "host": parent.host,
            "address": parent.address.removeprefix(_SCHEME),
            "identity": f"{image.name}/{self._host}/{parent.revision}",
            "secret": parent.ticket,
            "far": parent.far,
        }

    def follow(self, image: Image, parents: Sequence[Parent], *, sure: bool) -> None:  # noqa: ARG002
        self.ensure(image, parents)

    def unsettled(self, image: str) -> bool:  # noqa: ARG002
        """Never: the process itself goes back to a better parent."""
        return False

    def admit(
        self, image: str, revision: int, children: Sequence[Child], *, serving_key: str = "", new: bool = False
    ) -> None:
        if not serving_key:
            return  # Volt is older than 0.4.0
        who = {"serving_key": serving_key, "revision": revision, "children": [child.host for child in children]}
        self._call("admit", {"image": checked(image), "new": new, **who})

    def close(self, image: str) -> None:
        self._call("close", {"image": checked(image)})

    def drop(self, image: str, content: Image | None) -> None:  # noqa: ARG002
        if self._process.alive():
            self._call("drop", {"image": checked(image)})
        self._step("detach:layer")
        self._link(image).unlink(missing_ok=True)
        self._told = -FRESH

    def device(self, image: Image, *, of_vm: bool = True) -> Device:
        export = f"{image.name}/{image.key}" if of_vm else image.name
        return Device(size=image.size, node=client_node(self._link(image.name), export))

    def serving(self, image: str) -> bool:
        return self._link(image).exists() and image in self._known()

    def paths(self, image: str) -> Sequence[PathStatus]:
        told = self._known().get(checked(image), {}).get("parents", [])
        return [PathStatus(Parent(each["host"], _SCHEME + each["address"]), PathState(each["state"])) for each in told]

    def hit_bytes(self, image: str) -> int | None:
        hits: int = self._known().get(checked(image), {}).get("hits", 0)
        return hits

    def held(self, image: Image) -> CacheStats:
        held = self._call("held", {"key": image.key})["bytes"]
        return CacheStats(held_bytes=held, file_bytes=held)

    def fill(
        self, image: Image, ranges: Sequence[Range], *, idle: bool = False, rate: int | None = None
    ) -> None:  # fmt: skip
        self._call("fill", {"image": image.name, "ranges": _pairs(ranges), "idle": idle, "rate": rate})
        self._told = -FRESH

    def filled(self, image: str) -> Filled:
        told = self._known().get(checked(image))
        if told is None:
            return Filled()
        done, _ = told["filled"]
        return Filled(done, told["filling"], told["whole"], told["boot_set"], told["pinned"], told["sent"])

    def lacking(self, image: Image) -> Sequence[Range]:
        return _ranges(self._call("lacking", {"image": image.name}, timeout=_LONG)["ranges"])

    def put(self, image: Image, ranges: Sequence[Range], file: int) -> Taken:
        taken = self._call("put", {"image": image.name, "ranges": _pairs(ranges)}, file=file, timeout=_LONG)
        self._told = -FRESH
        return Taken(taken["kept"], tuple(_ranges(taken["wrong"])), taken["full"])

    def get(self, image: Image, ranges: Sequence[Range], file: int) -> None:
        self._call("get", {"image": image.name, "ranges": _pairs(ranges)}, file=file, timeout=_LONG)
        self._told = -FRESH

    def pin(self, image: Image, until: float) -> None:
        self._call("pin", {"key": image.key, "until": int(until)})
        self._told = -FRESH

    def boot_set(self, image: str) -> Sequence[Range] | None:
        ranges = self._call("boot-set", {"image": checked(image)})["ranges"]
        return None if ranges is None else _ranges(ranges)

    def existing(self) -> frozenset[str]:
        return frozenset(path.stem for path in self._links.glob("[!.]*.sock"))

    def kept(self) -> frozenset[str]:
        self._process.ensure()
        return frozenset(self._call("kept")["keys"])

    def kept_size(self, key: str) -> int:
        size: int = self._call("held", {"key": key, "alone": True})["bytes"]
        return size

    def forget(self, key: str) -> int:
        freed: int = self._call("forget", {"key": key})["bytes"]
        return freed

    def stop(self) -> None:
        self._process.stop()

    def shut(self) -> None:
        """Let go of everything without stopping it, for the next source to find."""
        self._closed.set()
        self._process.close()

    # What happens

    def _tell(self) -> None:
        """The process has started, or was found."""
        self._call("limits", asdict(self._limits))
        self.group.tell()
        self._told = -FRESH

    def _died(self) -> None:
        self._told = -FRESH
        for image in self.existing():
            self._image_died(image)

    def _hear(self) -> None:
        """Hand on what the process tells, as long as it lives."""
        while not self._closed.is_set():
            try:
                for event in self._process.control.events():
                    if event.get("event") == "parent-lost":
                        log.warning("image %s: parent %s is %s", event["image"], event["host"], event["why"])
                        self._lost(event["image"], event["host"])
            except StoreDown as error:
                log.debug("no events: %s", error)
            self._closed.wait(FRESH)

    def _known(self) -> dict[str, dict[str, Any]]:
        """By name, the images that are served. Asked for each image with each heartbeat, so the answer is kept."""
        with self._lock:
            if not self._process.alive():
                return {}
            if time.monotonic() - self._told >= FRESH:
                try:
                    self._images = {each["name"]: each for each in self._call("status", timeout=_QUICK)["images"]}
                except DriverError as error:
                    log.warning("what is served cannot be told, and is taken to be as before: %s", error)
                self._told = time.monotonic()
            return self._images


def _pairs(ranges: Sequence[Range]) -> list[tuple[int, int]]:
    return [(each.offset, each.offset + each.length) for each in ranges]


def _ranges(pairs: Sequence[tuple[int, int]]) -> list[Range]:
    return [Range(begin, end - begin) for begin, end in pairs]


def client_node(socket: Path, export: str) -> BlockNode:
    """The node by which a QEMU reads an image at a socket, and outlives restarts of the process.

    A VM's ``export`` has the image's key: who serves other content under the same name refuses.
    """
    return {
        "driver": "nbd",
        "server": {"type": "unix", "path": str(socket)},
        "export": export,
        "reconnect-delay": RECONNECT_DELAY,
        "open-timeout": OPEN_TIMEOUT,
    }
