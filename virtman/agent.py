"""The agent: owns this host's stacks and VMs.

It composes the parts; each part has its own module. Nothing of the data path runs in this process: while it is down,
VMs and children go on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from drivers.base import CacheGroup, Image, Volume
from drivers.digests import DRAWN, draw, key_of, kind_of
from drivers.errors import DriverError
from drivers.host.space import Room
from drivers.host.watch import deaths
from drivers.registry import load
from virtman import attaching, booting, creating, disks, inplace, migration, models, renaming, streams, views
from virtman.accel import Verdict, choose_accel
from virtman.config import AgentConfig, agent_id, prepare
from virtman.convert import Content, Progress, holds
from virtman.copies import Copies, Target
from virtman.devices import Devices
from virtman.errors import (
    ConfigError,
    CoordinatorDown,
    HypervisorError,
    ImageExists,
    ImageInUse,
    NotSupported,
    NoVolumes,
    UnknownImage,
    UnknownVm,
    UnknownVolume,
    VirtmanError,
)
from virtman.heartbeat import Heartbeat
from virtman.hostdrivers import HostDrivers
from virtman.imagefile import check_size, source
from virtman.imagestore import ImageStore
from virtman.kept import Kept
from virtman.kinds import VM_KINDS
from virtman.locks import NamedLocks
from virtman.machines import OFF, SAVED, LibvirtMachines
from virtman.parallel import raise_all, side_by_side
from virtman.passing import Passed
from virtman.peer import Peer
from virtman.pipe import Caller, Pipe, sweep
from virtman.records import DETACH, PUBLISH, Boot, DeviceRecord, ImageRecord, InPlace, Role, Shelf, VmRecord
from virtman.roles import Permit, anything
from virtman.stackchoice import USERSPACE
from virtman.stacks import Stacks, published_otherwise
from virtman.steps import Step, log_step
from virtman.upkeep import Upkeep
from virtman.vms import Vms
from virtman.voltlink import VoltLink
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
        self._drivers = self._load_drivers()
        self._room = Room(config.state, config.reserve)
        self._store = ImageStore(config.state / "images", self._room)
        self._publishing = NamedLocks()
        self._placing = NamedLocks()
        """Held, by what identifies a block device, while it is published in place."""
        self._volt = VoltLink(self._volt_client(), config.name, self._drivers.export.address)
        self._machines = LibvirtMachines(config.libvirt, config.name, config.state / "machines", self.verdict.accel)
        self._stacks = Stacks(
            self._drivers, Shelf(config.state / "records" / "images", ImageRecord), self._store, self._volt,
            in_use=lambda image: self._vms.uses(image) or self._copies.reads(image),
            changed=lambda: self._heartbeat.soon(), released=lambda image: self._upkeep.released(image), step=step,
        )  # fmt: skip
        self._vms = Vms(
            Shelf(config.state / "records" / "vms", VmRecord), self._drivers.snapshot, self._machines, self._stacks,
            VM_KINDS, step,
        )  # fmt: skip
        self._copies = Copies(self._vms, self._stacks, self._drivers.export)
        self._kept = Kept(self._stacks, self._store, self._drivers.cache, self._publishing)
        self._devices = Devices(
            Shelf(config.state / "records" / "devices", DeviceRecord),
            self._drivers.device_cache,
            self._no_volumes,
            step,
        )
        self._upkeep = Upkeep(
            self._stacks, self._vms, self._drivers, self._kept, self._devices, self._volt.register, config.idle_grace
        )  # fmt: skip
        self._heartbeat = Heartbeat(self._tell_volt, self._on_answer)
        self._step = step

    @property
    def _no_volumes(self) -> str:
        return f"the cache driver of this host, {self.config.cache}, has no volumes; bcache has them"

    def _accel(self) -> Verdict:
        if self.config.accel == "auto":
            return choose_accel(self.config.probe_kernel, self.config.state / "accel.json")
        return Verdict(self.config.accel, "set by --accel")

    def _volt_client(self) -> VoltClient:
        try:
            return VoltClient(self.config.volt, self.config.volt_token_file, agent=agent_id(self.config.state))
        except VoltError as error:
            raise ConfigError(str(error)) from error

    def _load_drivers(self) -> HostDrivers:
        config, place = self.config, self.config.place
        try:
            return HostDrivers(
                attach=load("attach", config.attach)(
                    place, lost=lambda image, parent: self._upkeep.places.parent_lost(image.name, parent.host)
                ),
                cache=load("cache", config.cache)(place),
                export=load("export", config.export)(place, died=lambda image: self._upkeep.images.died(image)),
                snapshot=load("snapshot", config.snapshot)(place),
            )
        except DriverError as error:
            raise ConfigError(str(error)) from error

    def start(self) -> None:
        """Clean up after a kill, begin to repair in the background, and connect to Volt."""
        self._store.clean()
        sweep(self.config.socket.parent)
        self._upkeep.start()
        self._heartbeat.start()

    def stop(self) -> None:
        """End the agent's own threads; stacks and VMs go on."""
        self._upkeep.stopped = True
        self._stacks.readers.close()
        self._heartbeat.stop()
        self._upkeep.queue.stop()
        self._volt.close()
        for lock in self._locks:
            os.close(lock)

    def suspend(self, *, force: bool) -> None:
        """Stop serving every image, so that its cache is closed cleanly; the next start brings all back.

        Raises HypervisorError while VMs run, unless ``force``.
        """
        states = self._vm_states(self._vms.shelf.all())
        using = [f"{vm} ({state})" for vm, state in states.items() if state not in (OFF, SAVED)]
        if using and not force:
            raise HypervisorError(
                f"these VMs use their disks, or may: {', '.join(using)}; stop them first, or use --force"
            )
        self._stacks.suspended = True  # before the records are read: no stack without a record is built any more
        records = self._stacks.records()
        raise_all(side_by_side([partial(self._stacks.suspend, record.name) for record in records]))
        log.info("all images are suspended: %s", ", ".join(record.name for record in records) or "there are none")

    def _tell_volt(self) -> HeartbeatAnswer:
        reports, needed = self._upkeep.news()
        return self._volt.heartbeat(reports, self._upkeep.kept(), needed)

    def _on_answer(self, answer: HeartbeatAnswer | None) -> None:
        self._upkeep.handle(answer)

    # Images

    def publish(self, name: str, file: Path | Passed, progress: Progress) -> models.Published:
        """Make this host the origin of an image with the file's content.

        Raises BadImageFile, NoRoom, ImageExists, CoordinatorDown, DriverError.
        """
        self._check_name(name)
        with source(file, self._store.folder, self._room, progress) as content:
            return self._publish(name, content, progress)

    def publish_vm(self, name: str, vm: str, progress: Progress) -> models.Published:
        """Make this host the origin of an image with what a VM's disk holds now.

        Raises as ``disks.take``, BadImageFile, NoRoom, ImageExists, CoordinatorDown.
        """
        size = self._vms.record(vm).size
        if size is not None:
            check_size(f"the disk of vm {vm}", size)
        self._check_name(name, size)
        with self._copies.vm(vm) as (content, _point):
            return self._publish(name, content, progress)

    def _publish(self, name: str, content: Content, progress: Progress) -> models.Published:
        with self._publishing.hold(name):
            kind = self._check_name(name, content.size)
            image = self._published_already(name, content, progress) or self._store.add(name, content, progress, kind)
            self._step("publish:stored")
            try:
                record = self._stacks.add_origin(image)
            except (VirtmanError, DriverError):
                self._kept.remove(image.key, publishing=name)
                raise
        return views.published(record)

    def _check_name(self, name: str, size: int | None = None) -> str | None:
        """Whether a copy, of ``size`` bytes, may be published under a name, as far as that is known before it is read.

        It may if it holds what is published already: what has the same size is yet to be read. Returns the kind of the
        digest of what is published, if that is known. Raises ImageExists.
        """
        here = self._stacks.find(name)
        if here is not None and here.role is Role.HOST:
            raise ImageExists(
                f"image {name!r} is on this host already, and another host published it; choose another name"
            )
        if here is not None and here.in_place is not None:
            raise published_otherwise(here)
        if here is not None and here.size is not None:
            known, digest = here.size, str(here.digest)
        else:
            try:
                listed = self._volt.image(name)
            except (UnknownImage, CoordinatorDown):  # one that does not answer decides when it does
                return None
            known, digest = listed.size, listed.digest
        if digest.startswith(DRAWN) or size not in (None, known):
            raise ImageExists(
                f"image {name!r} is published already, and holds something else: {known} bytes, {digest}; choose"
                " another name"
            )
        return kind_of(digest)

    def _published_already(self, name: str, content: Content, progress: Progress) -> Image | None:
        """The image that this host published under a name, which holds the same. None: there is none.

        Raises ImageExists if it holds something else.
        """
        here = self._stacks.find(name)
        if here is None or here.digest is None or not (stored := self._store.path(here.image)).exists():
            return None
        if not holds(content, stored, progress):
            raise ImageExists(
                f"image {name!r} is on this host already, and not from this content; choose another name, or:"
                f" virtman unpublish {name}"
            )
        return here.image

    def publish_in_place(
        self, name: str, file: Path | Passed, trust: str | None, *, digest: bool,
        progress: Progress = lambda _step, _done, _total: None,
    ) -> models.Published:  # fmt: skip
        """Make this host the origin of an image whose content stays where it is. ``trust``: the digest that it has.

        What is published so already stays so, also by another path; something else takes its place only if it is
        trusted to have the same digest. ``digest``: its sum is computed when it is served. Raises BadImageFile,
        ImageExists, CoordinatorDown, DriverError, NoRoom, HostTrouble.
        """
        with (
            self._publishing.hold(name),
            inplace.to_publish(file, (self.config.state, self.config.run)) as (found, fd),
            self._placing.hold(found.identity),
        ):
            before = self._stacks.find(name)
            if before is not None and self._is_same(before, found, trust):
                image, wanted = before.image, (before.in_place or found).model_copy(update={"path": found.path})
            else:
                self._check_new(name, found, before, trust)
                inplace.check_free(found, fd)
                image, wanted = Image(name, found.size, trust or self._new_digest(name, found)), found
            if digest:
                wanted = wanted.model_copy(update={"digest": True})
            progress("look", found.size, found.size)  # a caller who has hung up while the file was written out ends it
            return views.published(self._stacks.add_origin(image, wanted))

    def _is_same(self, before: ImageRecord, found: InPlace, trust: str | None) -> bool:
        """Whether this is published in place already. Raises ImageExists if it is, with another digest."""
        if before.in_place is None or inplace.differs(before.in_place, found):
            return False
        if trust not in (None, before.digest):
            raise ImageExists(
                f"image {before.name!r} is published from {before.in_place.path} already, with digest {before.digest}"
            )
        return True

    def _check_new(self, name: str, found: InPlace, before: ImageRecord | None, trust: str | None) -> None:
        """Whether something may be published in place under this name, and no other one. Raises ImageExists."""
        if before is not None and (before.in_place is None or before.digest != trust or before.size != found.size):
            had = "" if before.in_place is None else f", in place, from {before.in_place.path} as it was then"
            raise ImageExists(
                f"image {name!r} is on this host already{had}, and not from this content; if this host published it:"
                f" virtman unpublish {name}"
            )
        for record in self._stacks.records():
            known = None if record.leaving or record.name == name else record.in_place
            if found.identity and known is not None and known.identity == found.identity:
                raise ImageExists(f"{found.path} is published in place already, as image {record.name!r}")

    def _new_digest(self, name: str, found: InPlace) -> str:
        """An identity for content that nobody has read. Raises ImageExists if Volt has content under this name."""
        try:
            listed = self._volt.image(name).digest
        except (UnknownImage, CoordinatorDown):  # one that does not answer decides when it does
            return draw()
        raise ImageExists(
            f"image {name!r} is published already, with digest {listed}; if {found.path} holds just that, say so:"
            f" virtman publish {name} {found.path} --in-place --trust {listed}"
        )

    def unpublish(self, name: str, *, when_unused: bool = False) -> models.Unpublished:
        """Be no origin of an image any more; without another origin it is withdrawn at Volt.

        It is served until no VM of this host needs it; ``gc`` deletes its content. Also one that is yet to be announced
        is taken back only when Volt agrees. ``when_unused``: if it has no other origin it is served until no host needs
        it, and its content goes without ``gc``. Raises UnknownImage (this host did not publish it), ImageInUse (never
        ``when_unused``), CoordinatorDown, DriverError.
        """
        with self._publishing.hold(name):
            record = self._published(name)
            withdrawn = self._unpublish(name, when_unused=when_unused)
            if when_unused and not withdrawn and record.digest is not None:
                self._kept.remove(key_of(record.digest), publishing=name)
        self._heartbeat.soon()
        return models.Unpublished(name=name, serving=self._stacks.serving(name), withdrawn=withdrawn)

    def _unpublish(self, name: str, *, when_unused: bool) -> bool:
        """Returns whether Volt goes on listing the image with this host as its origin, as withdrawn."""
        if self._published(name).doing(PUBLISH) and self._take_back(name, when_unused=when_unused):
            return False
        record = self._published(name)
        if record.leaving:
            self._stacks.leave_later(name)
            return False
        self._volt.withdraw(name, when_unused=when_unused)
        if record.doing(DETACH):
            self._stacks.restore(name)
            return False
        if when_unused and self._volt.lists_origin(name):
            return True
        self._stacks.drop_origin(name, given_up=True)
        return False

    def _take_back(self, name: str, *, when_unused: bool) -> bool:
        """Take back what is yet to be announced, or announce it where it has to be withdrawn: somebody reads it."""
        try:
            return self._stacks.take_back(name)
        except ImageInUse:
            if not when_unused:
                raise
            self._stacks.restore(name)
            return False

    def export_image(self, image: str, file: Path | Passed, image_format: str, progress: Progress) -> models.Exported:
        """Write a file of its own that holds what an image does. Raises as ``Stacks.ensure`` and ``Target``."""
        target = Target(file, self._store.folder, self._room)
        with self._copies.image(image) as content:
            target.fill(content, image_format, progress)
            return models.Exported(file=str(target.name), format=image_format, size=content.size)

    def _published(self, name: str) -> ImageRecord:
        """The record of an image that this host published. Raises UnknownImage, StateDamaged."""
        record = self._stacks.find(name)
        if record is None or record.role is not Role.ORIGIN:
            raise UnknownImage(f"image {name!r} was not published by this host")
        return record

    def images(self) -> list[models.Image]:
        """All published images, and how far they are on this host. Raises CoordinatorDown."""
        here, held = {record.name: record for record in self._stacks.records()}, self._stacks.held()
        return [
            views.image(
                image, here.get(image.name), self._upkeep.looks.stats(image.name).held_bytes,
                self._in_place(here.get(image.name), held),
            )
            for image in self._volt.images()
        ]  # fmt: skip

    def _in_place(self, record: ImageRecord | None, held: frozenset[str]) -> models.InPlace | None:
        if record is None:
            return None
        return views.in_place(record, self._stacks.flaws.get(record.name), held=record.name in held)

    def tree(self, image: str) -> ImageTree:
        """An image's tree. Raises UnknownImage, CoordinatorDown."""
        return self._volt.tree(image)

    # VMs

    def create(self, vm: str, image: str, size: int | None) -> models.Vm:
        """A disk for a VM. Raises as ``creating.create``."""
        present = self._stacks.known(image)
        try:
            creating.create(self._vms, vm, image, size)
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

    def destroy(self, vm: str, permit: Permit = anything) -> None:
        """Remove a VM and its disk for good, and end what is being received for it.

        Raises UnknownVm, Forbidden, DriverError, HypervisorError.
        """
        self._vms.require_permitted(vm, permit)
        interrupted = self._vms.receiving.end(vm, f"vm {vm!r} was destroyed while it was received")
        try:
            creating.destroy(self._vms, vm, permit)
        except UnknownVm:
            if not interrupted:  # else it was a new one, and is gone with its stream
                raise

    def vm(self, name: str) -> models.Vm:
        """One VM, with its disk as a path and as QEMU block node. Raises UnknownVm, DriverError."""
        record = self._vms.record(name)
        user = self._vms.attached_to(record)
        disk = views.open_disk(record, self._drivers.snapshot.open(name), None if user is None else user.name)
        machine = self._machine(record, self._vm_states([record]))
        return models.Vm(name=name, disk=disk, machine=machine, **views.more(record))

    def vms(self) -> list[models.VmLine]:
        """All VMs of this host."""
        records = self._vms.shelf.all()
        states = self._vm_states(records)
        users = {disk: record.name for record in records for disk in record.disks}
        return [
            models.VmLine(
                name=record.name, disk=views.disk(record, users.get(record.name)),
                machine=self._machine(record, states), **views.more(record),
            )
            for record in records
        ]  # fmt: skip

    def _booted(self, name: str) -> models.Booted:
        return models.Booted(**dict(self.vm(name)))

    def _machine(self, record: VmRecord, states: dict[str, str]) -> models.Machine | None:
        state = states.get(record.name, OFF)
        return views.machine(record, state, self._machines.console_log(record.name), self.verdict.accel)

    def _vm_states(self, records: list[VmRecord]) -> dict[str, str]:
        """State by name of those that were booted and are not off. libvirt is asked only if there are any."""
        booted = [record.name for record in records if record.boot]
        try:
            return self._machines.states() if booted else {}
        except HypervisorError as error:
            log.warning("states of VMs are unknown: %s", error)
            return dict.fromkeys(booted, "unknown")

    def boot(
        self, vm: str, image: str, size: int | None, boot: Boot, ssh_keys: list[str], user_data: str | None
    ) -> models.Booted:
        """Create the VM if needed and start it; one that runs so already is left alone.

        Raises as ``create``, HypervisorError, DomainForeign, VmRuns, BadRequest.
        """
        booting.boot(self._vms, vm, image, size, boot, ssh_keys, user_data)
        return self._booted(vm)

    def start_vm(self, vm: str) -> models.Booted:
        """Start a VM again as it was booted before; one that runs is left alone.

        Raises UnknownVm, NeverBooted, HypervisorError, DomainForeign, DriverError.
        """
        booting.start(self._vms, vm)
        return self._booted(vm)

    def stop_vm(self, vm: str, *, force: bool) -> None:
        """Shut a VM down; with ``force`` cut its power. Raises UnknownVm, VmMoving, VmSaved, HypervisorError."""
        self._vms.require_here(self._vms.record(vm))
        self._machines.stop(vm, force=force)

    def rename(self, vm: str, new: str, permit: Permit = anything) -> models.Vm:
        """Let a VM that is off have another name. Raises as ``renaming.rename``."""
        renaming.rename(self._vms, vm, new, permit)
        return self.vm(new)

    def attach_disk(self, vm: str, disk: str) -> models.Vm:
        """Let a VM use another disk besides its own. Raises as ``attaching.attach``."""
        attaching.attach(self._vms, vm, disk)
        return self.vm(vm)

    def detach_disk(self, vm: str, disk: str) -> models.Vm:
        """Take such a disk away from a VM. Raises as ``attaching.detach``."""
        attaching.detach(self._vms, vm, disk)
        return self.vm(vm)

    def traveller(self, vm: str) -> models.Traveller:
        """What goes along with the disk of a VM that is to move. Raises as ``migration.traveller``."""
        return views.traveller(migration.traveller(self._vms, vm))

    def migrate(self, vm: str, how: models.MigrateRequest, progress: Progress) -> models.Left:
        """Move a VM's memory to another libvirt. Raises as ``migration.leave``."""
        tell = partial(progress, "memory")
        return models.Left(downtime=migration.leave(self._vms, vm, how.to, how.domain, how.point, tell))

    def finish_migration(self, vm: str, to: str) -> None:
        """Destroy what is left of a VM that goes on elsewhere. Raises as ``migration.finish``."""
        migration.finish(self._vms, vm, to)

    def end_migration(self, vm: str) -> models.Vm:
        """End a migration that is under way. Raises as ``migration.abort``."""
        migration.abort(self._vms, vm)
        return self.vm(vm)

    def take_back(self, vm: str, uri: str) -> models.Vm:
        """Let a VM that went be started here again. Raises as ``migration.take_back``."""
        migration.take_back(self._vms, vm, uri)
        return self.vm(vm)

    def check_arrival(self, what: models.Traveller) -> None:
        """Whether a VM can come here. Raises NotSupported, and as ``migration.check``."""
        if self.config.snapshot != USERSPACE.snapshot:
            raise NotSupported("this host has disks of the kernel stack; VMs move to hosts of the userspace stack")
        self._machines.check(views.of_traveller(what))

    def give_up_arrival(self, vm: str, points: Sequence[str]) -> models.GivenUp:
        """Destroy what has come of a VM. Raises as ``migration.give_up``."""
        return models.GivenUp(state=migration.give_up(self._vms, vm, points))

    def expect(self, vm: str, what: models.Traveller) -> models.Expected:
        """Make ready for a VM that comes. Raises BadRequest, and as ``migration.expect``."""
        return models.Expected(domain=migration.expect(self._vms, vm, views.of_traveller(what)))

    def arrive(self, vm: str) -> models.Booted:
        """Let a VM go on that has come. Raises as ``migration.arrive``."""
        migration.arrive(self._vms, vm)
        return self._booted(vm)

    def console(self, vm: str) -> models.Console:
        """Where the VM's console is found. Raises UnknownVm."""
        record = self._vms.record(vm)
        log_file = str(self._machines.console_log(vm))
        return models.Console(libvirt=self._machines.uri, domain=record.name, log=log_file)

    # Disks of VMs

    def resize(self, vm: str, size: int, permit: Permit = anything) -> models.Vm:
        """Let a VM's disk have ``size`` bytes. Raises as ``disks.resize``."""
        disks.resize(self._vms, vm, size, permit)
        return self.vm(vm)

    def snapshots(self, vm: str) -> list[models.Snapshot]:
        """A VM's snapshots in the order in which they were taken. Raises UnknownVm."""
        record = self._vms.record(vm)
        return [views.snapshot(record, point) for point in record.points if not point.temporary]

    def take_snapshot(self, vm: str, name: str, permit: Permit = anything) -> models.Snapshot:
        """Keep what a VM's disk holds now; a snapshot of this name is left alone. Raises as ``disks.take``."""
        point = disks.take(self._vms, vm, name, permit)
        return views.snapshot(self._vms.record(vm), point)

    def revert(self, vm: str, snapshot: str, permit: Permit = anything) -> models.Vm:
        """Let the disk of a VM that is off hold what it held then. Raises as ``disks.revert``."""
        disks.revert(self._vms, vm, snapshot, permit)
        return self.vm(vm)

    def delete_snapshot(self, vm: str, name: str, permit: Permit = anything) -> None:
        """Forget a snapshot of a VM's disk. Raises as ``disks.drop``."""
        disks.drop(self._vms, vm, name, permit)

    def clone(self, vm: str, names: Sequence[str]) -> list[models.Vm]:
        """New VMs whose disks hold what a VM's disk holds now. Raises as ``disks.clone``."""
        creating.clone(self._vms, vm, names)
        return [self.vm(name) for name in names]

    def export_vm(self, vm: str, file: Path | Passed, image_format: str, progress: Progress) -> models.Exported:
        """Write a file of its own that holds what a VM's disk does now. Raises as ``disks.take`` and ``Target``."""
        target = Target(file, self._store.folder, self._room)
        with self._copies.vm(vm) as (content, point):
            target.fill(content, image_format, progress)
            return models.Exported(
                file=str(target.name), format=image_format, size=content.size, state=point.state
            )  # fmt: skip

    def pipe(self, peer: Peer) -> Pipe:
        """Where a caller writes or reads a stream, or passes a file. Raises HostTrouble, NoRoom."""
        return Pipe(self.config.socket.parent, peer.uid)

    def send(self, vm: str, what: models.SendRequest, caller: Caller, progress: Progress) -> models.Sent:
        """Write a VM's stream to the caller. Raises as ``streams.send`` and CallerGone."""
        return streams.send(
            self._vms,
            self._copies,
            vm,
            what.snapshot,
            what.since,
            caller.write,
            progress,
            with_snapshots=what.with_snapshots,
        )

    def receive(
        self, vm: str, image: str, caller: Caller, progress: Progress, permit: Permit = anything
    ) -> models.Vm:  # fmt: skip
        """Make a VM of the caller's stream, or let one go on. Raises as ``streams.receive_from``."""
        present = self._stacks.known(image)
        try:
            streams.receive_from(self._vms, vm, image, caller, progress, permit)
        except (VirtmanError, DriverError):
            if not present:
                self._let_go(image)
            raise
        return self.vm(vm)

    # The volumes of the cache

    def volumes(self) -> list[models.Volume]:
        """The volumes of the cache. Raises NoVolumes, DriverError."""
        self._cache_group()
        return self._volumes(self._upkeep.look_at_volumes())

    def _volumes(self, found: list[Volume]) -> list[models.Volume]:
        devices = self._devices.records()
        return [views.volume(volume, devices) for volume in found]

    def add_volume(self, path: Path) -> models.Volume:
        """Let the cache use a disk, a partition, or a file that is made. Raises NoVolumes, DriverError."""
        volume = self._cache_group().add_volume(path)
        self._upkeep.look_at_volumes()
        self._upkeep.tend_all()
        return self._volumes([volume])[0]

    def remove_volume(self, path: Path) -> None:
        """Take a volume from the cache, also while images are read.

        Raises NoVolumes, UnknownVolume; DriverError, VolumeInUse if somebody else has attached a device to it.
        """
        if not self._cache_group().remove_volume(path):
            raise UnknownVolume(f"{str(path)!r} is no volume of the cache")
        self._upkeep.look_at_volumes()
        self._upkeep.tend_all()

    def _cache_group(self) -> CacheGroup:
        if (group := self._drivers.cache_group) is None:
            raise NoVolumes(self._no_volumes)
        return group

    # Devices of others

    def cached_devices(self) -> list[models.CachedDevice]:
        """The devices that are read through the cache. Raises NoVolumes, DriverError."""
        self._cache_group()
        return self._listed_devices()

    def _listed_devices(self) -> list[models.CachedDevice]:
        return [views.cached_device(*each) for each in self._devices.listed()]

    def attach_device(self, path: Path, passed: Passed | None = None) -> models.CachedDevice:
        """Have a device read through the cache. Raises as ``Devices.attach``."""
        name = self._devices.attach(path, passed).name
        return next(views.cached_device(*each) for each in self._devices.listed() if each[0].name == name)

    def detach_device(self, path: Path, *, force: bool) -> None:
        """Let such a device go. Raises as ``Devices.detach``."""
        self._devices.detach(path, force=force)

    # The host

    def status(self) -> models.Status:
        """What this host has and does now."""
        heartbeat, held = self._heartbeat, self._stacks.held()
        return models.Status(
            host=self.config.name,
            pid=os.getpid(),
            volt=models.VoltStatus(url=self.config.volt, connected=heartbeat.connected, trouble=heartbeat.trouble),
            accel=views.accel(self.verdict),
            repairing=self._upkeep.repairing(),
            suspended=self._stacks.suspended,
            images=[self._stack(record, held) for record in self._stacks.records()],
            vms=self.vms(),
            disks=views.disks(self._drivers.snapshot.trouble(), self.config.state),
            cache_volumes=self._volumes(self._upkeep.volumes),
            cached_devices=self._listed_devices(),
            strays=sorted(self._vms.strays()),
            damaged=views.left_alone(self._vms.shelf.unreadable(), self._stacks.troubles(), self._devices.troubles()),
            troubles=self._upkeep.troubles(),
            deaths=[views.death(death) for death in deaths()],
        )

    def _stack(self, record: ImageRecord, held: frozenset[str]) -> models.Stack:
        return views.stack(
            record,
            self._upkeep.looks.refresh(record),
            self._drivers.export.hit_bytes(record.name) if record.role is Role.HOST else 0,
            self._upkeep.looks.paths(record),
            [vm.name for vm in self._vms.shelf.all() if vm.image == record.name],
            self._in_place(record, held),
            serving=self._stacks.serving(record.name),
        )

    def repair(self) -> models.Repaired:
        """Make what the records say true. Raises Suspended, RepairIncomplete with every error."""
        self._stacks.check_not_suspended()
        done = self._upkeep.repair()
        self._heartbeat.soon()
        return models.Repaired(**done)

    def gc(self) -> models.Removed:
        """Remove the stacks and the cached and published data that nobody needs. Raises CoordinatorDown."""
        records = self._stacks.records()
        unlisted, kept = self._unlisted_origins(records)
        removed: list[str] = []

        def remove(name: str, act: Callable[[str], bool]) -> None:
            removed.extend([name] if act(name) else [])

        failed = side_by_side(
            [
                *(partial(remove, record.name, self._stacks.remove_if_idle) for record in records),
                *(partial(remove, record.name, self._drop_unlisted) for record in unlisted),
            ]
        )
        freed, more = self._kept.remove_all()
        raise_all([*failed, *more])
        return models.Removed(stacks=sorted(removed), freed_bytes=freed, kept=kept)

    def _drop_unlisted(self, name: str) -> bool:
        """Stop serving an image that Volt does not list as this host's: whoever publishes it again meanwhile asks Volt
        before or after that, and not in between.
        """
        with self._publishing.hold(name):
            return not self._volt.lists_origin(name) and self._stacks.drop_origin(name)

    def would_remove(self) -> models.Removed:
        """What ``gc`` would remove now, and nothing changes. Raises CoordinatorDown."""
        records = self._stacks.records()
        going = {record.name for record in records if self._stacks.idle(record)}
        unlisted, kept = self._unlisted_origins(records)
        going |= {record.name for record in unlisted if not self._vms.uses(record.name)}
        unused = self._kept.unused([record for record in records if record.name not in going])
        freed = sum(self._kept.size(key) for key in unused)
        return models.Removed(stacks=sorted(going), freed_bytes=freed, kept=kept)

    def _unlisted_origins(self, records: list[ImageRecord]) -> tuple[list[ImageRecord], list[str]]:
        """Images that this host published and Volt does not list as its own any more; and the names of those among them
        that are kept: other hosts read them when Volt was heard last, and its database may have been set back since.

        Raises CoordinatorDown.
        """
        listed = {image.name for image in self._volt.images() if self.config.name in image.origins}
        origins = [record for record in records if record.role is Role.ORIGIN and record.steady]
        unlisted = [record for record in origins if record.name not in listed]
        return [record for record in unlisted if not record.children], [r.name for r in unlisted if r.children]
