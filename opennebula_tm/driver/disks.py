"""A VM's disk on a host: made of an image, kept at a moment, changed and removed."""

from __future__ import annotations

import json
from dataclasses import dataclass

from opennebula_tm.driver import names
from opennebula_tm.driver.errors import HostFailed, NotThere
from opennebula_tm.driver.names import Place
from opennebula_tm.driver.remote import Hosts


@dataclass(frozen=True)
class Source:
    """A disk of a host that is sent from there. ``lock``: the folder and the name of its lock on the host."""

    host: str
    lock: tuple[str, str]
    name: str


@dataclass(frozen=True)
class Ref:
    """The disk ``number`` of VM ``vm`` at a place, whether or not it is there."""

    place: Place
    vm: int
    number: int

    @property
    def host(self) -> str:
        """Where it is."""
        return self.place.host

    @property
    def name(self) -> str:
        """Its name in VirtMan."""
        return names.disk(self.vm, self.number, self.place.host)

    @property
    def lock(self) -> tuple[str, str]:
        """The folder and the name of its lock on the host."""
        return str(self.place.locks), f"{self.vm}-{self.number}"

    @property
    def link(self) -> str:
        """The link in the VM's folder that leads to it."""
        return str(self.place.path)

    @property
    def source(self) -> Source:
        """To be sent."""
        return Source(self.host, self.lock, self.name)

    def __str__(self) -> str:
        """For people."""
        return f"disk {self.number} of VM {self.vm}"


@dataclass(frozen=True)
class Described:
    """A disk that is there. ``image``: that it lies over."""

    path: str
    size: int
    image: str
    snapshots: tuple[str, ...]


class Disks:
    """Disks on ``hosts``. All calls can be repeated, and raise HostFailed."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts

    def create(self, ref: Ref, image: str, size: int, disk_format: str, *, monitor: str, fresh: bool) -> None:
        """Make it of an image, of ``size`` bytes (0: the image's), and link it.

        ``fresh``: not as it is there. ``monitor``: the driver of the system datastore that reports its room, or "".
        """
        size_text = str(size) if size else ""
        arguments = (ref.link, ref.name, image, size_text, disk_format, monitor, "fresh" if fresh else "")
        self._hosts.run(ref.host, "create", *ref.lock, *arguments)

    def describe(self, ref: Ref | Source) -> Described | None:
        """What there is; None if it is not there."""
        answer = self._hosts.run(ref.host, "describe", ref.name)
        if not answer.strip():
            return None
        try:
            read = json.JSONDecoder().raw_decode
            disk, end = read(answer)
            snapshots, _ = read(answer[end:].lstrip())
            about = disk["disk"]
            kept = tuple(one["name"] for one in snapshots)
            return Described(about["path"], about["size"], about["image"], kept)
        except (ValueError, KeyError, TypeError) as error:
            raise HostFailed(f"{ref.host}: virtman describes {ref.name} in a way that is not understood") from error

    def there(self, ref: Ref) -> Described:
        """As ``describe``, of a disk that must be there. Also raises NotThere."""
        found = self.describe(ref)
        if found is None:
            raise NotThere(f"{ref} is not on {ref.host}")
        return found

    def destroy(self, ref: Ref, *, end: bool = False) -> None:
        """Remove it and its link, if they are there. ``end``: an action that goes on with the disk is ended first."""
        self._hosts.run(ref.host, "destroy", *ref.lock, ref.link, ref.name, "end" if end else "")

    def link(self, ref: Ref, path: str, monitor: str) -> None:
        """Make its link, to a path. ``monitor``: see ``create``."""
        self._hosts.run(ref.host, "link", *ref.lock, ref.link, path, monitor)

    def moved(self, ref: Ref, path: str, *, stays: bool = False) -> None:
        """Let its link lead to a path, if the VM's folder is there, and remove it unless it ``stays``."""
        self._hosts.run(ref.host, "moved", *ref.lock, ref.link, path, "" if stays else ref.name)

    def snapshot(self, ref: Ref, number: int, domain: str, libvirt: str) -> None:
        """Keep what it holds. ``domain``: that of a VM that runs, whose guest is asked to hold still, or ""."""
        self._hosts.run(ref.host, "snapshot", *ref.lock, ref.name, names.snapshot(number), domain, libvirt)

    def drop_system_snapshots(self, ref: Ref) -> None:
        """Delete the snapshots that the hypervisor took inside the disk's file; the VM is off, and none is fine."""
        self._hosts.run(ref.host, "drop-system-snapshots", *ref.lock, ref.name)

    def revert(self, ref: Ref, number: int) -> None:
        """Let it hold what it held then."""
        self._hosts.run(ref.host, "revert", *ref.lock, ref.link, ref.name, names.snapshot(number))

    def forget(self, ref: Ref, number: int) -> None:
        """Delete a snapshot; one that is not there is fine. Also raises NotThere, of the disk."""
        self._hosts.run(ref.host, "forget", *ref.lock, ref.name, names.snapshot(number))

    def grow(self, ref: Ref | Source, size: int) -> None:
        """Let it have ``size`` bytes at least."""
        found = self.describe(ref)
        if found is not None and size > found.size:
            self.resize(ref, size)

    def resize(self, ref: Ref | Source, size: int) -> None:
        """Let it have ``size`` bytes."""
        self._hosts.run(ref.host, "resize", *ref.lock, ref.name, str(size))
