"""What OpenNebula tells its drivers: the XML of VMs and of requests to datastores."""

from __future__ import annotations

import base64
import binascii
import subprocess
from dataclasses import dataclass
from xml.etree import ElementTree

from opennebula_tm.driver.errors import FrontendFailed

LIMIT = 120.0
"""Seconds that a command of OpenNebula may take."""
MIB = 1 << 20

LOST = {16: "is not heard of", 60: "is lost", 61: "is lost"}
"""States of a VM (LCM_STATE) whose host does not answer: UNKNOWN, PROLOG_MIGRATE_UNKNOWN and the failure of that."""
WELL = frozenset({"1", "2"})
"""States (STATE) of a host that is monitored: MONITORING_MONITORED and MONITORED."""
VOLATILE = frozenset({"FS", "SWAP"})
"""Types of disks that are of no image: each is a file in the VM's folder."""
DONE = 6
"""The state (STATE) of a VM that was terminated."""
DELETED = frozenset({15, 23})
"""States of a VM that is being deleted: CLEANUP_RESUBMIT (it is made anew after that) and CLEANUP_DELETE."""
DISK_RESIZE = 62
"""The state of a running VM whose disk is resized."""
DISK_RESIZE_UNDEPLOYED = 64
"""The state of a VM whose disk is resized while it is undeployed."""


class Element:
    """A part of an XML document."""

    def __init__(self, element: ElementTree.Element) -> None:
        self._element = element

    def text(self, path: str) -> str:
        """The text at a path, or nothing."""
        return (self._element.findtext(path) or "").strip()

    def number(self, path: str, default: int = -1) -> int:
        """The number at a path."""
        text = self.text(path)
        return int(text) if text.isdigit() else default

    def all(self, path: str) -> list[Element]:
        """All parts at a path."""
        return [Element(found) for found in self._element.iterfind(path)]


def parse(xml: str | bytes, what: str) -> Element:
    """Read a document. Raises FrontendFailed."""
    try:
        return Element(ElementTree.fromstring(xml))  # noqa: S314  it is OpenNebula's own
    except (ElementTree.ParseError, ValueError) as error:
        raise FrontendFailed(f"{what} is no XML: {error}") from error


def decode(request: bytes, what: str) -> Element:
    """Read a document in base64. Raises FrontendFailed."""
    try:
        return parse(base64.b64decode(request, validate=False), what)
    except binascii.Error as error:
        raise FrontendFailed(f"{what} is no base64: {error}") from error


@dataclass(frozen=True)
class VmDisk:
    """A disk of a VM, sizes in MiB. ``source``: the card of its image, or what another datastore's driver has there.

    ``volatile``: the format of the file that is the disk, if the disk is volatile, and else "". ``method``: by which
    its image is to go to all hosts, as it is written there, or "".
    """

    number: int
    size: int
    original_size: int
    driver: str
    tm_mad: str
    source: str = ""
    volatile: str = ""
    method: str = ""

    @property
    def grown(self) -> int:
        """Bytes that the disk is to have, or 0 for the image's size."""
        return self.size * MIB if self.size > self.original_size >= 0 else 0


@dataclass(frozen=True)
class Vm:
    """A VM as OpenNebula knows it. ``hosts``: those that it has been on, the last one at the end.

    ``datastores``: the numbers of the system datastores that it has been in. ``system``: the driver of the last one.
    ``done``: it was terminated.
    """

    number: int
    state: int
    deploy_id: str
    hosts: tuple[str, ...]
    disks: tuple[VmDisk, ...]
    datastores: tuple[int, ...] = ()
    system: str = ""
    done: bool = False

    @property
    def deleted(self) -> bool:
        """Whether all of it is removed, or was."""
        return self.done or self.state in DELETED

    def disk(self, number: int) -> VmDisk:
        """One of its disks. Raises FrontendFailed."""
        for disk in self.disks:
            if disk.number == number:
                return disk
        raise FrontendFailed(f"OpenNebula does not say that VM {self.number} has a disk {number}")


def vm_of(element: Element) -> Vm:
    """A VM of its XML."""
    return Vm(
        number=element.number("ID"),
        state=element.number("LCM_STATE"),
        deploy_id=element.text("DEPLOY_ID"),
        hosts=tuple(one.text("HOSTNAME") for one in element.all("HISTORY_RECORDS/HISTORY")),
        disks=tuple(_disk_of(one) for one in element.all("TEMPLATE/DISK")),
        datastores=tuple(one.number("DS_ID") for one in element.all("HISTORY_RECORDS/HISTORY")),
        system=element.text("HISTORY_RECORDS/HISTORY[last()]/TM_MAD"),
        done=element.number("STATE") == DONE,
    )


def _disk_of(disk: Element) -> VmDisk:
    return VmDisk(
        number=disk.number("DISK_ID"),
        size=disk.number("SIZE"),
        original_size=disk.number("ORIGINAL_SIZE"),
        driver=disk.text("DRIVER"),
        tm_mad=disk.text("TM_MAD"),
        source=disk.text("SOURCE"),
        volatile=_file_format(disk) if disk.text("TYPE").upper() in VOLATILE else "",
        method=disk.text("VIRTMAN_METHOD"),
    )


def _file_format(disk: Element) -> str:
    """The format that OpenNebula's mkimage gives to a volatile disk."""
    return "qcow2" if disk.text("FORMAT").lower() == "qcow2" else "raw"


def show_vm(number: int) -> Vm:
    """Ask OpenNebula for a VM. Raises FrontendFailed, also if the answer is not of that VM."""
    vm = vm_of(parse(show("onevm", number), f"what onevm says of VM {number}"))
    if vm.number != number:
        raise FrontendFailed(f"onevm was asked for VM {number} and answered with another one")
    return vm


def hosts() -> list[Element]:
    """All hosts, as OpenNebula lists them. Raises FrontendFailed."""
    return parse(_run("onehost", "list", "-x"), "what onehost lists").all("HOST")


def show(command: str, number: int) -> bytes:
    """The XML that ``onevm``, ``oneimage`` or ``onedatastore`` shows of one of these. Raises FrontendFailed."""
    return _run(command, "show", "-x", str(number))


def _run(*argv: str) -> bytes:
    command = " ".join(argv)
    try:
        # fmt: off
        return subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT, check=True
        ).stdout
        # fmt: on
    except subprocess.CalledProcessError as error:
        said = " ".join(error.stderr.decode(errors="replace").split())
        raise FrontendFailed(f"{command} failed: {said or f'exit code {error.returncode}'}") from error
    except subprocess.TimeoutExpired as error:
        raise FrontendFailed(f"{command} did not answer within {LIMIT:g} seconds") from error
    except OSError as error:
        raise FrontendFailed(f"cannot run {command}: {error.strerror}") from error
