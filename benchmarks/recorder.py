"""Record the reads of one real boot of an image.

QEMU boots it under TCG from a private qcow2 disk over the image, as VirtMan's VMs do. nbdkit serves the image below
that disk and logs every read that leaves it, until the serial console shows a login prompt.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import select
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks import processes
from benchmarks.errors import BadImage, BadTrace, BootFailed
from benchmarks.processes import say
from benchmarks.trace import Read, Trace, load, parse_nbdkit_log, save
from lab.process import attempts
from lab.tools import BUILD, run

LOGIN = re.compile(rb"login: ?$")
BOOT_LIMIT = 300.0
"""Seconds for a boot under emulation to come to its login prompt."""

_START_LIMIT = 10.0
_FORMATS = {b"QFI\xfb": "qcow2", b"KDMV": "vmdk"}


def boot_trace(image: Path, chosen: Path | None = None) -> Trace:
    """The trace in the file ``chosen``, else the one kept for this image in build/, else one recorded now.

    Raises BadImage, BadTrace, BootFailed, ToolMissing.
    """
    digest = image_digest(image)
    kept = chosen or BUILD / "traces" / f"{digest.removeprefix('sha256:')[:16]}.json"
    if chosen is None and not kept.exists():
        reads, boot_s = record(image)
        save(Trace(digest, image.stat().st_size, boot_s, tuple(reads)), kept)
    trace = load(kept)
    if trace.digest != digest:
        raise BadTrace(f"{kept} is the trace of another image than {image}")
    say(f"boot trace {kept}: {len(trace.reads)} reads")
    return trace


def image_digest(image: Path) -> str:
    """``sha256:<hex>`` of a raw image. Raises BadImage."""
    try:
        with image.open("rb") as file:
            kind = _FORMATS.get(file.read(4))
            if kind is not None:
                raise BadImage(f"{image} is {kind}; make it raw: qemu-img convert -O raw {image} {image.stem}.raw")
            file.seek(0)
            return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BadImage(f"{image}: {error.strerror}") from error


def record(image: Path) -> tuple[list[Read], float]:
    """The reads of a boot, and the seconds it took. Raises BootFailed, ToolMissing."""
    say(f"recording the reads of one boot of {image} under emulation")
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="vm-trace-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        server, log = folder / "nbd", folder / "log"
        serve = ["nbdkit", "--foreground", "--exit-with-parent", "--readonly", "--unix", str(server)]
        # The probe for the listener makes it complain about a client without a handshake.
        quiet = stack.enter_context((folder / "nbdkit.log").open("wb"))
        serve += ["--filter=log", "file", str(image), f"logfile={log}"]
        stack.enter_context(processes.running(serve, stderr=quiet))
        _wait_for_listener(server)
        disk = folder / "disk.qcow2"
        create = ["create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b", f"nbd+unix:///?socket={server}"]
        run([processes.tool("qemu-img"), *create, str(disk), str(image.stat().st_size)])
        boot_s = _boot(disk)
        with log.open() as lines:
            return list(parse_nbdkit_log(lines)), boot_s


def _wait_for_listener(path: Path) -> None:
    for _ in attempts(_START_LIMIT):
        with socket.socket(socket.AF_UNIX) as sock:
            if sock.connect_ex(str(path)) == 0:
                return
    raise BootFailed(f"nbdkit does not listen after {_START_LIMIT:g} s")


def _boot(disk: Path) -> float:
    drive = {"driver": "qcow2", "node-name": "disk", "file": {"driver": "file", "filename": str(disk)}}
    argv = ["qemu-system-x86_64", "-machine", "q35", "-accel", "tcg", "-m", "512", "-smp", "1", "-nodefaults"]
    argv += ["-display", "none", "-no-reboot", "-serial", "stdio"]
    argv += ["-blockdev", json.dumps(drive), "-device", "virtio-blk-pci,drive=disk"]
    started = time.monotonic()
    with processes.running(argv, stdout=subprocess.PIPE) as machine:
        assert machine.stdout is not None
        said = _read_until_login(machine.stdout.fileno(), started + BOOT_LIMIT)
    if not LOGIN.search(said):
        raise BootFailed(
            f"no login prompt on the serial console; it ended with {said[-200:].decode(errors='replace')!r}"
        )
    return time.monotonic() - started


def _read_until_login(console: int, deadline: float) -> bytes:
    """What the console said up to its login prompt, or up to the deadline or the machine's end if there came none."""
    said = b""
    while not LOGIN.search(said):
        ready, _, _ = select.select([console], [], [], max(0, deadline - time.monotonic()))
        data = os.read(console, 65536) if ready else b""
        if not data:
            break
        said += data
    return said
