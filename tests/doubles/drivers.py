"""A host in memory, and the four drivers over it.

``Host`` is what is on the machine: daemons, sockets, caches, disks. It outlives the drivers, as a real host outlives
its agent, so that a test can throw the drivers away in the middle of a call and look at what new ones find.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from drivers.attach.iscsi import origin_file
from drivers.base import (
    CacheStats,
    Child,
    Device,
    Died,
    Filled,
    Image,
    LostParent,
    Monitor,
    Opened,
    Parent,
    PathState,
    PathStatus,
    Place,
    Range,
    Taken,
)
from drivers.blocks import Blocks, open_blocks
from drivers.cache.cachefiles import checked_key
from drivers.cachemodels import CachedDevice, DeviceState, Volume, VolumeState
from drivers.door import translated
from drivers.errors import (
    BadDevice,
    BadDisk,
    DeviceInUse,
    DeviceRefused,
    DiskInUse,
    DriverError,
    InUse,
    NoParents,
    NotAttached,
    SnapshotMissing,
    VmDiskMissing,
)
from drivers.layered import LayeredSource
from drivers.names import checked
from virtman.vms import OpenBlocks

Moment = Callable[[str], None]
"""Told of each moment at which a call of a double may be cut off."""

ADDRESS = "unix:///run/virtman/serve"
HIT_BYTES = 3 << 20
BYTES_PER_FETCH = 1 << 20
SECTOR = 512
DEVICE_SIZE = 1 << 30
CHUNK = 64 << 10
POOL = Volume(path="/state/cache/pool", size=1 << 30, images=[], state=VolumeState.IDLE)


def unnoticed(_moment: str) -> None:
    """Nobody listens."""


@dataclass
class Disk:
    """A VM's disk; ``writes`` is what the VM wrote. ``whole`` is False while it is being made.

    ``snapshots``: what it held, and its size, by the name of the snapshot. ``stranger``: somebody else has it open.
    ``layer``: what its node is made of changes when snapshots are taken and gone back to. ``device``: it is one of the
    host, and no block node.
    """

    size: int
    origin: Device
    whole: bool = False
    writes: str = ""
    snapshots: dict[str, tuple[str, int]] = field(default_factory=dict)
    stranger: bool = False
    layer: int = 0
    device: bool = False

    def sizes(self) -> dict[str, int]:
        """The size of the disk at each snapshot."""
        return {name: size for name, (_, size) in self.snapshots.items()}


class Host:
    """What the drivers made on one machine."""

    known: ClassVar[dict[Path, Host]] = {}
    """By state folder, for drivers that are made by the name of their class and a ``Place``."""

    def __init__(self) -> None:
        self.moment: Moment = unnoticed
        self.failing: dict[str, Exception] = {}
        """What a call ("export.publish") raises until it is taken out again."""
        self.calls: list[str] = []
        self.routes: dict[str, list[Parent]] = {}
        self.reading: dict[str, set[Parent]] = {}
        """Parents that the process of an image may have connections to."""
        self.unsettled: set[str] = set()
        self.caches: dict[str, int] = {}
        self.open_caches: set[str] = set()
        self.filling: dict[str, list[Range]] = {}
        self.rates: dict[str, int | None] = {}
        """By image, the most bytes a second by which that goes."""
        """By image, what is being filled."""
        self.filled: dict[str, Filled] = {}
        """By image, how far that is; else it goes on."""
        self.pins: dict[str, float] = {}
        self.contents: dict[str, bytes] = {}
        """By key, all that an image holds, here or at its parents. Tests of ``put`` and ``get`` set it."""
        self.chunks: dict[str, set[int]] = {}
        """By key, where the chunks begin that came by ``put``."""
        self.volumes = {Path(POOL.path): POOL}
        """Of the cache, if the driver has volumes."""
        self.endpoints: set[str] = set()
        self.served: dict[str, Device] = {}
        self.allowed: dict[str, list[Child]] = {}
        self.disks: dict[str, Disk] = {}
        self.disk_trouble = ""
        self.spare = 1 << 60
        """Bytes that may be written to disks beside what VMs write."""
        self.devices: dict[str, CachedDevice] = {}
        """Devices of others that are read through the cache, by the names of their attachments."""
        self.numbers: dict[str, str] = {}
        """Of the devices of attachments."""
        self.half_devices: set[str] = set()
        """Attachments that are not whole."""
        self.refused: dict[str, str] = {}
        """Why devices are refused, by their numbers."""
        self.open_devices: set[str] = set()
        """Attachments whose path somebody has open."""
        self.cut_off: set[str] = set()
        """Those among them who get nothing but errors."""
        self.sizes: dict[str, int] = {}
        """Bytes of devices, by their numbers; others have DEVICE_SIZE."""

    @contextmanager
    def act(self, call: str) -> Iterator[None]:
        """One call: it may be cut off before and after its effect, or fail before it."""
        self.calls.append(call)
        self.moment(f"before {call}")
        if call in self.failing:
            raise self.failing[call]
        yield
        self.moment(f"after {call}")

    def leftovers(self) -> dict[str, object]:
        """All that is on the host but caches, which are meant to stay; empty containers left out."""
        kinds = (
            "routes", "reading", "open_caches", "endpoints", "served", "allowed", "disks", "devices", "half_devices",
        )  # fmt: skip
        return {kind: getattr(self, kind) for kind in kinds if getattr(self, kind)}

    def has_volume(self) -> bool:
        """Whether a volume takes devices."""
        return any(volume.state is not VolumeState.FAILED for volume in self.volumes.values())

    def daemon_dies(self, image: str) -> None:
        """The process that serves an image is killed."""
        del self.served[image]
        self.reading.pop(image, None)


class AttachDouble:
    """Routes in the host's memory."""

    def __init__(self, place: Place | Host, *, lost: LostParent) -> None:
        self.host = _host(place)
        self.lost = lost
        self.watched: set[str] = set()

    def connect(self, image: Image, parents: Sequence[Parent]) -> Device:
        with self.host.act("attach.connect"):
            self.host.routes[checked(image.name)] = _some(image, parents)
            self.watched.add(image.name)
        return Device(image.size, node={"driver": "nbd", "export": image.name})

    def origin(self, image: Image, file: Path | Opened) -> Device:
        with self.host.act("attach.origin"):
            path = origin_file(image, file)
            name = file.mark if isinstance(file, Opened) else str(path)
            return Device(image.size, node={"driver": "file", "filename": name, "key": image.key})

    def update(self, image: Image, parents: Sequence[Parent]) -> bool:
        with self.host.act("attach.update"):
            if image.name not in self.watched:
                raise NotAttached(image.name)
            moved = self.host.routes[image.name][:1] != _some(image, parents)[:1]
            self.host.routes[image.name] = list(parents)
            if moved:
                self.host.reading.setdefault(image.name, set()).add(parents[0])
            return moved

    def unsettled(self, image: str) -> bool:
        with self.host.act("attach.unsettled"):
            return image in self.host.unsettled

    def abandon(self, image: str) -> None:
        with self.host.act("attach.abandon"):
            pass

    def disconnect(self, image: str) -> None:
        with self.host.act("attach.disconnect"):
            self.host.routes.pop(checked(image), None)
            self.watched.discard(image)

    def paths(self, image: str) -> list[PathStatus]:
        if image not in self.watched:
            raise NotAttached(image)
        parents = self.host.routes[image]
        return [
            PathStatus(parent, PathState.STANDBY if number else PathState.ACTIVE)
            for number, parent in enumerate(parents)
        ]

    def existing(self) -> frozenset[str]:
        return frozenset(self.host.routes)


