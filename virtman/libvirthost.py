"""A libvirt, and what the agent has there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import libvirt

from drivers.base import Device
from drivers.host.durable import write_atomically
from virtman.domain import NEWEST, Machine, owner_of
from virtman.errors import DomainForeign, HypervisorAbsent, HypervisorError
from virtman.hostfiles import translate_os_errors
from virtman.qemu import files_of, give_to_hypervisor
from virtman.records import Boot


@contextlib.contextmanager
def connected(uri: str) -> Iterator[Any]:
    """A connection of its own for each operation: libvirtd may be restarted between two. Raises HypervisorError."""
    libvirt.registerErrorHandler(_quiet, None)
    try:
        connection = libvirt.open(uri)
    except libvirt.libvirtError as error:
        raise HypervisorAbsent(f"no libvirt at {uri}: {error}") from error
    try:
        yield connection
    except libvirt.libvirtError as error:
        raise HypervisorError(f"libvirt: {error}") from error
    finally:
        with contextlib.suppress(libvirt.libvirtError):  # libvirtd is gone, and with it the connection
            connection.close()


def _quiet(_context: object, _error: object) -> None:
    """libvirt prints errors on stderr unless told otherwise; every one of them is raised as well."""


def _lookup(connection: Any, name: str) -> Any:
    """The domain of this name, or None."""
    try:
        return connection.lookupByName(name)
    except libvirt.libvirtError as error:
        if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
            return None
        raise


class LibvirtHost:
    """A libvirt, and a folder of files for the VMs that this agent defines there.

    ``owner`` tells these VMs from those of other agents at the same libvirt; ``accel`` is ``kvm`` or ``tcg``.
    """

    def __init__(self, uri: str, owner: str, folder: Path, accel: str) -> None:
        self.uri, self._owner, self._folder, self._accel = uri, owner, folder, accel
        folder.mkdir(parents=True, exist_ok=True)

    def console_log(self, vm: str) -> Path:
        """The file that keeps what the VM's serial port printed since it was started."""
        return self._folder / f"{vm}.console"

    def _seed(self, vm: str) -> Path:
        return self._folder / f"{vm}.seed.iso"

    def _files(self, vm: str) -> list[Path]:
        """The VM's seed and console log, and what libvirt's virtlogd has put beside: it begins a new log at 2 MiB.

        No name of a VM has a dot (virtman/names.py), so no other VM's files begin so.
        """
        return list(self._folder.glob(f"{vm}.*"))

    def _write_seed(self, vm: str, content: bytes) -> None:
        with translate_os_errors(f"writing {self._seed(vm)}"):
            write_atomically(self._seed(vm), content)

    def _give_files(self, connection: Any, vm: str, *disks: Device) -> None:
        """Let the VM's QEMU open the VM's seed and the files of disks. Raises HostTrouble."""
        files = (file for disk in disks for file in files_of(disk.node or {}))
        give_to_hypervisor(connection, [self._seed(vm), *files])

    def _machine_of(
        self, vm: str, uuid: str, disk: Device, boot: Boot, disks: Mapping[str, Device], hardware: str = NEWEST
    ) -> Machine:
        return Machine(
            vm=vm, uuid=uuid, owner=self._owner, disk=disk, seed=self._seed(vm), console_log=self.console_log(vm),
            accel=self._accel, memory=boot.memory, cpus=boot.cpus, network=boot.network, disks=disks, hardware=hardware,
        )  # fmt: skip

    @contextlib.contextmanager
    def _domain(self, vm: str) -> Iterator[Any]:
        """The VM's domain; None if libvirt has none of this agent's. Raises HypervisorError."""
        with connected(self.uri) as connection:
            try:
                found = self._find(connection, vm)
            except DomainForeign:
                found = None
            yield found

    def _find(self, connection: Any, vm: str) -> Any:
        """The domain of a VM that is to be defined, if libvirt has the domain already. Raises DomainForeign."""
        domain = _lookup(connection, vm)
        if domain is not None and owner_of(domain.XMLDesc()) != self._owner:
            raise DomainForeign(
                f"libvirt at {self.uri} has a domain {vm!r} that this agent did not define; use another name"
            )
        return domain
