"""What the API answers, made of records and of what drivers say. Nothing here asks or changes anything."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from drivers import base
from drivers.host.watch import Death
from virtman import models
from virtman.accel import Verdict
from virtman.errors import BadRequest
from virtman.hostfiles import told
from virtman.records import ARRIVE, Boot, ImageRecord, Point, VmRecord
from virtman.vms import Traveller
from volt.client import Image as PublishedImage


def disk(record: VmRecord, user: str | None) -> models.Disk:
    """A VM's disk, as far as its record knows it; ``user`` is the VM that it is attached to."""
    return models.Disk(
        image=record.image, size=record.size, phase=record.phase, source=record.source, attached_to=user
    )  # fmt: skip


def open_disk(record: VmRecord, device: base.Device, user: str | None) -> models.OpenDisk:
    """A VM's disk that was opened. Its block node names no layers: who kept them would later write to a snapshot's."""
    path, node = str(device.path), device.node
    blockdev = None if node is None else {"driver": node["driver"], "file": {"driver": "file", "filename": path}}
    return models.OpenDisk(**dict(disk(record, user)), path=path, blockdev=blockdev)


def snapshot(record: VmRecord, point: Point) -> models.Snapshot:
    """A point in time of a VM's disk."""
    return models.Snapshot(
        name=point.name, parent=point.parent, size=point.size, taken=datetime.fromtimestamp(point.taken, UTC),
        state=point.state, current=point.name == record.current,
    )  # fmt: skip


def machine(boot: Boot | None, state: str, console_log: Path, accel: str) -> models.Machine | None:
    """What runs from a disk; None for a VM that was never booted."""
    if boot is None:
        return None
    return models.Machine(
        state=state, memory=boot.memory, cpus=boot.cpus, network=boot.network, console_log=str(console_log), accel=accel
    )


def more(record: VmRecord) -> dict[str, Any]:
    """What else there is to say of a VM."""
    return {
        "disks": list(record.disks),
        "moved_to": record.moved,
        "uuid": record.uuid,
        "arriving": record.arriving and not record.doing(ARRIVE),
    }


def traveller(found: Traveller) -> models.Traveller:
    """What goes along with a VM's disk."""
    return models.Traveller(
        uuid=UUID(found.uuid), memory=found.boot.memory, cpus=found.boot.cpus, network=found.boot.network,
        seed=base64.b64encode(found.seed).decode(), hardware=found.hardware,
    )  # fmt: skip


def of_traveller(told: models.Traveller) -> Traveller:
    """What came along with a VM's disk. Raises BadRequest."""
    try:
        seed = base64.b64decode(told.seed, validate=True)
    except ValueError as error:
        raise BadRequest(f"the seed is not base64: {error}") from error
    boot = Boot(memory=told.memory, cpus=told.cpus, network=told.network)
    return Traveller(str(told.uuid), boot, seed, told.hardware)


def image(published: PublishedImage, record: ImageRecord | None, held_bytes: int) -> models.Image:
    """A published image, and how far it is here."""
    here = None
    if record is not None:
        here = models.ImageHere(role=record.role, phase=record.phase, held_bytes=held_bytes)
    return models.Image(
        name=published.name, size=published.size, digest=published.digest, origins=published.origins,
        nodes=published.nodes, here=here, withdrawn=published.withdrawn,
    )  # fmt: skip


def published(record: ImageRecord) -> models.Published:
    """An image that this host published."""
    return models.Published(name=record.image.name, size=record.image.size, digest=record.image.digest)


def stack(
    record: ImageRecord, stats: base.CacheStats, hit_bytes: int | None, paths: Iterable[base.PathStatus],
    vms: Iterable[str], *, serving: bool,
) -> models.Stack:  # fmt: skip
    """One image's stack."""
    return models.Stack(
        name=record.name, role=record.role, phase=record.phase, serving=serving, slot=record.slot, size=record.size,
        fetched_bytes=stats.held_bytes, cache_file_bytes=stats.file_bytes, cache_hit_bytes=hit_bytes,
        paths=[models.Route(host=p.parent.host, address=p.parent.address, state=p.state) for p in paths],
        children=[child.host for child in record.children], vms=list(vms),
    )  # fmt: skip


def volume(found: base.Volume) -> models.Volume:
    """A volume of the cache."""
    return models.Volume(path=str(found.path), size=found.size, state=found.state, images=list(found.images))


def accel(verdict: Verdict) -> models.Accel:
    """What VMs are started with."""
    return models.Accel(use=verdict.accel, reason=verdict.reason)


def left_alone(vms: Mapping[str, str], images: Mapping[str, str]) -> dict[str, str]:
    """Why records are left alone, by what they are of."""
    return {f"vm {name}": why for name, why in vms.items()} | {f"image {name}": why for name, why in images.items()}


def death(died: Death) -> models.Death:
    """A thread of the agent that died."""
    return models.Death(thread=died.thread, times=died.times, error=died.error, running=died.running)


def disks(trouble: str, state: Path) -> models.Disks:
    """What VMs' disks have: whether they are in trouble, and the room of the state folder's file system.

    Raises HostTrouble.
    """
    with told(f"looking at {state}"):
        room = os.statvfs(state)
    # Not f_bfree: what is reserved for root is nothing to plan with.
    return models.Disks(
        trouble=trouble or None, total=room.f_blocks * room.f_frsize, free=room.f_bavail * room.f_frsize
    )  # fmt: skip