class CacheDouble:
    """What is kept, by key, in the host's memory."""

    def __init__(self, place: Place | Host) -> None:
        self.host = _host(place)

    def open(self, image: Image, base: Device) -> Device:
        with self.host.act("cache.open"):
            checked_key(image.key)
            _require_content(base)
            if image.size % SECTOR:
                raise BadDisk(f"image {image.name}: its size {image.size} is not a multiple of {SECTOR}")
            self.host.open_caches.add(image.key)
            self.host.caches.setdefault(image.key, BYTES_PER_FETCH)
        return Device(image.size, node={"driver": "qcow2", "key": image.key, "backing": base.node})

    def close(self, image: Image) -> None:
        with self.host.act("cache.close"):
            self.host.open_caches.discard(image.key)

    def remove(self, key: str) -> int:
        with self.host.act("cache.remove"):
            if checked_key(key) in self.host.open_caches:
                raise InUse(Path("/caches") / key)
            return self.host.caches.pop(key, 0)

    def size(self, key: str) -> int:
        return self.host.caches.get(checked_key(key), 0)

    def stats(self, image: Image) -> CacheStats:
        if "cache.stats" in self.host.failing:
            raise self.host.failing["cache.stats"]
        held = self.host.caches.get(image.key, 0)
        return CacheStats(held, 2 * held)

    def existing(self) -> frozenset[str]:
        return frozenset(self.host.caches)


