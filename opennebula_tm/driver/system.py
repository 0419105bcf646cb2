"""What a system datastore of the driver ``virtman`` does: as OpenNebula's ``ssh``, but it lets no disk get lost.

A VM's folder has links, contexts, swap and volatile disks. OpenNebula's own script moves and removes it.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import NoReturn

from opennebula_tm.driver import names, nebula
from opennebula_tm.driver.errors import DriverError, FrontendFailed, HostFailed, Refused
from opennebula_tm.driver.remote import Hosts

log = logging.getLogger(__name__)

OURS = "virtman"
AS_SSH = "ssh"


class SystemDatastore:
    """``folder``: of the transfer managers' scripts, each in a folder of its name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def as_ssh(self, action: str, arguments: Sequence[str], stdin: bytes | None = None) -> NoReturn:
        """Do as OpenNebula's ssh driver, whose script says what goes wrong. Raises SystemExit with its exit code."""
        raise SystemExit(self.run_ssh(action, arguments, stdin))

    def run_ssh(self, action: str, arguments: Sequence[str], stdin: bytes | None = None) -> int:
        """As ``as_ssh``, but return the exit code."""
        script = self._folder / AS_SSH / action
        try:
            # It gets our own standard input if there is none for it.
            done = subprocess.run([str(script), *arguments], input=stdin, check=False)
        except OSError as error:
            raise FrontendFailed(f"cannot run {script}: {error.strerror}") from error
        return done.returncode if done.returncode >= 0 else 1

    def monitor(self, hosts: Hosts, arguments: Sequence[str], request: bytes) -> None:
        """Have each host report the room for this datastore, also one on which no VM of it has been yet.

        A host reports the system datastores in which it finds our folder. OpenNebula calls this every few minutes, and
        knows from the hosts' reports which of them have it already. What fails is tried again by the next call.
        """
        try:
            store = nebula.decode(request, "what monitor was told").all("DATASTORE")[0]
            folder = PurePosixPath(store.text("BASE_PATH")) / names.OURS
            for host in silent_hosts(store, nebula.hosts()):
                _mark(hosts, host, folder)
        except (DriverError, IndexError) as error:
            log.warning("which hosts report the datastore is not known: %s", error)
        self.as_ssh("monitor", arguments, request)

    def premigrate(self, arguments: Sequence[str], request: bytes) -> None:
        """Before a live migration: only here can it be stopped.

        OpenNebula's migration takes a disk that is a link for one that both hosts have, and does not copy it.
        """
        if len(arguments) > len(("from", "to", "folder", "vm", "datastore")):
            return  # for the disks, on behalf of another system datastore, which does not look at what we answer
        vm = nebula.vm_of(nebula.decode(request, "what premigrate was told of the VM"))
        private = [disk.number for disk in vm.disks if disk.tm_mad == OURS]
        if private and arguments[0] != arguments[1]:
            said = ", ".join(map(str, private))
            raise Refused(
                f"VM {vm.number} cannot move while it runs: only {arguments[0]} has the data of its disks {said};"
                " migrate it without --live"
            )
        self.as_ssh("premigrate", arguments, request)

    def after_migration(self, action: str, arguments: Sequence[str]) -> None:
        """``postmigrate`` and ``failmigrate``: nothing was made for a disk of ours that would have to go."""
        if len(arguments) > len(("from", "to", "folder", "vm", "datastore")):
            return
        self.as_ssh(action, arguments)


def silent_hosts(store: nebula.Element, hosts: Sequence[nebula.Element]) -> list[str]:
    """The hosts with VirtMan in the datastore's clusters that are well and have not reported the datastore."""
    number, clusters = store.text("ID"), {one.text(".") for one in store.all("CLUSTERS/ID")}
    return [
        host.text("NAME")
        for host in hosts
        if host.text("STATE") in nebula.WELL
        and host.text("CLUSTER_ID") in clusters
        and host.text("TEMPLATE/VIRTMAN") == "YES"
        and number not in {one.text(".") for one in host.all("HOST_SHARE/DATASTORES/DS/ID")}
    ]


def _mark(hosts: Hosts, host: str, folder: PurePosixPath) -> None:
    try:
        hosts.run(names.check_host(host), "mark", str(folder))
    except HostFailed as error:
        log.warning("the datastore in %s is not reported yet: %s", folder.parent, error)


def is_systems(arguments: Sequence[str]) -> bool:
    """Decide whether an action is the system datastore's own affair: with a VM's folder, or with a volatile disk in it.

    The last argument is the number of the datastore that the disk belongs to. When a volatile disk moves to another
    system datastore, this is the number of the new one: so both places are compared.
    """
    *words, datastore = arguments
    for word in words:
        try:
            place = names.place(word)
        except DriverError:
            continue
        if place.path == place.folder or datastore == str(place.datastore):
            return True
    return False


def stdin() -> bytes:
    """What we were given to read."""
    return os.fdopen(os.dup(0), "rb").read()
