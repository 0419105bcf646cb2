"""Running VMs, through libvirt."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from drivers.base import Device
from drivers.host.durable import write_atomically
from virtman.domain import (
    NEWEST,
    NONE,
    Machine,
    arriving,
    domain_xml,
    firmware_of,
    hardware_of,
    has_tpm,
    is_emulated,
    machine_of,
    owner_of,
    redefined,
    with_firmware,
)
from virtman.errors import (
    DomainForeign,
    HypervisorAbsent,
    HypervisorError,
    NotSupported,
    UnknownVm,
    VirtmanError,
    VmRuns,
    VmSaved,
)
from virtman.hostfiles import translate_os_errors
from virtman.hypervisor import NO_DISKS, MigrationSource
from virtman.qemu import RunningVm, files_of, give_to_hypervisor, state_of
from virtman.records import Boot
from virtman.seed import Identity, is_seed_of, seed_image

log = logging.getLogger(__name__)

STOP_TIMEOUT = 60.0
"""Seconds that a VM has to shut down when asked to."""
ASK_AGAIN = 10.0
"""Seconds after which it is asked again: nobody keeps the press of a button for a VM that is not listening yet."""
TELL = 0.5
"""Seconds between two looks at how far a migration is."""
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
SAVED, OFF = "saved", "off"
"""States of VMs that do not run: with and without memory that libvirt has saved (``virsh managedsave``)."""
_OFF = -1
"""libvirt's ID of a VM that does not run (virDomainGetID)."""


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

    def start(
        self,
        vm: str,
        disk: Device,
        boot: Boot,
        ssh_keys: list[str] | None,
        user_data: str | None,
        *,
        uuid: str,
        disks: Mapping[str, Device] = NO_DISKS,
    ) -> None:
        """Define and start the VM. A running one is left alone; without ``ssh_keys`` it keeps the seed that it has.

        A VM whose memory is saved goes on with that memory, and with the machine that it had then.
        ``uuid``: of a VM that libvirt does not have; one that it has keeps what it has. ``disks``: those that it uses
        besides its own, by name. After an error what was not there is not there, unless libvirt went away meanwhile.
        Raises HypervisorError, HypervisorAbsent, DomainForeign, BadRequest, VmRuns.
        """
        with connected(self._uri) as connection:
            present = self._find(connection, vm)
            uuid = uuid if present is None else present.UUIDString()
            machine = self._machine_of(vm, uuid, disk, boot, disks)
            xml = domain_xml(machine) if present is None else redefined(_definition(present), machine)
            identity = Identity(vm, uuid, ssh_keys or [], user_data)
            if present is not None and (present.isActive() or _is_saved(present)):
                if ssh_keys is not None:
                    self._check_runs_as(present, boot, identity)
                if not present.isActive():
                    _fit_saved(present, xml)
                    present.create()
                return
            keep = ssh_keys is None and self._seed(vm).exists()
            try:
                if not keep:
                    seed = seed_image(identity)
                    with translate_os_errors(f"writing {self._seed(vm)}"):
                        write_atomically(self._seed(vm), seed)
                files = (file for one in (disk, *disks.values()) for file in files_of(one.node or {}))
                give_to_hypervisor(connection, [self._seed(vm), *files])
                connection.defineXML(xml).create()
            except Exception as error:
                log.error("vm %s: start failed: %s", vm, error)
                if present is None:
                    self._forget_again(connection, vm, files=not keep)
                raise

    def _machine_of(
        self, vm: str, uuid: str, disk: Device, boot: Boot, disks: Mapping[str, Device], hardware: str = NEWEST
    ) -> Machine:
        return Machine(
            vm=vm,
            uuid=uuid,
            owner=self._owner,
            disk=disk,
            seed=self._seed(vm),
            console_log=self.console_log(vm),
            accel=self._accel,
            memory=boot.memory,
            cpus=boot.cpus,
            network=boot.network,
            disks=disks,
            hardware=hardware,
        )

    def _check_runs_as(self, domain: Any, boot: Boot, identity: Identity) -> None:
        """Whether a running VM is the one that is asked for: the call for it may be a repeated one. Raises VmRuns."""
        runs, state = _machine(domain), f"vm {identity.vm!r} is {_state(domain)}"
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
        import libvirt

        try:
            self._forget(vm, self._find(connection, vm), files=files)
        except (libvirt.libvirtError, DomainForeign) as second:
            log.error("vm %s: taking its start back failed too: %s", vm, second)

    def machine(self, vm: str) -> Boot | None:
        """The machine of the VM of this name that this agent defined, if there is one. Raises HypervisorError."""
        with connected(self._uri) as connection:
            try:
                domain = self._find(connection, vm)
            except DomainForeign:
                return None
            return None if domain is None else _machine(domain)

    @contextlib.contextmanager
    def running_vm(self, vm: str) -> Iterator[RunningVm | None]:
        """The VM of this name that this agent defined, if it runs. Raises HypervisorError, VmSaved."""
        with connected(self._uri) as connection:
            try:
                domain = self._find(connection, vm)
            except DomainForeign:
                domain = None
            if domain is not None:
                _require_not_saved(vm, domain)
            yield RunningVm(vm, domain) if domain is not None and domain.isActive() else None

    def follow(self, vm: str, disk: Device, disks: Mapping[str, Device] = NO_DISKS) -> None:
        """Have the VM begin with these disks when somebody starts it with libvirt's own tools: virsh start, say.

        One that libvirt does not have is left so. Raises HypervisorError, DomainForeign.
        """
        with connected(self._uri) as connection:
            domain = self._find(connection, vm)
            if domain is not None:
                machine = self._machine_of(vm, domain.UUIDString(), disk, _machine(domain), disks)
                xml = redefined(_definition(domain), machine)
                connection.defineXML(xml)
                if _is_saved(domain):
                    _fit_saved(domain, xml)

    def rename(self, vm: str, new: str) -> None:
        """Have the VM, which is off, under another name, its UUID being the same; ``follow`` is to come next.

        What has the new name already is left alone. Raises HypervisorError, DomainForeign, VmRuns, VmSaved,
        HostTrouble.
        """
        with connected(self._uri) as connection:
            there, here = self._find(connection, new), self._find(connection, vm)
            domain = there or here
            if there is None and here is not None:
                if here.isActive():
                    raise VmRuns(f"vm {vm!r} is {_state(here)}; stop it before it gets another name")
                _require_not_saved(vm, here)
                here.rename(new)
            if domain is not None:
                _rename_firmware(domain, vm, new)
        with translate_os_errors(f"renaming the files of vm {vm} in {self._folder}"):
            for file in self._files(vm):
                file.rename(file.with_name(new + file.name.removeprefix(vm)))

    def migration_source(self, vm: str) -> MigrationSource:
        """What goes along with the disk of a VM that moves. Raises HypervisorError, UnknownVm, HostTrouble."""
        with connected(self._uri) as connection:
            domain = self._find(connection, vm)
            if domain is None:
                raise UnknownVm(f"libvirt does not have vm {vm!r}")
            with translate_os_errors(f"reading {self._seed(vm)}"):
                seed = self._seed(vm).read_bytes()
            return MigrationSource(domain.UUIDString(), _machine(domain), seed, hardware_of(domain.XMLDesc()))

    def check(self, source: MigrationSource) -> None:
        """Whether a VM can come. Raises HypervisorError, NotSupported if QEMU here lacks its machine."""
        import libvirt

        with connected(self._uri) as connection:
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
        """Make ready for a VM that comes. Returns its domain (XML). Raises HypervisorError, DomainForeign."""
        with connected(self._uri) as connection:
            self._find(connection, vm)
            with translate_os_errors(f"writing {self._seed(vm)}"):
                write_atomically(self._seed(vm), source.seed)
            give_to_hypervisor(connection, [self._seed(vm), *files_of(disk.node or {})])
        # libvirt moves the network that the VM has, of whatever kind (``domain.arriving``).
        boot = source.boot.model_copy(update={"network": NONE})
        return domain_xml(self._machine_of(vm, source.uuid, disk, boot, NO_DISKS, source.hardware))

    def migrate(self, vm: str, uri: str, domain: str, tell: Callable[[int, int], None]) -> float:
        """Move the VM's memory to the libvirt at ``uri``, where it is paused then. Returns seconds that it stood still.

        The two libvirt daemons do it by the connection between them (VIR_MIGRATE_PEER2PEER, TUNNELLED): it is as safe
        as that, needs no port of its own, and ends, well or not, also if this process is killed.

        A VM that is emulated stands still for all of it: QEMU does not notice all that one writes to its memory while
        that is moved (QEMU before 9.0; commit 03bfc2188f mends the worst of it), and its guest goes on with what it
        had before. Raises HypervisorError, and as ``tell``, after which the VM goes on here.
        """
        import libvirt

        flags = libvirt.VIR_MIGRATE_PEER2PEER | libvirt.VIR_MIGRATE_TUNNELLED
        flags |= libvirt.VIR_MIGRATE_PERSIST_DEST | libvirt.VIR_MIGRATE_PAUSED
        # unsafe, for all that libvirt knows: it takes the disk for one that both hosts have
        flags |= libvirt.VIR_MIGRATE_UNSAFE
        with connected(self._uri) as connection, ThreadPoolExecutor(1, thread_name_prefix="migrate") as pool:
            found = self._find(connection, vm)
            if found is None:
                raise UnknownVm(f"libvirt does not have vm {vm!r}")
            if not is_emulated(found.XMLDesc()):
                flags |= libvirt.VIR_MIGRATE_LIVE | libvirt.VIR_MIGRATE_AUTO_CONVERGE
            running = found.XMLDesc(libvirt.VIR_DOMAIN_XML_MIGRATABLE | libvirt.VIR_DOMAIN_XML_SECURE)
            how = {
                libvirt.VIR_MIGRATE_PARAM_DEST_XML: arriving(running, domain),
                libvirt.VIR_MIGRATE_PARAM_PERSIST_XML: arriving(_definition(found), domain),
            }
            moving = pool.submit(found.migrateToURI3, uri, how, flags)
            try:
                while not wait([moving], TELL).done:
                    tell(*_moved(found))
            except VirtmanError:
                with contextlib.suppress(libvirt.libvirtError):  # it ends at this moment
                    found.abortJob()
                raise
            moving.result()
            return float(found.jobStats(libvirt.VIR_DOMAIN_JOB_STATS_COMPLETED).get("downtime", 0)) / 1000

    def went(self, vm: str) -> bool | None:
        """Whether the VM does not run here because its memory was moved; None if libvirt does not know any more.

        libvirt keeps why a domain is off until it is started anew itself. Raises HypervisorError.
        """
        import libvirt

        with connected(self._uri) as connection:
            domain = self._find(connection, vm)
            if domain is None:
                return None
            state, reason = domain.state()
            if state != libvirt.VIR_DOMAIN_SHUTOFF or _is_saved(domain):
                return False
            unknown = reason in (libvirt.VIR_DOMAIN_SHUTOFF_UNKNOWN, libvirt.VIR_DOMAIN_SHUTOFF_DAEMON)
            return None if unknown else reason == libvirt.VIR_DOMAIN_SHUTOFF_MIGRATED

    def end_migration(self, vm: str) -> None:
        """Have what ``migrate`` does end, with an error; with nothing to end it is fine. Raises HypervisorError."""
        import libvirt

        with connected(self._uri) as connection:
            domain = self._find(connection, vm)
            if domain is None or not domain.isActive():
                return
            if domain.jobInfo()[0] != libvirt.VIR_DOMAIN_JOB_NONE:
                with contextlib.suppress(libvirt.libvirtError):  # it ends at this moment
                    domain.abortJob()
            if not _await(lambda: domain.jobInfo()[0] == libvirt.VIR_DOMAIN_JOB_NONE, STOP_TIMEOUT):
                raise HypervisorError(f"vm {vm!r}: libvirt does not end its migration within {STOP_TIMEOUT:.0f} s")

    def undefine(self, vm: str) -> None:
        """Forget a VM that is off, and keep its files. Raises HypervisorError."""
        with connected(self._uri) as connection:
            domain = self._find(connection, vm)
            if domain is not None:
                domain.undefineFlags(_all_of(domain))

    def stop(self, vm: str, *, force: bool) -> None:
        """Shut the VM down, or with ``force`` cut its power. A stopped one is left alone.

        Saved memory goes with ``force``, as that of a running VM does. Raises HypervisorError, UnknownVm, VmSaved.
        """
        with connected(self._uri) as connection:
            domain = self._find(connection, vm)
            if domain is None:
                raise UnknownVm(f"vm {vm!r} was never booted")
            if force:
                _cut_power(domain)
                return
            _require_not_saved(vm, domain)
            if not domain.isActive():
                return
            log.info("vm %s: awaiting its shutdown, at most %.0f s", vm, STOP_TIMEOUT)
            if not shut_down(domain, timeout=STOP_TIMEOUT, again=ASK_AGAIN):
                raise HypervisorError(f"vm {vm!r} did not shut down within {STOP_TIMEOUT:.0f} s; stop it with --force")

    def remove(self, vm: str) -> None:
        """Cut the VM's power, undefine it, and delete all files that are kept for it, libvirt's too.

        Nothing there is fine; a domain of somebody else is left alone.
        """
        with connected(self._uri) as connection:
            try:
                domain = self._find(connection, vm)
            except DomainForeign as error:
                log.warning("%s", error)
                domain = None
            self._forget(vm, domain)

    def _forget(self, vm: str, domain: Any, *, files: bool = True) -> None:
        if domain is not None:
            _cut_power(domain)
            domain.undefineFlags(_all_of(domain))
        if not files:
            return
        with translate_os_errors(f"removing the files of vm {vm} in {self._folder}"):
            for file in self._files(vm):
                file.unlink()

    def states(self) -> dict[str, str]:
        """State by name of the VMs that this agent defined, as ``Running.state``; or saved, or off.

        Raises HypervisorError.
        """
        with connected(self._uri) as connection:
            domains = connection.listAllDomains()
            return {d.name(): _state(d) for d in domains if owner_of(d.XMLDesc()) == self._owner}

    def _files(self, vm: str) -> list[Path]:
        """The VM's seed and console log, and what libvirt's virtlogd has put beside: it begins a new log at 2 MiB.

        No name of a VM has a dot (virtman/names.py), so no other VM's files begin so.
        """
        return list(self._folder.glob(f"{vm}.*"))

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


