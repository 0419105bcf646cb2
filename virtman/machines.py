"""Running VMs, through libvirt."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from drivers.base import Device
from drivers.durable import write_atomically
from virtman.domain import Machine, domain_xml, owner_of
from virtman.errors import DomainForeign, HypervisorError, UnknownVm
from virtman.records import Boot
from virtman.seed import Identity, seed_image

log = logging.getLogger(__name__)

STOP_TIMEOUT = 60.0
"""Seconds that a VM has to shut down when asked to."""
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0


class LibvirtMachines:
    """The VMs of one agent. ``owner`` tells them from those of other agents at the same libvirt."""

    def __init__(self, uri: str, owner: str, folder: Path, accel: str) -> None:
        self._uri = uri
        self._owner = owner
        self._folder = folder
        self._accel = accel
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def uri(self) -> str:
        """The libvirt that has the VMs."""
        return self._uri

    def console_log(self, vm: str) -> Path:
        """The file that keeps what the VM's serial port printed since it was started."""
        return self._folder / f"{vm}.console"

    def start(self, vm: str, disk: Device, boot: Boot, ssh_keys: list[str], user_data: str | None) -> None:
        """Define and start the VM. A running one is left alone; after an error, what was not there is not there.

        Raises HypervisorError, DomainForeign, BadRequest.
        """
        machine = Machine(
            vm=vm,
            owner=self._owner,
            disk=disk,
            seed=self._seed(vm),
            console_log=self.console_log(vm),
            accel=self._accel,
            memory=boot.memory,
            cpus=boot.cpus,
            network=boot.network,
        )
        xml = domain_xml(machine)
        with connected(self._uri) as connection:
            present = self._find(connection, vm)
            if present is not None and present.isActive():
                return
            identity = Identity(vm, machine.uuid, ssh_keys, user_data)
            try:
                write_atomically(self._seed(vm), seed_image(identity))
                _give_to_hypervisor(
                    connection, [self._seed(vm), *([disk.path] if disk.node is not None and disk.path else [])]
                )
                connection.defineXML(xml).create()
            except Exception as error:
                log.error("vm %s: start failed: %s", vm, error)
                if present is None:
                    self._forget(vm, self._find(connection, vm))
                raise

    def stop(self, vm: str, *, force: bool) -> None:
        """Shut the VM down, or with ``force`` cut its power. A stopped one is left alone. Raises HypervisorError."""
        with connected(self._uri) as connection:
            domain = self._find(connection, vm)
            if domain is None:
                raise UnknownVm(f"vm {vm!r} was never booted")
            if not domain.isActive():
                return
            if force:
                domain.destroy()
                return
            domain.shutdown()
            log.info("vm %s: awaiting its shutdown, at most %.0f s", vm, STOP_TIMEOUT)
            if not _await(lambda: not domain.isActive(), STOP_TIMEOUT):
                raise HypervisorError(f"vm {vm!r} did not shut down within {STOP_TIMEOUT:.0f} s; stop it with --force")

    def remove(self, vm: str) -> None:
        """Cut the VM's power, undefine it, and delete its seed and console log.

        Nothing there is fine; a domain of somebody else is left alone.
        """
        with connected(self._uri) as connection:
            try:
                domain = self._find(connection, vm)
            except DomainForeign as error:
                log.warning("%s", error)
                domain = None
            self._forget(vm, domain)

    def _forget(self, vm: str, domain: Any) -> None:
        if domain is not None:
            if domain.isActive():
                domain.destroy()
            domain.undefine()
        self._seed(vm).unlink(missing_ok=True)
        self.console_log(vm).unlink(missing_ok=True)

    def states(self) -> dict[str, str]:
        """State by name of the VMs that this agent defined: running, paused, off. Raises HypervisorError."""
        with connected(self._uri) as connection:
            domains = connection.listAllDomains()
            return {d.name(): _state(d) for d in domains if owner_of(d.XMLDesc()) == self._owner}

    def _seed(self, vm: str) -> Path:
        return self._folder / f"{vm}.seed.iso"

    def _find(self, connection: Any, vm: str) -> Any:
        import libvirt

        try:
            domain = connection.lookupByName(vm)
        except libvirt.libvirtError as error:
            if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
                return None
            raise
        if owner_of(domain.XMLDesc()) != self._owner:
            raise DomainForeign(
                f"libvirt at {self._uri} has a domain {vm!r} that this agent did not define; use another name"
            )
        return domain


@contextmanager
def connected(uri: str) -> Iterator[Any]:
    """A connection of its own for each operation: libvirtd may be restarted between two. Raises HypervisorError."""
    import libvirt

    libvirt.registerErrorHandler(_quiet, None)
    try:
        connection = libvirt.open(uri)
    except libvirt.libvirtError as error:
        raise HypervisorError(f"no libvirt at {uri}: {error}") from error
    try:
        yield connection
    except libvirt.libvirtError as error:
        raise HypervisorError(f"libvirt: {error}") from error
    finally:
        connection.close()


def _give_to_hypervisor(connection: Any, files: list[Path]) -> None:
    """Let QEMU open the files as the user that libvirt runs it as; libvirt itself does so only for disks of its XML."""
    label = ET.fromstring(connection.getCapabilities()).findtext("host/secmodel[model='dac']/baselabel[@type='qemu']")  # noqa: S314
    if label is None or os.geteuid() != 0:
        return
    user, _, group = label.partition(":")
    for file in files:
        os.chown(file, int(user), int(group))


def _quiet(_context: object, _error: object) -> None:
    """libvirt prints errors on stderr unless told otherwise; every one of them is raised as well."""


def _state(domain: Any) -> str:
    import libvirt

    state, _reason = domain.state()
    running = {libvirt.VIR_DOMAIN_RUNNING: "running", libvirt.VIR_DOMAIN_PAUSED: "paused"}
    return running.get(state, "running" if domain.isActive() else "off")


def _await(condition: Any, timeout: float) -> bool:
    end, pause, tick = time.monotonic() + timeout, FIRST_PAUSE, threading.Event()
    while not condition():
        if time.monotonic() >= end:
            return False
        tick.wait(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    return True
