"""The transfer manager's actions with disks of images, each called as OpenNebula's driver calls its scripts.

An action ends well, or raises a DriverError; then the state is as before, or the same call repairs it. What an argument
means: ``docs/opennebula.md``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath

from opennebula_tm.driver import names, nebula
from opennebula_tm.driver.card import Cards
from opennebula_tm.driver.content import Contents, Origins
from opennebula_tm.driver.deploying import Deployments
from opennebula_tm.driver.disks import Disks, Ref
from opennebula_tm.driver.errors import HostFailed, NotThere, Refused
from opennebula_tm.driver.moving import Mover, Stored, Streams
from opennebula_tm.driver.nebula import DISK_RESIZE, DISK_RESIZE_UNDEPLOYED, LOST, MIB, Vm, VmDisk
from opennebula_tm.driver.remote import Hosts
from opennebula_tm.driver.settings import Settings
from opennebula_tm.driver.system import OURS

log = logging.getLogger(__name__)


class TransferManager:
    """Carries actions out."""

    def __init__(self, settings: Settings, show_vm: Callable[[int], Vm] = nebula.show_vm) -> None:
        self._settings = settings
        self._show_vm = show_vm
        self._hosts = Hosts(settings)
        self._cards = Cards()
        self._disks = Disks(self._hosts)
        self._streams = Streams(self._hosts)
        self._mover = Mover(self._disks, self._streams)
        self._deployments = Deployments(self._hosts, self._cards)

    def clone(self, source: str, target: str, vm: str, _datastore: str, *, system: str = "") -> None:
        """A disk of its own for a VM, of an image. What an earlier try left there is removed.

        ``system``: the driver of the system datastore, "" for our own.
        """
        path = names.path_of(source)
        ref = self._ref(target, vm)
        known = self._show_vm(ref.vm)
        disk = known.disk(ref.number)
        with self._unless_deleted(ref):
            card = self._contents(path).settled()
            self._deployments.begin(ref.host, path, card.published, disk.method)
            self._disks.create(ref, card.published, disk.grown, card.format, monitor=system, fresh=True)
        # A VM that was undeployed, and is made anew, left its disk on the front end.
        _forget_stored(ref, known)

    def ln(self, source: str, target: str, vm: str, _datastore: str, *, system: str = "") -> None:
        """The disk of a persistent image for a VM."""
        path = names.path_of(source)
        ref = self._ref(target, vm)
        disk = self._show_vm(ref.vm).disk(ref.number)
        with self._unless_deleted(ref), self._cards.locked(path):
            self._contents(path).give(ref, self._disks, disk.grown, system)

    def mvds(self, source: str, target: str, vm: str, _datastore: str) -> None:
        """The end of a persistent image's use: its disk waits at the origins for the next VM."""
        ref = self._ref(source, vm)
        self._at_home(ref, lambda: self._give_back(ref, names.path_of(target)))

    def _give_back(self, ref: Ref, path: PurePosixPath) -> None:
        with self._cards.locked(path):
            known, contents = self._show_vm(ref.vm), self._contents(path)
            stored = _stored(ref, known)
            on_host = ref.host in known.hosts
            found = self._disks.describe(ref) if on_host else None
            if found is not None:
                self._disks.drop_system_snapshots(ref)  # which are the VM's own, and end with it
                contents.keep(found.image, ref.source, ref.name)
                _forget_stored(ref, known)  # first: a repeated call that finds no disk takes what is stopped
            elif stored.there:
                contents.keep(stored.image, stored.file, ref.name, known.disk(ref.number).grown)
            elif (kept := contents.card.kept) is None or kept.of != ref.name:
                raise NotThere(f"{ref} is neither on {ref.host} nor on the front end")
        if on_host:
            self._disks.destroy(ref)
        _forget_stored(ref, known)
        self._remove_elsewhere(ref, known)

    def cpds(self, source: str, target: str, snapshot: str, vm: str, _datastore: str) -> None:
        """Save as: what a disk holds, or held at a snapshot, becomes the content of another image."""
        ref = self._ref(source, vm)
        number = names.number("the snapshot", snapshot)
        self._at_home(ref, lambda: self._save(ref, number, names.path_of(target)))

    def _save(self, ref: Ref, number: int, path: PurePosixPath) -> None:
        with self._cards.locked(path):
            known, contents = self._show_vm(ref.vm), self._contents(path)
            stored = _stored(ref, known)
            found = self._disks.describe(ref) if ref.host in known.hosts else None
            if found is not None:
                options = ("--snapshot", names.snapshot(number)) if number >= 0 else ()
                contents.fill(found.image, ref.source, options)
            elif not stored.there:
                raise NotThere(f"{ref} is neither on {ref.host} nor on the front end")
            elif number >= 0:
                raise Refused(f"{ref} is on the front end: resume the VM before its snapshot {number} is saved")
            else:
                contents.fill(stored.image, stored.file, size=known.disk(ref.number).grown)

    def delete(self, target: str, vm: str, _datastore: str) -> None:
        """A VM's disk, for good. What is not there is fine."""
        ref = self._ref(target, vm)
        known = self._show_vm(ref.vm)
        self._remove(ref, known, end=True)
        if ref.host not in known.hosts or ref.host == known.hosts[-1]:  # else the VM has left it, and lives on
            self._remove_elsewhere(ref, known)

    def _remove_elsewhere(self, ref: Ref, known: Vm) -> None:
        """Remove a disk where a move that failed has left it: that may be at both of its ends."""
        for other in _elsewhere(ref, known):
            try:
                self._disks.destroy(other, end=True)
            except HostFailed as error:
                log.warning("%s may still be elsewhere: %s", ref, error)

    def _remove(self, ref: Ref, known: Vm, *, end: bool = False) -> None:
        """Remove a disk from a place. ``end``: see ``Disks.destroy``."""
        _forget_stored(ref, known)
        # Who is no host of the VM is the front end, which need not have an agent.
        if ref.host in known.hosts:
            self._disks.destroy(ref, end=end)

    def mv(self, source: str, target: str, vm: str, _datastore: str) -> None:
        """A VM's disk goes to another host, to the front end (stop, undeploy), or comes from there (resume)."""
        before, after = self._ref(source, vm), self._ref(target, vm)
        known = self._show_vm(before.vm)
        with self._unless_deleted(after, before):
            self._at_home(before, lambda: self._move(before, after, known), after)

    @contextmanager
    def _unless_deleted(self, *places: Ref) -> Iterator[None]:
        """Remove a disk from these places at the end, if its VM was deleted meanwhile. Raises Refused then.

        The DELETE of the VM may have looked for the disk before the disk came there.
        """
        try:
            yield
        finally:
            if (known := self._show_vm(places[0].vm)).deleted:
                for ref in places:
                    self._remove(ref, known)
                raise Refused(f"VM {known.number} was deleted meanwhile, and so is its disk {places[0].number}")

    def _move(self, before: Ref, after: Ref, known: Vm) -> None:
        if (why := LOST.get(known.state)) is not None:
            raise Refused(
                f"{before} is only on {before.host}, which {why}: wait until that host is back, or recreate the VM"
            )
        disk = known.disk(before.number)
        if after.host != known.hosts[-1]:
            self._mover.stop(before, Stored(after))
        elif before.host == after.host and (there := self._disks.describe(after)) is not None:
            self._mover.relocate(after, there.path, Stored(before))
        elif before.host in known.hosts and (found := self._disks.describe(before)) is not None:
            self._mover.migrate(before, found, after, disk.driver, Stored(before), stays=known.system == OURS)
        else:
            self._resume(_stored(before, known), after, disk, Path(before.place.path))

    def mv_folder(self, source: str, target: str, vm: str, *, move: Callable[[], int]) -> None:
        """A VM's folder goes to another host. Only then do its disks leave the old one: until then the VM can go back.

        ``move``: does it, and returns an exit code. It loses the folder if it is repeated after it was done.
        """
        before, after = names.place(source), names.place(target)
        known = self._show_vm(names.number("the VM", vm))
        migrates = before.host != after.host and before.host in known.hosts and after.host == known.hosts[-1]
        disks = [disk.number for disk in known.disks if disk.tm_mad == OURS and migrates]
        there = not disks or self._hosts.run(before.host, "folder", str(before.path))
        if there and (code := move()) != 0:
            raise SystemExit(code)
        for number in disks:
            old, ref = (Ref(replace(p, path=p.path / f"disk.{number}"), known.number, number) for p in (before, after))
            self._disks.moved(ref, self._disks.there(ref).path, stays=True)
            self._disks.destroy(old)

    def _resume(self, stored: Stored, target: Ref, disk: VmDisk, link: Path) -> None:
        self._mover.resume(stored, target, disk.driver, link)
        if disk.grown:
            self._disks.grow(target, disk.grown)

    def resize(self, source: str, size: str, vm: str, _datastore: str) -> None:
        """Let a disk have ``size`` MiB. The disk of an undeployed VM grows when it comes to a host.

        OpenNebula keeps the new size in the VM, and so does whoever takes the disk from the front end.
        """
        ref = self._ref(source, vm)
        mib = names.number("the size", size)
        known = self._show_vm(ref.vm)
        # A host that the VM has not been on is the front end, which need not have an agent.
        off_hosts = known.state == DISK_RESIZE_UNDEPLOYED or ref.host not in known.hosts
        if Stored(ref).there and (off_hosts or self._disks.describe(ref) is None):
            return
        if known.state == DISK_RESIZE and known.disk(ref.number).driver == "qcow2":
            raise Refused(f"{ref} is a file that only its running QEMU may resize: power the VM off first")
        self._at_home(ref, lambda: self._disks.resize(ref, mib * MIB))

    def snap_create(self, source: str, snapshot: str, vm: str, _datastore: str) -> None:
        """Keep what the disk of a VM that does not run holds."""
        ref, number = self._ref(source, vm), names.number("the snapshot", snapshot)
        self._at_home(ref, lambda: self._disks.snapshot(ref, number, "", ""))

    def snap_create_live(self, source: str, snapshot: str, vm: str, _datastore: str) -> None:
        """Keep what the disk of a running VM holds; its guest is asked to write all down and hold still, if it can."""
        ref = self._ref(source, vm)
        domain = self._show_vm(ref.vm).deploy_id
        self._disks.snapshot(ref, names.number("the snapshot", snapshot), domain, self._settings.libvirt_uri)

    def snap_revert(self, source: str, snapshot: str, vm: str, _datastore: str) -> None:
        """Let the disk of a VM that does not run hold what it held then."""
        ref, number = self._ref(source, vm), names.number("the snapshot", snapshot)
        self._at_home(ref, lambda: self._disks.revert(ref, number))

    def snap_delete(self, source: str, snapshot: str, vm: str, _datastore: str) -> None:
        """Forget a snapshot."""
        ref, number = self._ref(source, vm), names.number("the snapshot", snapshot)
        self._at_home(ref, lambda: self._disks.forget(ref, number))

    def _at_home(self, ref: Ref, act: Callable[[], None], target: Ref | None = None) -> None:
        """Do something with a disk; one that is not where OpenNebula says is brought there first.

        If a VM's folder cannot move after its disks, ``onevm recover --failure`` says that the VM is where it was.
        ``target``: where a move takes the disk. From there nothing is brought back: the move was repeated, and is done.
        """
        try:
            act()
        except NotThere:
            if not self._brought_back(ref, self._show_vm(ref.vm), target):
                raise
            act()

    def _brought_back(self, ref: Ref, known: Vm, target: Ref | None) -> bool:
        at_host, disk = ref.host in known.hosts, known.disk(ref.number)
        if known.deleted or (at_host and self._disks.describe(ref) is not None):
            return False
        # In a system datastore of ours a disk stays until its VM has moved: elsewhere are only copies of that time.
        for other in () if known.system == OURS else _elsewhere(ref, known):
            if target is not None and other.host == target.host:
                continue
            if (found := self._disks.describe(other)) is not None:
                if at_host:
                    self._mover.migrate(other, found, ref, disk.driver, Stored(ref))
                else:
                    self._mover.stop(other, Stored(ref))
                return True
        stored = _stored(ref, known)
        if at_host and stored.there and (target is None or target.host in known.hosts):
            self._resume(stored, ref, disk, Path(ref.link))
            return True
        return False

    def _ref(self, argument: str, vm: str) -> Ref:
        place = names.place(argument)
        if place.disk is None:
            raise Refused(
                f"{place} is no disk of a VM: a VirtMan datastore is for disks, and for kernels and other files there"
                " are datastores of type FILE"
            )
        return Ref(place, names.number("the VM", vm), place.disk)

    def _contents(self, path: PurePosixPath) -> Contents:
        return Contents(self._cards, path, Origins(self._hosts, self._streams, path.parent))


def _elsewhere(ref: Ref, known: Vm) -> Iterator[Ref]:
    """The disk at other hosts of its VM, the last one first."""
    for host in dict.fromkeys(reversed(known.hosts)):
        if host != ref.host:
            yield replace(ref, place=replace(ref.place, host=host))


def _stored(ref: Ref, known: Vm) -> Stored:
    """What is on the front end of a disk, in whatever system datastore its VM was stopped."""
    places = (Stored(ref, datastore) for datastore in known.datastores)
    return next((stored for stored in places if stored.there), Stored(ref))


def _forget_stored(ref: Ref, known: Vm) -> None:
    """Remove what is on the front end of a disk, in whatever system datastore its VM was stopped."""
    for datastore in {ref.place.datastore, *known.datastores}:
        Stored(ref, datastore).remove()