class VolumesDouble:
    """Volumes in the host's memory; no image ever joins one."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def volumes(self) -> list[Volume]:
        if "cache.volumes" in self.host.failing:
            raise self.host.failing["cache.volumes"]
        return list(self.host.volumes.values())

    def tend_volume(self, path: Path) -> None:
        if "cache.tend_volume" in self.host.failing:
            raise self.host.failing["cache.tend_volume"]

    def add_volume(self, path: Path) -> Volume:
        with self.host.act("cache.add_volume"):
            return self.host.volumes.setdefault(path, POOL.model_copy(update={"path": str(path)}))

    def remove_volume(self, path: Path) -> bool:
        if path not in self.host.volumes:
            return False
        with self.host.act("cache.remove_volume"):
            del self.host.volumes[path]
            if not self.host.has_volume():
                for name, device in self.host.devices.items():
                    self.host.devices[name] = device.model_copy(update={"state": DeviceState.DIRECT})
            return True


class DevicesDouble:
    """Devices of others in the host's memory; they join a volume if one runs."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def attach_device(self, name: str, device: Path) -> Device:
        checked(name)
        with self.host.act("cache.attach_device"):
            number = number_in(device)
            if not number:
                raise DeviceRefused("there is no such device")
            known, size = self.host.devices.get(name), self.host.sizes.get(number, DEVICE_SIZE)
            if known is None and (why := self.host.refused.get(number)):
                raise DeviceRefused(why)
            if known is not None and self.host.numbers[name] != number:
                raise BadDevice(f"{name} is attached to another device")
            if known is not None and size < known.size:
                raise DeviceRefused("it has shrunk")
            self.host.half_devices.add(name)
            self.host.moment("within cache.attach_device")
            path = Path("/dev/mapper") / f"virtman-volume-{name}"
            state = DeviceState.CACHED if self.host.has_volume() else DeviceState.DIRECT
            self.host.devices[name] = CachedDevice(device=name, path=str(path), size=size, state=state)
            self.host.numbers[name] = number
            self.host.half_devices.discard(name)
        return Device(size, path)

    def tend_device(self, name: str) -> None:
        checked(name)
        with self.host.act("cache.tend_device"):
            if name in self.host.devices and self.host.has_volume():
                self.host.devices[name] = self.host.devices[name].model_copy(update={"state": DeviceState.CACHED})

    def detach_device(self, name: str, *, force: bool = False) -> None:
        checked(name)
        with self.host.act("cache.detach_device"):
            if name in self.host.open_devices and not force:
                raise DeviceInUse(Path("/dev/mapper") / f"virtman-volume-{name}")
            if name in self.host.open_devices:
                self.host.cut_off.add(name)
            self.host.devices.pop(name, None)
            self.host.half_devices.discard(name)

    def devices(self) -> list[CachedDevice]:
        return [device for _, device in sorted(self.host.devices.items())]

    def existing_devices(self) -> frozenset[str]:
        return frozenset(self.host.devices.keys() | self.host.half_devices)


class CacheGroupDouble(CacheDouble):
    """A cache with volumes."""

    def __init__(self, place: Place | Host) -> None:
        super().__init__(place)
        self.group, self.devices = VolumesDouble(self.host), DevicesDouble(self.host)