@contextlib.contextmanager
def connected(uri: str) -> Iterator[Any]:
    """A connection of its own for each operation: libvirtd may be restarted between two. Raises HypervisorError."""
    import libvirt

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


def shut_down(domain: Any, *, timeout: float, again: float) -> bool:
    """Ask a VM to shut down, every ``again`` seconds, until it is off: False if it is not within ``timeout`` seconds.

    It is off also if somebody else has started it again meanwhile: that run of it is not asked. Raises libvirtError if
    it cannot be asked at all.
    """
    import libvirt

    end, run = time.monotonic() + timeout, _run_of(domain)
    if run == _OFF:
        return True
    try:
        domain.shutdown()
    except libvirt.libvirtError:
        if _run_of(domain) == run:
            raise
        return True  # it went off by itself
    while not _await(lambda: _run_of(domain) != run, min(again, end - time.monotonic())):
        if time.monotonic() >= end:
            return False
        try:
            domain.shutdown()
        except libvirt.libvirtError as error:
            log.info("asking a VM again to shut down: %s", error)  # it may be off, or about to
    return True


def _run_of(domain: Any) -> int:
    """The ID of the VM's run, another one after each start. What was looked up before may have that of an earlier run,
    and yet whatever it is asked for happens to the run of now: libvirt goes by the UUID.
    """
    import libvirt

    try:
        return int(domain.connect().lookupByUUID(domain.UUID()).ID())
    except libvirt.libvirtError as error:
        if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
            return _OFF  # somebody has removed it
        raise


