"""The transfer manager's actions with disks of images, each called as OpenNebula's driver calls its scripts.

An action ends well, or raises a DriverError; then the state is as before, or the same call repairs it. What an argument
means: ``docs/opennebula.md``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from opennebula_tm.driver import names, nebula
from opennebula_tm.driver.card import Cards
from opennebula_tm.driver.content import Contents, Origins
from opennebula_tm.driver.disks import Disks, Ref
from opennebula_tm.driver.errors import NotThere, Refused
from opennebula_tm.driver.moving import Mover, Stored, Streams
from opennebula_tm.driver.nebula import DISK_RESIZE, DISK_RESIZE_UNDEPLOYED, LOST, MIB, Vm
from opennebula_tm.driver.remote import Hosts
from opennebula_tm.driver.settings import Settings

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

    def clone(self, source: str, target: str, vm: str, _datastore: str, *, system: str = "") -> None:
        """A disk of its own for a VM, of an image. What an earlier try left there is removed.

        ``system``: the driver of the system datastore, "" for our own.
        """
        path = names.path_of(source)
        ref = self._ref(target, vm)
        known = self._show_vm(ref.vm)
        disk = known.disk(ref.number)
        card = self._contents(path).settled()
        self._disks.create(ref, card.published, disk.grown, card.format, monitor=system, fresh=True)
        # A VM that was undeployed, and is made anew, left its disk on the front end.
        _forget_stored(ref, known)

    def ln(self, source: str, target: str, vm: str, _datastore: str, *, system: str = "") -> None:
        """The disk of a persistent image for a VM."""
        path = names.path_of(source)
        ref = self._ref(target, vm)
        disk = self._show_vm(ref.vm).disk(ref.number)
        with self._cards.locked(path):
            self._contents(path).give(ref, self._disks, disk.grown, system)

    def mvds(self, source: str, target: str, vm: str, _datastore: str) -> None:
        """The end of a persistent image's use: its disk waits at the origins for the next VM."""
        ref = self._ref(source, vm)
        path = names.path_of(target)
        stored = Stored(ref)
        with self._cards.locked(path):
            contents, known = self._contents(path), self._show_vm(ref.vm)
            on_host = ref.host in known.hosts
            found = self._disks.describe(ref) if on_host else None
            if found is not None:
                self._disks.drop_system_snapshots(ref)  # which are the VM's own, and end with it
                contents.keep(found.image, ref.source, ref.name)
                stored.remove()  # first: a repeated call that finds no disk takes what is stopped
            elif stored.there:
                contents.keep(stored.image, stored.file, ref.name, known.disk(ref.number).grown)
            elif (kept := contents.card.kept) is None or kept.of != ref.name:
                raise NotThere(f"{ref} is neither on {ref.host} nor on the front end")
        if on_host:
            self._disks.destroy(ref, link=True)
        stored.remove()

    def cpds(self, source: str, target: str, snapshot: str, vm: str, _datastore: str) -> None:
        """Save as: what a disk holds, or held at a snapshot, becomes the content of another image."""
        ref = self._ref(source, vm)
        number = names.number("the snapshot", snapshot)
        path = names.path_of(target)
        stored = Stored(ref)
        with self._cards.locked(path):
            contents = self._contents(path)
            known = self._show_vm(ref.vm)
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
        _forget_stored(ref, known)
        # Who is no host of the VM is the front end, which need not have an agent.
        if ref.host in known.hosts:
            self._disks.destroy(ref, link=True)

    def mv(self, source: str, target: str, vm: str, _datastore: str) -> None:
        """A VM's disk goes to another host, to the front end (stop, undeploy), or comes from there (resume)."""
        before, after = self._ref(source, vm), self._ref(target, vm)
        known = self._show_vm(before.vm)
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
            self._mover.migrate(before, found, after, disk.driver, Stored(before))
        else:
            self._mover.resume(Stored(before), after, disk.driver, Path(before.place.path))
            if disk.grown:
                self._disks.grow(after, disk.grown)

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
        self._disks.resize(ref, mib * MIB)

    def snap_create(self, source: str, snapshot: str, vm: str, _datastore: str) -> None:
        """Keep what the disk of a VM that does not run holds."""
        ref = self._ref(source, vm)
        self._disks.snapshot(ref, names.number("the snapshot", snapshot), "", "")

    def snap_create_live(self, source: str, snapshot: str, vm: str, _datastore: str) -> None:
        """Keep what the disk of a running VM holds; its guest is asked to write all down and hold still, if it can."""
        ref = self._ref(source, vm)
        domain = self._show_vm(ref.vm).deploy_id
        self._disks.snapshot(ref, names.number("the snapshot", snapshot), domain, self._settings.libvirt_uri)

    def snap_revert(self, source: str, snapshot: str, vm: str, _datastore: str) -> None:
        """Let the disk of a VM that does not run hold what it held then."""
        self._disks.revert(self._ref(source, vm), names.number("the snapshot", snapshot))

    def snap_delete(self, source: str, snapshot: str, vm: str, _datastore: str) -> None:
        """Forget a snapshot."""
        self._disks.forget(self._ref(source, vm), names.number("the snapshot", snapshot))

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


def _forget_stored(ref: Ref, known: Vm) -> None:
    """Remove what is on the front end of a disk, in whatever system datastore its VM was stopped."""
    for datastore in {ref.place.datastore, *known.datastores}:
        Stored(ref, datastore).remove()
