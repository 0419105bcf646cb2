"""Images in place: a raw file or a block device that this agent serves and did not copy.

Nothing keeps others from changing the file. So the agent records its identity when the image is published
(``InPlace``), and checks the open object each time it is opened and with every heartbeat. A changed object is not
served. The agent hands on what is open, never the path, which may lead elsewhere meanwhile.

A file is compared by inode, size and times; nobody can set the time of the last change. The number of its file system
does not count: it differs after each mount. The record of a device has size and lasting name; a device without such a
name has its number, the kernel's count of disks (diskseq), and the boot.

A changed image loses all layers, the endpoint included. Its children go to another parent, or wait. Members of the
agent's group publish, too, so a path in their hands must never lead the agent to another file.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import stat
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from drivers.base import Opened
from drivers.digests import BLAKE3, DRAWN, kind_of
from drivers.host import blockdev, descriptors
from drivers.host.retry import until
from virtman.convert import RAW
from virtman.errors import BadImageFile, OriginChanged, OriginMissing
from virtman.fdpassing import Passed, check_read
from virtman.hostfiles import translate_os_errors
from virtman.imagefile import LONGEST, check_size, refuse_other_formats
from virtman.records import DEVICE, FILE, ImageRecord, InPlace

log = logging.getLogger(__name__)

SECTOR = 512
SETTLED = 0.05
"""Seconds: the kernel's clock for files' times ticks at least 100 times a second. A write in the tick of the last
change, after the agent has read the times, would not show."""
SETTLES_WITHIN = 2.0
"""Seconds after which a file that still changes is refused."""


# To publish


@contextmanager
def to_publish(
    file: Path | Passed, ours: Collection[Path], clock: Callable[[], float] = time.time
) -> Iterator[tuple[InPlace, int]]:
    """The identity of a file or device to publish in place, and its open descriptor.

    ``ours``: the agent's folders, from which nothing is published; ``clock``: seconds since 1970. Raises BadImageFile,
    HostTrouble.
    """
    path = file.name if isinstance(file, Passed) else file
    if not path.is_absolute():
        raise BadImageFile(f"{str(path)!r} is not an absolute path")
    with contextlib.ExitStack() as stack:
        try:
            fd = stack.enter_context(_opened(path))
        except (OSError, BadImageFile) as error:
            if isinstance(file, Passed) and not file.trusted:  # the caller may not know what is there
                raise _not_passed(path) from error
            if isinstance(error, BadImageFile):
                raise
            raise BadImageFile(f"cannot read {path}: {error.strerror}") from error
        if isinstance(file, Passed):
            check_read(file.fd, path)
            if _where(file.fd) != _where(fd):
                raise _not_passed(path)
        _check_not_ours(fd, path, ours)
        _check_raw(fd, path)
        found = _settled(fd, path, clock)
        _check_size(found)
        if found.kind == DEVICE and isinstance(file, Passed) and not (file.trusted or file.writable):
            found = found.model_copy(update={"lockable": False})
        yield found, fd


def check_free(found: InPlace, fd: int) -> None:
    """Whether nobody has claimed a block device. Raises BadImageFile."""
    with translate_os_errors(f"inspecting {found.path}"):
        if found.kind == DEVICE and blockdev.is_held(fd):
            raise BadImageFile(
                f"{found.path} is in use: it, or a partition of it, is mounted, or is a part of another device"
            )


def _not_passed(path: Path) -> BadImageFile:
    return BadImageFile(f"{path} does not lead to the file that was passed")


def _where(fd: int) -> tuple[int, ...]:
    found = os.fstat(fd)
    kind = stat.S_IFMT(found.st_mode)
    return (kind, found.st_rdev) if stat.S_ISBLK(kind) else (kind, found.st_dev, found.st_ino)


def _check_not_ours(fd: int, path: Path, ours: Collection[Path]) -> None:
    found = os.fstat(fd)
    names = [str(Path(f"/proc/self/fd/{fd}").readlink())]
    if stat.S_ISBLK(found.st_mode):
        names.append(blockdev.backing_file(found.st_rdev))
        if blockdev.map_uuid(found.st_rdev).startswith("VIRTMAN-"):
            raise BadImageFile(f"{path} is the agent's own")
    for folder in ours:
        if any(Path(name).is_relative_to(folder.resolve()) for name in names if name):
            raise BadImageFile(f"{path} is the agent's own: it is in {folder}")


def _settled(fd: int, path: Path, clock: Callable[[], float]) -> InPlace:
    """The identity of an open object, whose data is on the disk and whose last change is so old that another shows."""
    with translate_os_errors(f"inspecting {path}"):
        _sync(fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return _identify(fd, path)
        found = _identify(fd, path)

        def settled() -> bool:
            nonlocal found
            found = _identify(fd, path)
            return not 0 <= clock() - found.ctime_ns / 1e9 < SETTLED

        if not until(settled, limit=SETTLES_WITHIN, first=SETTLED):
            raise BadImageFile(f"{path} is being written to; publish it when that is done")
        return found


def _sync(fd: int) -> None:
    """Write out what waits in memory. Raises OSError.

    After a power cut the times may be there without the data, and a map over a device reads past the memory. A program
    that has pages mapped, and writes to them afterwards, changes the times again.
    """
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EROFS):  # a file system that nobody writes to
            raise


def _check_size(found: InPlace) -> None:
    check_size(found.path, found.size)
    if found.size % SECTOR:
        raise BadImageFile(
            f"{found.path} has {found.size} bytes, and in place only whole sectors of {SECTOR} bytes are served"
        )


def _check_raw(fd: int, path: Path) -> None:
    with translate_os_errors(f"reading {path}"):
        begin = os.pread(fd, LONGEST, 0)
    refuse_other_formats(path, begin, RAW)


# What was published


@contextmanager
def opened(record: ImageRecord) -> Iterator[tuple[InPlace, Opened]]:
    """The object that a record says is served in place: its identity now, and its descriptor.

    Raises OriginChanged, OriginMissing.
    """
    known = record.in_place
    assert known is not None  # noqa: S101
    if wrong := _wrong(record):
        raise OriginChanged(_unserved(record, wrong))
    path = Path(known.path)
    with contextlib.ExitStack() as stack:
        try:
            fd = stack.enter_context(_opened(path))
            now = _identify(fd, path)
        except BadImageFile as error:
            raise OriginChanged(_unserved(record, str(error))) from error
        except OSError as error:
            raise _missing(record, error) from error
        if difference := differs(known, now):
            raise OriginChanged(_unserved(record, f"{path} {difference}"))
        yield now, Opened(fd, _mark(fd, now))


def differs(known: InPlace, now: InPlace) -> str:
    """How an object differs from the known one, for a sentence that begins with its path; empty if it does not."""
    if known.kind != now.kind:
        return f"is a {now.kind} now, and was a {known.kind}"
    if known.identity != now.identity:
        return "is another device now" + _why_another(known.identity, now.identity)
    if known.size != now.size:
        return f"has {now.size} bytes now, and had {known.size}"
    if known.inode != now.inode:
        return "is another file now"
    if (known.mtime_ns, known.ctime_ns) != (now.mtime_ns, now.ctime_ns):
        return "has changed since it was published"
    return ""


def _why_another(known: str, now: str) -> str:
    """A device without a lasting name has a name until the host boots."""
    booted = known.startswith(blockdev.THIS_BOOT) and not now.startswith(" ".join(known.split()[:2]))
    return ", or cannot be known again, since it has no name that it keeps over a boot of this host" if booted else ""


def _wrong(record: ImageRecord) -> str:
    known = record.in_place
    if known is None or known.content is None or record.digest in (None, known.content):
        return ""
    if kind_of(str(record.digest)) != kind_of(known.content):  # no sum was trusted
        return ""
    return f"{known.path} holds {known.content}, and not {record.digest}"


def kind_of_sum(record: ImageRecord) -> str:
    """The kind of digest to compute: that of the trusted digest, if this is a sum."""
    kind = kind_of(str(record.digest))
    return BLAKE3 if kind == DRAWN else kind


def _unserved(record: ImageRecord, why: str) -> str:
    return (
        f"{why}; so image {record.name!r} is not served from it any more: bring back what was published, or publish"
        f" what holds the same: --in-place --trust {record.digest}, or give it up: virtman unpublish {record.name}"
    )


def _missing(record: ImageRecord, error: OSError) -> OriginMissing:
    path = "" if record.in_place is None else record.in_place.path
    return OriginMissing(
        f"cannot open {path}: {error.strerror}; image {record.name!r} is not served from it until it is back"
    )


def _mark(fd: int, found: InPlace) -> str:
    """Differs if a process that has the old object open would not read the new one."""
    instance = blockdev.instance(os.fstat(fd).st_rdev) if found.kind == DEVICE else ""
    facts = (found.kind, found.identity, instance, found.size, found.inode, found.mtime_ns, found.ctime_ns)
    return hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()


# Locks of devices


def is_writable(found: InPlace, fd: int) -> bool:
    """Whether the object is a device that others can write to, and that this agent may lock. Raises OSError."""
    return found.kind == DEVICE and os.geteuid() == 0 and not blockdev.is_read_only(fd)


def lock(fd: int) -> None:
    """Have the kernel refuse to write to a device, if it lets this agent do that. Raises HostTrouble."""
    with translate_os_errors("setting a block device read-only"):
        try:
            blockdev.set_read_only(fd, read_only=True)
        except PermissionError as error:
            log.info("the kernel does not let this agent set a device read-only: %s", error)


def unlock(known: InPlace) -> None:
    """Unlock a device, if it is still there; its path may lead elsewhere. Errors are logged."""
    for path in blockdev.nodes(known.identity):
        try:
            with _opened(path) as fd:
                if blockdev.is_numbered_like(known.identity, _identify(fd, path).identity):
                    blockdev.set_read_only(fd, read_only=False)
        except (OSError, BadImageFile) as error:
            log.warning("%s, which was %s, stays read-only: %s", path, known.path, error)


# Both


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A file or a block device, open for reading. Opening anything else may have effects.

    Raises OSError, BadImageFile.
    """
    with descriptors.opened(path, os.O_PATH) as handle:
        mode = os.fstat(handle).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
            raise BadImageFile(f"{path} is neither a file nor a block device")
        with descriptors.opened(f"/proc/self/fd/{handle}", os.O_NOCTTY | os.O_NONBLOCK) as fd:
            yield fd


def _identify(fd: int, path: Path) -> InPlace:
    """The identity of an open object. Raises OSError."""
    found = os.fstat(fd)
    if stat.S_ISBLK(found.st_mode):
        return InPlace(
            path=str(path), kind=DEVICE, size=blockdev.size(fd), identity=blockdev.identity(found.st_rdev)
        )  # fmt: skip
    return InPlace(
        path=str(path), kind=FILE, size=found.st_size, device=found.st_dev, inode=found.st_ino,
        mtime_ns=found.st_mtime_ns, ctime_ns=found.st_ctime_ns,
    )  # fmt: skip
