"""The contract between the agent and its drivers.

A stack is attach -> cache -> export, one per image and host; a VM disk lies on top of it. Every call is
idempotent: asking twice is asking once, and removing what is not there is fine. Calls for one image are serialised by
the agent; calls for different images run in parallel, so drivers keep no state that is shared between images without a
lock.

What exists on the host is the truth, not what a driver remembers: after kill -9 of the agent a new driver object finds
what the old one made through ``existing()``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from drivers import digests

if TYPE_CHECKING:  # commands import this, and are quick without pydantic
    from drivers.cachemodels import CachedDevice, Volume

BlockNode = Mapping[str, Any]
"""Options of one QEMU ``--blockdev``, possibly with nested nodes (QEMU: qapi/block-core.json, BlockdevOptions)."""


FAILOVER = "failover"
PATH_POLICIES = (FAILOVER, "service-time", "round-robin", "queue-length")
"""How a host reads from several live parents: from the first of them, or from all, chosen for each read by a path
selector of the kernel's multipath target (Linux: drivers/md/dm-ps-*.c, multipath.conf(5) path_selector)."""


@dataclass(frozen=True)
class Limits:
    """What other hosts may take of this one: bytes a second that the host sends (``up``) and reads (``down``), for all
    images together, and ``connections``. None: no limit, or the driver's own.
    """

    up: int | None = None
    down: int | None = None
    connections: int | None = None


@dataclass(frozen=True)
class Place:
    """What the administrator set for the drivers of this host.

    ``state``: a folder that survives a reboot. ``run``: a folder for sockets and pid files, with a short path: a unix
    socket's path has at most 107 bytes (unix(7)). ``host`` is this host's name, ``address`` the IP address at which
    children reach the host; a driver whose children are on this machine needs neither. ``path_policy`` is one of
    ``PATH_POLICIES``. ``group``: the number of a group whose members may use VMs' disks by their QEMU. ``reserve``:
    bytes that are kept free for what VMs write (drivers/host/space.py). ``port``: at which children reach the host; 0:
    one that is free, and kept. ``cache_limit``: the most bytes that a file of the cache gets. Drivers of the kernel
    know no ``limits``.
    """

    state: Path
    run: Path
    host: str = ""
    address: str = ""
    path_policy: str = FAILOVER
    group: int | None = None
    reserve: int | None = None
    port: int = 0
    cache_limit: int | None = None
    limits: Limits = field(default=Limits())


@dataclass(frozen=True)
class Image:
    """A published, immutable base disk. ``size`` in bytes; ``digest``: see drivers/digests.py."""

    name: str
    size: int
    digest: str

    @property
    def key(self) -> str:
        """Names files that hold this image's content, whatever the image is called: letters and digits."""
        return digests.key_of(self.digest)


@dataclass(frozen=True)
class Parent:
    """One host to read misses from. ``address``: registered at Volt, e.g. ``nbds://192.0.2.7:10809``.

    ``ticket``: a secret as well, of the assignment with this ``revision`` (volt/edgesecrets.py). A parent with a newer
    ticket is the same parent. ``far``: it is in another place. A host reads there only when no parent in its own place
    answers.
    """

    host: str
    address: str
    secret: str = field(default="", repr=False)
    ticket: str = field(default="", repr=False, compare=False)
    revision: int = field(default=0, compare=False)
    far: bool = False


@dataclass(frozen=True)
class Child:
    """One host that may read an image. ``secret``: 64 hexadecimal digits, by which parent and child authenticate.

    Volt gave them to these two hosts for this image; the child has them in its ``Parent``. Drivers whose endpoints no
    other machine reaches need none.
    """

    host: str
    secret: str = field(default="", repr=False)


@dataclass(frozen=True)
class Opened:
    """A file or block device that this process has open as ``fd``, wherever its path leads now.

    ``mark``: at most 20 letters and digits, which differ for another object. The receiver uses it at once.
    """

    fd: int
    mark: str

    @property
    def path(self) -> Path:
        """A path by which every program opens what is open here (proc(5))."""
        return Path(f"/proc/{os.getpid()}/fd/{self.fd}")


