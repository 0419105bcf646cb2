"""An image's card: the file on the front end that its SOURCE names, and that says where the image is in VirtMan.

It lies in the datastore's folder, which all front ends of a cluster share, as with other drivers.

A card says which image VMs' disks are made of, where the disk of a persistent image waits (``kept``), and which VM has
it. It is written after the data are safe, and then origins forget what no card names (``host.sh sweep``): a step that
was cut off leaves something that the next one sweeps away, never a card without data. The name of content is given
once: the card counts the names, and is written before the name is used.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Self

from opennebula_tm.driver.errors import FrontendFailed, Refused

NAME = re.compile(r"one-\d{1,10}-[0-9a-f]{8}")
VERSION = 1
FORMATS = ("raw", "qcow2")


@dataclass(frozen=True)
class Kept:
    """The disk of a persistent image while no VM has it.

    ``disk``: its name at each of the hosts ``at``; ``over``: the image that it lies over; ``of``: the VM's disk that it
    was, which a VM that gets it next forgets.
    """

    disk: str
    at: tuple[str, ...]
    over: str
    of: str = ""


@dataclass(frozen=True)
class Card:
    """``image``: what VMs' disks are made of, "" while nothing was published; ``origins``: the hosts that published it.

    ``format``: of VMs' disks. ``generation`` counts names: no two images or disks of one card get the same.
    ``used_by``: the VM's disk that a persistent image was given to last. ``left_to``: the VMs for whose disks the image
    stays, after OpenNebula has deleted it.
    """

    name: str
    format: str
    origins: tuple[str, ...]
    image: str = ""
    digest: str = ""
    generation: int = 0
    kept: Kept | None = None
    used_by: str = ""
    left_to: tuple[int, ...] = ()
    version: int = field(default=VERSION)

    def next_name(self, letter: str) -> tuple[Self, str]:
        """The card with a name that was not given before, for a disk or an image."""
        number = self.generation + 1
        return replace(self, generation=number), f"{self.name}-{letter}{number}"

    @property
    def published(self) -> str:
        """The image that VMs' disks are made of. Raises Refused if there is none yet."""
        if not self.image:
            raise Refused(f"image {self.name} holds nothing yet: what is saved as it has not been saved")
        return self.image


class Cards:
    """Reads and writes cards, one call at a time for each."""

    @contextmanager
    def locked(self, path: PurePosixPath) -> Iterator[None]:
        """Nobody else changes the card meanwhile. Raises FrontendFailed."""
        with _open_lock(path) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @contextmanager
    def locked_at_once(self, path: PurePosixPath) -> Iterator[bool]:
        """As ``locked``, but does not wait: yields whether the card is locked now. Raises FrontendFailed."""
        with _open_lock(path) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def read(self, path: PurePosixPath) -> Card:
        """The card of an image. Raises Refused (it is none of ours), FrontendFailed."""
        _check_name(path)
        try:
            return _card(json.loads(Path(path).read_text()), path)
        except FileNotFoundError:
            raise Refused(f"there is no card {path}: was the image deleted, or the datastore's folder lost?") from None
        except (OSError, ValueError) as error:
            raise FrontendFailed(f"cannot read the card {path}: {error}") from error

    def exists(self, path: PurePosixPath) -> bool:
        """Whether there is one."""
        _check_name(path)
        return Path(path).exists()

    def paths(self, folder: PurePosixPath) -> list[PurePosixPath]:
        """The cards in a datastore's folder."""
        return [PurePosixPath(file) for file in Path(folder).glob("one-*") if NAME.fullmatch(file.name)]

    def write(self, path: PurePosixPath, card: Card) -> None:
        """Write the card down, so that it is there after a power cut. Raises FrontendFailed."""
        _check_name(path)
        file = Path(path)
        try:
            durable(file, json.dumps(asdict(card), indent=2).encode() + b"\n")
        except OSError as error:
            raise FrontendFailed(f"cannot write the card {path}: {error.strerror}") from error

    def remove(self, path: PurePosixPath) -> None:
        """Remove it, and its lock. Raises FrontendFailed."""
        file = Path(path)
        try:
            file.unlink(missing_ok=True)
            file.with_name(f".{file.name}.lock").unlink(missing_ok=True)
        except OSError as error:
            raise FrontendFailed(f"cannot remove the card {path}: {error.strerror}") from error


@contextmanager
def _open_lock(path: PurePosixPath) -> Iterator[int]:
    """The descriptor of a card's lock. Raises Refused, FrontendFailed."""
    file = Path(path)
    _check_name(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(file.with_name(f".{file.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise FrontendFailed(f"cannot lock the card {path}: {error.strerror}") from error
    try:
        yield lock
    finally:
        os.close(lock)


def durable(file: Path, content: bytes) -> None:
    """Write a file whole or not at all. Raises OSError."""
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "wb") as target:
            target.write(content)
            target.flush()
            os.fsync(target.fileno())
        Path(name).rename(file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync(file.parent)


def sync(folder: Path) -> None:
    """Have the names in a folder on the disk. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _check_name(path: PurePosixPath) -> None:
    if not NAME.fullmatch(path.name):
        raise Refused(f"{path} is no image of a VirtMan datastore")


def _card(found: Any, path: PurePosixPath) -> Card:
    if not isinstance(found, dict) or found.get("version") != VERSION:
        raise FrontendFailed(f"the card {path} is of another release: this one knows version {VERSION}")
    known = {key: value for key, value in found.items() if key in Card.__dataclass_fields__}
    try:
        if known.get("kept"):
            known["kept"] = Kept(**_tuples(known["kept"]))
        return Card(**_tuples(known))
    except (TypeError, AttributeError) as error:
        raise FrontendFailed(f"the card {path} is damaged: {error}") from error


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
            for key, value in values.items()}  # fmt: skip
