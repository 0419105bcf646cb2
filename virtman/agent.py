"""The agent: owns this host's stacks and VMs.

It composes the parts, and hands events from one to the other; each part has its own module. Nothing of the data path
runs in this process: while it is down, VMs and children go on.
"""

from __future__ import annotations

import logging
import os
from functools import partial

from drivers.base import CacheDriver, CacheGroup, DeviceCache, Died, ImageSource, LostParent, VmDiskDriver
from drivers.errors import DriverError
from drivers.host.space import Room
from drivers.layered import LayeredSource
from drivers.needs import Machine
from drivers.registry import load
from virtman import models
from virtman.accel import choose_accel
from virtman.cachevolumes import CacheVolumes
from virtman.config import AgentConfig, agent_id, prepare
from virtman.devices import Devices
from virtman.errors import ConfigError, HypervisorError
from virtman.heartbeat import Heartbeat
from virtman.imagestore import ImageStore
from virtman.kinds import IMAGE_KINDS, VM_KINDS
from virtman.libvirtdomain import OFF, SAVED
from virtman.machines import LibvirtMachines
from virtman.overview import Overview
from virtman.parallel import raise_all, side_by_side
from virtman.pipe import sweep
from virtman.publishing import Publishing
from virtman.records import DeviceRecord, ImageRecord, RecordStore, VmRecord
from virtman.serving import suspend
from virtman.stackchoice import old_caches
from virtman.stacks import Stacks
from virtman.steps import Step, log_step
from virtman.transferring import Transfers, usable
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
        client = _volt_client(config)
        source, snapshot, group, cached = _load_drivers(
            config,
            lost=lambda image, host: self.upkeep.places.parent_lost(image, host),
            died=lambda image: self.upkeep.images.died(image),
            step=step,
        )
        store = ImageStore(config.state, Room(config.state, config.reserve))
        methods = usable(Machine(), config.address) if source.fills else {}
        volt = VoltLink(client, config.name, source.address, config.location, sorted(methods))
        accel = _accel(config)
        machines = LibvirtMachines(config.libvirt, config.name, config.state / "machines", accel.use)
        vms = RecordStore(records / "vms", VmRecord)
        self.stacks = Stacks(
            source, RecordStore(records / "images", ImageRecord), vms, store, volt, IMAGE_KINDS,
            changed=lambda: self.heartbeat.soon(), released=lambda image: self.upkeep.released(image), step=step,
        )  # fmt: skip
        self.vms = Vms(vms, snapshot, machines, self.stacks, VM_KINDS, step)
        named = config.source or config.cache
        no_devices = f"devices are not read through {named}; bcache does so"
        without = f"the cache driver of this host, {named}, has no volumes; chunkstore and bcache have them"
        self.devices = Devices(RecordStore(records / "devices", DeviceRecord), cached, no_devices, step)
        self.transfers = Transfers(config.place, source, methods, lambda: self.heartbeat.soon())
        self.upkeep = Upkeep(self.stacks, self.vms, group, self.devices, self.transfers, config.idle_grace)
        self.heartbeat = Heartbeat(self._tell_volt, self.upkeep.handle)
        self.publishing = Publishing(self.vms, (config.state, config.run), step)
        self.volumes = CacheVolumes(group, without, self.devices, self.upkeep)
        self.overview = Overview(
            config, accel, machines, self.vms, self.devices, self.volumes, self.upkeep, self.heartbeat,
        )  # fmt: skip

    def start(self) -> None:
        """Clean up after a kill, begin to repair in the background, and connect to Volt."""
        if caches := old_caches(self.config.state):
            log.warning("%s", caches)
        self.stacks.store.clean()
        self.transfers.clean()
        sweep(self.config.socket.parent)
        self.upkeep.start()
        self.heartbeat.start()

    def stop(self) -> None:
        """End the agent's own threads; stacks and VMs go on."""
        self.upkeep.stopped = True
        self.stacks.readers.close()
        self.transfers.stop()
        self.heartbeat.stop()
        self.upkeep.queue.stop()
        self.stacks.volt.close()
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
        self.transfers.stop()
        records = self.stacks.records.all()
        raise_all(side_by_side([partial(suspend, self.stacks, record.name) for record in records]))
        self.stacks.source.stop()
        log.info("all images are suspended: %s", ", ".join(record.name for record in records) or "there are none")

    def repair(self) -> models.Repaired:
        """Make what the records say true. Raises Suspended, VirtmanError with every error."""
        self.stacks.check_not_suspended()
        done = self.upkeep.repair()
        self.heartbeat.soon()
        return models.Repaired(**done)

    def _tell_volt(self) -> HeartbeatAnswer:
        reports, needed = self.upkeep.news()
        transfers = self.upkeep.deployments.reports()
        return self.stacks.volt.heartbeat(reports, self.upkeep.kept, needed, transfers)


def _accel(config: AgentConfig) -> models.Accel:
    if config.accel == "auto":
        return choose_accel(config.probe_kernel, config.state / "accel.json")
    return models.Accel(use=config.accel, reason="set by --accel")


def _volt_client(config: AgentConfig) -> VoltClient:
    try:
        return VoltClient(config.volt, config.volt_token_file, agent=agent_id(config.state))
    except VoltError as error:
        raise ConfigError(str(error)) from error


def _load_drivers(
    config: AgentConfig, lost: LostParent, died: Died, step: Step
) -> tuple[ImageSource, VmDiskDriver, CacheGroup | None, DeviceCache | None]:
    """The source of images, the driver of VMs' disks; what has volumes and what reads devices, if any does.

    Raises ConfigError.
    """
    try:
        snapshot: VmDiskDriver = load("snapshot", config.snapshot)(config.place)
        if config.source:
            source: ImageSource = load("source", config.source)(config.place, lost=lost, died=died, step=step)
            return source, snapshot, getattr(source, "group", None), None
        cache: CacheDriver = load("cache", config.cache)(config.place)
        attach = load("attach", config.attach)(config.place, lost=lost)
        export = load("export", config.export)(config.place, died=died)
    except DriverError as error:
        raise ConfigError(str(error)) from error
    layered = LayeredSource(attach, cache, export, step)
    return layered, snapshot, getattr(cache, "group", None), getattr(cache, "devices", None)