class ExportDouble:
    """Endpoints and processes in the host's memory."""

    address = ADDRESS

    def __init__(self, place: Place | Host, *, died: Died) -> None:
        self.host = _host(place)
        self.died = died

    def reserve(self, image: str) -> None:
        with self.host.act("export.reserve"):
            self.host.endpoints.add(checked(image))

    def publish(self, image: Image, device: Device, *, replace: bool = False) -> None:
        with self.host.act("export.publish"):
            _require_content(device)
            checked(image.name)
            same = self.host.served.get(image.name) == device
            self.host.endpoints.add(image.name)
            if replace or not same:
                self.host.reading[image.name] = set(self.host.routes.get(image.name, [])[:1])
                self.host.served[image.name] = device

    def local(self, image: Image) -> Device:
        return Device(image.size, node={"driver": "nbd", "export": checked(image.name), "key": image.key})

    def serving(self, image: str) -> bool:
        return checked(image) in self.host.served

    def hit_bytes(self, image: str) -> int | None:
        return HIT_BYTES if checked(image) in self.host.served else 0

    def allow(self, image: str, children: Sequence[Child]) -> None:
        with self.host.act("export.allow"):
            self.host.allowed[image] = list(children)

    def withdraw(self, image: str) -> None:
        with self.host.act("export.withdraw"):
            checked(image)
            for made in (self.host.served, self.host.reading, self.host.allowed):
                made.pop(image, None)
            self.host.endpoints.discard(image)

    def existing(self) -> frozenset[str]:
        return frozenset(self.host.endpoints | self.host.served.keys())


class SnapshotDouble:
    """Disks in the host's memory; the path of one is made of the VM's name."""

    moves_live = True

    def __init__(self, place: Place | Host) -> None:
        self.host = _host(place)

    def create(self, vm: str, origin: Device, size: int) -> Device:
        with self.host.act("snapshot.create"):
            disk = self.host.disks.get(checked(vm))
            if disk is None or not disk.whole:
                _require_content(origin)
                if size < origin.size or size % SECTOR:
                    raise BadDisk(f"VM {vm}: {size} is not a disk size")
                disk = self.host.disks[vm] = Disk(size, origin)
                self.host.moment("within snapshot.create")
                disk.whole = True
        return _device(vm, disk)

    def open(self, vm: str) -> Device:
        return _device(vm, self._disk(vm))

    def _disk(self, vm: str) -> Disk:
        disk = self.host.disks.get(checked(vm))
        if disk is None or not disk.whole:
            raise VmDiskMissing(vm)
        return disk

    def delete(self, vm: str) -> None:
        with self.host.act("snapshot.delete"):
            self.host.disks.pop(checked(vm), None)

    def rename(self, vm: str, new: str) -> Device:
        for name in (vm, new):
            checked(name)
        with self.host.act("snapshot.rename"):
            if vm in self.host.disks or new not in self.host.disks:
                disk = self._disk(vm)
                if new in self.host.disks:
                    raise BadDisk(f"VM {new} has a disk")
                _check_unused(vm, disk, None)
                self.host.disks[new] = self.host.disks.pop(vm)
        return self.open(new)

    def resize(self, vm: str, size: int, monitor: Monitor | None) -> Device:
        with self.host.act("snapshot.resize"):
            disk = self._disk(vm)
            if size < disk.size or size % SECTOR:
                raise BadDisk(f"VM {vm}: {size} is not a disk size")
            _check_unused(vm, disk, monitor)
            disk.size = size
        return _device(vm, disk)

    def take(self, vm: str, snapshot: str, monitor: Monitor | None) -> Device:
        with self.host.act("snapshot.take"):
            disk = self._disk(vm)
            _check_unused(vm, disk, monitor)
            if checked(snapshot) not in disk.snapshots:
                disk.snapshots[snapshot] = disk.writes, disk.size
                disk.layer += 1
        return _device(vm, disk)

    def revert(self, vm: str, snapshot: str) -> Device:
        with self.host.act("snapshot.revert"):
            disk = self._disk(vm)
            if checked(snapshot) not in disk.snapshots:
                raise SnapshotMissing(vm, snapshot)
            _check_unused(vm, disk, None)
            disk.writes, disk.size = disk.snapshots[snapshot]
            disk.layer += 1
        return _device(vm, disk)

    def drop(self, vm: str, snapshot: str, monitor: Monitor | None) -> None:
        with self.host.act("snapshot.drop"):
            disk = self._disk(vm)
            _check_unused(vm, disk, monitor)
            disk.snapshots.pop(checked(snapshot), None)

    def snapshots(self, vm: str) -> frozenset[str]:
        return frozenset(self._disk(vm).snapshots)

    def clone(self, vm: str, snapshot: str, new: str) -> Device:
        checked(new)
        with self.host.act("snapshot.clone"):
            writes, size = self._snapshot(vm, snapshot)
            disk = self.host.disks.setdefault(new, Disk(size, self._disk(vm).origin, writes=writes))
            self.host.moment("within snapshot.clone")
            disk.whole = True
        return _device(new, disk)

    @contextmanager
    def reading(self, vm: str, snapshot: str) -> Iterator[Device]:
        """A real file, for programs to read."""
        writes, size = self._snapshot(vm, snapshot)
        with tempfile.NamedTemporaryFile() as file:
            file.write(writes.encode())
            file.truncate(size)
            yield Device(size, Path(file.name))

    def changes(self, vm: str, snapshot: str | None, since: str | None) -> list[Range]:
        disk = self._disk(vm)
        for name in (name for name in (snapshot, since) if name is not None):
            checked(name)
        if snapshot is None:
            _check_unused(vm, disk, None)
        writes, size = (disk.writes, disk.size) if snapshot is None else self._snapshot(vm, snapshot)
        before = "" if since is None else self._snapshot(vm, since)[0]
        if writes == before:
            return []
        return [Range(0, SECTOR)] if len(writes) < SECTOR else [Range(0, SECTOR), Range(size - SECTOR, SECTOR)]

    def _snapshot(self, vm: str, snapshot: str) -> tuple[str, int]:
        disk = self._disk(vm)
        if checked(snapshot) not in disk.snapshots:
            raise SnapshotMissing(vm, snapshot)
        return disk.snapshots[snapshot]

    def existing(self) -> frozenset[str]:
        return frozenset(self.host.disks)

    def spare(self) -> int:
        return self.host.spare

    def trouble(self) -> str:
        return self.host.disk_trouble


