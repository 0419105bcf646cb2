"""Volt and a number of hosts on this machine, each agent a process of its own with its own state folder and sockets."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lab.errors import LabError, Leftovers, NotReady
from lab.network import Network
from lab.process import Service, kill_and_wait, processes_of
from lab.running import Running
from lab.tools import run
from virtman.client import AgentClient
from virtman.errors import AgentUnreachable, VirtmanError
from volt.client import VoltClient

log = logging.getLogger(__name__)

READY_TIMEOUT = 180.0
"""Seconds for one process to answer, on a machine that is busy starting a hundred of them."""
STARTS_AT_ONCE = 16
VOLT = "volt"
"""Volt's name in the cluster's network."""
VOLT_PORT, PORT = 8700, 10809
"""Ports of Volt and of each host's chunk store, where each has an address of its own."""


class Cluster(Running):
    """Context manager: Volt and ``hosts`` agents. The first host is called origin, the others host-1, host-2, ….

    ``agents`` and ``names`` have the hosts in that order. At the end the VMs, the chunk stores and the sockets of all
    hosts are gone, or Leftovers says what had to be removed by force. Logs and states stay in ``folder``.
    """

    def __init__(
        self,
        folder: Path,
        hosts: int,
        *,
        libvirt: str | Sequence[str] = "qemu:///system",
        accel: str = "tcg",
        volt_options: Sequence[str] = (),
        agent_options: Sequence[str] = (),
        agent: Sequence[str | Path] | None = None,
        network: Network | None = None,
        places: Mapping[str, str] | None = None,
    ) -> None:
        """Nothing is started yet. ``accel`` is ``kvm`` or ``tcg``, as ``proven_accel`` found; ``agent``: another.

        ``libvirt``: that of all hosts, or of each. ``network``: one with ``network_names(hosts)``, entered already;
        without it all hosts are at a loopback address. ``places``: by host, its site and rack.
        """
        self.folder = folder
        _, *self.names = network_names(hosts)
        self.volt_url = ""
        self._volt_options = list(volt_options)
        self._agent_options = ["--stack", "chunkstore", "--accel", accel, *agent_options]
        self._libvirts = [libvirt] * hosts if isinstance(libvirt, str) else list(libvirt)
        self._agent: list[str | Path] = [*(agent or [tool("virtman"), "agent"])]
        self._network, self._places = network, places or {}
        self._token_file = folder / "volt.token" if network else None
        self._volt_listen = f"{network.address(VOLT)}:{VOLT_PORT}" if network else "127.0.0.1:0"
        self._run = Path("/nonexistent")
        self._volt: Service | None = None
        self._volt_client: VoltClient | None = None
        self._hosts: dict[int, Service] = {}
        self._killed: set[int] = set()
        self.agents: list[AgentClient] = []

    @property
    def volt(self) -> VoltClient:
        """A client of Volt, which is good across restarts of it."""
        if self._volt_client is None:
            raise NotReady("volt was not started")
        return self._volt_client

    def socket(self, host: int) -> Path:
        """The socket of a host's agent."""
        return self.run_folder(host) / "agent.sock"

    def run_folder(self, host: int) -> Path:
        """The folder of a host's sockets: short, because a unix socket's path has at most 107 bytes."""
        return self._run / f"h{host}"

    def state_folder(self, host: int) -> Path:
        """The folder of what a host keeps."""
        return self.folder / self.names[host]

    def start(self) -> None:
        """Start Volt and all agents and wait until they answer. Raises NotReady."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._run = Path(tempfile.mkdtemp(prefix="vm-", dir="/tmp"))
        if self._token_file is not None:
            self._token_file.touch(mode=0o600)
            self._token_file.write_text(secrets.token_hex())
        self.start_volt()
        self.agents = self._new_agents()
        with ThreadPoolExecutor(STARTS_AT_ONCE) as pool:
            list(pool.map(self.start_agent, range(len(self.names))))

    def _new_agents(self) -> list[AgentClient]:
        return [AgentClient(self.socket(host)) for host in range(len(self.names))]

    def reconnect(self) -> None:
        """Make new clients: a process that was forked must not use the connections of the one before."""
        self.agents = self._new_agents()
        self._volt_client = self._new_volt_client()

    def _new_volt_client(self) -> VoltClient:
        return VoltClient(self.volt_url, self._token_file, READY_TIMEOUT)

    def start_volt(self) -> None:
        """Start Volt, at the same address as before, and wait until it listens."""
        state = self.folder / "volt"
        state.mkdir(exist_ok=True)
        log_file = self.folder / "volt.log"
        seen = log_file.stat().st_size if log_file.exists() else 0
        argv = [*self._on(VOLT), tool("volt"), "serve", "--listen", self._volt_listen, "--state", state]
        if self._token_file is not None:
            argv += ["--token-file", self._token_file]
        argv += self._volt_options
        self._volt = Service("volt", argv, log_file)
        self._volt.start()

        def listens() -> bool:
            said = re.search(r"listening on (http://(\S+))", log_file.read_text()[seen:])
            if said:
                self.volt_url, self._volt_listen = said[1], said[2]
            return said is not None

        self._volt.wait_ready(listens, READY_TIMEOUT)
        self._volt_client = self._volt_client or self._new_volt_client()

    def stop_volt(self) -> None:
        """Stop Volt; its store stays. Hosts and VMs go on."""
        if self._volt is not None:
            self._volt.stop()

    def kill_volt(self) -> None:
        """SIGKILL to Volt; its store stays. Hosts and VMs go on."""
        if self._volt is not None:
            self._volt.kill()

    def start_agent(self, host: int) -> None:
        """Start a host's agent on what its folders hold, and wait until it answers."""
        self.run_folder(host).mkdir(exist_ok=True)
        name = self.names[host]
        argv = [*self._on(name), *self._agent, "--name", name, "--state", self.state_folder(host)]
        argv += ["--run", self.run_folder(host), "--volt", self.volt_url, *self._address_options(name)]
        argv += ["--libvirt", self._libvirts[host], *self._agent_options]
        if name in self._places:
            argv += ["--place", self._places[name]]
        service = Service(name, argv, self.folder / f"{name}.log")
        self._hosts[host] = service
        service.start()
        service.wait_ready(lambda: self._answers(host), READY_TIMEOUT)

    def _on(self, name: str) -> list[str | Path]:
        """What to put before a command to run it on a host, or where Volt is."""
        return [*self._network.inside(name)] if self._network else []

    def _address_options(self, name: str) -> list[str | Path]:
        if self._network is None or self._token_file is None:
            return ["--port", "0"]
        address = self._network.address(name)
        return ["--address", address, "--port", str(PORT), "--volt-token-file", self._token_file]

    def _answers(self, host: int) -> bool:
        # Asked first, because httpx leaves a socket open that could not connect.
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(self.socket(host))) != 0:
                return False
        with contextlib.suppress(AgentUnreachable):
            self.agents[host].status()
            return True
        return False

    def kill_agent(self, host: int) -> None:
        """SIGKILL to a host's agent; its chunk store and VMs go on."""
        self._killed.add(host)
        self._hosts[host].kill()

    def restart_agent(self, host: int) -> None:
        """Stop a host's agent if it runs, and start it again."""
        self._hosts[host].stop()
        self.start_agent(host)
        self._killed.discard(host)

    def stop(self) -> None:
        """Destroy all VMs, end all processes, remove all sockets; go on after errors.

        Raises Leftovers with all errors and with what outlived its agent. What an agent left that was killed by
        ``kill_agent`` is removed as well and is no error.
        """
        errors: list[str] = []
        with ThreadPoolExecutor(STARTS_AT_ONCE) as pool:
            # The leaves first: a daemon that lost its parent is slower to end.
            for found in pool.map(self._stop_host, reversed(list(self._hosts))):
                errors += found
        errors += attempt(self.stop_volt)
        if self._volt_client is not None:
            self._volt_client.close()
        errors += self._remove_leftovers()
        shutil.rmtree(self._run, ignore_errors=True)
        self._hosts.clear()
        if errors:
            raise Leftovers("; ".join(errors))

    def _stop_host(self, host: int) -> list[str]:
        service, client = self._hosts[host], self.agents[host]
        if not service.running:
            return []
        errors = attempt(lambda: destroy_all(client))
        errors += attempt(lambda: client.suspend(force=True))
        return errors + attempt(service.stop)

    def _remove_leftovers(self) -> list[str]:
        """Kill what still uses the run folder. Returns what was not to be expected there."""
        expected = {str(self.run_folder(host)) for host in self._killed}
        errors: list[str] = []
        for pid, line in processes_of(self._run).items():
            errors += attempt(lambda pid=pid: kill_and_wait(pid))  # type: ignore[misc]
            if not any(f"{folder}/" in line for folder in expected):
                errors.append(f"process {pid} outlived its agent: {line[:300]}")
        for host in set(range(len(self.names))) - self._killed:
            errors += [f"socket left: {path}" for path in self.run_folder(host).rglob("*") if path.is_socket()]
        return errors


