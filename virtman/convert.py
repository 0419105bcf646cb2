"""Copying the whole of a disk into one file of its own, by qemu-img."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from drivers.base import BlockNode, Device
from drivers.errors import CommandFailed
from drivers.host.command import Check, run
from drivers.host.space import Room
from drivers.qemu.monitor import SETPRIV
from virtman.errors import BadImageFile, HostTrouble, NoRoom, VirtmanError
from virtman.hostfiles import no_room, require_room, translate_os_errors

Progress = Callable[[str, int, int], None]
"""Called with what is done ("read", "copy", "compare" or "digest"), bytes done and bytes in all."""

RAW, QCOW2 = "raw", "qcow2"
COPY_TIMEOUT = 6 * 3600.0
"""Seconds."""
_DIFFERENT = 1
"""qemu-img compare: exit code for two disks that do not hold the same."""

FASTEST = 4 << 30
"""Bytes a second that no copy reaches: room is checked again before a copy can have used it up."""
SHORTEST_PAUSE, LONGEST_PAUSE = 0.002, 1.0
"""Seconds between two checks of the room."""


@dataclass(frozen=True)
class Content:
    """A whole disk. ``name`` is for people; ``location``: how qemu-img opens it; ``size`` of the disk in bytes.

    ``needed``: bytes of disk space that a copy surely takes; ``fault``: what to raise if it cannot be read.
    """

    name: str
    location: tuple[str, ...]
    size: int
    needed: int
    fault: type[VirtmanError] = BadImageFile


def node_of(device: Device) -> BlockNode:
    """How QEMU opens a layer of the agent's own."""
    return device.node or {"driver": "host_device", "filename": str(device.path)}


def of_device(name: str, device: Device) -> Content:
    """What a layer of the agent's own holds. How much a copy takes is not known before its end."""
    if device.node is not None:
        location: tuple[str, ...] = ("json:" + json.dumps(device.node),)
    else:
        location = ("-f", RAW, str(device.path))
    return Content(name, location, device.size, 0, HostTrouble)


def convert(content: Content, target: Path, image_format: str, progress: Progress, room: Room) -> None:
    """Fill ``target``, sparse.

    Raises NoRoom, before it begins if ``needed`` says so, or at the reserve; HostTrouble, or the content's ``fault``.
    """
    where = target if target.exists() else target.parent
    require_room(room, where, content.needed, f"{content.name}, which takes {content.needed >> 20} MiB")

    def keep_reserve() -> float:
        """Keep the reserve. A file system without one may be filled. Returns when to look again. Raises NoRoom."""
        with translate_os_errors(f"looking for room in {where}"):
            spare = room.spare(where)
            if not spare and room.reserve(where):
                raise no_room(room, where, content.name)
        return min(max(spare / FASTEST, SHORTEST_PAUSE), LONGEST_PAUSE)

    argv = ["-O", image_format, *content.location, str(target)]
    try:
        _qemu_img("convert", argv, "copy", content.size, progress, keep_reserve)
        keep_reserve()
    except CommandFailed as error:
        if "No space left" in error.stderr:
            raise no_room(room, where, content.name) from error
        if "File too large" in error.stderr:
            raise NoRoom(
                f"the file system of {target.resolve().parent} has no files of {content.size} bytes, which"
                f" {content.name} has"
            ) from error
        said = last_line(error.stderr).replace(content.location[-1], content.name)
        raise content.fault(f"cannot copy {content.name}: {said}") from error


def holds(content: Content, raw: Path, progress: Progress) -> bool:
    """Whether a raw file of the same size holds the same. It is read to the first difference, and no hole is read.

    Raises the content's ``fault``.
    """
    try:
        _qemu_img("compare", ["-F", RAW, *content.location, str(raw)], "compare", content.size, progress)
    except CommandFailed as error:
        if error.code == _DIFFERENT:
            return False
        said = last_line(error.stderr).replace(content.location[-1], content.name)
        raise content.fault(f"cannot compare {content.name} with {raw}: {said}") from error
    return True


def _qemu_img(
    command: str, rest: Sequence[str], step: str, size: int, progress: Progress, check: Check | None = None
) -> None:  # fmt: skip
    """Run a program that the kernel ends with this thread (prctl(2), PR_SET_PDEATHSIG).

    Raises CommandFailed, and as ``check``.
    """

    def on_line(line: str) -> None:
        # qemu-img -p prints "    (12.34/100%)"
        percent = line.strip().strip("(").partition("/")[0]
        if percent.replace(".", "", 1).isdigit():
            progress(step, int(size * float(percent) / 100), size)

    argv = [SETPRIV.name, "--pdeathsig", "KILL", "qemu-img", command, "-p", *rest]
    run(argv, timeout=COPY_TIMEOUT, on_line=on_line, check=check)


def last_line(text: str) -> str:
    """What a tool said at last."""
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "no reason given"
