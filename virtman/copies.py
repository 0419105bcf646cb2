"""Whole copies of what VMs' disks and images hold: as files, or to be published as images."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from drivers.base import Device
from virtman import disks, hosting, models
from virtman.convert import QCOW2, Content, Progress, convert, of_device
from virtman.fdpassing import Passed, check_writable, theirs
from virtman.imagestore import ImageStore
from virtman.newfile import check_new, new_file
from virtman.records import Snapshot
from virtman.stacks import Stacks
from virtman.vms import Vms


@contextmanager
def content_of_vm(vms: Vms, vm: str) -> Iterator[tuple[Content, Snapshot]]:
    """What a VM's disk holds at this moment, to be copied while the VM goes on. Raises as ``disks.take``.

    The stack of its image stays meanwhile, also if the VM is destroyed.
    """
    with (
        vms.images.keeping(vms.record(vm).image),
        disks.temporary(vms, vm) as snapshot,
        vms.vmdisks.reading(vm, snapshot.name) as device,
    ):
        yield of_device(f"the disk of vm {vm}", device), snapshot


@contextmanager
def content_of_image(stacks: Stacks, image: str) -> Iterator[Content]:
    """What an image holds. Its stack stays meanwhile. Raises as ``hosting.ensure``."""
    with stacks.keeping(image):
        yield of_device(f"image {image}", device_of_image(stacks, image))


def device_of_image(stacks: Stacks, image: str) -> Device:
    """Where this host's programs read an image, while who calls keeps the stack. Raises as ``hosting.ensure``."""
    return stacks.source.device(hosting.ensure(stacks, image).image, of_vm=False)


def export_image(
    stacks: Stacks, image: str, file: Path | Passed, image_format: str, progress: Progress
) -> models.Exported:  # fmt: skip
    """Write what an image holds to a new file. Raises as ``hosting.ensure`` and ``fill``."""
    _check_target(file)
    with content_of_image(stacks, image) as content:
        fill(file, content, image_format, stacks.store, progress)
        return models.Exported(file=_name(file), format=image_format, size=content.size)


def export_vm(vms: Vms, vm: str, file: Path | Passed, image_format: str, progress: Progress) -> models.Exported:
    """Write what a VM's disk holds now to a new file. Raises as ``disks.take`` and ``fill``."""
    _check_target(file)
    with content_of_vm(vms, vm) as (content, snapshot):
        fill(file, content, image_format, vms.images.store, progress)
        return models.Exported(file=_name(file), format=image_format, size=content.size, state=snapshot.state)


def _name(file: Path | Passed) -> str:
    return str(file.name if isinstance(file, Passed) else file)


def _check_target(file: Path | Passed) -> None:
    """Raises BadRequest, Conflict, before anything is done for a file that cannot be written."""
    if isinstance(file, Passed):
        check_writable(file.fd, file.name)
    else:
        check_new(file)


def fill(file: Path | Passed, content: Content, image_format: str, store: ImageStore, progress: Progress) -> None:
    """Write a disk into a file that a caller passed, or into a new one, which is not there after an error.

    qemu-img reads what it writes of a qcow2 file: the caller must not be able to change that meanwhile, so it is
    written in the agent's own folder first. Raises BadRequest, Conflict, NoRoom, HostTrouble.
    """
    if not isinstance(file, Passed):
        with new_file(file) as made:
            convert(content, made.path, image_format, progress, store.room)
    elif image_format == QCOW2 and not file.trusted:
        with theirs(file, store.folder, store.room) as path:
            convert(content, path, image_format, progress, store.room)
    else:
        convert(content, file.path, image_format, progress, store.room)
