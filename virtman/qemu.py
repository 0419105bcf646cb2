"""A VM while it runs: its QEMU's monitor, and the agent in its guest, both through libvirt."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping
from typing import Any

from drivers.errors import MonitorFailed
from virtman.errors import HypervisorError

log = logging.getLogger(__name__)

AGENT_TIMEOUT = 20
"""Seconds that the guest's agent has for an answer: it writes down all that the guest has in memory."""


class RunningVm:
    """A running domain of libvirt."""

    def __init__(self, vm: str, domain: Any) -> None:
        self._vm = vm
        self._domain = domain

    def execute(self, command: str, arguments: Mapping[str, Any] | None = None) -> Any:
        """What QEMU returns for one command (QEMU: interop/qemu-qmp-ref). Raises MonitorFailed."""
        import libvirt
        import libvirt_qemu

        text = json.dumps({"execute": command, "arguments": dict(arguments or {})})
        try:
            answer = json.loads(libvirt_qemu.qemuMonitorCommand(self._domain, text, 0))
        except libvirt.libvirtError as error:
            raise MonitorFailed(command, str(error)) from error
        if "error" in answer:
            raise MonitorFailed(command, answer["error"].get("desc", "refused"), answer["error"].get("class", ""))
        return answer["return"]

    def freeze(self) -> bool:
        """Have the guest write its file systems down and hold them still; False if no agent in it does so.

        Raises as ``thaw``.
        """
        import libvirt

        try:
            with contextlib.suppress(libvirt.libvirtError):  # of a libvirt that cannot: it is asked all the same
                self._domain.agentSetResponseTimeout(AGENT_TIMEOUT)
            return bool(self._domain.fsFreeze())
        except libvirt.libvirtError as error:
            log.info("vm %s: its file systems are not frozen: %s", self._vm, error)
        self.thaw()  # it may have frozen them later than it had time to
        return False

    def thaw(self) -> None:
        """Let the guest go on; one that was not held still, or that does not answer, is left alone.

        Raises HypervisorError if libvirt went away: the guest may be held still.
        """
        import libvirt

        try:
            self._domain.fsThaw()
        except libvirt.libvirtError as error:
            if not self._domain.connect().isAlive():
                raise HypervisorError(f"libvirt went away before vm {self._vm!r} was let go on: {error}") from error
            log.info("vm %s: its file systems are not thawed: %s", self._vm, error)
