"""VMs' memory moves between hosts, through libvirt."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any
from uuid import UUID

import libvirt

from drivers.base import Device
from drivers.host.retry import until
from virtman.domain import NONE, arriving, domain_xml, hardware_of, is_emulated
from virtman.errors import HypervisorError, NotSupported, UnknownVm, VirtmanError
from virtman.hostfiles import translate_os_errors
from virtman.hypervisor import NO_DISKS
from virtman.libvirtdomain import definition, is_saved, machine
from virtman.libvirthost import LibvirtHost, connected
from virtman.models import MigrationSource
from virtman.records import Boot

TELL = 0.5
"""Seconds between two reports of progress."""
END_TIMEOUT = 60.0
"""Seconds that libvirt has to end a migration."""


class LibvirtMigrations(LibvirtHost):
    """Moves VMs to another libvirt, and makes ready for those that come."""

    def migration_source(self, vm: str) -> MigrationSource:
        with self._domain(vm) as domain:
            if domain is None:
                raise _unknown(vm)
            with translate_os_errors(f"reading {self._seed(vm)}"):
                seed = self._seed(vm).read_bytes()
            return MigrationSource(
                uuid=UUID(domain.UUIDString()), **machine(domain).model_dump(), seed=base64.b64encode(seed).decode(),
                hardware=hardware_of(domain.XMLDesc()),
            )  # fmt: skip

    def check(self, source: MigrationSource) -> None:
        with connected(self.uri) as connection:
            try:
                kind = "kvm" if self._accel == "kvm" else "qemu"
                connection.getDomainCapabilities(None, "x86_64", source.hardware, kind)
            except libvirt.libvirtError as error:
                if error.get_error_code() not in (libvirt.VIR_ERR_INVALID_ARG, libvirt.VIR_ERR_CONFIG_UNSUPPORTED):
                    raise
                raise NotSupported(
                    f"QEMU of this host does not have the machine {source.hardware!r} that the VM has; stop it, and"
                    " use 'virtman send' and 'receive'"
                ) from error

    def expect(self, vm: str, disk: Device, source: MigrationSource) -> str:
        with connected(self.uri) as connection:
            self._find(connection, vm)
            self._write_seed(vm, base64.b64decode(source.seed))
            self._give_files(connection, vm, disk)
        # libvirt moves the network that the VM has, of whatever kind (``domain.arriving``).
        boot = Boot(memory=source.memory, cpus=source.cpus, network=NONE)
        return domain_xml(self._machine_of(vm, str(source.uuid), disk, boot, NO_DISKS, source.hardware))

    def migrate(self, vm: str, uri: str, domain: str, tell: Callable[[int, int], None]) -> float:
        """The two libvirt daemons move it by the connection between them (VIR_MIGRATE_PEER2PEER, TUNNELLED): it is as
        safe as that, needs no port of its own, and ends, well or not, also if this process is killed.

        An emulated VM stands still for all of it: QEMU misses writes to the memory of such a VM while the memory is
        moved (QEMU before 9.0; commit 03bfc2188f mends the worst of it), and the guest would go on with old content.
        """
        flags = libvirt.VIR_MIGRATE_PEER2PEER | libvirt.VIR_MIGRATE_TUNNELLED
        flags |= libvirt.VIR_MIGRATE_PERSIST_DEST | libvirt.VIR_MIGRATE_PAUSED
        # unsafe, for all that libvirt knows: it takes the disk for one that both hosts have
        flags |= libvirt.VIR_MIGRATE_UNSAFE
        with self._domain(vm) as found, ThreadPoolExecutor(1, thread_name_prefix="migrate") as pool:
            if found is None:
                raise _unknown(vm)
            if not is_emulated(found.XMLDesc()):
                flags |= libvirt.VIR_MIGRATE_LIVE | libvirt.VIR_MIGRATE_AUTO_CONVERGE
            running = found.XMLDesc(libvirt.VIR_DOMAIN_XML_MIGRATABLE | libvirt.VIR_DOMAIN_XML_SECURE)
            how = {
                libvirt.VIR_MIGRATE_PARAM_DEST_XML: arriving(running, domain),
                libvirt.VIR_MIGRATE_PARAM_PERSIST_XML: arriving(definition(found), domain),
            }
            moving = pool.submit(found.migrateToURI3, uri, how, flags)
            try:
                while not wait([moving], TELL).done:
                    tell(*_moved(found))
            except VirtmanError:
                _abort(found)
                raise
            moving.result()
            return float(found.jobStats(libvirt.VIR_DOMAIN_JOB_STATS_COMPLETED).get("downtime", 0)) / 1000

    def went(self, vm: str) -> bool | None:
        """libvirt keeps why a domain is off until it is started anew itself."""
        with self._domain(vm) as domain:
            if domain is None:
                return None
            state, reason = domain.state()
            if state != libvirt.VIR_DOMAIN_SHUTOFF or is_saved(domain):
                return False
            unknown = reason in (libvirt.VIR_DOMAIN_SHUTOFF_UNKNOWN, libvirt.VIR_DOMAIN_SHUTOFF_DAEMON)
            return None if unknown else reason == libvirt.VIR_DOMAIN_SHUTOFF_MIGRATED

    def end_migration(self, vm: str) -> None:
        with self._domain(vm) as domain:
            if domain is None or not domain.isActive() or _idle(domain):
                return
            _abort(domain)
            if not until(lambda: _idle(domain), limit=END_TIMEOUT):
                raise HypervisorError(f"vm {vm!r}: libvirt does not end its migration within {END_TIMEOUT:.0f} s")


def _unknown(vm: str) -> UnknownVm:
    return UnknownVm(f"libvirt does not have vm {vm!r}")


def _idle(domain: Any) -> bool:
    """Whether libvirt does nothing with a domain that takes long."""
    return bool(domain.jobInfo()[0] == libvirt.VIR_DOMAIN_JOB_NONE)


def _abort(domain: Any) -> None:
    with contextlib.suppress(libvirt.libvirtError):  # the migration ends at this moment
        domain.abortJob()


def _moved(domain: Any) -> tuple[int, int]:
    """Bytes of memory that have been moved, and in all; zeros if libvirt does not say."""
    try:
        job = domain.jobStats()
    except libvirt.libvirtError:
        return 0, 0
    return max(0, job.get("memory_total", 0) - job.get("memory_remaining", 0)), job.get("memory_total", 0)
