"""Volt and hosts as real processes, for tests that kill them."""

from __future__ import annotations

import grp
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import testtools

from drivers.chunkstore.control import Control, StoreDown
from drivers.chunkstore.process import VMS
from lab.process import processes_of
from tests.others import GROUP, as_nobody
from tests.patience import PATIENCE, wait_until
from tests.programs import require
from tests.sockets import listens
from tests.unit.virtman.scene import folder_for
from virtman.client import AgentClient
from virtman.errors import AgentUnreachable
from volt.client import VoltClient

Act = Callable[[AgentClient], object]


class VoltProcess:
    """A coordinator of the test's own."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._folder = folder
        self._options = options
        self._listen = "127.0.0.1:0"
        self.url = ""
        self._clients: list[VoltClient] = []

    def start(self) -> None:
        """Start it, at the same address as before."""
        argv = [sys.executable, "-m", "volt.cli", "serve", "--listen", self._listen, "--state", str(self._folder)]
        with (self._folder / "volt.log").open("ab") as log:
            self.process = subprocess.Popen([*argv, *self._options], stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if "listening on http://" in line:
                self.url = line.split("listening on ")[1].split()[0]
                self._listen = self.url.removeprefix("http://")
                return
        raise AssertionError(f"volt did not start: {(self._folder / 'volt.log').read_text()}")

    def stop(self) -> None:
        """Stop it; its store stays. Clients are closed, and may be used again."""
        for client in self._clients:
            client.close()
        self._clients.clear()
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(timeout=PATIENCE)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def client(self, agent: str = "") -> VoltClient:
        """A client of it. ``agent``: the id of the agent for which it calls."""
        client = VoltClient(self.url, timeout=PATIENCE, agent=agent)
        self._clients.append(client)
        return client


class HostProcess:
    """One host with an agent that may be killed and started again on the same folders."""

    def __init__(self, name: str, folder: Path, volt: str) -> None:
        self.name = name
        self.state = folder / name
        self.run = folder / f"r-{name}"
        self.notes = folder / f"{name}.steps"
        self.group = ""
        """Whose members may call the agent."""
        self.settings: dict[str, str] = {}
        """Of the agent, as its environment has them: VIRTMAN_PLACE, VIRTMAN_CACHE_LIMIT."""
        self._log = folder / f"{name}.log"
        self._volt = volt
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, die_at: str | None = None) -> AgentClient:
        """Start the agent and wait until it answers; it kills itself at step ``die_at``."""
        self._spawn(die_at)
        wait_until(self._listens, f"agent {self.name} answers; its log: {self._log}")
        return self.client()

    def _spawn(self, die_at: str | None) -> None:
        self.notes.unlink(missing_ok=True)
        argv = [sys.executable, "-m", "tests.userspace.stepping_agent", self.name, str(self.state), str(self.run)]
        argv += [self._volt, str(self.notes), *([die_at] if die_at else [])]
        with self._log.open("ab") as log:
            environment = {**os.environ, "VIRTMAN_GROUP": self.group, **self.settings}
            self._process = subprocess.Popen(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)

    def _listens(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError(f"agent {self.name} ended: {self._log.read_text()[-2000:]}")
        return listens(self.run / "agent.sock")

    def said(self) -> str:
        """The agent's log."""
        return self._log.read_text()

    def client(self) -> AgentClient:
        """A client of the agent."""
        return AgentClient(self.run / "agent.sock", timeout=PATIENCE)

    def kill(self) -> None:
        """SIGKILL to the agent, and to nothing else."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """End the agent in order; what it serves goes on."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait(timeout=PATIENCE)

    def wait_dead(self) -> None:
        """Wait until the agent has killed itself."""
        assert self._process is not None
        if self._process.wait(timeout=PATIENCE) != -signal.SIGKILL:
            raise AssertionError(f"agent {self.name} was to be killed; its log: {self._log.read_text()[-2000:]}")

    def steps(self) -> list[str]:
        """The steps that the agent has reached since its start."""
        return self.notes.read_text().split() if self.notes.exists() else []

    def steps_of(self, act: Act) -> list[str]:
        """The steps that the agent reaches in an act, each once, in order."""
        reached = len(self.steps())
        act(self.client())
        return list(dict.fromkeys(self.steps()[reached:]))

    def served(self) -> set[str]:
        """The images that the host's chunk store serves."""
        try:
            return {image["name"] for image in Control(self.run / "chunkd.sock").call("status")["images"]}
        except StoreDown:
            return set()

    def daemons(self) -> dict[int, str]:
        """The processes of the host's chunk store: command line by process id."""
        return {pid: line for pid, line in processes_of(self.run).items() if "virtman-chunkd" in line}

    def kill_daemons(self) -> None:
        """SIGKILL to the chunk store of this host."""
        for pid in self.daemons():
            os.kill(pid, signal.SIGKILL)

    def files(self) -> set[str]:
        """Everything that stacks and VMs leave in the host's folders, without caches and logs."""
        folders = [self.run / "serve", self.state / "snapshots"]
        folders += [self.state / "records" / "vms", self.state / "records" / "images"]
        found = {f"{folder.name}/{path.name}" for folder in folders if folder.exists() for path in folder.iterdir()}
        found.discard(f"serve/{VMS}")
        owned = {link.name for link in (self.state / "snapshots").glob("[!.]*/*.qcow2")}
        layers = {path.name for path in (self.state / "snapshots/.layers").glob("*")}
        found.discard("snapshots/.layers")
        return found | {f"layers/{name}" for name in layers - owned}  # those of no disk

    def tear_down(self) -> None:
        """Kill all that this host has started."""
        self.kill()
        self.kill_daemons()


class HostsTestCase(testtools.TestCase):
    """A test with a Volt and hosts of its own; everything is killed and removed at its end."""

    volt_options: tuple[str, ...] = ()

    def setUp(self) -> None:
        """Start Volt."""
        super().setUp()
        require(self, "qemu-storage-daemon", "qemu-img")
        self.folder = folder_for(self)
        self.volt = VoltProcess(self.folder, *self.volt_options)
        self.addCleanup(self.volt.stop)
        self.volt.start()

    def host(self, name: str) -> HostProcess:
        """A host that is not started yet."""
        host = HostProcess(name, self.folder, self.volt.url)
        self.addCleanup(host.tear_down)
        return host

    def killed(self, host: HostProcess, step: str, act: Act) -> AgentClient:
        """Have an agent that starts anew killed at a step of an act, and the next one repair what it left."""
        host.stop()
        client = host.start(die_at=step)
        self.assertRaises(AgentUnreachable, act, client)
        host.wait_dead()
        client = host.start()
        client.repair()
        return client

    def member(self, host: HostProcess, act: Act) -> str:
        """What a call comes to that a member of the agent's group makes."""
        return as_nobody(self, lambda: act(host.client()), (grp.getgrnam(GROUP).gr_gid,))

    def image_file(self, name: str = "image", size: int = 8 << 20) -> Path:
        """A file of random content to publish."""
        path = self.folder / f"{name}.raw"
        path.write_bytes(os.urandom(size))
        return path

    def assert_same_content(self, disk: Path, file: Path) -> None:
        """Every byte of the VM disk is the byte of the file."""
        compare = subprocess.run(
            ["qemu-img", "compare", "-f", "qcow2", "-F", "raw", str(disk), str(file)],
            capture_output=True,
            text=True,
            check=False,
        )
        self.assertEqual(0, compare.returncode, compare.stdout + compare.stderr)