class SourceDouble(LayeredSource):
    """A source that fills until the test says something else (``Host.filled``)."""

    fills = True

    def __init__(self, host: Host, step: Callable[[str], None]) -> None:
        attach = AttachDouble(host, lost=lambda _image, _parent: None)
        super().__init__(attach, CacheDouble(host), ExportDouble(host, died=lambda _image: None), step)
        self.host = host

    def fill(
        self, image: Image, ranges: Sequence[Range], *, idle: bool = False, rate: int | None = None
    ) -> None:  # fmt: skip
        with self.host.act("source.fill.idle" if idle else "source.fill"):
            self.host.filling[image.name] = list(ranges)
            self.host.rates[image.name] = rate
            if ended := self.host.filled.get(image.name):
                self.host.filled[image.name] = replace(ended, goes_on=bool(ranges))

    def filled(self, image: str) -> Filled:
        filled = self.host.filled.get(checked(image), Filled(goes_on=bool(self.host.filling.get(image))))
        return replace(filled, pinned=self.host.pins.get(image, 0))

    def lacking(self, image: Image) -> list[Range]:
        content, here = self._content(image), self.host.chunks.get(image.key, set())
        if image.name not in self.host.routes:
            return []  # an origin
        return _chunks(
            begin for begin in range(0, image.size, CHUNK) if begin not in here and any(content[begin:][:CHUNK])
        )

    def put(self, image: Image, ranges: Sequence[Range], file: int) -> Taken:
        content, here = self._content(image), self.host.chunks.setdefault(image.key, set())
        new, wrong = set[int](), list[int]()
        with self.host.act("source.put"):
            for each in ranges:
                for begin in range(each.offset, each.offset + each.length, CHUNK):
                    right = _read(file, CHUNK) == content[begin:][:CHUNK]
                    new.add(begin) if right else wrong.append(begin)
            kept = CHUNK * len(new - here)
            here |= new
        return Taken(kept, tuple(_chunks(wrong)))

    def get(self, image: Image, ranges: Sequence[Range], file: int) -> None:
        content = self._content(image)
        if not all(0 < each.length <= image.size - each.offset for each in ranges):
            raise DriverError("a range has to be within the image, and not empty")
        try:
            with self.host.act("source.get"), open(file, "wb", closefd=False) as out:
                out.writelines(content[each.offset :][: each.length] for each in ranges)
        except OSError as error:
            raise translated(error) from error

    def _content(self, image: Image) -> bytes:
        """What a served image holds: whole chunks."""
        if image.name not in self.host.served:
            raise NotAttached(image.name)
        return self.host.contents[image.key]

    def drop(self, image: str, content: Image | None) -> None:
        super().drop(image, content)
        self.host.filling.pop(image, None)

    def pin(self, image: Image, until: float) -> None:
        with self.host.act("source.pin"):
            self.host.pins[image.name] = until

    def boot_set(self, image: str) -> list[Range] | None:
        return [Range(2 * CHUNK, CHUNK), Range(0, CHUNK)] if self.filled(image).boot_set else None