@dataclass(frozen=True)
class Device:
    """What one layer hands to the next: a size in bytes and a kernel path, or a QEMU block node; a VM disk has both."""

    size: int
    path: Path | None = None
    node: BlockNode | None = None


class PathState(StrEnum):
    """State of one route to a parent."""

    ACTIVE = "active"
    STANDBY = "standby"
    LOST = "lost"


@dataclass(frozen=True)
class PathStatus:
    """One route to a parent and whether it is in use."""

    parent: Parent
    state: PathState


@dataclass(frozen=True)
class CacheStats:
    """``held_bytes``: image content in the cache, all of it fetched from parents; ``file_bytes``: its disk space, or
    that of all images of the host where they share it.
    """

    held_bytes: int
    file_bytes: int


@dataclass(frozen=True)
class Filled:
    """What a source reads behind demand: ``done`` bytes of what it was told last, and whether it ``goes_on``.

    ``whole``: all of the image is here, so no parent is needed. ``boot_set``: it is known what VMs have read first.
    ``pinned``: until when what is kept stays, in seconds since 1970. ``sent``: bytes of the image that other hosts have
    read here, since it began to be served.
    """

    done: int = 0
    goes_on: bool = False
    whole: bool = False
    boot_set: bool = False
    pinned: float = 0
    sent: int = 0


@dataclass(frozen=True)
class Taken:
    """What came of a ``put``: the bytes that were not here before, what was wrong, and whether there was no room."""

    kept: int = 0
    wrong: tuple[Range, ...] = ()
    full: bool = False


LostParent = Callable[[str, str], None]
"""Called from a driver's thread, with the names of an image and of a host, when a parent in use was lost and the driver
has moved on. It has to return at once.

Soon after, ``connect`` is to be called, and its device to be published.
"""

Died = Callable[[str], None]
"""Called from a driver's thread with an image's name when the process that serves it died unasked."""


class AttachDriver(Protocol):
    """How a host reaches its parents."""

    def connect(self, image: Image, parents: Sequence[Parent]) -> Device:
        """Make the image readable through the first parent that lives. Watch the parents from now on.

        Never wait for a parent's data. The device changes when its readers may still have a connection to an earlier
        parent: publishing the new device ends that connection.
        """

    def origin(self, image: Image, file: Path | Opened) -> Device:
        """The device of a host that has the whole image in ``file``, or in a block device: it has no parents."""

    def update(self, image: Image, parents: Sequence[Parent]) -> bool:
        """Follow a new list. True if the route in use changes and the stack must be published again."""

    def unsettled(self, image: str) -> bool:
        """Whether ``connect`` with the same parents would read from a better one now. May take seconds."""

    def abandon(self, image: str) -> None:
        """Fail the reads that wait for a parent, since the stack is being removed. ``connect`` undoes that."""

    def disconnect(self, image: str) -> None:
        """Forget the image's parents and stop watching them."""

    def paths(self, image: str) -> list[PathStatus]:
        """The routes in the order of the parents."""

    def existing(self) -> frozenset[str]:
        """Names of images with something of this driver on the host."""


class CacheDriver(Protocol):
    """How a host keeps what it has read."""

    def open(self, image: Image, base: Device) -> Device:
        """A device that reads from the cache, else from ``base``, and keeps what it read.

        A damaged cache starts empty.
        """

    def close(self, image: Image) -> None:
        """The stack is gone: what was kept stays for the next ``open``."""

    def remove(self, key: str) -> int:
        """Delete what is kept under an image's key. Returns the bytes of disk space freed."""

    def size(self, key: str) -> int:
        """The bytes of disk space that ``remove`` would free."""

    def stats(self, image: Image) -> CacheStats:
        """What the image's cache holds now.

        Called every few seconds. The cache writes its metadata meanwhile, so that kill -9 costs only what was fetched
        since.
        """

    def existing(self) -> frozenset[str]:
        """Keys (``Image.key``) of the images with something kept on this host."""


