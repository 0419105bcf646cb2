"""The disk of a VM that is small enough to boot in a guest of the kernel lab: emulation in emulation.

Any BIOS boots it: Debian's kernel, busybox, and an init that reads a file of known content and prints its sum on
ttyS0. It is made of files of the lab's root and kept under a hash of everything that makes it.

``python -m lab.kernel.tinyvm [--suite trixie]`` builds it and prints where it is.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

from lab import guest
from lab.errors import NotReady
from lab.kernel.root import Root, root
from lab.tools import BUILD, run

LAID_OVER = guest.LAB / "tiny-root"
LOADER_SETTINGS = guest.LAB / "guest-root/boot/extlinux"
DISK_BYTES = 64 * guest.MIB
CONTENT_BYTES = 2 * guest.MIB


@dataclass(frozen=True)
class TinyVm:
    """The disk (raw, sparse, whole MiB), and what a VM prints from user space when it read the right content."""

    disk: Path
    line: str


def tiny_vm(suite: str = "", cache: Path = BUILD / "tiny-vm") -> TinyVm:
    """The disk, built now if it is not in the cache. ``suite``: as for the root that it is made of."""
    made_from = root(suite)
    home = guest.kept(cache, recipe_hash(made_from), "the tiny VM", functools.partial(build, made_from))
    return TinyVm(home / "disk.img", f"virtman-tiny: up, disk sum {hashlib.sha256(content()).hexdigest()}")


def content() -> bytes:
    """What is in /content of the disk: always the same, and no two blocks of it are alike."""
    return random.Random("virtman-tiny").randbytes(CONTENT_BYTES)


def recipe_hash(made_from: Root) -> str:
    """Names a disk by all that makes it. The root has a name of that kind, which covers lab.guest."""
    digest = hashlib.sha256(made_from.image.parent.name.encode())
    files = [*guest.files_below(LAID_OVER), *guest.files_below(LOADER_SETTINGS), guest.LAB / "install-extlinux"]
    for path in sorted([Path(__file__), *files]):
        digest.update(f"\0{path.relative_to(guest.LAB)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def build(made_from: Root, work: Path, made: Path) -> None:
    """Make the disk in ``made``."""
    tree = work / "root"
    shutil.copytree(LAID_OVER, tree)
    shutil.copytree(LOADER_SETTINGS, tree / "boot/extlinux")
    for folder in ("bin", "dev", "lib", "proc", "sys"):
        (tree / folder).mkdir()
    shutil.copy(made_from.kernel, tree / "boot/vmlinuz")
    take(made_from, f"dump -p /usr/bin/busybox {tree / 'bin/busybox'}", tree / "bin/busybox")
    take(made_from, f"rdump /usr/lib/modules {tree / 'lib'}", tree / "lib/modules")
    (tree / "bin/sh").symlink_to("busybox")
    guest.make_initrd(tree, second_modules=())
    shutil.rmtree(tree / "lib")  # what it needs is in the initrd
    (tree / "content").write_bytes(content())
    guest.make_disk(tree, made / "disk.img", DISK_BYTES)


def take(made_from: Root, request: str, result: Path) -> None:
    """Copy from the root's file system, unmounted. Raises NotReady: debugfs ends with 0 whatever happens."""
    run(["debugfs", "-R", request, made_from.image])
    if not result.exists():
        raise NotReady(f"{made_from.image}: debugfs did not make {result}")


def main() -> None:
    """Build the disk and print where it is."""
    parser = argparse.ArgumentParser(prog="python -m lab.kernel.tinyvm", description=__doc__)
    guest.add_suite(parser)
    print(tiny_vm(parser.parse_args().suite).disk)


if __name__ == "__main__":
    main()
