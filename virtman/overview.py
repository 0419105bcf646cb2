"""What the API answers about this host, its images and its VMs, made of records and of what drivers say."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from drivers import base
from drivers.digests import proves_chunks
from drivers.host.watch import deaths
from virtman import hydrating, models
from virtman.cachevolumes import CacheVolumes
from virtman.config import AgentConfig
from virtman.devices import Devices
from virtman.domain import NONE, mac_of
from virtman.errors import HypervisorError, UnknownImage
from virtman.heartbeat import Heartbeat
from virtman.hostfiles import translate_os_errors
from virtman.imagekeeper import IMAGE
from virtman.libvirtdomain import OFF
from virtman.machines import LibvirtMachines
from virtman.records import ARRIVE, ImageRecord, Role, Snapshot, VmRecord
from virtman.sharing import Amounts, amounts
from virtman.upkeep import Upkeep
from virtman.vms import Vms
from volt.client import Image as PublishedImage
from volt.client import TreeNode

log = logging.getLogger(__name__)


class Overview:
    """Reads the parts of an agent, and changes nothing."""

    def __init__(
        self, config: AgentConfig, accel: models.Accel, machines: LibvirtMachines, vms: Vms, devices: Devices,
        volumes: CacheVolumes, upkeep: Upkeep, heartbeat: Heartbeat,
    ) -> None:  # fmt: skip
        self._config, self._accel = config, accel
        self._vms, self._stacks, self._devices, self._volumes = vms, vms.images, devices, volumes
        self._volt = vms.images.volt
        self._machines, self._upkeep, self._heartbeat = machines, upkeep, heartbeat

    # VMs

    def vm(self, name: str) -> models.Vm:
        """One VM, with its disk as a path and as QEMU block node. Raises UnknownVm, DriverError."""
        record = self._vms.record(name)
        user = self._vms.attached_to(record)
        disk = _open_disk(_disk(record, None if user is None else user.name), self._vms.vmdisks.open(name))
        return models.Vm(disk=disk, **self._fields(record, self.vm_states([record])))

    def booted(self, name: str) -> models.Booted:
        """One VM that was booted. Raises as ``vm``."""
        return models.Booted(**dict(self.vm(name)))

    def vms(self) -> list[models.VmLine]:
        records = self._vms.records.all()
        states = self.vm_states(records)
        users = {disk: record.name for record in records for disk in record.disks}
        return [
            models.VmLine(disk=_disk(record, users.get(record.name)), **self._fields(record, states))
            for record in records
        ]

    def _fields(self, record: VmRecord, states: dict[str, str]) -> dict[str, Any]:
        """All fields of a VM but its disk. ``machine`` is None for a VM that was never booted."""
        machine = None
        if record.boot is not None:
            machine = models.Machine(
                **dict(record.boot),
                state=states.get(record.name, OFF),
                console_log=str(self._machines.console_log(record.name)),
                accel=self._accel.use,
                mac=None if record.boot.network == NONE else mac_of(record.uuid),
            )
        arriving = record.arriving and not record.doing(ARRIVE)
        more = {"machine": machine, "moved_to": record.moved, "arriving": arriving}
        return {"name": record.name, "uuid": record.uuid, "disks": list(record.disks), **more}

    def vm_states(self, records: list[VmRecord]) -> dict[str, str]:
        """State by name of those that were booted and are not off. libvirt is asked only if there are any."""
        booted = [record.name for record in records if record.boot]
        try:
            return self._machines.states() if booted else {}
        except HypervisorError as error:
            log.warning("states of VMs are unknown: %s", error)
            return dict.fromkeys(booted, "unknown")

    def console(self, vm: str) -> models.Console:
        """Where the VM's console is found. Raises UnknownVm."""
        record = self._vms.record(vm)
        log_file = str(self._machines.console_log(vm))
        return models.Console(libvirt=self._machines.uri, domain=record.name, log=log_file)

    def snapshots(self, vm: str) -> list[models.Snapshot]:
        """A VM's snapshots in the order in which they were taken. Raises UnknownVm."""
        record = self._vms.record(vm)
        return [self.snapshot(record, snapshot) for snapshot in record.snapshots if not snapshot.temporary]

    @staticmethod
    def snapshot(record: VmRecord, snapshot: Snapshot) -> models.Snapshot:
        return models.Snapshot(**dict(snapshot), current=snapshot.name == record.current)

    # Images

    def images(self) -> list[models.Image]:
        """All published images, and how far they are on this host. Raises CoordinatorDown."""
        held = self._stacks.held()
        here = {record.name: self._here(record, held) for record in self._stacks.records.all()}
        return [models.Image(**dict(image), here=here.get(image.name)) for image in self._stacks.volt.images()]

    def image(self, name: str) -> models.ImageDetails:
        """One published image. Raises UnknownImage, CoordinatorDown, StateDamaged, HostTrouble."""
        image, tree, record = self._volt.image(name), self._volt.tree(name), self._stacks.records.get(name)
        known = self._amounts(image)
        return models.ImageDetails(
            **dict(image),
            here=None if record is None else self._here(record, self._stacks.held()),
            verified=proves_chunks(image.digest),
            hosts=sorted(host for host in _hosts_of(tree.root) if host not in image.origins),
            data_bytes=known.data, own_bytes=known.own, shared_bytes=known.shared,
        )  # fmt: skip

    def _amounts(self, image: PublishedImage) -> Amounts:
        parent = None
        if image.parent is not None:
            with suppress(UnknownImage):  # it may be gone
                parent = _as_drivers_know(self._volt.image(image.parent))
        with translate_os_errors(f"reading the manifests in {self._config.state}"):
            return amounts(self._config.state, _as_drivers_know(image), parent)

    def _here(self, record: ImageRecord, held: frozenset[str]) -> models.ImageHere:
        held_bytes, in_place = self._upkeep.images.stats(record.name).held_bytes, self._in_place(record, held)
        return models.ImageHere(role=record.role, phase=record.phase, held_bytes=held_bytes, in_place=in_place)

    def _in_place(self, record: ImageRecord, held: frozenset[str]) -> models.InPlace | None:
        """What an image is served from in place. Its trouble is why it is not served."""
        known = record.in_place
        if known is None:
            return None
        trouble = None
        if not self._stacks.source.serving(record.name):
            trouble = self._upkeep.queue.troubles().get(IMAGE + record.name)
        return models.InPlace(
            path=known.path, held=record.name in held, trouble=trouble, digest=known.content,
            computing=known.digest and known.content is None,
        )  # fmt: skip

    def _stack(self, record: ImageRecord, held: frozenset[str]) -> models.Stack:
        source, stats = self._stacks.source, self._upkeep.images.inspect(record)
        return models.Stack(
            name=record.name,
            role=record.role,
            phase=record.phase,
            serving=source.serving(record.name),
            slot=record.slot,
            size=record.size,
            fetched_bytes=stats.held_bytes,
            cache_file_bytes=stats.file_bytes,
            cache_hit_bytes=source.hit_bytes(record.name) if record.role is Role.HOST else 0,
            paths=[_route(path) for path in source.paths(record.name)],
            children=[child.host for child in record.children],
            vms=[vm.name for vm in self._vms.records.all() if vm.image == record.name],
            in_place=self._in_place(record, held),
            hydration=self.hydration(record) if record.hydrate else None,
            verified=proves_chunks(record.digest) if record.digest else None,
        )

    def hydration(self, record: ImageRecord) -> models.Hydration:
        """How much of an image is here. Raises StateDamaged."""
        total = record.image.size
        whole = record.role is Role.ORIGIN or hydrating.is_whole(self._stacks, record)
        done = total if whole else min(total, self._stacks.source.filled(record.name).done)
        return models.Hydration(done=done, total=total, whole=whole)

    # The host

    def status(self) -> models.Status:
        heartbeat, held = self._heartbeat, self._stacks.held()
        return models.Status(
            host=self._config.name,
            pid=os.getpid(),
            volt=models.VoltStatus(url=self._config.volt, connected=heartbeat.connected, trouble=heartbeat.trouble),
            accel=self._accel,
            repairing=self._upkeep.repairing(),
            suspended=self._stacks.suspended,
            images=[self._stack(record, held) for record in self._stacks.records.all()],
            vms=self.vms(),
            disks=self._disks(),
            cache_volumes=self._volumes.known(),
            cached_devices=self.devices(),
            orphans=sorted(self._vms.orphans()),
            damaged=self._damaged(),
            troubles=self._upkeep.queue.troubles(),
            deaths=deaths(),
        )

    def _disks(self) -> models.Disks:
        """Whether VMs' disks are in trouble, and the room of the state folder's file system. Raises HostTrouble."""
        with translate_os_errors(f"looking at {self._config.state}"):
            room = os.statvfs(self._config.state)
        # Not f_bfree: what is reserved for root is nothing to plan with.
        total, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
        return models.Disks(trouble=self._vms.vmdisks.trouble() or None, total=total, free=free)

    def _damaged(self) -> dict[str, str]:
        """Why records cannot be read, by kind and name."""
        kinds = {
            "vm": self._vms.records.unreadable(),
            "image": self._stacks.records.unreadable(),
            "device": self._devices.records.unreadable(),
        }
        return {f"{kind} {name}": why for kind, found in kinds.items() for name, why in found.items()}

    def devices(self) -> list[models.CachedDevice]:
        """The devices that are read through the cache. Raises DriverError."""
        return list(self._devices.listed().values())

    def device(self, name: str) -> models.CachedDevice:
        """The device of an attachment. Raises DriverError."""
        return self._devices.listed()[name]


def _disk(record: VmRecord, user: str | None) -> models.Disk:
    """A VM's disk, as far as its record knows it; ``user`` is the VM that it is attached to."""
    return models.Disk(**dict(record), phase=record.phase, attached_to=user)


def _open_disk(disk: models.Disk, device: base.Device) -> models.OpenDisk:
    """A VM's disk that was opened.

    Its block node names no layers: a program that kept them would later write to a snapshot.
    """
    path, blockdev = str(device.path), None
    if device.node is not None:
        blockdev = {option: value for option, value in device.node.items() if option != "backing"}
        blockdev["file"] = {"driver": "file", "filename": path}
    return models.OpenDisk(**dict(disk), path=path, blockdev=blockdev)


def _as_drivers_know(image: PublishedImage) -> base.Image:
    return base.Image(image.name, image.size, image.digest)


def _hosts_of(node: TreeNode) -> Iterator[str]:
    yield node.host
    for child in node.children:
        yield from _hosts_of(child)


def _route(path: base.PathStatus) -> models.Route:
    return models.Route(host=path.parent.host, address=path.parent.address, state=path.state)
