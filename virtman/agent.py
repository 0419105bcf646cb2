"""The agent: owns this host's stacks and VMs.

It composes the parts; each part has its own module. Nothing of the data path runs in this process: while it is down,
VMs and children go on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from drivers.base import CacheGroup, Volume
from drivers.errors import DriverError
from drivers.registry import load
from virtman import imagestore
from virtman.accel import Verdict, choose_accel
from virtman.config import AgentConfig, prepare
from virtman.errors import ConfigError, HypervisorError, NoVolumes, RepairIncomplete, UnknownVolume, VirtmanError
from virtman.heartbeat import Heartbeat
from virtman.hostdrivers import HostDrivers
from virtman.imagestore import ImageStore
from virtman.locks import NamedLocks
from virtman.machines import LibvirtMachines
from virtman.records import Boot, ImagePhase, ImageRecord, Role, Shelf, VmPhase, VmRecord
from virtman.stacks import Stacks
from virtman.steps import Step, log_step
from virtman.upkeep import Upkeep
from virtman.vms import Vms
from virtman.voltlink import VoltLink
from virtman.workers import Workers
from volt.client import HeartbeatAnswer, ImageTree, VoltClient
from volt.errors import VoltError

log = logging.getLogger(__name__)


class Agent:
    """One host's agent. ``step`` hears of every step of an operation."""

    def __init__(self, config: AgentConfig, step: Step = log_step) -> None:
        """Lock the folders and put the parts together; nothing is started. Raises ConfigError, StateLocked."""
        self.config = config
        self._locks = prepare(config)
        self.verdict = self._accel()
        self._workers = Workers()
        self._drivers = self._load_drivers()
        self._store = ImageStore(config.state / "images")
        self._publishing = NamedLocks()
        self._volt = VoltLink(self._volt_client(), config.name, self._drivers.export.address)
        self._machines = LibvirtMachines(config.libvirt, config.name, config.state / "machines", self.verdict.accel)
        self._stacks = Stacks(
            self._drivers, Shelf(config.state / "records" / "images", ImageRecord), self._store, self._volt,
            in_use=lambda image: self._vms.uses(image), step=step,
        )  # fmt: skip
        self._vms = Vms(
            Shelf(config.state / "records" / "vms", VmRecord), self._drivers.snapshot, self._stacks.ensure,
            lambda record: self._drivers.export.local(record.image), self._machines, step,
        )  # fmt: skip
        self._upkeep = Upkeep(
            self._stacks, self._drivers, self._workers, lambda: self._heartbeat.soon(), config.idle_grace
        )
        self._heartbeat = Heartbeat(lambda: self._volt.heartbeat(self._upkeep.reports()), self._on_answer)
        self._step = step

    def _accel(self) -> Verdict:
        if self.config.accel == "auto":
            return choose_accel(self.config.probe_kernel, self.config.state / "accel.json")
        return Verdict(self.config.accel, "set by --accel")

    def _volt_client(self) -> VoltClient:
        try:
            return VoltClient(self.config.volt, self.config.volt_token_file)
        except VoltError as error:
            raise ConfigError(str(error)) from error

    def _load_drivers(self) -> HostDrivers:
        config, place = self.config, self.config.place
        try:
            return HostDrivers(
                attach=load("attach", config.attach)(
                    place, lost=lambda image, parent: self._upkeep.parent_lost(image, parent)
                ),
                cache=load("cache", config.cache)(place),
                export=load("export", config.export)(place, died=lambda image: self._upkeep.died(image)),
                snapshot=load("snapshot", config.snapshot)(place),
            )
        except DriverError as error:
            raise ConfigError(str(error)) from error

    def start(self) -> None:
        """Clean up after an interrupted publish, begin to repair in the background, and connect to Volt."""
        self._store.clean()
        self._workers.submit("repair", self.repair)
        self._workers.submit("register", self._volt.register)
        self._heartbeat.start()

    def stop(self) -> None:
        """End the agent's own threads; stacks and VMs go on."""
        self._upkeep.stopped = True
        self._heartbeat.stop()
        self._workers.stop()
        self._volt.close()
        for lock in self._locks:
            os.close(lock)

    def suspend(self, *, force: bool) -> None:
        """Stop serving every image, so that its cache is closed cleanly; the next start brings all back.

        Raises HypervisorError while VMs run, unless ``force``.
        """
        running = [vm for vm, state in self._vm_states().items() if state in ("running", "paused")]
        if running and not force:
            raise HypervisorError(f"these VMs are running: {', '.join(running)}; stop them first, or use --force")
        self._upkeep.stopped = True
        _all([partial(self._stacks.suspend, record.name) for record in self._stacks.records()])

    def _on_answer(self, answer: HeartbeatAnswer | None) -> None:
        self._upkeep.handle(answer)

    # Images

    def publish(self, name: str, file: Path, progress: imagestore.Progress) -> ImageRecord:
        """Make this host the origin of an image with the file's content.

        Raises BadImageFile, NoRoom, ImageExists, CoordinatorDown, DriverError.
        """
        source = imagestore.inspect(file)
        with self._publishing.hold(name):
            image = self._store.add(name, source, progress)
            self._step("publish:stored")
            try:
                record = self._stacks.add_origin(image)
            except (VirtmanError, DriverError):
                if not self._publishing.held(but=name):  # the same content may be about to get another name
                    self._remove_unused(image.key)
                raise
        self._heartbeat.soon()
        return record

    def _remove_unused(self, key: str) -> int:
        """Delete the content and cache of a key that no stack refers to, as far as known. Returns the bytes freed."""
        with self._stacks.content:
            here = [record for record in self._stacks.records() if record.phase is not ImagePhase.LEAVING]
            if self._stacks.damaged() or any(record.digest == f"sha256:{key}" for record in here):
                return 0
            return self._store.remove(key) + self._drivers.cache.remove(key)

    def images(self) -> list[dict[str, Any]]:
        """All published images, and how far they are on this host. Raises CoordinatorDown."""
        here = {record.name: record for record in self._stacks.records()}
        return [
            image.model_dump(mode="json")
            | {"here": _where(here.get(image.name)), "held_bytes": self._upkeep.stats(image.name).held_bytes}
            for image in self._volt.images()
        ]

    def tree(self, image: str) -> ImageTree:
        """An image's tree. Raises UnknownImage, CoordinatorDown."""
        return self._volt.tree(image)

    # VMs

    def create(self, vm: str, image: str, size: int | None) -> dict[str, Any]:
        """A disk for a VM. Raises as ``Vms.create``."""
        present = self._stacks.known(image)
        try:
            self._vms.create(vm, image, size)
        except (VirtmanError, DriverError):
            if not present:
                self._let_go(image)
            raise
        return self.vm(vm)

    def _let_go(self, image: str) -> None:
        """Remove the stack that a create made for nothing; the create's error is the one to raise."""
        try:
            self._stacks.remove_if_idle(image)
        except (VirtmanError, DriverError) as second:
            log.error("image %s: removing its stack failed too; repair will finish it: %s", image, second)

    def destroy(self, vm: str) -> None:
        """Remove a VM and its disk for good. Raises UnknownVm, DriverError, HypervisorError."""
        self._vms.destroy(vm)

    def vm(self, name: str) -> dict[str, Any]:
        """One VM, with its disk as a path and as QEMU block node. Raises UnknownVm, DriverError."""
        record = self._vms.record(name)
        device = self._vms.device(name)
        return _vm_line(record) | {"path": str(device.path), "blockdev": device.node}

    def vms(self) -> list[dict[str, Any]]:
        """All VMs of this host; ``state`` is disk for one that was never booted."""
        states = self._vm_states()
        return [
            _vm_line(record) | {"state": states.get(record.name, "disk" if record.boot is None else "off")}
            for record in self._vms.records()
        ]

    def _vm_states(self) -> dict[str, str]:
        if not any(record.boot for record in self._vms.records()):
            return {}
        try:
            return self._machines.states()
        except HypervisorError as error:
            log.warning("states of VMs are unknown: %s", error)
            return {record.name: "unknown" for record in self._vms.records() if record.boot}

    def boot(
        self, vm: str, image: str, size: int | None, boot: Boot, ssh_keys: list[str], user_data: str | None
    ) -> dict[str, Any]:
        """Create the VM if needed and start it. Raises as ``create``, HypervisorError, DomainForeign, BadRequest."""
        with self._vms.locks.hold(vm):
            before = self._vms.find(vm)
            self._vms.create_held(vm, image, size)
            self._vms.set_boot(vm, boot)
            self._step("boot:recorded")
            try:
                self._machines.start(vm, self._vms.device(vm), boot, ssh_keys, user_data)
            except (VirtmanError, DriverError):
                self._vms.undo_boot(vm, before)
                raise
            self._step("boot:started")
        return self.vm(vm) | {"console_log": str(self._machines.console_log(vm)), "accel": self.verdict.accel}

    def stop_vm(self, vm: str, *, force: bool) -> None:
        """Shut a VM down; with ``force`` cut its power. Raises UnknownVm, HypervisorError."""
        self._vms.record(vm)
        self._machines.stop(vm, force=force)

    def console(self, vm: str) -> dict[str, str]:
        """Where the VM's console is found. Raises UnknownVm."""
        record = self._vms.record(vm)
        return {"libvirt": self._machines.uri, "domain": record.name, "log": str(self._machines.console_log(vm))}

    # The volumes of the cache

    def volumes(self) -> list[dict[str, Any]]:
        """The volumes of the cache. Raises NoVolumes, DriverError."""
        self._cache_group()
        return [_volume_line(volume) for volume in self._upkeep.look_at_volumes()]

    def add_volume(self, path: Path) -> dict[str, Any]:
        """Let the cache use a disk, a partition, or a file that is made. Raises NoVolumes, DriverError."""
        volume = self._cache_group().add_volume(path)
        self._upkeep.look_at_volumes()
        return _volume_line(volume)

    def remove_volume(self, path: Path) -> None:
        """Take a volume from the cache, also while images are read. Raises NoVolumes, UnknownVolume, DriverError."""
        group = self._cache_group()
        if path not in (volume.path for volume in group.volumes()):
            raise UnknownVolume(f"{str(path)!r} is no volume of the cache")
        group.remove_volume(path)
        self._upkeep.look_at_volumes()

    def _cache_group(self) -> CacheGroup:
        if (group := self._drivers.cache_group) is None:
            raise NoVolumes(f"the cache driver of this host, {self.config.cache}, has no volumes; bcache has them")
        return group

    # The host

    def status(self) -> dict[str, Any]:
        """What this host has and does now."""
        return {
            "host": self.config.name,
            "pid": os.getpid(),
            "volt": {
                "url": self.config.volt,
                "connected": self._heartbeat.connected,
                "trouble": self._heartbeat.trouble,
            },
            "accel": {"use": self.verdict.accel, "reason": self.verdict.reason},
            "repairing": self._workers.busy("repair"),
            "images": [self._image_status(record) for record in self._stacks.records()],
            "vms": self.vms(),
            "disks": {"trouble": self._drivers.snapshot.trouble() or None},
            "cache_volumes": [_volume_line(volume) for volume in self._upkeep.volumes],
            "strays": sorted(self._vms.strays()),
            "damaged": self._vms.damaged() + self._stacks.damaged(),
        }

    def _image_status(self, record: ImageRecord) -> dict[str, Any]:
        stats = self._upkeep.refresh(record)
        return {
            "image": record.name,
            "role": record.role,
            "phase": record.phase,
            "serving": self._stacks.serving(record.name),
            "slot": record.slot,
            "size": record.size,
            "fetched_bytes": stats.held_bytes,
            "cache_file_bytes": stats.file_bytes,
            "cache_hit_bytes": self._drivers.export.hit_bytes(record.name) if record.role is Role.HOST else 0,
            "paths": [
                {"host": p.parent.host, "address": p.parent.address, "state": p.state}
                for p in self._upkeep.paths(record)
            ],
            "children": [child.host for child in record.children],
            "vms": [vm.name for vm in self._vms.records() if vm.image == record.name],
        }

    def repair(self) -> dict[str, list[str]]:
        """Make what the records say true. Raises RepairIncomplete with every error."""
        done: dict[str, list[str]] = {"vms": [], "images": [], "strays": []}
        acts: list[Callable[[], None]] = []
        for vm in self._vms.records():
            if vm.phase is not VmPhase.READY:
                done["vms"].append(vm.name)
                acts.append(partial(self._vms.repair, vm.name))
        failed = _all(acts, raising=False)
        acts = []
        for image in self._stacks.records():
            if image.phase is not ImagePhase.ATTACHED or not self._stacks.serving(image.name):
                done["images"].append(image.name)
            acts.append(partial(self._stacks.restore, image.name))
        done["strays"] = sorted(self._stacks.strays())
        acts += [partial(self._stacks.remove_stray, stray) for stray in done["strays"]]
        failed += _all(acts, raising=False)
        # After a reboot, a disk is usable again once the stack below it is there.
        failed += _all([partial(self._vms.reopen, vm.name) for vm in self._vms.records()], raising=False)
        if failed:
            raise RepairIncomplete("; ".join(str(error) for error in failed))
        self._heartbeat.soon()
        return done

    def gc(self) -> dict[str, Any]:
        """Remove the stacks and the cached and published data that nobody needs. Raises CoordinatorDown."""
        listed = {image.name for image in self._volt.images()}
        removed = [record.name for record in self._stacks.records() if self._stacks.remove_if_idle(record.name)]
        unlisted = [r.name for r in self._stacks.records() if r.role is Role.ORIGIN and r.name not in listed]
        removed += [name for name in unlisted if self._stacks.drop_origin(name)]
        keys = set(self._drivers.cache.existing().names)
        if not self._publishing.held():  # what is being published has content before it has a record
            keys |= set(self._store.keys())
        freed = sum(self._remove_unused(key) for key in keys)
        return {"stacks": sorted(removed), "freed_bytes": freed}


def _where(record: ImageRecord | None) -> str | None:
    return None if record is None else f"{record.role} ({record.phase})"


def _vm_line(record: VmRecord) -> dict[str, Any]:
    return {"vm": record.name, "image": record.image, "size": record.size, "phase": record.phase}


def _volume_line(volume: Volume) -> dict[str, Any]:
    return {"path": str(volume.path), "size": volume.size, "state": volume.state, "images": list(volume.images)}


def _all(acts: list[Callable[[], None]], *, raising: bool = True) -> list[Exception]:
    """Do all acts side by side, whatever fails. Returns what was raised, or raises it as one RepairIncomplete."""
    failed: list[Exception] = []
    with ThreadPoolExecutor(16, thread_name_prefix="repair") as pool:
        for future in [pool.submit(act) for act in acts]:
            error = future.exception()
            if isinstance(error, Exception):
                log.error("repair: %s", error)
                failed.append(error)
    if failed and raising:
        raise RepairIncomplete("; ".join(str(error) for error in failed))
    return failed