def network_names(hosts: int) -> list[str]:
    """The names in the network of a cluster with so many hosts: Volt, the origin, the others."""
    return [VOLT, "origin", *(f"host-{number}" for number in range(1, hosts))]


def destroy_all(host: AgentClient) -> None:
    """Destroy all VMs of a host; the first error is raised after the last one was tried."""
    errors: list[VirtmanError] = []
    for vm in sorted(host.vms(), key=lambda vm: vm.disk.attached_to is not None):
        try:
            host.destroy(vm.name)
        except VirtmanError as error:
            log.error("destroying %s: %s", vm.name, error)
            errors.append(error)
    if errors:
        raise errors[0]


def attempt(act: Callable[[], None]) -> list[str]:
    """Do one step of a clean-up; returns the error as text, logged, so that the next steps follow."""
    try:
        act()
    except (LabError, VirtmanError) as error:
        log.error("cleaning up: %s", error)
        return [str(error)]
    return []


def tool(name: str) -> Path:
    """A command of ours, from the same environment as this Python."""
    return Path(sys.executable).parent / name


def proven_accel(kernel: Path) -> str:
    """``kvm`` if it proved to work by booting ``kernel``, else ``tcg``."""
    verdict: dict[str, str] = json.loads(run([tool("virtman"), "accel", "--kernel", kernel, "--json"]))
    log.info("VMs run with %s: %s", verdict["accel"], verdict["reason"])
    return verdict["accel"]
