"""The two versions of VirtMan that are compared: this one, and the last one with the userspace drivers.

The same Python runs both. The checkout that is first on PYTHONPATH gives the modules, and with its ``egg-info`` the
drivers' entry points. Everything that either version keeps is below its own checkout.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.chunkrows.scale import Job
from benchmarks.errors import Failed
from benchmarks.processes import cpu_seconds, say
from lab.process import processes_of
from lab.tools import BUILD, CHECKOUT, run

COMMIT = "c0e5713"
"""The last commit with the userspace drivers."""

CHECKED_OUT = BUILD / f"before-{COMMIT}"
NOW, BEFORE = "chunk store", "before"

IMAGE = "img"
_PROGRAM = Path(__file__).with_name("either.py")
_DATA_PATH = ("virtman-chunkd", "qemu-storage-daemon")
_END_LIMIT = 300.0


def checked_out(folder: Path | None) -> Path:
    """A checkout of the version before: ``folder``, else one in build/. Raises CommandFailed, Failed."""
    found = (folder or CHECKED_OUT).absolute()
    if not found.exists():
        fresh = found.with_suffix(".new")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        archive = fresh / "checkout.tar"
        run(["git", "-C", CHECKOUT, "archive", "-o", archive, COMMIT])
        run(["tar", "-x", "-C", fresh, "-f", archive])
        archive.unlink()
        fresh.rename(found)
    if not (found / "drivers/cache/qcow2.py").exists():
        raise Failed(f"{found} has no userspace drivers: it is no checkout of {COMMIT}")
    if not (found / "virtman.egg-info").exists():
        subprocess.run([sys.executable, "setup.py", "-q", "egg_info"], cwd=found, check=True)
    return found


def checkouts(job: Job) -> dict[str, Path]:
    """Where each version is."""
    return {NOW: CHECKOUT, BEFORE: job.before}


class Chain:
    """Hosts in a chain. Level 0 is the origin's; each host reads from the one above."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders

    def socket(self, level: int) -> Path:
        """Where a host serves IMAGE to programs, under that name."""
        return self._folders[level] / "serve" / f"{IMAGE}.sock"

    def cpu(self, level: int) -> float:
        """Seconds that the host's data path has used so far: not its agent."""
        found = processes_of(self._folders[level])
        return sum(cpu_seconds(pid) for pid, line in found.items() if Path(line.split()[0]).name in _DATA_PATH)


@contextmanager
def chain(checkout: Path, image: Path, levels: int) -> Iterator[Chain]:
    """Hosts of one version that have nothing of the image yet. Raises Failed."""
    with _program(checkout, "chain", str(image), str(levels)) as process:
        yield Chain([Path(folder) for folder in _answer(process)["hosts"]])


def wave(checkout: Path, image: Path, trace: Path, hosts: int, vms_per_host: int) -> dict[str, Any]:
    """The figures of ``benchmarks.boot_wave`` for a tree of hosts of one version. Raises Failed."""
    with _program(checkout, "wave", str(image), str(trace), str(hosts), str(vms_per_host)) as process:
        figures = _answer(process)
    for left in figures["leftovers"]:
        say(f"left behind: {left}")
    return figures


@contextmanager
def _program(checkout: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """``either.py`` with the modules of a checkout; ended by the end of its input."""
    folder = checkout / "build" / f"chunkstore-{words[0]}"
    shutil.rmtree(folder, ignore_errors=True)
    argv = [sys.executable, "-P", str(_PROGRAM), words[0], str(folder), *words[1:]]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    process = subprocess.Popen(argv, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        try:
            process.communicate(timeout=_END_LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        if process.returncode == 0:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            say(f"hosts ended with exit code {process.returncode}; their logs are in {folder}")


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise Failed("the hosts of one version ended without an answer: see above")
    answer: dict[str, Any] = json.loads(line)
    return answer
