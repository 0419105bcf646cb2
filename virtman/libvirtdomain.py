"""What the agent reads and does with one domain of libvirt.

All functions raise libvirtError, of which ``libvirthost.connected`` makes a HypervisorError.
"""

from __future__ import annotations

import contextlib
from typing import Any

import libvirt

from drivers.host.retry import until
from virtman.domain import arriving, firmware_of, has_tpm, machine_of, with_firmware
from virtman.errors import VmSaved
from virtman.hostfiles import translate_os_errors
from virtman.records import Boot

SAVED, OFF = "saved", "off"
"""States of VMs that do not run: with and without memory that libvirt has saved (``virsh managedsave``)."""
_OFF = -1
"""libvirt's ID of a VM that does not run (virDomainGetID)."""
_STATES = {
    libvirt.VIR_DOMAIN_PAUSED: "paused",
    libvirt.VIR_DOMAIN_SHUTDOWN: "in shutdown",
    libvirt.VIR_DOMAIN_CRASHED: "crashed",
    libvirt.VIR_DOMAIN_PMSUSPENDED: "pmsuspended",
}
"""The words of ``virsh domstate``; a domain in any other state with a QEMU is running."""


def state_of(domain: Any) -> str:
    """What libvirt calls the state of a domain that has a QEMU."""
    state, _reason = domain.state()
    return _STATES.get(state, "running")


def state_or_off(domain: Any) -> str:
    """As ``state_of``; or that the domain is saved, or off."""
    if is_saved(domain):
        return SAVED
    return state_of(domain) if domain.isActive() else OFF


def is_saved(domain: Any) -> bool:
    """Whether libvirt has saved the memory of a VM, and lets the VM go on with it when it is started."""
    return bool(domain.hasManagedSaveImage()) and not domain.isActive()


def require_not_saved(vm: str, domain: Any) -> None:
    """Raises VmSaved."""
    if is_saved(domain):
        raise VmSaved(
            f"libvirt has saved the memory of vm {vm!r}, so the disk must stay as it is: 'virtman start {vm}' lets the"
            f" VM go on; 'virtman stop {vm} --force' (or 'virsh managedsave-remove {vm}') discards the memory"
        )


def machine(domain: Any) -> Boot:
    """The machine as it was defined. Of a running domain libvirt tells what became of the network, too."""
    return machine_of(definition(domain))


def definition(domain: Any) -> str:
    """What ``virsh edit`` shows: all that it takes to define the domain again, passwords of its screen too."""
    return str(domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE | libvirt.VIR_DOMAIN_XML_SECURE))


def fit_saved(domain: Any, xml: str) -> None:
    """Have memory, if it is saved, go on with the disks of the definition ``xml``.

    libvirt saves the definition with which the VM was started. Since then the disk may have got layers, and disks may
    have come and gone, by QEMU's monitor.
    """
    if not is_saved(domain):
        return
    try:
        saved = domain.managedSaveGetXMLDesc(libvirt.VIR_DOMAIN_SAVE_IMAGE_XML_SECURE)
    except libvirt.libvirtError as error:
        if error.get_error_code() != libvirt.VIR_ERR_NO_SUPPORT:  # as libvirt's test driver, which has no disks
            raise
        return
    domain.managedSaveDefineXML(arriving(saved, xml), 0)


def rename_firmware(domain: Any, vm: str, new: str) -> None:
    """libvirt leaves the variables of UEFI in a file of the old name, which a new VM of that name would use, too.

    Raises HostTrouble.
    """
    file = firmware_of(definition(domain))
    if file is not None and file.name.startswith(f"{vm}_"):
        moved = file.with_name(new + file.name.removeprefix(vm))
        with translate_os_errors(f"renaming {file} to {moved}"), contextlib.suppress(FileNotFoundError):
            file.rename(moved)
        domain.connect().defineXML(with_firmware(definition(domain), moved))


def undefine(domain: Any) -> None:
    """Have libvirt forget a domain with all that libvirt keeps for an administrator's changes of it."""
    xml = definition(domain)
    flags = libvirt.VIR_DOMAIN_UNDEFINE_SNAPSHOTS_METADATA
    flags |= libvirt.VIR_DOMAIN_UNDEFINE_NVRAM if firmware_of(xml) else 0
    flags |= libvirt.VIR_DOMAIN_UNDEFINE_TPM if has_tpm(xml) else 0
    domain.undefineFlags(flags)


def cut_power(domain: Any) -> None:
    """Have the VM off, without its memory. One that is off is fine."""
    if domain.isActive():
        domain.destroy()
    if domain.hasManagedSaveImage():
        domain.managedSaveRemove()


def shut_down(domain: Any, *, timeout: float, again: float) -> bool:
    """Ask a VM to shut down, every ``again`` seconds, until it is off: False if it is not within ``timeout`` seconds.

    A VM that was started again meanwhile counts as off, and is not asked. libvirt's refusal is raised if the VM is not
    off after ``again`` seconds: the VM may have been about to go off.
    """
    run = _run_of(domain)

    def ask() -> bool:
        refusal: libvirt.libvirtError | None = None
        try:
            domain.shutdown()
        except libvirt.libvirtError as error:
            refusal = error
        off = until(lambda: _run_of(domain) != run, limit=min(again, timeout))
        if refusal is not None and not off:
            raise refusal
        return off

    return run == _OFF or until(ask, limit=timeout, first=0)


def _run_of(domain: Any) -> int:
    """The ID of the VM's run, another one after each start. What was looked up before may have that of an earlier run,
    and yet whatever it is asked for happens to the run of now: libvirt goes by the UUID.
    """
    try:
        return int(domain.connect().lookupByUUID(domain.UUID()).ID())
    except libvirt.libvirtError as error:
        if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
            return _OFF  # it was removed
        raise