class CacheGroup(Protocol):
    """The volumes of a cache that all images of the host share: the attribute ``group`` of a cache driver with them."""

    def volumes(self) -> list[Volume]:
        """All volumes, also those that have failed or are missing. Nobody waits for a disk."""

    def tend_volume(self, path: Path) -> None:
        """Take the next steps of a volume. The agent calls this again and again, also after an error.

        An unused volume stops. A used one runs, is joined, and begins empty after it failed. A removal that failed goes
        on. Raises DriverError while a step fails. An unknown path is fine.
        """

    def add_volume(self, path: Path) -> Volume:
        """Let images use a disk, a partition, or a file, which is made. An existing volume is no error.

        Raises BadVolume, and nothing has changed, if anything of somebody else is there.
        """

    def remove_volume(self, path: Path) -> bool:
        """Release a volume, also while images are read: what it held is fetched anew. False: there is none."""


class DeviceCache(Protocol):
    """Devices of others that VMs read through the cache, and write: the attribute ``devices`` of a driver with them.

    Calls for one name, and for one device, are serialised by the agent, which draws a name for each attachment. Nothing
    but what VMs write is ever written to a device, and before it is acknowledged. An attachment ends with a detach or
    with the host; what was read for it is nothing to a later one.
    """

    def attach_device(self, name: str, device: Path) -> Device:
        """What VMs use in the device's place. An attached device gets its present size.

        Raises DeviceRefused, and nothing has changed, for a device that is in use or unfit.
        """

    def tend_device(self, name: str) -> None:
        """Have a device read by way of the cache, if a volume takes it. One that is not attached is fine."""

    def detach_device(self, name: str, *, force: bool = False) -> None:
        """Release a device. Raises DeviceInUse, and nothing has changed, while a program has its path open.

        ``force``: that program gets errors from then on, also if NotReleased is raised because the storage does not
        answer; then call again. One that is not attached is fine.
        """

    def devices(self) -> list[CachedDevice]:
        """Those that are attached."""

    def existing_devices(self) -> frozenset[str]:
        """Names of attachments, whole or half made, on this host."""


class ExportDriver(Protocol):
    """How a host serves its children."""

    @property
    def address(self) -> str:
        """What this host registers at Volt; children compute an image's endpoint from it."""

    def reserve(self, image: str) -> None:
        """Make the endpoint exist now. Children may connect; their reads wait until ``publish``."""

    def publish(self, image: Image, device: Device, *, replace: bool = False) -> None:
        """Serve ``device`` read-only and return when a client gets answers.

        The same device again changes nothing, unless ``replace``: then every old connection to the parents is dropped
        before this returns, and clients of this export wait meanwhile and see no error.
        """

    def local(self, image: Image) -> Device:
        """What VM disks of this host are made on: the same data that children get."""

    def serving(self, image: str) -> bool:
        """Whether the image is being served at this moment."""

    def hit_bytes(self, image: str) -> int | None:
        """Bytes that the cache answered without a parent, counted since the image began to be served.

        None where nobody counts them.
        """

    def allow(self, image: str, children: Sequence[Child]) -> None:
        """Name the hosts that may read. File permissions are enough for an endpoint that no other machine reaches.

        Do not wait for reads of hosts that may not read any more: the next ``publish`` may be what ends them.
        """

    def withdraw(self, image: str) -> None:
        """Stop serving and remove the endpoint. Clients' reads that wait end: ``AttachDriver.abandon`` came before."""

    def existing(self) -> frozenset[str]:
        """Names of images with something of this driver on the host: a process, a socket, a target."""


