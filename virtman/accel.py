"""Whether KVM works on this machine.

That /dev/kvm exists proves nothing: on some virtual machines a stock kernel hangs in it. So a kernel is booted with it,
and must print its banner within a time limit. The answer is kept until the next reboot.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import threading
from pathlib import Path

from drivers.host.blockdev import BOOT_ID
from drivers.host.durable import write_atomically
from virtman.models import Accel

log = logging.getLogger(__name__)

TIME_LIMIT = 10.0
"""Seconds to the kernel's banner. With a KVM that works it takes less than one."""
BANNER = b"Linux version"
QEMU = "qemu-system-x86_64"


def choose_accel(kernel: Path | None, memory: Path, device: Path = Path("/dev/kvm")) -> Accel:
    """The accelerator to use; ``memory`` is the file that keeps the answer.

    ``kernel`` is the Linux kernel to prove KVM with; by default the newest in /boot.
    """
    kernel = kernel or newest_kernel(Path("/boot"))
    known = known_accel(memory, device, kernel)
    if known is not None:
        return known
    if kernel is None:
        return _emulation("KVM cannot be proven to work: no kernel in /boot to boot with it (see --probe-kernel)")
    accel = prove_kvm(kernel)
    note = {"boot_id": BOOT_ID.read_text().strip(), "kernel": str(kernel), **accel.model_dump()}
    write_atomically(memory, json.dumps(note).encode())
    return accel


def newest_kernel(folder: Path) -> Path | None:
    """The kernel in a boot folder that was installed last."""
    kernels = [path for path in folder.glob("vmlinuz*") if os.access(path, os.R_OK)]
    return max(kernels, key=lambda path: path.stat().st_mtime, default=None)


def known_accel(memory: Path, device: Path = Path("/dev/kvm"), kernel: Path | None = None) -> Accel | None:
    """The accelerator, if no proof is needed to tell, or one was made with ``kernel`` (None: any) since the boot."""
    if not os.access(device, os.R_OK | os.W_OK):
        return _emulation(f"{device} is not there or not ours to use")
    try:
        note = json.loads(memory.read_bytes())
        if note["boot_id"] == BOOT_ID.read_text().strip() and kernel in (None, Path(note["kernel"])):
            return Accel(use=note["use"], reason=note["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        log.debug("%s does not say whether KVM works", memory)
    return None


def prove_kvm(kernel: Path, time_limit: float = TIME_LIMIT) -> Accel:
    """Boot ``kernel`` and wait for its banner, ``time_limit`` seconds at most."""
    argv = [
        QEMU, "-machine", "q35", "-accel", "kvm", "-m", "256", "-nodefaults", "-display", "none", "-no-reboot",
        "-serial", "stdio", "-kernel", str(kernel), "-append", "console=ttyS0 earlyprintk=ttyS0 panic=-1",
    ]  # fmt: skip
    log.info("awaiting the banner of %s under KVM, at most %.0f s", kernel, time_limit)
    try:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError as error:
        return _emulation(f"cannot run {QEMU}: {error.strerror}")
    limit = threading.Timer(time_limit, process.kill)
    limit.start()
    with process:
        seen = any(BANNER in line for line in process.stdout or ())
        limit.cancel()
        process.kill()
    if seen:
        return Accel(use="kvm", reason=f"{kernel.name} booted with it")
    return _emulation(f"{kernel.name} did not boot with KVM within {time_limit:.0f} s")


def _emulation(reason: str) -> Accel:
    return Accel(use="tcg", reason=reason)
