"""Volt on the origin and an agent of the kernel stack on every guest, as the services that the project ships."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from lab.kernel.machine import COMMAND_TIMEOUT, Machine
from virtman.client import AgentClient

VOLT_PORT = 8700
TOKEN_FILE = "/etc/volt/token"
AGENT_SETTINGS = "/etc/default/virtman-agent"
AGENT_SOCKET = "/run/virtman/agent.sock"
_LISTENS = f"until (: < /dev/tcp/127.0.0.1/{VOLT_PORT}) 2>/dev/null; do sleep 0.2; done"


class Services:
    """What runs on the guests of a lab; ``origin`` is where Volt is."""

    def __init__(self, machines: Mapping[str, Machine], *, volt_settings: Sequence[str] = ()) -> None:
        """Nothing is started yet. ``volt_settings``: lines as in /etc/default/volt."""
        self._machines = machines
        self._volt_settings = volt_settings
        self._token = secrets.token_hex(32)

    def start(self) -> None:
        """Start Volt and all agents; they answer when this returns. Raises CommandFailed."""
        with ThreadPoolExecutor(len(self._machines)) as pool:
            list(pool.map(self.settle, self._machines.values()))
            self.start_volt()
            list(pool.map(self.start_agent, self._machines.values()))

    def settle(self, machine: Machine) -> None:
        """Give a guest the settings and the token. Raises CommandFailed."""
        machine.run(["mkdir", "-p", "-m", "700", "/etc/volt"])
        machine.run(["sh", "-c", f"umask 077; cat > {TOKEN_FILE}"], stdin=self._token)
        origin = self._machines["origin"].address
        settings = [
            f"VIRTMAN_VOLT=http://{origin}:{VOLT_PORT}",
            f"VIRTMAN_VOLT_TOKEN_FILE={TOKEN_FILE}",
            "VIRTMAN_STACK=kernel",
            f"VIRTMAN_ADDRESS={machine.address}",
            # QEMU emulates a processor with KVM of its own: a VM boots six times as fast as by emulation in emulation.
            f"VIRTMAN_ACCEL={machine.run(['sh', '-c', 'test -c /dev/kvm && echo kvm || echo tcg']).strip()}",
        ]
        machine.run(["tee", AGENT_SETTINGS], stdin="\n".join([*settings, ""]))

    def start_volt(self) -> None:
        """Start Volt, if it is not running. Raises CommandFailed."""
        origin = self._machines["origin"]
        listen = f"VOLT_LISTEN=0.0.0.0:{VOLT_PORT}"
        origin.run(["tee", "/etc/default/volt"], stdin="\n".join([listen, *self._volt_settings, ""]))
        origin.run(["systemctl", "start", "volt.service"])
        origin.run(["timeout", str(COMMAND_TIMEOUT), "bash", "-c", _LISTENS])

    def stop(self) -> None:
        """Stop all agents and Volt. What agents made stays. Raises CommandFailed."""
        units = ["virtman-agent.service", "volt.service"]
        with ThreadPoolExecutor(len(self._machines)) as pool:
            list(pool.map(lambda machine: machine.run(["systemctl", "stop", *units]), self._machines.values()))

    def restart_volt(self, settings: Sequence[str]) -> None:
        """Stop Volt and start it with other settings. Raises CommandFailed."""
        self._volt_settings = settings
        self._machines["origin"].run(["systemctl", "stop", "volt.service"])
        self.start_volt()

    def start_agent(self, machine: Machine) -> None:
        """Start a guest's agent, if it is not running. Raises CommandFailed."""
        machine.run(["systemctl", "start", "virtman-agent.service"])


def agent(machine: Machine) -> AgentClient:
    """A guest's agent; without the time that a command line takes to start under emulation."""
    return AgentClient(machine.forward(AGENT_SOCKET))