class ImageSource(Protocol):
    """All that a host has of images: it reads each from parents, keeps what it read, and serves it to children.

    An image whose content this host has as a whole is an *origin's*: it has no parents. The agent serialises calls for
    one image, except ``admit``, ``unsettled`` and calls that change nothing.
    """

    fills: bool
    """Whether ``fill`` returns at once, and goes on behind what VMs read. Without it there are no pins, boot sets,
    ``put`` or ``get``."""

    @property
    def address(self) -> str:
        """What this host registers at Volt, as a URI; children compute an image's endpoint from it."""

    def reserve(self, image: str) -> None:
        """Make the endpoint exist now. Children may connect; their reads wait until ``ensure``."""

    def ensure(self, image: Image, parents: Sequence[Parent], *, fresh: bool = False) -> None:
        """Serve the image, and read misses from the first parent that lives; never wait for a parent's data.

        Asked again it changes nothing. ``fresh``: no connection to a host that is no parent is left when this returns.
        """

    def ensure_origin(self, image: Image, content: Path | Opened) -> None:
        """Serve the image from a file or block device of this host. Asked again it changes nothing."""

    def follow(self, image: Image, parents: Sequence[Parent], *, sure: bool) -> None:
        """Read from other parents. ``sure``: it is certain that the source reads from no host of an earlier list.

        No connection to a host that is no parent is left when this returns.
        """

    def unsettled(self, image: str) -> bool:
        """Whether ``ensure`` with the same parents would read from a better one now. May take seconds."""

    def admit(
        self, image: str, revision: int, children: Sequence[Child], *, serving_key: str = "", new: bool = False
    ) -> None:
        """Let exactly these children read. Volt's words may arrive in any order: the highest revision counts.

        An image without an endpoint stays closed, unless ``new``: then the endpoint is being made, or Volt counts its
        revisions anew. ``serving_key``: by which children are known that Volt names only later (volt/edgesecrets.py).
        Does not wait for calls that make or change the source.
        """

    def close(self, image: str) -> None:
        """Let no further children in until ``admit`` says ``new``."""

    def drop(self, image: str, content: Image | None) -> None:
        """Stop serving and forget the parents; reads that wait end. What was kept stays for the next ``ensure``.

        ``content``: the image, if its size and digest are known and it is no origin's. Goes on after an error, and
        raises the first.
        """

    def device(self, image: Image, *, of_vm: bool = True) -> Device:
        """What VMs' disks of this host are made on: the same data that children get.

        ``of_vm``: what is read there first may be told as what a boot reads (``boot_set``).
        """

    def serving(self, image: str) -> bool:
        """Whether the image is being served at this moment."""

    def paths(self, image: str) -> Sequence[PathStatus]:
        """The routes to parents in their order; none of an origin, nor before ``ensure``. Asks no parent."""

    def hit_bytes(self, image: str) -> int | None:
        """See ``ExportDriver.hit_bytes``."""

    def held(self, image: Image) -> CacheStats:
        """What is kept of the image now (``CacheDriver.stats``)."""

    def fill(
        self, image: Image, ranges: Sequence[Range], *, idle: bool = False, rate: int | None = None
    ) -> None:  # fmt: skip
        """Have what these ranges hold kept here, read from parents where it is not, in this order.

        It replaces what was asked for before; no ranges end that. ``idle``: nobody is about to read it, so it takes
        hardly anything from who reads. ``rate``: bytes a second at most. Raises NoSpace if there is no room.
        """

    def filled(self, image: str) -> Filled:
        """How far ``fill`` is. Asks no parent."""

    def lacking(self, image: Image) -> Sequence[Range]:
        """What of the image is not kept here and does not hold zeros only. Asks parents for the image's manifest."""

    def put(self, image: Image, ranges: Sequence[Range], file: int) -> Taken:
        """Keep ranges of the image, which came another way than from a parent.

        They are read one after the other from where the descriptor is, or from a pipe. What is not of the image is not
        kept. Raises DriverError: the file ends too early, or nothing proves what the image holds.
        """

    def get(self, image: Image, ranges: Sequence[Range], file: int) -> None:
        """Write ranges of the image, one after the other, to where the descriptor is, or into a pipe.

        What is not here is read from parents. Raises DriverError: nobody reads the pipe any more, or the disk is full.
        """

    def pin(self, image: Image, until: float) -> None:
        """Have what is kept of the image stay until a time, in seconds since 1970; one that has passed ends that."""

    def boot_set(self, image: str) -> Sequence[Range] | None:
        """What VMs of this host have read first, in order; None as long as that is not known."""

    def stop(self) -> None:
        """End what serves no image any more: the host is suspended. Only another source brings it back."""

    def existing(self) -> frozenset[str]:
        """Names of images with anything of a source on the host."""

    def kept(self) -> frozenset[str]:
        """Keys (``Image.key``) of images of which something is kept."""

    def kept_size(self, key: str) -> int:
        """The bytes of disk space that ``forget`` would free."""

    def forget(self, key: str) -> int:
        """Delete what is kept under an image's key. Returns the bytes of disk space freed."""


