"""What the API answers, made of records and of what drivers say. Nothing here asks or changes anything."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from drivers import base
from virtman import models
from virtman.domain import NONE, mac_of
from virtman.hostfiles import translate_os_errors
from virtman.records import ARRIVE, ImageRecord, Snapshot, VmRecord
from volt.client import Image as PublishedImage


def disk(record: VmRecord, user: str | None) -> models.Disk:
    """A VM's disk, as far as its record knows it; ``user`` is the VM that it is attached to."""
    return models.Disk(**dict(record), phase=record.phase, attached_to=user)


def open_disk(record: VmRecord, device: base.Device, user: str | None) -> models.OpenDisk:
    """A VM's disk that was opened.

    Its block node names no layers: a program that kept them would later write to a snapshot.
    """
    path, blockdev = str(device.path), None
    if device.node is not None:
        blockdev = {option: value for option, value in device.node.items() if option != "backing"}
        blockdev["file"] = {"driver": "file", "filename": path}
    return models.OpenDisk(**dict(disk(record, user)), path=path, blockdev=blockdev)


def snapshot(record: VmRecord, snapshot: Snapshot) -> models.Snapshot:
    """A point in time of a VM's disk."""
    return models.Snapshot(**dict(snapshot), current=snapshot.name == record.current)


def machine(record: VmRecord, state: str, console_log: Path, accel: str) -> models.Machine | None:
    """What runs from a disk; None for a VM that was never booted."""
    if record.boot is None:
        return None
    mac = None if record.boot.network == NONE else mac_of(record.uuid)
    return models.Machine(**dict(record.boot), state=state, console_log=str(console_log), accel=accel, mac=mac)


def more(record: VmRecord) -> dict[str, Any]:
    """What else there is to say of a VM."""
    return {
        "disks": list(record.disks),
        "moved_to": record.moved,
        "uuid": record.uuid,
        "arriving": record.arriving and not record.doing(ARRIVE),
    }


def image(
    published: PublishedImage, record: ImageRecord | None, held_bytes: int, in_place: models.InPlace | None
) -> models.Image:  # fmt: skip
    """A published image, and how far it is here."""
    here = None
    if record is not None:
        here = models.ImageHere(role=record.role, phase=record.phase, held_bytes=held_bytes, in_place=in_place)
    return models.Image(**dict(published), here=here)


def in_place(record: ImageRecord, trouble: str | None, *, held: bool) -> models.InPlace | None:
    """What an image is served from in place; None if it is not."""
    known = record.in_place
    if known is None:
        return None
    return models.InPlace(
        path=known.path, held=held, trouble=trouble, digest=known.content,
        computing=known.digest and known.content is None,
    )  # fmt: skip


def published(record: ImageRecord) -> models.Published:
    """An image that this host published."""
    return models.Published(name=record.image.name, size=record.image.size, digest=record.image.digest)


def stack(
    record: ImageRecord, stats: base.CacheStats, hit_bytes: int | None, paths: Iterable[base.PathStatus],
    vms: Iterable[str], in_place: models.InPlace | None, *, serving: bool,
) -> models.Stack:  # fmt: skip
    """One image's stack."""
    return models.Stack(
        name=record.name, role=record.role, phase=record.phase, serving=serving, slot=record.slot, size=record.size,
        fetched_bytes=stats.held_bytes, cache_file_bytes=stats.file_bytes, cache_hit_bytes=hit_bytes,
        paths=[models.Route(host=p.parent.host, address=p.parent.address, state=p.state) for p in paths],
        children=[child.host for child in record.children], vms=list(vms), in_place=in_place,
    )  # fmt: skip


def left_alone(
    vms: Mapping[str, str], images: Mapping[str, str], devices: Mapping[str, str]
) -> dict[str, str]:  # fmt: skip
    """Why records are left alone, by what they are of."""
    kinds = {"vm": vms, "image": images, "device": devices}
    return {f"{kind} {name}": why for kind, found in kinds.items() for name, why in found.items()}


def disks(trouble: str, state: Path) -> models.Disks:
    """What VMs' disks have: whether they are in trouble, and the room of the state folder's file system.

    Raises HostTrouble.
    """
    with translate_os_errors(f"looking at {state}"):
        room = os.statvfs(state)
    # Not f_bfree: what is reserved for root is nothing to plan with.
    return models.Disks(
        trouble=trouble or None, total=room.f_blocks * room.f_frsize, free=room.f_bavail * room.f_frsize
    )  # fmt: skip
