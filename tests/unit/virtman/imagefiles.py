"""Files of disks for tests of what is published."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
from pathlib import Path

from blake3 import blake3
from testtools import TestCase
from testtools.matchers import Contains

from drivers.digests import BLAKE3
from drivers.host.space import Room
from drivers.manifest import CHUNK, NAME, PAGE
from tests.unit.virtman.scene import folder_for
from virtman.errors import BadImageFile
from virtman.imagefile import inspect

MIB = 1 << 20
CONTENT = random.Random(1).randbytes(MIB) + bytes(2 * MIB) + b"end".ljust(512, b".")


def qemu_img(*arguments: object) -> None:
    """Run it."""
    subprocess.run(["qemu-img", *map(str, arguments)], check=True, capture_output=True)


def digest_of(content: bytes) -> str:
    """The digest of an image with this content, as drivers/manifest.py describes it."""
    chunks = [content[at : at + CHUNK].ljust(CHUNK, b"\0") for at in range(0, len(content), CHUNK)]
    names = [bytes(NAME) if chunk == bytes(CHUNK) else blake3(chunk).digest() for chunk in chunks]
    pages = [b"".join(names[at : at + PAGE]) for at in range(0, len(names), PAGE)]
    listed = b"".join(blake3(page).digest() for page in pages)
    return BLAKE3 + blake3(len(content).to_bytes(8, "little") + listed).hexdigest()


class ImagesTest(TestCase):
    """A folder with a raw disk."""

    def setUp(self) -> None:
        super().setUp()
        if shutil.which("qemu-img") is None:
            self.skipTest("qemu-img is missing: it is in Debian's package qemu-utils")
        self.folder = folder_for(self)
        self.raw = self.file("disk.raw", CONTENT)
        self.room = Room(self.folder)

    def file(self, name: str, content: bytes) -> Path:
        path = self.folder / name
        path.write_bytes(content)
        return path

    def qcow2(self, *options: str) -> Path:
        path = self.folder / "disk.qcow2"
        qemu_img("convert", "-O", "qcow2", *options, self.raw, path)
        return path

    def refused(self, path: Path, *reasons: str) -> None:
        """The file is refused in one line that names it."""
        error = self.assertRaises(BadImageFile, inspect, path)
        for text in (str(path), *reasons):
            self.assertThat(str(error), Contains(text))

    def tiny(self, size: int) -> Path:
        """A file system of the given size."""
        if os.geteuid() != 0:
            self.skipTest("only root can mount a small file system")
        folder = self.folder / "tiny"
        folder.mkdir()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"tmpfs", bytes(folder), b"tmpfs", 0, f"size={size}".encode()) != 0:
            self.skipTest(f"cannot mount a tmpfs: {os.strerror(ctypes.get_errno())}")
        self.addCleanup(libc.umount2, bytes(folder), 0)
        return folder
