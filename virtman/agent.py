"""The agent: owns this host's stacks and VMs.

It composes the parts, and hands events from one to the other; each part has its own module. Nothing of the data path
runs in this process: while it is down, VMs and children go on.
"""

from __future__ import annotations

import logging
import os
from functools import partial

from drivers.base import CacheGroup, DeviceCache, Image, Parent
from drivers.errors import DriverError
from drivers.host.locks import NamedLocks
from drivers.host.space import Room
from drivers.layered import LayeredSource
from drivers.registry import load
from virtman import models
from virtman.accel import choose_accel
from virtman.cachevolumes import CacheVolumes
from virtman.cleaning import Cleaning
from virtman.config import AgentConfig, agent_id, prepare
from virtman.copies import Copies
from virtman.devices import Devices
from virtman.errors import ConfigError, HypervisorError
from virtman.heartbeat import Heartbeat
from virtman.hostdrivers import HostDrivers
from virtman.imagestore import ImageStore
from virtman.kinds import VM_KINDS
from virtman.libvirtdomain import OFF, SAVED
from virtman.machines import LibvirtMachines
from virtman.overview import Overview
from virtman.parallel import raise_all, side_by_side
from virtman.pipe import sweep
from virtman.publishing import Publishing
from virtman.records import DeviceRecord, ImageRecord, RecordStore, VmRecord
from virtman.retained import Retained
from virtman.signal import Signal
from virtman.stacks import Stacks
from virtman.steps import Step, log_step
from virtman.upkeep import Upkeep
from virtman.vms import Vms
from virtman.voltlink import VoltLink
from volt.client import HeartbeatAnswer, VoltClient
from volt.errors import VoltError

log = logging.getLogger(__name__)


class Agent:
    """One host's agent. ``step`` hears of every step of an operation."""

    def __init__(self, config: AgentConfig, step: Step = log_step) -> None:
        """Lock the folders and put the parts together; nothing is started. Raises ConfigError."""
        self.config = config
        self._locks = prepare(config)
        records = config.state / "records"
        changed, released, lost, died = Signal[()](), Signal[str](), Signal[Image, Parent](), Signal[str]()
        self.drivers = _load_drivers(config, lost, died, step)
        room = Room(config.state, config.reserve)
        self._store = ImageStore(config.state / "images", room)
        self.volt = VoltLink(_volt_client(config), config.name, self.drivers.source.address)
        accel = _accel(config)
        machines = LibvirtMachines(config.libvirt, config.name, config.state / "machines", accel.use)
        self.stacks = Stacks(
            self.drivers.source, RecordStore(records / "images", ImageRecord), self._store, self.volt, changed,
            released, step,
        )  # fmt: skip
        self.vms = Vms(
            RecordStore(records / "vms", VmRecord), self.drivers.snapshot, machines, self.stacks, VM_KINDS, step
        )  # fmt: skip
        self.copies = Copies(self.vms, self.stacks, self._store.folder, room)
        self.stacks.used_by(self.vms.uses)
        self.stacks.used_by(self.copies.reads)
        publishing = NamedLocks()
        retained = Retained(self.stacks, self._store, self.drivers.source, publishing)
        without = f"the cache driver of this host, {config.cache}, has no volumes; bcache has them"
        self.devices = Devices(RecordStore(records / "devices", DeviceRecord), self.drivers.device_cache, without, step)
        self.upkeep = Upkeep(
            self.stacks, self.vms, self.drivers, retained, self.devices, self.volt.register, config.idle_grace
        )  # fmt: skip
        self.heartbeat = Heartbeat(self._tell_volt, self.upkeep.handle)
        changed.connect(self.heartbeat.soon)
        released.connect(self.upkeep.released)
        lost.connect(lambda image, parent: self.upkeep.places.parent_lost(image.name, parent.host))
        died.connect(self.upkeep.images.died)
        self.publishing = Publishing(
            self.stacks, self.vms, self.copies, self._store, retained, self.volt, room, publishing,
            (config.state, config.run), changed, step,
        )  # fmt: skip
        self.cleaning = Cleaning(self.stacks, retained, self.volt, publishing)
        self.volumes = CacheVolumes(self.drivers.cache_group, without, self.devices, self.upkeep)
        self.overview = Overview(
            config, accel, self.drivers, machines, self.volt, self.stacks, self.vms, self.devices, self.volumes,
            self.upkeep, self.heartbeat,
        )  # fmt: skip

    def start(self) -> None:
        """Clean up after a kill, begin to repair in the background, and connect to Volt."""
        self._store.clean()
        sweep(self.config.socket.parent)
        self.upkeep.start()
        self.heartbeat.start()

    def stop(self) -> None:
        """End the agent's own threads; stacks and VMs go on."""
        self.upkeep.stopped = True
        self.stacks.readers.close()
        self.heartbeat.stop()
        self.upkeep.queue.stop()
        self.volt.close()
        for lock in self._locks:
            os.close(lock)

    def suspend(self, *, force: bool) -> None:
        """Stop serving every image, so that its cache is closed cleanly; the next start brings all back.

        Raises HypervisorError while VMs run, unless ``force``.
        """
        states = self.overview.vm_states(self.vms.records.all())
        using = [f"{vm} ({state})" for vm, state in states.items() if state not in (OFF, SAVED)]
        if using and not force:
            raise HypervisorError(
                f"these VMs use their disks, or may: {', '.join(using)}; stop them first, or use --force"
            )
        self.stacks.suspended = True  # before the records are read: no stack without a record is built any more
        records = self.stacks.records()
        raise_all(side_by_side([partial(self.stacks.suspend, record.name) for record in records]))
        log.info("all images are suspended: %s", ", ".join(record.name for record in records) or "there are none")

    def repair(self) -> models.Repaired:
        """Make what the records say true. Raises Suspended, RepairIncomplete with every error."""
        self.stacks.check_not_suspended()
        done = self.upkeep.repair()
        self.heartbeat.soon()
        return models.Repaired(**done)

    def _tell_volt(self) -> HeartbeatAnswer:
        reports, needed = self.upkeep.news()
        return self.volt.heartbeat(reports, self.upkeep.kept(), needed)


def _accel(config: AgentConfig) -> models.Accel:
    if config.accel == "auto":
        return choose_accel(config.probe_kernel, config.state / "accel.json")
    return models.Accel(use=config.accel, reason="set by --accel")


def _volt_client(config: AgentConfig) -> VoltClient:
    try:
        return VoltClient(config.volt, config.volt_token_file, agent=agent_id(config.state))
    except VoltError as error:
        raise ConfigError(str(error)) from error


def _load_drivers(config: AgentConfig, lost: Signal[Image, Parent], died: Signal[str], step: Step) -> HostDrivers:
    try:
        cache = load("cache", config.cache)(config.place)
        attach = load("attach", config.attach)(config.place, lost=lost)
        export = load("export", config.export)(config.place, died=died)
        return HostDrivers(
            LayeredSource(attach, cache, export, step),
            load("snapshot", config.snapshot)(config.place),
            cache if isinstance(cache, CacheGroup) else None,
            cache if isinstance(cache, DeviceCache) else None,
        )
    except DriverError as error:
        raise ConfigError(str(error)) from error