def _quiet(_context: object, _error: object) -> None:
    """libvirt prints errors on stderr unless told otherwise; every one of them is raised as well."""


def _moved(domain: Any) -> tuple[int, int]:
    """Bytes of memory that have been moved, and in all; zeros if libvirt does not say."""
    import libvirt

    try:
        job = domain.jobStats()
    except libvirt.libvirtError:
        return 0, 0
    return max(0, job.get("memory_total", 0) - job.get("memory_remaining", 0)), job.get("memory_total", 0)


def _machine(domain: Any) -> Boot:
    """As it was defined: of one that runs, libvirt also tells what it has made of a network."""
    return machine_of(_definition(domain))


def _definition(domain: Any) -> str:
    """What ``virsh edit`` shows: all that it takes to define the domain again, passwords of its screen too."""
    import libvirt

    return str(domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE | libvirt.VIR_DOMAIN_XML_SECURE))


def _state(domain: Any) -> str:
    if _is_saved(domain):
        return SAVED
    return state_of(domain) if domain.isActive() else OFF


def _is_saved(domain: Any) -> bool:
    """Whether libvirt has saved the memory of a VM, and lets the VM go on with it when it is started."""
    return bool(domain.hasManagedSaveImage()) and not domain.isActive()


def _fit_saved(domain: Any, definition: str) -> None:
    """Have saved memory go on with the disks of ``definition``. Raises libvirtError.

    libvirt saves the definition with which the VM was started. Since then the disk may have got layers, and disks may
    have come and gone, by QEMU's monitor.
    """
    import libvirt

    try:
        saved = domain.managedSaveGetXMLDesc(libvirt.VIR_DOMAIN_SAVE_IMAGE_XML_SECURE)
    except libvirt.libvirtError as error:
        if error.get_error_code() != libvirt.VIR_ERR_NO_SUPPORT:  # as libvirt's test driver, which has no disks
            raise
        return
    domain.managedSaveDefineXML(arriving(saved, definition), 0)


