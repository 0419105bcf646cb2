"""Keep what was read from the parents in bcache volumes, which all images of the host share (the cache group).

Each volume is a bcache cache set, in a file or on a disk (cachevolumes.py beside this). Each image is attached to one
of them as a backing device, or to none, and can leave it for another while it is read. bcache wants its superblock at
the start of a backing device: below it lies a linear map of a small local header and of what reads from the parents,
which sees to it that readers who miss the same cause one fetch (onefetch.py). Above bcache a map splits large reads,
see SPLIT; and above that a multipath map reads from the parents what bcache refuses. Nothing here waits for a parent::

    virtman-cache-NAME-KEY (read-only) -> virtman-cachesplit-NAME-KEY -> bcacheN
             └-----> parents

    bcacheN -> virtman-cacheof-NAME-KEY -> header's loop device, zeros
       |                └----------------> virtman-cacheonce-NAME-KEY -> parents
       └-----> virtman-cachevol-NUMBER -> volume

The header names the image in a volume by a random UUID, and a volume gives each UUID a number of its own, which it
never gives again: without the header nothing finds what a volume holds of a removed image, until its buckets are used
anew. bcache writes down within 30 s which ranges a volume holds, and not before their data are on the disk, so a power
cut costs what was fetched in the last half minute (Linux: drivers/md/bcache/btree.c, bch_btree_leaf_dirty; what it only
caches is not in its journal); docs/performance.md says what was seen besides. A superblock that bcache refuses is
thrown away with what it describes.
When a volume fails, bcache itself reads from the parents what the volume cannot give, and detaches its images; but
while it does so it also refuses reads of the parents (Linux: closure_bio_submit, CACHE_SET_IO_DISABLE).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from pathlib import Path

from drivers.base import CachedDevice, CacheStats, Device, Image, Place, Volume
from drivers.cache import cacheddevices, fetchnotes, onefetch
from drivers.cache.cacheddevices import Devices
from drivers.cache.cachefiles import checked_key, file_bytes, file_of, key_of, label
from drivers.cache.cachegroup import IMAGE, Group
from drivers.cache.cachevolumes import Volumes
from drivers.door import door
from drivers.errors import BadDevice, BadDisk, DriverError, InUse
from drivers.host.command import run
from drivers.host.folders import matching
from drivers.host.space import Room
from drivers.kernel import bcachedev, devmapper, loopdev, multipath, ownership
from drivers.needs import DEVICE_MAPPER, DMSETUP, LOOP, LOSETUP, MODPROBE, UDEVADM, Needs, Tool

log = logging.getLogger(__name__)

POOL_SIZE = 64 << 30
"""Bytes that a volume in a file has at most."""

BUCKET = 512 << 10
"""Bytes: the unit that a volume gives to an image and takes away again. The fewer there are, the sooner bcache has
written down a refill of its free list. A volume knows BUCKET/128 images in its life (struct uuid_entry); then it starts
empty."""

SPLIT = 64 << 10
"""Bytes of the largest read that reaches bcache: for each read it keeps only the first range that it had to fetch."""

GUARD, GUARD_BEHIND = 8 << 20, 2 << 20
"""Bytes of zeros before and behind an image on its bcache device. When the device begins to run, the kernel looks there
for partitions and udev for file systems; in an image that would wait for parents, and read what guests wrote. What is
looked for farthest from the start is 4 MiB behind it, and from the end 3087 sectors before it (libblkid:
superblocks/luks.c, superblocks/promise_raid.c)."""

SUPERBLOCK_AT = 16384
"""Bytes from the start of a header to bcache's superblock, which no probe of the header's loop device finds there."""

_SECTOR = devmapper.SECTOR
_HEADER = bcachedev.SUPERBLOCK


@door
class BcacheCache:
    """The headers in ``<state>/cache``, and the volumes."""

    needs = Needs(
        tools=(Tool("make-bcache", "bcache-tools"), DMSETUP, LOSETUP, MODPROBE, UDEVADM),
        modules=("bcache", *onefetch.MODULES, *cacheddevices.MODULES, "dm_zero"),
        nodes=(DEVICE_MAPPER, LOOP),
        root=True,
    )

    def __init__(self, place: Place, *, pool_size: int = POOL_SIZE, bucket: int = BUCKET, split: int = SPLIT) -> None:
        ownership.claim(place.state)
        self._folder = place.state / "cache"
        self._folder.mkdir(parents=True, exist_ok=True)
        room = Room(place.state, place.reserve)
        self._group = Group(self._folder, Volumes(file_size=pool_size, bucket=bucket, room=room))
        self._devices = Devices(self._group, place.group, split)
        self._split = split
        self._calm = threading.Lock()
        self._seen: dict[str, int] = {}
        """How much was fetched for an image when its memory was looked at last."""
        self._freed: dict[str, int] = {}
        """And how much when it was given back last: there is none since."""

    def open(self, image: Image, base: Device) -> Device:
        """A read-only disk over ``base`` that keeps what it reads. A damaged volume or header starts empty.

        Without a volume that runs, the disk reads from ``base`` until there is one.

        Raises BadDevice, also if the image is open over another device; BadDisk if the image's size is no multiple of
        512; NotReleased, CommandFailed.
        """
        if base.path is None:
            raise BadDevice(f"image {image.name}: what is below the cache is no kernel device")
        if image.size % _SECTOR:
            raise BadDisk(f"image {image.name}: its size {image.size} is not a multiple of {_SECTOR}")
        top = _top(image)
        with self._group.lock:
            self._check_base(image, base.path)
            if not devmapper.exists(top):
                try:
                    disk = self._start_disk(image, base.path)
                    note = fetchnotes.read(self._note(image))
                    note = note.opened(_volume(image), onefetch.fetched(label(image)))
                    fetchnotes.write(self._note(image), note)
                    sectors = image.size // _SECTOR
                    pieces = devmapper.pieces(0, sectors, disk, GUARD // _SECTOR, self._split)
                    split = devmapper.create(_split_of(image), pieces, read_only=True)
                    devmapper.create(top, [devmapper.either(split, base.path, sectors)], read_only=True)
                except (DriverError, OSError):
                    self._undo(image)
                    raise
        return Device(size=image.size, path=devmapper.map_path(top))

    def close(self, image: Image) -> None:
        """Remove all but the header and what the volume holds; the volumes are stopped with the last image.

        Raises CommandFailed if somebody reads from the disk, NotReleased. ``tend_volume`` tells of errors of volumes.
        """
        with self._group.lock:
            self._close(image)

    def remove(self, key: str) -> int:
        """Make unreachable what is kept of an image. Returns the bytes of the header: a volume does not shrink.

        Raises InUse if the image is open.
        """
        with self._group.lock:
            headers = list(matching(self._folder, f"{checked_key(key)}-*.header"))
            for header in headers:
                if loopdev.device_of(header):
                    raise InUse(header)
            freed = self.size(key)
            for file in matching(self._folder, f"{key}-*"):
                file.unlink()
        return freed

    def size(self, key: str) -> int:
        """The bytes that ``remove`` would free: those of the header."""
        return sum(file_bytes(header) for header in matching(self._folder, f"{checked_key(key)}-*.header"))

    def stats(self, image: Image) -> CacheStats:
        """``held_bytes``: what was fetched for the image since it joined its volume, at most its size; if it was open
        then, since the next call.

        bcache does not count what it holds per image. The figure is too high for what was fetched and not kept, or
        dropped since for other images. ``file_bytes`` is that of all volumes in files, which all images share.

        An image that has a volume again reads by way of the cache again. Memory is freed if nothing was fetched since
        the last call: what it holds is in the volume by now.
        """
        note = fetchnotes.read(self._note(image))
        if not self._is_calm(image, note.volume):
            with self._group.lock:
                self._return(image)
                self._count(image)
                if devmapper.exists(_top(image)):
                    self._free(label(image))
                note = fetchnotes.read(self._note(image))
        return CacheStats(held_bytes=min(note.held, image.size), file_bytes=self._group.file_bytes())

    def existing(self) -> frozenset[str]:
        """Keys of the images with a header, whole or half made."""
        files = [path for kind in ("header", "new") for path in matching(self._folder, f"*-*.{kind}")]
        return frozenset(map(key_of, files))

    def volumes(self) -> list[Volume]:
        """All volumes, also those that have failed or are missing, and the first one while there is no room for it.

        No disk is asked, and nobody is waited for.
        """
        return self._group.described()

    def tend_volume(self, path: Path) -> None:
        """Take the next steps of a volume: start, stop, format or remove it, and have images join that have none.

        Raises BadVolume if the path does not lead to the volume, or nothing answers; BadDisk if bcache refuses the
        volume, or an image; VolumeInUse, NotReleased, NoSpace, CommandFailed.
        """
        self._group.tend(path)

    def add_volume(self, path: Path) -> Volume:
        """Let images use a disk, a partition, or a file, which is made. An existing volume is no error.

        Images that have no volume join it. Raises BadVolume, and nothing has changed, if anything but an old volume
        is there, or it is in use, or too small; NoSpace, CommandFailed.
        """
        return self._group.add(path)

    def remove_volume(self, path: Path) -> bool:
        """Release a volume: a file is deleted, a disk is free again. False: there is none.

        Its images go on, on the other volumes or without any; what it held is fetched anew. A volume that cannot be
        released takes no more images, and ``tend_volume`` goes on with its removal. Raises VolumeInUse, NotReleased,
        CommandFailed, DiskFull.
        """
        return self._group.remove(path)

    def attach_device(self, name: str, device: Path) -> Device:
        """A device of somebody else, read through the volumes that images use, and written through.

        Without a volume that runs, it goes straight to the device until there is one. Raises DeviceRefused, BadDevice,
        BadName, NotOurs, CommandFailed.
        """
        return self._devices.attach(name, device)

    def tend_device(self, name: str) -> None:
        """Have a device read by way of a volume again, or at last, with nothing of it there.

        Raises CommandTimedOut if its storage does not answer, NotReleased, BadName, CommandFailed.
        """
        self._devices.tend(name)

    def detach_device(self, name: str, *, force: bool = False) -> None:
        """Let a device go, with all that was made for it. Raises DeviceInUse, NotReleased, BadName, CommandFailed."""
        self._devices.detach(name, force=force)

    def devices(self) -> list[CachedDevice]:
        """Those that are attached. Raises CommandFailed."""
        return self._devices.found()

    def existing_devices(self) -> frozenset[str]:
        """Names of attachments with a map or a header."""
        return self._devices.existing()

    def _is_calm(self, image: Image, volume: str) -> bool:
        """Whether it is read by way of this volume, and nothing was fetched for it since its memory was given back.

        Most images are at most times, and all that are used are asked for every few seconds: without the lock of the
        group, which may be held for long, and one after the other, since threads that read files side by side pass the
        interpreter to each other with each of them.
        """
        try:
            with self._calm:
                return self._looks_calm(image, volume)
        except (DriverError, OSError):  # somebody may be closing it just now
            return False

    def _looks_calm(self, image: Image, volume: str) -> bool:
        name, top = label(image), _top(image)
        freed = self._freed.get(name)  # once: whoever closes it takes it out meanwhile
        if freed is None or onefetch.fetched(name) != freed:
            return False
        home = bcachedev.set_of(_below(image))
        if home is None or home.name != volume:
            return False
        if multipath.state(onefetch.device(name).name).failed:
            return False
        paths = multipath.state(top)
        return not paths.failed and paths.group <= 1

    def _return(self, image: Image) -> None:
        """Read by way of bcache again, or of the parents, if that has failed."""
        top = _top(image)
        if devmapper.exists(top):
            once = onefetch.device(label(image)).name
            multipath.reinstate(once, multipath.state(once).failed)
            paths = multipath.state(top)
            multipath.reinstate(top, paths.failed)
            if paths.failed or paths.group > 1:  # an agent may have died between the two
                multipath.switch_to(top, 1)

    def _check_base(self, image: Image, base: Path) -> None:
        """Raises BadDevice if the image is open over another device."""
        source = onefetch.source(label(image))
        if not devmapper.exists(source.name):
            return
        if not base.exists() or devmapper.numbers_in(devmapper.table(source.name)) != [devmapper.number(base)]:
            raise BadDevice(f"image {image.name}: it is open over another device than {base}; close it first")

    def _start_disk(self, image: Image, base: Path) -> Path:
        """The bcache device of an image, which is in a volume afterwards if there is one."""
        below = _below(image)
        if not devmapper.exists(below):
            if not self._header(image).exists():
                self._make_header(image)
            self._attach_disk(image, base)
        try:
            bcachedev.register(below)
        except BadDisk as error:
            log.warning("image %s: its cache starts empty: %s", image.name, error)
            self._detach_disk(image)
            self._forget(image)
            self._make_header(image)
            self._attach_disk(image, base)
            bcachedev.register(below)
        self._group.settle()
        with contextlib.suppress(DriverError, OSError):  # tend_volume tells why
            self._group.join(below)
        settings = bcachedev.settings(below)
        if not (settings / "dev").exists():
            # Its volume is not there. bcache waits for it unless told not to, and then does not trust what it holds.
            bcachedev.tell(settings / "running", "1")
        bcachedev.wait((settings / "dev/dev").exists, f"bcache device of image {image.name}")
        (settings / "sequential_cutoff").write_text("0")
        return Path("/dev") / (settings / "dev").resolve().name

    def _make_header(self, image: Image) -> None:
        fresh = file_of(self._folder, image, "new")
        fresh.unlink(missing_ok=True)
        with fresh.open("wb") as file:
            file.truncate(_HEADER)
        run(["make-bcache", "-B", "--data-offset", str(_HEADER // _SECTOR), "--block", str(_SECTOR), str(fresh)])
        fresh.write_bytes(bytes(SUPERBLOCK_AT) + fresh.read_bytes()[:_HEADER])
        fresh.rename(self._header(image))

    def _attach_disk(self, image: Image, base: Path) -> None:
        header = loopdev.attach(self._header(image))
        head, sectors = _HEADER // _SECTOR, image.size // _SECTOR
        data = onefetch.start(label(image), [f"0 {sectors} linear {base} 0"], sectors)
        guard = GUARD // _SECTOR
        table = [
            f"0 {head} linear {header} {SUPERBLOCK_AT // _SECTOR}",
            f"{head} {guard} zero",
            *devmapper.pieces(head + guard, sectors, data, 0, onefetch.piece()),
            f"{head + guard + sectors} {GUARD_BEHIND // _SECTOR} zero",
        ]
        devmapper.create(_below(image), table)

    def _detach_disk(self, image: Image) -> None:
        devmapper.remove(_below(image))
        onefetch.stop(label(image))
        loopdev.detach(self._header(image))

    def _close(self, image: Image) -> None:
        devmapper.remove(_top(image))
        devmapper.remove(_split_of(image))
        below = _below(image)
        if devmapper.exists(below):
            self._count(image)
            bcachedev.stop(below)
        self._freed.pop(label(image), None)  # what counts begins anew
        self._detach_disk(image)
        self._group.settle()

    def _undo(self, image: Image) -> None:
        """Remove what a failed opening has made. The first error is the one to tell."""
        try:
            self._close(image)
        except (DriverError, OSError) as error:
            log.error("image %s: removing a half made cache failed too: %s", image.name, error)

    def _free(self, label: str) -> None:
        """Give memory back, but not while what it holds may be on its way to the volume: it would be fetched again."""
        fetched = onefetch.fetched(label)
        if self._seen.get(label) == fetched:
            onefetch.free(label)
            self._freed[label] = fetched
        self._seen[label] = fetched

    def _count(self, image: Image) -> None:
        """Write down how many bytes were fetched from the parents for the image's volume until now."""
        below = _below(image)
        if devmapper.exists(below) and bcachedev.settings(below).exists():
            note = fetchnotes.read(self._note(image))
            fetchnotes.write(self._note(image), note.counted(_volume(image), onefetch.fetched(label(image))))

    def _forget(self, image: Image) -> None:
        self._header(image).unlink(missing_ok=True)
        self._note(image).unlink(missing_ok=True)

    def _header(self, image: Image) -> Path:
        return file_of(self._folder, image, "header")

    def _note(self, image: Image) -> Path:
        return file_of(self._folder, image, "json")


def _top(image: Image) -> str:
    return f"virtman-cache-{label(image)}"


def _split_of(image: Image) -> str:
    return f"virtman-cachesplit-{label(image)}"


def _volume(image: Image) -> str:
    """The set that the image is read by way of; empty if none."""
    home = bcachedev.set_of(_below(image))
    return home.name if home else ""


def _below(image: Image) -> str:
    return IMAGE + label(image)
