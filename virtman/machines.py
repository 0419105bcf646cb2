"""Running VMs, through libvirt."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import libvirt

from drivers.base import Device
from virtman import libvirtdomain
from virtman.domain import domain_xml, owner_of, redefined
from virtman.errors import DomainForeign, HypervisorError, UnknownVm, VmRuns
from virtman.hostfiles import translate_os_errors
from virtman.hypervisor import NO_DISKS
from virtman.libvirtdomain import definition, is_saved, require_not_saved, shut_down, state_or_off
from virtman.libvirthost import connected
from virtman.libvirtmigration import LibvirtMigrations
from virtman.qemu import RunningVm
from virtman.records import Boot
from virtman.seed import Identity, is_seed_of, seed_image

log = logging.getLogger(__name__)

STOP_TIMEOUT = 60.0
"""Seconds that a VM has to shut down when asked to."""
ASK_AGAIN = 10.0
"""Seconds until the next request: a guest that does not listen yet misses the press of the power button."""


class LibvirtMachines(LibvirtMigrations):
    """The VMs of one agent (``hypervisor.Machines``)."""

    def start(self, identity: Identity, disk: Device, boot: Boot, disks: Mapping[str, Device] = NO_DISKS) -> None:
        """After an error what was not there is not there, unless libvirt went away meanwhile."""
        vm = identity.vm
        with connected(self.uri) as connection:
            present = self._find(connection, vm)
            if present is not None:
                identity = replace(identity, uuid=present.UUIDString())
            machine = self._machine_of(vm, identity.uuid, disk, boot, disks)
            xml = domain_xml(machine) if present is None else redefined(definition(present), machine)
            if present is not None and (present.isActive() or is_saved(present)):
                if identity.ssh_keys is not None:
                    self._check_runs_as(present, boot, identity)
                if not present.isActive():
                    libvirtdomain.fit_saved(present, xml)
                    present.create()
                return
            keep = identity.ssh_keys is None and self._seed(vm).exists()
            try:
                if not keep:
                    self._write_seed(vm, seed_image(identity))
                self._give_files(connection, vm, disk, *disks.values())
                connection.defineXML(xml).create()
            except Exception as error:
                log.error("vm %s: start failed: %s", vm, error)
                if present is None:
                    self._forget_again(connection, vm, files=not keep)
                raise

    def _check_runs_as(self, domain: Any, boot: Boot, identity: Identity) -> None:
        """Whether a VM runs as a repeated call for it asks. Raises VmRuns."""
        runs, state = libvirtdomain.machine(domain), f"vm {identity.vm!r} is {state_or_off(domain)}"
        if runs != boot:
            raise VmRuns(
                f"{state}, with memory {runs.memory} MiB, cpus {runs.cpus}, network {runs.network}; stop it first"
            )
        if (identity.ssh_keys or identity.user_data) and not self._has_seed_of(identity):
            raise VmRuns(f"{state}, with other keys or user data, which are handed over at a start only; stop it first")

    def _has_seed_of(self, identity: Identity) -> bool:
        seed = self._seed(identity.vm)
        with translate_os_errors(f"reading {seed}"):
            return seed.exists() and is_seed_of(seed.read_bytes(), identity)

    def _forget_again(self, connection: Any, vm: str, *, files: bool) -> None:
        """Take a failed start back; the first error is the one to raise."""
        try:
            _forget(self._find(connection, vm))
            if files:
                self._remove_files(vm)
        except (libvirt.libvirtError, DomainForeign) as second:
            log.error("vm %s: taking its start back failed too: %s", vm, second)

    def machine(self, vm: str) -> Boot | None:
        with self._domain(vm) as domain:
            return None if domain is None else libvirtdomain.machine(domain)

    @contextlib.contextmanager
    def running_vm(self, vm: str) -> Iterator[RunningVm | None]:
        with self._domain(vm) as domain:
            if domain is not None:
                require_not_saved(vm, domain)
            yield RunningVm(vm, domain) if domain is not None and domain.isActive() else None

    def follow(self, vm: str, disk: Device, disks: Mapping[str, Device] = NO_DISKS) -> None:
        with self._domain(vm) as domain:
            if domain is not None:
                machine = self._machine_of(vm, domain.UUIDString(), disk, libvirtdomain.machine(domain), disks)
                xml = redefined(definition(domain), machine)
                domain.connect().defineXML(xml)
                libvirtdomain.fit_saved(domain, xml)

    def rename(self, vm: str, new: str) -> None:
        with connected(self.uri) as connection:
            renamed, domain = self._find(connection, new), self._find(connection, vm)
            if renamed is None and domain is not None:
                if domain.isActive():
                    raise VmRuns(f"vm {vm!r} is {state_or_off(domain)}; stop it before it gets another name")
                require_not_saved(vm, domain)
                domain.rename(new)
                renamed = domain
            if renamed is not None:
                libvirtdomain.rename_firmware(renamed, vm, new)
        with translate_os_errors(f"renaming the files of vm {vm} in {self._folder}"):
            for file in self._files(vm):
                file.rename(file.with_name(new + file.name.removeprefix(vm)))

    def stop(self, vm: str, *, force: bool) -> None:
        with self._domain(vm) as domain:
            if domain is None:
                raise UnknownVm(f"vm {vm!r} was never booted")
            if force:
                libvirtdomain.cut_power(domain)
                return
            require_not_saved(vm, domain)
            log.info("vm %s: awaiting its shutdown, at most %.0f s", vm, STOP_TIMEOUT)
            if not shut_down(domain, timeout=STOP_TIMEOUT, again=ASK_AGAIN):
                raise HypervisorError(f"vm {vm!r} did not shut down within {STOP_TIMEOUT:.0f} s; stop it with --force")

    def undefine(self, vm: str) -> None:
        with self._domain(vm) as domain:
            if domain is not None:
                libvirtdomain.undefine(domain)

    def remove(self, vm: str) -> None:
        with self._domain(vm) as domain:
            _forget(domain)
        self._remove_files(vm)

    def _remove_files(self, vm: str) -> None:
        with translate_os_errors(f"removing the files of vm {vm} in {self._folder}"):
            for file in self._files(vm):
                file.unlink()

    def states(self) -> dict[str, str]:
        """State by name of the VMs that this agent defined, as ``Running.state``; or saved, or off.

        Raises HypervisorError.
        """
        with connected(self.uri) as connection:
            domains = connection.listAllDomains()
            return {d.name(): state_or_off(d) for d in domains if owner_of(d.XMLDesc()) == self._owner}


def _forget(domain: Any) -> None:
    """Cut the power of a VM that libvirt may have, and undefine it."""
    if domain is not None:
        libvirtdomain.cut_power(domain)
        libvirtdomain.undefine(domain)
