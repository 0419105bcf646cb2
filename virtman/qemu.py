"""A VM while it runs: its QEMU's monitor, and the agent in its guest, both through libvirt."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import libvirt
import libvirt_qemu

from drivers.base import BlockNode, Device
from drivers.errors import MonitorFailed
from drivers.qemu import hotplug
from virtman.domain import GUEST_AGENT, disks_of, free_target, scsi_disk
from virtman.errors import HypervisorError
from virtman.hostfiles import translate_os_errors
from virtman.libvirtdomain import state_of

log = logging.getLogger(__name__)

PING_TIMEOUT = 5
"""Seconds that it has to say that it is there."""
AGENT_TIMEOUT = 20
"""Seconds that the guest's agent has for an answer: it writes down all that the guest has in memory."""


class RunningVm:
    """A running domain of libvirt (``hypervisor.Running``)."""

    def __init__(self, vm: str, domain: Any) -> None:
        self._vm = vm
        self._domain = domain

    def execute(self, command: str, arguments: Mapping[str, Any] | None = None) -> Any:
        """What QEMU returns for one command (QEMU: interop/qemu-qmp-ref). Raises MonitorFailed."""
        text = json.dumps({"execute": command, "arguments": dict(arguments or {})})
        try:
            answer = json.loads(libvirt_qemu.qemuMonitorCommand(self._domain, text, 0))
        except libvirt.libvirtError as error:
            raise MonitorFailed(command, str(error)) from error
        if "error" in answer:
            raise MonitorFailed(command, answer["error"].get("desc", "refused"), answer["error"].get("class", ""))
        return answer["return"]

    @property
    def state(self) -> str:
        return state_of(self._domain)

    def go_on(self) -> None:
        state, _reason = self._domain.state()
        if state == libvirt.VIR_DOMAIN_PAUSED:
            self._domain.resume()

    def plug(self, name: str, disk: Device) -> None:
        """libvirt attaches a device of the host: libvirt keeps QEMU from opening devices that it does not know."""
        if disk.node is not None:
            give_to_hypervisor(self._domain.connect(), files_of(disk.node))
            hotplug.plug(self, name, disk.node)
            return
        present = disks_of(self._domain.XMLDesc())
        if str(disk.path) not in present:
            xml = scsi_disk(name, disk, free_target(present.values()))
            self._domain.attachDeviceFlags(xml, libvirt.VIR_DOMAIN_AFFECT_LIVE)

    def unplug(self, name: str, disk: Device) -> None:
        if disk.node is not None:
            hotplug.unplug(self, name, disk.node)
            return
        target = disks_of(self._domain.XMLDesc()).get(str(disk.path))
        if target is not None:
            self._domain.detachDeviceFlags(scsi_disk(name, disk, target), libvirt.VIR_DOMAIN_AFFECT_LIVE)
        if str(disk.path) in disks_of(self._domain.XMLDesc()):
            raise HypervisorError(f"vm {self._vm!r} still uses {disk.path}; ask again")

    def freeze(self) -> bool:
        if not self._is_answered():
            return False
        try:
            with contextlib.suppress(libvirt.libvirtError):  # of a libvirt that cannot: it is asked all the same
                self._domain.agentSetResponseTimeout(AGENT_TIMEOUT)
            return bool(self._domain.fsFreeze())
        except libvirt.libvirtError as error:
            log.info("vm %s: its file systems are not frozen: %s", self._vm, error)
        self.thaw()  # it may have frozen them later than it had time to
        return False

    def _is_answered(self) -> bool:
        """Whether an agent in the guest answers now. One that does not answer might freeze the guest later."""
        try:
            libvirt_qemu.qemuAgentCommand(self._domain, json.dumps({"execute": "guest-ping"}), PING_TIMEOUT, 0)
        except libvirt.libvirtError as error:
            log.info("vm %s: no agent answers in its guest: %s", self._vm, error)
            return False
        return True

    def thaw(self) -> None:
        with contextlib.suppress(MonitorFailed):
            self.execute("query-status")  # a libvirt that has just come back does not know of the agent before
        try:
            self._domain.fsThaw()
        except libvirt.libvirtError as error:
            if self._has_agent():
                raise HypervisorError(f"the guest of vm {self._vm!r} may be frozen: {error}") from error
            log.info("vm %s: its file systems are not thawed: %s", self._vm, error)

    def _has_agent(self) -> bool:
        """Whether an agent runs in the guest, or one may for all that libvirt says."""
        try:
            channels = ET.fromstring(self._domain.XMLDesc()).iterfind("devices/channel/target")  # noqa: S314  libvirt wrote it
            return any(
                channel.get("name") == GUEST_AGENT and channel.get("state") == "connected" for channel in channels
            )
        except libvirt.libvirtError:
            return not self._domain.connect().isAlive()


def files_of(node: BlockNode) -> Iterator[Path]:
    """All files that QEMU opens for a block node, those of its backing nodes included."""
    if node.get("driver") == "file":
        yield Path(node["filename"])
    for child in node.values():
        if isinstance(child, Mapping):
            yield from files_of(child)


def give_to_hypervisor(connection: Any, files: Iterable[Path]) -> None:
    """Let QEMU open the files as the user that libvirt runs it as; libvirt itself does so only for disks of its XML.

    A group may have them besides, whose members use disks that no VM of libvirt's has: they write to these no more.
    Raises HostTrouble.
    """
    label = ET.fromstring(connection.getCapabilities()).findtext("host/secmodel[model='dac']/baselabel[@type='qemu']")  # noqa: S314
    if label is None or os.geteuid() != 0:
        return
    user = label.partition(":")[0]
    for file in files:
        with translate_os_errors(f"giving {file} to the user {label} of libvirt's VMs"):
            os.chown(file, int(user), -1)
            file.chmod(file.stat().st_mode & 0o7757)
