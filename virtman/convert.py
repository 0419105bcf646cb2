"""Copying the whole of a disk into one file of its own, by qemu-img."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from drivers.base import Device
from drivers.errors import CommandFailed
from drivers.host.command import run
from drivers.qemu.monitor import SETPRIV
from virtman.errors import BadImageFile, HostTrouble, NoRoom, VirtmanError

Progress = Callable[[str, int, int], None]
"""Called with what is done ("read", "copy", "compare" or "digest"), bytes done and bytes in all."""

RAW, QCOW2 = "raw", "qcow2"
COPY_TIMEOUT = 6 * 3600.0
"""Seconds."""
_DIFFERENT = 1
"""qemu-img compare: exit code for two disks that do not hold the same."""


@dataclass(frozen=True)
class Content:
    """A whole disk. ``name`` is for people; ``location``: how qemu-img opens it; ``size`` of the disk in bytes.

    ``needed``: bytes of disk space that a copy takes at least; ``fault``: what to raise if it cannot be read.
    """

    name: str
    location: tuple[str, ...]
    size: int
    needed: int
    fault: type[VirtmanError] = BadImageFile


def of_device(name: str, device: Device, needed: int = 0) -> Content:
    """What a layer of the agent's own holds. ``needed``: see ``Content``."""
    if device.node is not None:
        location: tuple[str, ...] = ("json:" + json.dumps(device.node),)
    else:
        location = ("-f", RAW, str(device.path))
    return Content(name, location, device.size, needed, HostTrouble)


def convert(content: Content, target: Path, image_format: str, progress: Progress) -> None:
    """Fill ``target``, sparse. Raises NoRoom, or the content's ``fault``."""
    try:
        _qemu_img("convert", ["-O", image_format, *content.location, str(target)], "copy", content.size, progress)
    except CommandFailed as error:
        if "No space left" in error.stderr:
            raise NoRoom(f"no space left in {target.resolve().parent} while copying {content.name}") from error
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


def _qemu_img(command: str, rest: Sequence[str], step: str, size: int, progress: Progress) -> None:
    """Run a program that the kernel ends with this thread (prctl(2), PR_SET_PDEATHSIG). Raises CommandFailed."""

    def on_line(line: str) -> None:
        # qemu-img -p prints "    (12.34/100%)"
        percent = line.strip().strip("(").partition("/")[0]
        if percent.replace(".", "", 1).isdigit():
            progress(step, int(size * float(percent) / 100), size)

    argv = [SETPRIV.name, "--pdeathsig", "KILL", "qemu-img", command, "-p", *rest]
    run(argv, timeout=COPY_TIMEOUT, on_line=on_line)


def last_line(text: str) -> str:
    """What a tool said at last."""
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "no reason given"
