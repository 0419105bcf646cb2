"""What this host tells of itself, its images and its VMs."""

from __future__ import annotations

import logging
import os

from drivers.host.watch import deaths
from virtman import models, views
from virtman.cachevolumes import CacheVolumes
from virtman.config import AgentConfig
from virtman.devices import Devices
from virtman.errors import HypervisorError
from virtman.heartbeat import Heartbeat
from virtman.hostdrivers import HostDrivers
from virtman.imagekeeper import IMAGE
from virtman.libvirtdomain import OFF
from virtman.machines import LibvirtMachines
from virtman.records import ImageRecord, Role, VmRecord
from virtman.upkeep import Upkeep
from virtman.vms import Vms

log = logging.getLogger(__name__)


class Overview:
    """Reads the parts of an agent, and changes nothing."""

    def __init__(
        self, config: AgentConfig, accel: models.Accel, drivers: HostDrivers, machines: LibvirtMachines, vms: Vms,
        devices: Devices, volumes: CacheVolumes, upkeep: Upkeep, heartbeat: Heartbeat,
    ) -> None:  # fmt: skip
        self._config, self._accel, self._drivers = config, accel, drivers
        self._vms, self._stacks, self._devices, self._volumes = vms, vms.images, devices, volumes
        self._machines, self._upkeep, self._heartbeat = machines, upkeep, heartbeat

    # VMs

    def vm(self, name: str) -> models.Vm:
        """One VM, with its disk as a path and as QEMU block node. Raises UnknownVm, DriverError."""
        record = self._vms.record(name)
        user = self._vms.attached_to(record)
        disk = views.open_disk(record, self._vms.vmdisks.open(name), None if user is None else user.name)
        machine = self._machine(record, self.vm_states([record]))
        return models.Vm(name=name, disk=disk, machine=machine, **views.more(record))

    def booted(self, name: str) -> models.Booted:
        """One VM that was booted. Raises as ``vm``."""
        return models.Booted(**dict(self.vm(name)))

    def vms(self) -> list[models.VmLine]:
        """All VMs of this host."""
        records = self._vms.records.all()
        states = self.vm_states(records)
        users = {disk: record.name for record in records for disk in record.disks}
        return [
            models.VmLine(
                name=record.name, disk=views.disk(record, users.get(record.name)),
                machine=self._machine(record, states), **views.more(record),
            )
            for record in records
        ]  # fmt: skip

    def _machine(self, record: VmRecord, states: dict[str, str]) -> models.Machine | None:
        state = states.get(record.name, OFF)
        return views.machine(record, state, self._machines.console_log(record.name), self._accel.use)

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
        return [views.snapshot(record, snapshot) for snapshot in record.snapshots if not snapshot.temporary]

    # Images

    def images(self) -> list[models.Image]:
        """All published images, and how far they are on this host. Raises CoordinatorDown."""
        here, held = {record.name: record for record in self._stacks.records.all()}, self._stacks.held()
        return [
            views.image(
                image, here.get(image.name), self._upkeep.images.stats(image.name).held_bytes,
                self._in_place(here.get(image.name), held),
            )
            for image in self._stacks.volt.images()
        ]  # fmt: skip

    def _in_place(self, record: ImageRecord | None, held: frozenset[str]) -> models.InPlace | None:
        """The trouble of an image in place is why it is not served."""
        if record is None:
            return None
        trouble = None
        if not self._stacks.source.serving(record.name):
            trouble = self._upkeep.queue.troubles().get(IMAGE + record.name)
        return views.in_place(record, trouble, held=record.name in held)

    def _stack(self, record: ImageRecord, held: frozenset[str]) -> models.Stack:
        return views.stack(
            record,
            self._upkeep.images.inspect(record),
            self._drivers.source.hit_bytes(record.name) if record.role is Role.HOST else 0,
            self._drivers.source.paths(record.name),
            [vm.name for vm in self._vms.records.all() if vm.image == record.name],
            self._in_place(record, held),
            serving=self._stacks.source.serving(record.name),
        )

    # The host

    def status(self) -> models.Status:
        """What this host has and does now."""
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
            disks=views.disks(self._drivers.snapshot.trouble(), self._config.state),
            cache_volumes=self._volumes.views(self._drivers.volumes()),
            cached_devices=self.devices(),
            strays=sorted(self._vms.strays()),
            damaged=views.left_alone(
                self._vms.records.unreadable(), self._stacks.records.unreadable(), self._devices.records.unreadable()
            ),
            troubles=self._upkeep.queue.troubles(),
            deaths=deaths(),
        )  # fmt: skip

    def devices(self) -> list[models.CachedDevice]:
        """The devices that are read through the cache. Raises DriverError."""
        return list(self._devices.listed().values())

    def device(self, name: str) -> models.CachedDevice:
        """The device of an attachment. Raises DriverError."""
        return self._devices.listed()[name]