def source_over(host: Host, step: Callable[[str], None] = lambda _step: None) -> SourceDouble:
    """New drivers of images on a host that may have things on it already."""
    return SourceDouble(host, step)


class MemoryBlocks:
    """The disk of a VM, of which ``writes`` is the beginning."""

    def __init__(self, host: Host, disk: Disk) -> None:
        self.host, self.disk = host, disk

    def read(self, offset: int, length: int) -> bytes:
        return self.disk.writes.encode().ljust(self.disk.size, b"\0")[offset : offset + length]

    def write(self, offset: int, data: bytes) -> None:
        with self.host.act("blocks.write"):
            before = bytearray(self.disk.writes.encode().ljust(offset + len(data), b"\0"))
            before[offset : offset + len(data)] = data
            self.disk.writes = before.rstrip(b"\0").decode()

    def zero(self, offset: int, length: int) -> None:
        self.write(offset, bytes(length))

    def flush(self) -> None:
        with self.host.act("blocks.flush"):
            pass


def blocks_of(host: Host) -> OpenBlocks:
    """How disks of this host are opened: for writing in its memory, for reading as the files that there are."""

    @contextmanager
    def opened(vm: str, device: Device, *, write: bool = False) -> Iterator[Blocks]:
        if not write:
            with open_blocks(vm, device) as blocks:
                yield blocks
            return
        disk = host.disks[vm]
        _check_unused(vm, disk, None)
        memory = MemoryBlocks(host, disk)
        yield memory
        memory.flush()

    return opened


def _check_unused(vm: str, disk: Disk, monitor: Monitor | None) -> None:
    if disk.stranger and monitor is None:
        raise DiskInUse(vm)


def _some(image: Image, parents: Sequence[Parent]) -> list[Parent]:
    if not parents:
        raise NoParents(image.name)
    return list(parents)


def _require_content(device: Device) -> None:
    if device.node is None:
        raise BadDevice(f"{device} has no QEMU block node")


def _device(vm: str, disk: Disk) -> Device:
    path = Path("/disks") / f"{vm}.qcow2"
    file = {"driver": "file", "filename": str(path), "layer": disk.layer}
    node = {"driver": "qcow2", "discard": "unmap", "file": file, "backing": disk.origin.node}
    return Device(disk.size, path, None if disk.device else node)


def number_in(device: Path) -> str:
    """The number of a block device, for which a file may stand that says nothing else; nothing if it is none."""
    if device.is_block_device():
        number = device.stat().st_rdev
        return f"{os.major(number)}:{os.minor(number)}"
    said = device.read_text() if device.is_file() else ""
    return said if re.fullmatch(r"\d+:\d+", said) else ""


def _chunks(begins: Iterable[int]) -> list[Range]:
    """The ranges of chunks, in order, that begin there."""
    ranges: list[Range] = []
    for begin in begins:
        if ranges and ranges[-1].offset + ranges[-1].length == begin:
            ranges[-1] = replace(ranges[-1], length=ranges[-1].length + CHUNK)
        else:
            ranges.append(Range(begin, CHUNK))
    return ranges


def _read(file: int, length: int) -> bytes:
    """The next bytes of a file or a pipe."""
    data = b""
    while len(data) < length:
        if not (part := os.read(file, length - len(data))):
            raise DriverError("the file ends too early")
        data += part
    return data


def _host(place: Place | Host) -> Host:
    return Host.known[place.state] if isinstance(place, Place) else place
