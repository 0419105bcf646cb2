"""Backup and restore of VMs in a system datastore of the driver ``virtman``: whole disks, as qcow2 files.

A volatile disk is a file in the VM's folder. OpenNebula names it for a backup if BACKUP_VOLATILE is YES.

OpenNebula's backup drivers take what they find in the folder ``backup``: ``vm.xml`` and ``disk.N.0``.
"""

from __future__ import annotations

import base64
import json
import logging
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any
from xml.etree import ElementTree

from opennebula_tm.driver import names, nebula
from opennebula_tm.driver.disks import Disks, Ref
from opennebula_tm.driver.errors import FrontendFailed, HostFailed, Refused
from opennebula_tm.driver.names import Place
from opennebula_tm.driver.nebula import Vm
from opennebula_tm.driver.remote import Hosts
from opennebula_tm.driver.settings import Settings
from opennebula_tm.driver.system import OURS

log = logging.getLogger(__name__)

FULL = -1
"""The last increment of a VM whose next backup is a whole one."""


class Backups:
    """Writes backups on hosts, and puts what they hold back. ``remotes``: OpenNebula's folder of scripts."""

    def __init__(self, settings: Settings, remotes: Path, show_vm: Callable[[int], Vm] = nebula.show_vm) -> None:
        self._settings = settings
        self._remotes = remotes
        self._show_vm = show_vm
        self._hosts = Hosts(settings)
        self._disks = Disks(self._hosts)

    def prebackup(self, folder: str, disks: str, vm: str, request: bytes, *, live: bool = False) -> None:
        """Write a VM's disks, ``0:1:…``, to its folder for backups. ``request``: its XML. ``live``: the VM runs."""
        place = _folder(folder)
        element = nebula.parse(request, f"what prebackup was told of VM {vm}")
        if element.number("BACKUPS/BACKUP_CONFIG/LAST_INCREMENT_ID", FULL) != FULL:
            raise Refused(f"VM {vm}: only whole backups can be made: set its backup mode to FULL")
        known = nebula.vm_of(element)
        numbers = [names.number("the disk", number) for number in disks.split(":") if number]
        volatile = [number for number in numbers if known.disk(number).volatile]
        if volatile and live:
            said = ", ".join(map(str, volatile))
            raise Refused(
                f"VM {vm}: its volatile disks {said} can be backed up only while it is off: power it off, or set"
                " BACKUP_VOLATILE to NO"
            )
        strangers = [number for number in numbers if not self._is_known(known, number)]
        if strangers:
            said = ", ".join(map(str, strangers))
            raise Refused(f"VM {vm}: its disks {said} are not VirtMan's and cannot be backed up with these")
        target = self._target(place, vm)
        with tempfile.TemporaryFile() as about:
            about.write(base64.encodebytes(request))
            about.seek(0)
            self._hosts.transfer(place.host, "backup-begin", target, stdin=about)
        for number in numbers:
            ref, file = _ref(place, vm, number), f"{target}/disk.{number}.0"
            if number in volatile:
                self._hosts.transfer(place.host, "backup-file", ref.link, known.disk(number).volatile, file)
            else:
                self._hosts.transfer(place.host, "backup", *ref.lock, ref.name, file)

    def postbackup(self, folder: str, vm: str) -> None:
        """Remove what was written, also what was written by half."""
        place = _folder(folder)
        self._hosts.run(place.host, "backup-end", self._target(place, vm))

    def restore(self, folder: str, vm: str, image: str, increment: str, disk: str) -> None:
        """Let a VM's disks, or the one of this number, hold what a backup holds. Their snapshots go."""
        place = _folder(folder)
        only = names.number("the disk", disk)
        known = self._show_vm(names.number("the VM", vm))
        found = self._contents(known, names.number("the image", image), names.number("the increment", increment))
        chosen = {
            int(number): url for number, url in found.items() if number.isdigit() and only in (-1, int(number))
        }  # fmt: skip
        if not chosen:
            raise Refused(f"the backup has no disk {disk} of VM {vm}")
        for number in chosen:
            if not self._is_known(known, number):
                raise Refused(f"disk {number} of VM {vm} is not VirtMan's and cannot be restored by it")
        for number, url in sorted(chosen.items()):
            self._restore(_ref(place, vm, number), url, known.disk(number).volatile)

    @staticmethod
    def _is_known(vm: Vm, number: int) -> bool:
        """Whether a disk of the VM is VirtMan's, or a file in the VM's folder."""
        disk = vm.disk(number)
        return bool(disk.volatile) or disk.tm_mad == OURS

    def _restore(self, ref: Ref, url: str, volatile: str) -> None:
        """``volatile``: the format of the disk's file, if the disk is volatile."""
        step: tuple[str, ...] = ("restore-file", ref.link, volatile)
        if not volatile:
            step = ("restore", *ref.lock, ref.link, ref.name, *self._disks.there(ref).snapshots)
        argv = [str(self._remotes / "datastore" / "downloader.sh"), "--nodecomp", url, "-"]
        with tempfile.TemporaryFile() as said:
            try:
                fetch = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said)
            except OSError as error:
                raise FrontendFailed(f"cannot run {argv[0]}: {error.strerror}") from error
            with fetch:
                try:
                    self._hosts.transfer(ref.host, *step, stdin=fetch.stdout)
                except HostFailed:
                    # What came was not whole if it was not sent whole, and then that is the reason.
                    if fetch.poll() in (None, 0):
                        raise
                finally:
                    fetch.kill()  # which says nothing to one that has ended
            if fetch.returncode != 0:
                said.seek(0)
                reason = " ".join(said.read().decode(errors="replace").split())
                raise FrontendFailed(f"cannot fetch disk {ref.number} of the backup: {reason or 'no reason given'}")

    def _contents(self, vm: Vm, image: int, increment: int) -> dict[str, str]:
        """The disks of a backup, as its datastore's driver lists them: where the downloader finds each."""
        shown = nebula.show("oneimage", image)
        store = nebula.parse(shown, f"image {image}").number("DATASTORE_ID")
        datastore = nebula.show("onedatastore", store)
        driver = nebula.parse(datastore, f"datastore {store}").text("DS_MAD").lower()
        if not driver.isidentifier():
            raise FrontendFailed(f"datastore {store} names no driver")
        root = ElementTree.Element("DS_DRIVER_ACTION_DATA")
        for document in (datastore, nebula.show("onevm", vm.number), shown):
            root.append(ElementTree.fromstring(document))  # noqa: S314  it is OpenNebula's own
        script = str(self._remotes / "datastore" / driver / "ls")
        try:
            done = subprocess.run(
                [script, "-i", str(increment)], input=ElementTree.tostring(root), capture_output=True, check=False,
                timeout=self._settings.step,
            )  # fmt: skip
            found: Any = json.loads(done.stdout) if done.returncode == 0 else None
            return {str(key): str(value) for key, value in found.items()}
        except (OSError, ValueError, AttributeError, subprocess.TimeoutExpired) as error:
            raise FrontendFailed(f"{script} does not list the backup in image {image}: {error}") from error

    def _target(self, place: Place, vm: str) -> str:
        base = self._base()
        return f"{base}/{vm}/backup" if base else f"{place.path}/backup"

    def _base(self) -> str:
        """Where OpenNebula is told to keep backups on the hosts meanwhile, if not in the VM's folder."""
        try:
            text = (self._remotes / "etc/datastore/datastore.conf").read_text()
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise FrontendFailed(f"cannot read {error.filename}: {error.strerror}") from error
        for line in text.splitlines():
            key, _, value = line.strip().removeprefix("export ").partition("=")
            if key.strip() == "BACKUP_BASE_PATH":
                path = value.strip().strip("\"'")
                return path if PurePosixPath(path).is_absolute() else ""
        return ""


def _folder(argument: str) -> Place:
    place = names.place(argument)
    if place.path != place.folder:
        raise Refused(f"{argument!r} is no VM's folder")
    return place


def _ref(place: Place, vm: str, number: int) -> Ref:
    return Ref(Place(place.host, place.path / f"disk.{number}"), names.number("the VM", vm), number)
