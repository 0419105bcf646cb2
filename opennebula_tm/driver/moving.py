"""A VM's disk on its way: from host to host, to a file on the front end when the VM is stopped, and back.

The source is destroyed last. OpenNebula moves the VM's folder after its disks and unpacks it over what is there, so the
link in the folder that is yet to be moved leads to the destination already. A stopped VM's disk is a file beside its
folder. If the folder cannot move, OpenNebula may say again that the VM is on its old host: an action that does not find
the disk there looks at the VM's other hosts and on the front end, and brings the disk back.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from opennebula_tm.driver.card import durable, sync
from opennebula_tm.driver.disks import Described, Disks, Ref, Source
from opennebula_tm.driver.errors import FrontendFailed, NotThere
from opennebula_tm.driver.names import OURS
from opennebula_tm.driver.remote import Hosts

ALL = ("--with-snapshots",)
"""A disk goes with all of its snapshots, also with those of other branches."""


class Streams:
    """Sends disks to others."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts

    def forward(self, source: Source, host: str, receive: tuple[str, ...], options: tuple[str, ...] = ALL) -> str:
        """Send a disk to a host, where ``receive`` takes it. Returns its path there. Raises HostFailed."""
        command = self._hosts.command("receive", *receive)
        to = "" if host == source.host else host
        arguments = (*source.lock, to, command, source.name, *options)
        return self._hosts.transfer(source.host, "forward", *arguments, forwarded=True).strip()

    def fetch(self, source: Source, file: Path) -> None:
        """Write a disk to a file of the front end, whole or not at all. Raises HostFailed, FrontendFailed."""
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        except OSError as error:
            raise FrontendFailed(f"cannot write {file}: {error.strerror}") from error
        part = Path(name)
        try:
            with os.fdopen(handle, "wb") as target:
                self._hosts.transfer(source.host, "send", *source.lock, source.name, *ALL, stdout=target)
                os.fsync(target.fileno())
            part.rename(file)
            sync(file.parent)
        except OSError as error:
            raise FrontendFailed(f"cannot write {file}: {error.strerror}") from error
        finally:
            part.unlink(missing_ok=True)

    def give(self, file: Path, host: str, receive: tuple[str, ...]) -> str:
        """Have a host take a disk out of a file of the front end. Returns its path.

        Raises HostFailed, FrontendFailed.
        """
        try:
            with file.open("rb") as source:
                return self._hosts.transfer(host, "receive", *receive, stdin=source).strip()
        except OSError as error:
            raise FrontendFailed(f"cannot read {file}: {error.strerror}") from error


class Stored:
    """A disk of a stopped or undeployed VM: a stream in a file of the front end, and what it lies over.

    It is beside the VM's folder, which ``mv`` of OpenNebula's ssh driver removes before it moves the other one there.
    """

    def __init__(self, ref: Ref, datastore: int | None = None) -> None:
        """``datastore``: another system datastore than that of the disk's place."""
        ours = ref.place.ours if datastore is None else ref.place.locks.parent / str(datastore) / OURS
        self.file = Path(ours) / f"{ref.vm}-{ref.number}.stream"
        self._about = self.file.with_suffix(".json")

    @property
    def there(self) -> bool:
        """Whether there is one that is whole."""
        return self.file.exists() and self._about.exists()

    @property
    def image(self) -> str:
        """The image that it lies over. Raises FrontendFailed."""
        try:
            about: Any = json.loads(self._about.read_text())
            return str(about["image"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FrontendFailed(f"cannot read {self._about}: {error}") from error

    def note(self, image: str) -> None:
        """Say what it lies over. Raises FrontendFailed."""
        try:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            durable(self._about, json.dumps({"image": image}).encode())
        except OSError as error:
            raise FrontendFailed(f"cannot write {self._about}: {error.strerror}") from error

    def remove(self) -> None:
        """Remove it; what is not there is fine. Raises FrontendFailed."""
        try:
            # Those that calls left that were killed, too.
            for file in (self.file, *self.file.parent.glob(f".{self.file.name}.*"), self._about):
                file.unlink(missing_ok=True)
        except OSError as error:
            raise FrontendFailed(f"cannot remove {self.file}: {error.strerror}") from error


class Mover:
    """Moves disks. A call that was cut off is repeated, and goes on where it was.

    OpenNebula moves a VM's folder after its disks, and its ssh driver removes what is at the destination before that.
    So the link in the folder that is yet to be moved already leads to where the disk is then. If the disk ``stays``
    till then, ``TransferManager.mv_folder`` makes the link and removes it.
    """

    def __init__(self, disks: Disks, streams: Streams) -> None:
        self._disks = disks
        self._streams = streams

    def stop(self, ref: Ref, stored: Stored) -> None:
        """From its host to the front end."""
        found = self._disks.describe(ref)
        if found is not None:
            stored.note(found.image)
            self._streams.fetch(ref.source, stored.file)
        elif not stored.there:
            raise NotThere(f"{ref} is neither on {ref.host} nor on the front end")
        self._disks.moved(ref, str(stored.file))

    def resume(self, stored: Stored, target: Ref, disk_format: str, link: Path) -> None:
        """From the front end, where ``link`` is in the VM's folder, to a host."""
        if stored.there:
            receive = (*target.lock, target.link, target.name, stored.image, disk_format)
            path = self._streams.give(stored.file, target.host, receive)
        else:
            path = self._arrived(target)
        if link.parent.is_dir():
            _relink(link, path)
        stored.remove()

    def migrate(
        self, source: Ref, found: Described, target: Ref, disk_format: str, stale: Stored, *, stays: bool = False
    ) -> None:
        """From a host, where it was ``found`` and perhaps ``stays``, to another. ``stale``: of an earlier stop."""
        receive = (*target.lock, target.link, target.name, found.image, disk_format)
        path = self._streams.forward(source.source, target.host, receive)
        stale.remove()  # first: a repeated call that finds no disk takes what is stopped
        if not stays:
            self._disks.moved(source, path)

    def relocate(self, target: Ref, path: str, stale: Stored) -> None:
        """From one system datastore of a host to another: the disk stays. ``stale``: see ``migrate``."""
        self._disks.moved(target, path, stays=True)
        stale.remove()

    def _arrived(self, target: Ref) -> str:
        """The path that it has at its destination, where an earlier call brought it."""
        found = self._disks.describe(target)
        if found is None:
            raise NotThere(f"{target} is neither where it was nor on {target.host}")
        return found.path


def _relink(link: Path, target: str) -> None:
    new = link.with_name(f"{link.name}.new")
    try:
        new.unlink(missing_ok=True)
        new.symlink_to(target)
        new.rename(link)
    except OSError as error:
        raise FrontendFailed(f"cannot make the link {link}: {error.strerror}") from error
