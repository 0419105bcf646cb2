"""Whether KVM works on this machine.

That /dev/kvm exists proves nothing: on some virtual machines a stock kernel hangs in it. So a kernel is booted with it,
and must print its banner within a time limit. The verdict is remembered until the next reboot.
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from drivers.host.durable import write_atomically

log = logging.getLogger(__name__)

TIME_LIMIT = 10.0
"""Seconds to the kernel's banner. With a KVM that works it takes less than one."""
BANNER = b"Linux version"
QEMU = "qemu-system-x86_64"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Verdict:
    """``accel`` is ``kvm`` or ``tcg``; ``reason`` says why, for people."""

    accel: str
    reason: str


def choose_accel(kernel: Path | None, memory: Path, device: Path = Path("/dev/kvm")) -> Verdict:
    """The accelerator to use; ``memory`` is the file that keeps the verdict.

    ``kernel`` is the Linux kernel to prove KVM with; by default the newest in /boot.
    """
    if not os.access(device, os.R_OK | os.W_OK):
        return Verdict("tcg", _no_device(device))
    kernel = kernel or newest_kernel(Path("/boot"))
    if kernel is None:
        return Verdict(
            "tcg", "KVM cannot be proven to work: no kernel in /boot to boot with it (name one with --probe-kernel)"
        )
    remembered = _recall(memory, kernel)
    if remembered is not None:
        return remembered
    verdict = prove_kvm(kernel)
    note = {"boot_id": BOOT_ID.read_text().strip(), "kernel": str(kernel), **asdict(verdict)}
    write_atomically(memory, json.dumps(note).encode())
    return verdict


def newest_kernel(folder: Path) -> Path | None:
    """The kernel in a boot folder that was installed last."""
    kernels = [path for path in folder.glob("vmlinuz*") if os.access(path, os.R_OK)]
    return max(kernels, key=lambda path: path.stat().st_mtime, default=None)


def known_accel(memory: Path, device: Path = Path("/dev/kvm")) -> Verdict | None:
    """The accelerator as far as it is known without a proof; None if only a proof can tell."""
    return _recall(memory, None) if os.access(device, os.R_OK | os.W_OK) else Verdict("tcg", _no_device(device))


def _no_device(device: Path) -> str:
    return f"{device} is not there or not ours to use"


def _recall(memory: Path, kernel: Path | None) -> Verdict | None:
    """The verdict of this boot of the machine on ``kernel``, or on whichever it was."""
    try:
        note = json.loads(memory.read_bytes())
        if note["boot_id"] == BOOT_ID.read_text().strip() and kernel in (None, Path(note["kernel"])):
            return Verdict(note["accel"], note["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        log.debug("no verdict on KVM in %s", memory)
    return None


def prove_kvm(kernel: Path, time_limit: float = TIME_LIMIT, accel: str = "kvm") -> Verdict:
    """Boot ``kernel`` and wait for its banner, ``time_limit`` seconds at most."""
    argv = [
        QEMU, "-machine", "q35", "-accel", accel, "-m", "256", "-nodefaults", "-display", "none", "-no-reboot",
        "-serial", "stdio", "-kernel", str(kernel), "-append", "console=ttyS0 earlyprintk=ttyS0 panic=-1",
    ]  # fmt: skip
    log.info("awaiting the banner of %s under %s, at most %.0f s", kernel, accel, time_limit)
    try:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError as error:
        return Verdict("tcg", f"cannot run {QEMU}: {error.strerror}")
    try:
        seen = _read_until(process, BANNER, time.monotonic() + time_limit)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    if seen:
        return Verdict(accel, f"{kernel.name} booted with it")
    return Verdict("tcg", f"{kernel.name} did not boot with {accel} within {time_limit:.0f} s")


def _read_until(process: subprocess.Popen[bytes], wanted: bytes, deadline: float) -> bool:
    assert process.stdout is not None  # noqa: S101  it was asked for
    output = b""
    poller = select.poll()  # select(2) takes no file beyond the first 1024
    poller.register(process.stdout, select.POLLIN)
    while wanted not in output:
        ready = poller.poll(1000 * max(0.0, deadline - time.monotonic()))
        chunk = os.read(process.stdout.fileno(), 4096) if ready else b""
        if not chunk:
            return False
        output += chunk
    return True