def _require_not_saved(vm: str, domain: Any) -> None:
    """Raises VmSaved."""
    if _is_saved(domain):
        raise VmSaved(
            f"libvirt has saved the memory of vm {vm!r}, so the disk must stay as it is: 'virtman start {vm}' lets the"
            f" VM go on; 'virtman stop {vm} --force' (or 'virsh managedsave-remove {vm}') discards the memory"
        )


def _rename_firmware(domain: Any, vm: str, new: str) -> None:
    """libvirt leaves the variables of UEFI in a file of the old name, which a new VM of that name would use, too.

    Raises HostTrouble.
    """
    file = firmware_of(_definition(domain))
    if file is not None and file.name.startswith(f"{vm}_"):
        moved = file.with_name(new + file.name.removeprefix(vm))
        with translate_os_errors(f"renaming {file} to {moved}"), contextlib.suppress(FileNotFoundError):
            file.rename(moved)
        domain.connect().defineXML(with_firmware(_definition(domain), moved))


def _all_of(domain: Any) -> int:
    """Flags by which libvirt forgets a domain with all that libvirt keeps for an administrator's changes of it."""
    import libvirt

    definition = _definition(domain)
    flags = libvirt.VIR_DOMAIN_UNDEFINE_SNAPSHOTS_METADATA
    flags |= libvirt.VIR_DOMAIN_UNDEFINE_NVRAM if firmware_of(definition) else 0
    return int(flags | (libvirt.VIR_DOMAIN_UNDEFINE_TPM if has_tpm(definition) else 0))


def _cut_power(domain: Any) -> None:
    """Have the VM off, without its memory. One that is off is fine."""
    if domain.isActive():
        domain.destroy()
    if domain.hasManagedSaveImage():
        domain.managedSaveRemove()


def _await(condition: Any, timeout: float) -> bool:
    end, pause, tick = time.monotonic() + timeout, FIRST_PAUSE, threading.Event()
    while not condition():
        if time.monotonic() >= end:
            return False
        tick.wait(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    return True
