"""Whole images by methods of drivers/transfer, with real programs, between hosts that are apart; and kills."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from pathlib import Path

from testtools import TestCase
from testtools.content import text_content

from lab.cluster import Cluster, network_names
from lab.network import Network
from lab.process import processes_of
from lab.tools import run
from tests.patience import wait_until
from tests.programs import require, require_root
from tests.sweeps import WHOLE
from tests.unit.virtman.scene import folder_for
from virtman.client import AgentClient
from volt.client import Deployment

METHODS = ("udpcast", "uftp", "bittorrent")
PROGRAMS = ("udp-sender", "udp-receiver", "uftp", "uftpd", "swarm")
HOSTS = 4
SIZE = 8 << 20
RATE = 40_000_000
"""Bits a second of each link: the image takes two seconds."""
ROUNDS = 50 if WHOLE else 1
"""Kills for each method."""
MOMENT = 4.0
"""Seconds within which something is killed after a deployment was asked for."""


class TogetherTest(TestCase):
    """An origin and three hosts, each in a network namespace."""

    def setUp(self) -> None:
        super().setUp()
        require_root(self, "network namespaces")
        for program in PROGRAMS[:-1]:
            require(self, program)
        folder = folder_for(self)
        self.image = folder / "image.raw"
        self.image.write_bytes(os.urandom(SIZE))
        self.network = self.enterContext(Network(network_names(HOSTS), rate=RATE))
        options = ["--heartbeat", "0.5", "--lease", "120"]
        self.cluster = self.enterContext(Cluster(folder / "c", HOSTS, volt_options=options, network=self.network))
        self.origin = self.cluster.agents[0]
        self.origin.publish("img", self.image)

    def deploy(self, method: str) -> Deployment:
        return self.origin.deploy({"image": "img", "everywhere": True, "method": method, "encrypt": False})

    def assert_whole(self, deployment: Deployment) -> None:
        """All hosts have all of the image, and nothing else of the deployment is left anywhere."""
        self.assertEqual({"whole"}, {host.state for host in deployment.hosts}, str(deployment.hosts))
        self.assertEqual(deployment.digest, self.origin.image("img").digest)
        for client in self.cluster.agents[1:]:
            [image] = client.status().images
            self.assertTrue(image.hydration is not None and image.hydration.whole, str(image))
        wait_until(lambda: self.left() == [], "nothing is left")

    def left(self) -> list[str]:
        """Programs and files of methods."""
        programs = [line for host in range(HOSTS) for line in self.programs_of(host).values()]
        files = [str(path) for host in range(HOSTS) for path in self.cluster.state_folder(host).glob("transfer/*")]
        return programs + files

    def programs_of(self, host: int) -> dict[int, str]:
        """The programs of methods that run on a host: their command lines, by process."""
        [_, where] = self.network.inside(self.cluster.names[host])
        pids = map(int, run(["ip", "netns", "pids", Path(where).name]).split())
        found = {pid: command_of(pid) for pid in pids}
        return {pid: line for pid, line in found.items() if any(name in line for name in PROGRAMS)}

    def let_go(self) -> None:
        """Hosts keep nothing of the image."""
        for client in self.cluster.agents[1:]:
            client.end_hydration("img")
        wait_until(lambda: [self.gone(client) for client in self.cluster.agents[1:]] == [True] * (HOSTS - 1))

    def gone(self, client: AgentClient) -> bool:
        client.gc()
        return not client.status().images

    def test_all_hosts_have_all_of_it_and_the_source_sent_it_once(self) -> None:
        for method in METHODS:
            made = self.deploy(method)
            self.assertEqual(method, made.method)
            ended = self.origin.follow_deployment(made.id)
            self.assert_whole(ended)
            self.assertEqual([("origin", True)], [(leg.source, leg.sent > 0) for leg in ended.legs])
            self.let_go()

    def test_auto_chooses_by_what_hosts_have_found_out(self) -> None:
        ended = self.origin.follow_deployment(self.deploy("auto").id)
        self.assert_whole(ended)
        self.assertIn("multicast reaches 100% of them", ended.why)
        self.assertIn(ended.method, ended.predicted)

    def test_whatever_is_killed_all_hosts_get_all_of_it(self) -> None:
        dice = random.Random(seed := random.randrange(1 << 32))
        self.addDetail("seed", text_content(str(seed)))
        for method in METHODS:
            for _ in range(ROUNDS):
                made = self.deploy(method)
                threading.Event().wait(dice.uniform(0, MOMENT))
                kill = dice.choice([self.kill_volt, self.kill_program, self.kill_agent, self.kill_store])
                self.addDetail("last", text_content(f"{method}: {kill.__name__}"))
                kill(dice)
                self.assert_whole(self.origin.follow_deployment(made.id))
                self.let_go()

    def kill_volt(self, _dice: random.Random) -> None:
        self.cluster.kill_volt()
        self.cluster.start_volt()

    def kill_program(self, dice: random.Random) -> None:
        """Of the sender, or of a receiver, if one runs."""
        for pid in self.programs_of(dice.randrange(HOSTS)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill_agent(self, dice: random.Random) -> None:
        """Of the sender, or of a receiver."""
        host = dice.randrange(HOSTS)
        self.cluster.kill_agent(host)
        self.cluster.restart_agent(host)

    def kill_store(self, dice: random.Random) -> None:
        """Of an inner host, or of the origin."""
        for pid, line in processes_of(self.cluster.run_folder(dice.randrange(HOSTS))).items():
            if "virtman-chunkd" in line:
                os.kill(pid, signal.SIGKILL)


def command_of(pid: int) -> str:
    """The command line of a process, or nothing if it has ended."""
    try:
        return Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
