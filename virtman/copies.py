"""Whole copies of what VMs' disks and images hold: as files, or to be published as images."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from drivers.host.space import Room
from virtman import disks, models
from virtman.convert import QCOW2, Content, Progress, convert, of_device
from virtman.fdpassing import Passed, check_writable, theirs
from virtman.newfile import check_new, new_file
from virtman.records import Snapshot
from virtman.stacks import Stacks
from virtman.vms import Vms


class Copies:
    """Reads the disks of ``vms`` and the images of ``stacks``.

    ``folder``: where the agent keeps what no caller may change while a copy is written; ``room``: of its file system.
    """

    def __init__(self, vms: Vms, stacks: Stacks, folder: Path, room: Room) -> None:
        self._vms = vms
        self._stacks = stacks
        self._folder, self._room = folder, room
        self._lock = threading.Lock()
        self._read: Counter[str] = Counter()

    def reads(self, image: str) -> bool:
        """Whether an image is being copied."""
        return self._read[image] > 0

    @contextmanager
    def vm(self, vm: str) -> Iterator[tuple[Content, Snapshot]]:
        """What a VM's disk holds at this moment, to be copied while the VM goes on. Raises as ``disks.take``.

        The stack of its image is there meanwhile, also if the VM is destroyed.
        """
        with (
            self.in_use(self._vms.record(vm).image),
            disks.temporary(self._vms, vm) as snapshot,
            self._vms.vmdisks.reading(vm, snapshot.name) as device,
        ):
            yield of_device(f"the disk of vm {vm}", device), snapshot

    @contextmanager
    def image(self, image: str) -> Iterator[Content]:
        """What an image holds. Its stack is there meanwhile. Raises as ``Stacks.ensure``."""
        with self.in_use(image):
            yield of_device(f"image {image}", self._stacks.origin(self._stacks.ensure(image)))

    def export_image(
        self, image: str, file: Path | Passed, image_format: str, progress: Progress
    ) -> models.Exported:  # fmt: skip
        """Write what an image holds to a new file. Raises as ``Stacks.ensure`` and ``Target``."""
        target = Target(file, self._folder, self._room)
        with self.image(image) as content:
            target.fill(content, image_format, progress)
            return models.Exported(file=str(target.name), format=image_format, size=content.size)

    def export_vm(self, vm: str, file: Path | Passed, image_format: str, progress: Progress) -> models.Exported:
        """Write what a VM's disk holds now to a new file. Raises as ``disks.take`` and ``Target``."""
        target = Target(file, self._folder, self._room)
        with self.vm(vm) as (content, snapshot):
            target.fill(content, image_format, progress)
            return models.Exported(
                file=str(target.name), format=image_format, size=content.size, state=snapshot.state
            )  # fmt: skip

    @contextmanager
    def in_use(self, image: str) -> Iterator[None]:
        """The stack of an image that is there stays meanwhile."""
        with self._lock:
            self._read[image] += 1
        try:
            yield
        finally:
            with self._lock:
                self._read[image] -= 1


class Target:
    """A new file that a disk is written to: one of a caller's, or one that the agent makes.

    ``name``: what it is called. ``folder``: where the agent keeps what no caller may change meanwhile.
    """

    def __init__(self, file: Path | Passed, folder: Path, room: Room) -> None:
        """Raises BadRequest, FileExists."""
        self._file, self._folder, self._room = file, folder, room
        if isinstance(file, Passed):
            self.name = file.name
            check_writable(file.fd, file.name)
        else:
            self.name = file
            check_new(file)

    def fill(self, content: Content, image_format: str, progress: Progress) -> None:
        """Have it hold a disk. After an error one that the agent makes is not there.

        Raises BadRequest, FileExists, NoRoom, HostTrouble.
        """
        if not isinstance(self._file, Passed):
            with new_file(self._file) as file:
                convert(content, file.path, image_format, progress, self._room)
        elif image_format == QCOW2 and not self._file.trusted:
            with theirs(self._file, self._folder, self._room) as path:
                convert(content, path, image_format, progress, self._room)
        else:
            convert(content, self._file.path, image_format, progress, self._room)
