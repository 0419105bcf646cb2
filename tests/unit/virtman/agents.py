"""A whole agent over doubles: in-memory drivers and libvirt, and a Volt double behind HTTP."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from testtools import TestCase

from drivers.host.watch import Watch
from tests.doubles.drivers import Host
from tests.doubles.plugin import install_doubles
from tests.doubles.servers import serve_volt
from tests.doubles.volt import VoltDouble
from tests.patience import wait_until
from tests.unit.virtman.hypervisor import LIBVIRT, connect, domains
from tests.unit.virtman.scene import Cut, await_quiet, folder_for
from virtman.agent import Agent
from virtman.config import AgentConfig

MIB = 1 << 20
SOON = 120.0


class Site:
    """A host that an agent can be started on, again and again; what is on it outlives the agent."""

    def __init__(self, test: TestCase) -> None:
        self.test = test
        self.folder = folder_for(test)
        self.host = Host()
        self.volt = VoltDouble()
        self._stopping: list[Callable[[], None]] = []
        install_doubles(test, self.folder / "packages")
        self.config = AgentConfig(
            name="here", state=self.folder / "state", run=self.folder / "run", volt=serve_volt(test, self.volt),
            libvirt=LIBVIRT, accel="tcg", source="", attach="double", cache="double", export="double",
            snapshot="double",
        )  # fmt: skip
        Host.known[self.config.state] = self.host
        test.addCleanup(Host.known.pop, self.config.state)
        self.hypervisor = connect(test)
        self.cut_at: str | None = None
        self.at: dict[str, Callable[[], object]] = {}
        """What happens, once, when the agent gets to a step."""

    def domains(self) -> list[str]:
        """Names of what libvirt knows, besides the domain that its test driver begins with."""
        return domains(self.hypervisor)

    def step(self, step: str) -> None:
        """Cut the agent off at ``cut_at``; have happen what is to happen there."""
        self.at.pop(step, lambda: None)()
        if step == self.cut_at:
            self.cut_at = None
            raise Cut(step)

    def agent(self, *, started: bool = True, **settings: object) -> Agent:
        """The agent, connected to Volt and done with its repair if ``started``."""
        agent = Agent(replace(self.config, **settings), self.step)  # type: ignore[arg-type]
        stopping = Once(agent.stop)
        self._stopping.append(stopping)
        self.test.addCleanup(stopping)
        if started:
            agent.start()
            wait_until(lambda: not agent.overview.status().repairing and agent.overview.status().volt.connected)
        return agent

    def restart(self, **settings: object) -> Agent:
        """End the agent, if there is one, and start it again."""
        for stop in self._stopping:
            stop()
        return self.agent(**settings)  # type: ignore[arg-type]

    def hold_still(self, agent: Agent) -> None:
        """Have an agent do nothing unasked from now on, but all that ``repair`` asks for."""
        await_quiet(agent.upkeep.queue)
        upkeep, settle = agent.upkeep, agent.upkeep.queue.settle
        upkeep.stopped = True

        def settle_now(keys: Collection[str]) -> None:
            upkeep.stopped = False
            settle(keys)
            upkeep.stopped = True

        upkeep.queue.settle = settle_now  # type: ignore[method-assign]

    def await_child(self, agent: Agent, image: str) -> None:
        """Wait until a host reads an image: who lets it in and who writes it down are two threads."""
        wait_until(
            lambda: (
                bool(self.host.allowed[image])
                and any(record.children for record in agent.stacks.records.all() if record.name == image)
            )
        )

    def have_a_thread_die(self, name: str, error: Exception) -> None:
        """Have a thread of the agent's process die of the error, again and again until the test ends."""

        def die() -> None:
            raise error

        stopped = threading.Event()
        watch = Watch(name, die, stopped)
        watch.start()
        self.test.addCleanup(watch.join)
        self.test.addCleanup(stopped.set)
        wait_until(lambda: watch.death)

    def image_file(self, name: str = "disk.raw", seed: int = 1, size: int = MIB) -> Path:
        """A raw file to publish; another seed is another content. Skips without qemu-img."""
        if shutil.which("qemu-img") is None:
            self.test.skipTest("qemu-img is missing: it is in Debian's package qemu-utils")
        path = self.folder / name
        path.write_bytes(random.Random(seed).randbytes(size))
        return path


class SiteCase(TestCase):
    """With an agent that is started, on a site; another host has published an image."""

    cache = "double"

    def setUp(self) -> None:
        super().setUp()
        self.site = Site(self)
        self.site.volt.offer("debian", size=MIB)
        self.agent = self.site.agent(cache=self.cache)


class Once:
    """A call that is made once, however often it is asked for."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def __call__(self) -> None:
        """Make the call, the first time."""
        call, self._call = self._call, None
        if call is not None:
            call()
