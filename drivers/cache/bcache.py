"""Keep what was read from the parents in bcache volumes, which all images of the host share (the cache group).

Each volume is a bcache cache set, in a file or on a disk (cachevolumes.py beside this). Each image is attached to one
of them as a backing device (backing.py), or to none, and can leave it for another while it is read. Below bcache,
readers who miss the same range cause one fetch (onefetch.py). Above bcache a map splits large reads, see SPLIT; and
above that a multipath map reads from the parents what bcache refuses. Nothing here waits for a parent::

    virtman-cache-NAME-KEY (read-only) -> virtman-cachesplit-NAME-KEY -> bcacheN
             └-----> parents

    bcacheN -> virtman-cacheof-NAME-KEY -> header's loop device
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

from drivers.base import CacheStats, Device, Image, Place
from drivers.cache import backing, onefetch
from drivers.cache.cacheddevices import Devices
from drivers.cache.cachefiles import Files, kernel_base, label, undone_after_error
from drivers.cache.cachegroup import IMAGE, Group
from drivers.cache.cachevolumes import Volumes
from drivers.door import door
from drivers.errors import BadDisk, DriverError
from drivers.host.space import Room
from drivers.kernel import bcachedev, devmapper, loopdev, multipath, ownership
from drivers.kernel.devmapper import SECTOR

log = logging.getLogger(__name__)

POOL_SIZE = 64 << 30
"""Bytes that a volume in a file has at most."""

BUCKET = 512 << 10
"""Bytes: the unit that a volume gives to an image and takes away again. The fewer there are, the sooner bcache has
written down a refill of its free list. A volume knows BUCKET/128 images in its life (struct uuid_entry); then it starts
empty."""

SPLIT = 64 << 10
"""Bytes of the largest read that reaches bcache: for each read it keeps only the first range that it had to fetch."""


@door
class BcacheCache:
    """The headers in ``<state>/cache``, and two further contracts: ``group`` has the volumes, ``devices`` the devices
    of others that are read through the same volumes.
    """

    needs = Group.needs

    def __init__(self, place: Place, *, pool_size: int = POOL_SIZE, bucket: int = BUCKET, split: int = SPLIT) -> None:
        ownership.claim(place.state)
        folder = place.state / "cache"
        self._files = Files(folder, "header", "new", "held")
        room = Room(place.state, place.reserve)
        self.group = Group(folder, Volumes(file_size=pool_size, bucket=bucket, room=room))
        self.devices = Devices(self.group, place.group, split)
        self._split = split
        self._counting = threading.Lock()
        self._seen: dict[str, int] = {}
        """How much was fetched for an image when its memory was checked last."""

    def open(self, image: Image, base: Device) -> Device:
        """A read-only disk over ``base`` that keeps what it reads. A damaged volume or header starts empty.

        Without a volume that runs, the disk reads from ``base`` until there is one. Raises BadDevice; BadDisk if the
        image's size is no multiple of 512; NotReleased, CommandFailed.
        """
        source, top = kernel_base(image, base), _top(image)
        with self.group.lock:
            if not devmapper.exists(top):
                with undone_after_error(image, self._close):
                    self._start(image, source)
        return Device(size=image.size, path=devmapper.map_path(top))

    def close(self, image: Image) -> None:
        """Remove all but the header and what the volume holds; the volumes are stopped with the last image.

        Raises CommandFailed if a program reads from the disk, NotReleased. ``tend_volume`` raises errors of volumes.
        """
        with self.group.lock:
            self._close(image)

    def remove(self, key: str) -> int:
        """Make unreachable what is kept of an image. Returns the bytes of the header: a volume does not shrink.

        Raises InUse if the image is open.
        """
        with self.group.lock:
            return self._files.remove(key)

    def size(self, key: str) -> int:
        """The bytes that ``remove`` would free: those of the header."""
        return self._files.size(key)

    def stats(self, image: Image) -> CacheStats:
        """``held_bytes``: what was fetched for the image since it joined its volume, at most its size; if it was open
        then, since the next call.

        bcache does not count what it holds per image. The figure is too high for what was fetched and not kept, or
        dropped since for other images; after a power cut it is too low for what was fetched since the opening.
        ``file_bytes`` is that of all volumes in files, which all images share.

        An image that has a volume again reads by way of the cache again. Memory is freed if nothing was fetched since
        the last call: what it holds is in the volume then.
        """
        held = 0
        with self._counting:  # not the group's lock, which may be held for long
            try:
                self._return(image)
                held = self._held(image)
            except (DriverError, OSError) as error:
                log.info("image %s: its cache is being closed, it seems: %s", image.name, error)
        return CacheStats(held_bytes=min(held, image.size), file_bytes=self.group.file_bytes())

    def existing(self) -> frozenset[str]:
        """Keys of the images with a header, whole or half made."""
        return self._files.keys()

    def _return(self, image: Image) -> None:
        """Read by way of bcache again, or of the parents, if that has failed; and give memory back."""
        top, name = _top(image), label(image)
        if not devmapper.exists(top):
            return
        once = onefetch.device(name).name
        multipath.reinstate(once, multipath.state(once).failed)
        paths = multipath.state(top)
        multipath.reinstate(top, paths.failed)
        if paths.failed or paths.group > 1:  # an agent may have died between the two
            multipath.switch_to(top, 1)
        fetched = onefetch.fetched(name)
        if self._seen.get(name) == fetched:  # else it may be on its way to the volume, and would be fetched again
            onefetch.free(name)
        self._seen[name] = fetched

    def _start(self, image: Image, base: Path) -> None:
        try:
            self._register(image, base)
        except BadDisk as error:
            log.warning("image %s: its cache starts empty: %s", image.name, error)
            self._remove_backing(image)
            for kind in ("header", "held"):
                self._files.of(image, kind).unlink(missing_ok=True)
            self._register(image, base)
        self.group.settle()
        below = _below(image)
        with contextlib.suppress(DriverError, OSError):  # tend_volume raises it
            self.group.join(below)
        if not (bcachedev.settings(below) / "dev").exists():
            # Its volume is not there. bcache waits for it unless told not to, and then does not trust what it holds.
            bcachedev.tell(bcachedev.settings(below) / "running", "1")
        disk = bcachedev.disk(below, sequential_cutoff="0")
        sectors = image.size // SECTOR
        pieces = devmapper.pieces(0, sectors, disk, backing.GUARD // SECTOR, self._split)
        split = devmapper.create(_split_of(image), pieces, read_only=True)
        self._held(image)  # begins to count in a volume that is new to the image
        either = multipath.table(sectors, [[devmapper.number(device)] for device in (split, base)])
        devmapper.create(_top(image), [either], read_only=True)

    def _register(self, image: Image, base: Path) -> None:
        """Have bcache take the image. Raises BadDisk if bcache refuses its header."""
        below, file = _below(image), self._files.of(image, "header")
        if not devmapper.exists(below):
            if not file.exists():
                backing.make_header(file)
            header, sectors = loopdev.attach(file), image.size // SECTOR
            source = onefetch.start(label(image), [f"0 {sectors} linear {base} 0"], sectors)
            data = devmapper.pieces(backing.START, sectors, source, 0, onefetch.piece())
            devmapper.create(below, backing.table(header, data, sectors))
        bcachedev.register(below)

    def _remove_backing(self, image: Image) -> None:
        devmapper.remove(_below(image))
        onefetch.stop(label(image))
        loopdev.detach(self._files.of(image, "header"))

    def _close(self, image: Image) -> None:
        devmapper.remove(_top(image))
        devmapper.remove(_split_of(image))
        volume, held = _volume(image), self._held(image)
        bcachedev.stop(_below(image))
        self._remove_backing(image)
        if volume:
            self._note(image, volume, held)
        self._seen.pop(label(image), None)
        self.group.settle()

    # How much was fetched: the kernel's counter since the opening, and a note of what it has to be added to

    def _held(self, image: Image) -> int:
        """Bytes fetched for the image since it joined its volume. Raises OSError."""
        try:
            noted, text = self._files.of(image, "held").read_text().split()
            before = int(text)
        except (OSError, ValueError):
            noted, before = "", 0
        if not devmapper.exists(_below(image)):
            return max(0, before)
        volume, fetched = _volume(image), onefetch.fetched(label(image))
        if not volume or volume != noted:
            self._note(image, volume, -fetched)
            return 0
        return max(0, before + fetched)

    def _note(self, image: Image, volume: str, before: int) -> None:
        """Note what was fetched for a volume before the kernel's counter began; less than 0 for what is not for it.

        The figure is for people: one that cannot be written makes it too small, and is no error.
        """
        with contextlib.suppress(OSError):
            self._files.of(image, "held").write_text(f"{volume} {before}")


def _top(image: Image) -> str:
    return f"virtman-cache-{label(image)}"


def _split_of(image: Image) -> str:
    return f"virtman-cachesplit-{label(image)}"


def _below(image: Image) -> str:
    return IMAGE + label(image)


def _volume(image: Image) -> str:
    """The set that the image is read by way of; empty if none."""
    below = _below(image)
    home = bcachedev.set_of(below) if devmapper.exists(below) else None
    return home.name if home else ""