class Monitor(Protocol):
    """The QEMU that runs a VM and has its disk open."""

    def execute(self, command: str, arguments: Mapping[str, Any] | None = None) -> Any:
        """What QEMU returns for one command (QEMU: interop/qemu-qmp-ref). Raises MonitorFailed."""


@dataclass(frozen=True, slots=True)  # there may be a million of them
class Range:
    """Where a disk differs from another state of it, in bytes. ``zeros``: it is known to hold nothing else there."""

    offset: int
    length: int
    zeros: bool = False


class VmDiskDriver(Protocol):
    """How one VM gets a private writable disk, and how that one is grown and its points in time are kept.

    A snapshot is a name for what the disk held at one moment; names are checked as VMs' names are. ``monitor`` is that
    of the VM if the agent runs it, which goes on meanwhile; without one, DiskInUse is raised where it matters that
    another program has the disk open, and then nothing has changed. All calls can be repeated after a crash at any
    step, or after an error, and finish what was begun.
    """

    moves_live: bool
    """Whether a VM with such a disk can move while it runs: its QEMU opens the disk as a block node of its own."""

    def create(self, vm: str, origin: Device, size: int) -> Device:
        """A writable disk of ``size`` bytes whose unwritten ranges read as ``origin``; an existing one is returned."""

    def open(self, vm: str) -> Device:
        """The existing disk of a VM."""

    def delete(self, vm: str) -> None:
        """Remove the VM's disk with all its snapshots."""

    def rename(self, vm: str, new: str) -> Device:
        """Let the disk, with all its snapshots, be that of another name, which has none. Done already, it is returned.

        Raises VmDiskMissing, BadDisk if there are two, and DiskInUse if anybody has it open.
        """

    def resize(self, vm: str, size: int, monitor: Monitor | None) -> Device:
        """Let the disk have ``size`` bytes; what is new are zeros. A running VM sees it at once.

        Raises VmDiskMissing, BadDisk if that is less than it has, or no multiple of 512, NotPossible.
        """

    def take(self, vm: str, snapshot: str, monitor: Monitor | None) -> Device:
        """Keep what the disk holds now as a snapshot; one of this name that is there is left alone.

        Returns the disk, which may be another file or node from now on. Raises VmDiskMissing, NotPossible, NoSpace.
        """

    def revert(self, vm: str, snapshot: str) -> Device:
        """Let the disk hold, and be as large as, what the snapshot keeps: what was written since is gone, snapshots
        stay.

        Raises VmDiskMissing, SnapshotMissing, NotPossible, and DiskInUse if anybody has it open.
        """

    def drop(self, vm: str, snapshot: str, monitor: Monitor | None) -> None:
        """Forget a snapshot, and free what no other snapshot and not the disk needs. One that is not there is fine.

        Raises VmDiskMissing, NoSpace, NotPossible.
        """

    def snapshots(self, vm: str) -> frozenset[str]:
        """The names of the snapshots of a disk. Raises VmDiskMissing."""

    def clone(self, vm: str, snapshot: str, new: str) -> Device:
        """A disk of another VM that holds what the snapshot keeps, without copying it; an existing one is returned.

        The two disks and the snapshot need nothing of each other from then on. Raises VmDiskMissing, SnapshotMissing,
        NotPossible, NoSpace.
        """

    def reading(self, vm: str, snapshot: str) -> AbstractContextManager[Device]:
        """What a snapshot keeps, for programs of this host to read meanwhile. Raises VmDiskMissing, SnapshotMissing."""

    def changes(self, vm: str, snapshot: str | None, since: str | None) -> list[Range]:
        """Where a snapshot, or the disk, differs from a snapshot that it came after, or from what it was made on.

        In order and without overlap; it may name more than has changed. Of the disk only while nobody has it open.
        What ``since`` keeps is read as zeros beyond its end. Raises VmDiskMissing, SnapshotMissing, NotPossible,
        DiskInUse.
        """

    def spare(self) -> int:
        """Bytes that may be written to disks beside what VMs write, for which the rest is kept (``Place.reserve``)."""

    def existing(self) -> frozenset[str]:
        """Names of VMs with a disk, whole or half made, on this host."""

    def trouble(self) -> str:
        """What keeps VMs from writing to their disks, or soon will; nothing if nothing does."""
