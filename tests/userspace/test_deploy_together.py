"""Whole images by methods of drivers/transfer, with real programs, between hosts that are apart; and kills."""

from __future__ import annotations

import contextlib
import filecmp
import os
import random
import signal
import threading
from functools import partial
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
KILLED = (*METHODS, "auto", "tree", "lazy", "unicast") if WHOLE else METHODS
"""Kills for each method, and the methods. What is killed by the tree alone: test_deploy.py."""
SHOWN = METHODS if WHOLE else METHODS[:1]
"""Methods with which a misfortune is shown that is the same with all."""
CHUNK = 64 << 10
MOMENT = 4.0
"""Seconds within which something is killed after a deployment was asked for."""


class TogetherCase(TestCase):
    """An origin and three hosts, each in a network namespace."""

    room: int | None = None
    """Bytes of the file system of the last host; none for that of all others."""

    def setUp(self) -> None:
        super().setUp()
        require_root(self, "network namespaces")
        for program in PROGRAMS[:-1]:
            require(self, program)
        folder = folder_for(self)
        self.image = folder / "image.raw"
        self.image.write_bytes(os.urandom(SIZE))
        self.network = self.enterContext(Network(network_names(HOSTS), rate=RATE))
        if self.room is not None:
            self.mount(folder / "c" / network_names(HOSTS)[-1], self.room)
        options = ["--heartbeat", "0.5", "--lease", "120"]
        self.cluster = self.enterContext(Cluster(folder / "c", HOSTS, volt_options=options, network=self.network))
        self.origin = self.cluster.agents[0]
        self.origin.publish("img", self.image)

    def mount(self, folder: Path, size: int) -> None:
        folder.mkdir(parents=True)
        run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder])
        self.addCleanup(run, ["umount", "--lazy", folder])

    def deploy(self, method: str, **more: object) -> Deployment:
        return self.origin.deploy({"image": "img", "everywhere": True, "method": method, "encrypt": False, **more})

    def assert_whole(self, deployment: Deployment) -> None:
        """All hosts have all of the image, and nothing else of the deployment is left anywhere."""
        self.assertEqual({"whole"}, {host.state for host in deployment.hosts}, str(deployment.hosts))
        self.assertEqual(deployment.digest, self.origin.image("img").digest)
        for client in self.cluster.agents[1:]:  # a chunk store that was killed afterwards compares everything first
            wait_until(partial(self.is_whole, client), "the host has all of it")
        wait_until(lambda: self.left() == [], "nothing is left")

    def is_whole(self, client: AgentClient) -> bool:
        [image] = client.status().images
        return image.hydration is not None and image.hydration.whole

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


class FullDiskTest(TogetherCase):
    room = 6 << 20

    def test_a_host_with_a_full_disk_says_so_in_a_sentence_and_the_others_go_on(self) -> None:
        for method in SHOWN:
            hosts = {host.host: host for host in self.origin.follow_deployment(self.deploy(method).id).hosts}
            full = hosts.pop(self.cluster.names[-1])
            self.assertEqual(({"whole"}, "failed"), ({host.state for host in hosts.values()}, full.state), str(full))
            self.assertIn("no room", full.error)
            wait_until(lambda: self.left() == [], "nothing is left")
            self.let_go()


class TogetherTest(TogetherCase):
    def test_all_hosts_have_all_of_it_and_the_source_sent_it_once(self) -> None:
        for method in METHODS:
            made = self.deploy(method)
            self.assertEqual(method, made.method)
            ended = self.origin.follow_deployment(made.id)
            self.assert_whole(ended)
            self.assertEqual([("origin", True)], [(leg.source, leg.sent > 0) for leg in ended.legs])
            self.let_go()

    def test_what_was_altered_is_never_kept(self) -> None:
        """A disk of the origin holds other bytes than were published, so that is what travels."""
        files = [path for path in self.cluster.state_folder(0).rglob("*") if path.is_file()]
        [stored] = [path for path in files if same(path, self.image)]
        for method in SHOWN:
            overwrite(stored, bytes(CHUNK))
            number = self.deploy(method).id
            wait_until(partial(self.all_but_a_chunk_came, number), "all came but what was altered")
            overwrite(stored, self.image.read_bytes()[:CHUNK])
            self.assert_whole(self.origin.follow_deployment(number))
            self.let_go()

    def all_but_a_chunk_came(self, deployment: int) -> bool:
        hosts = self.origin.deployment(deployment).hosts
        return [SIZE - host.done for host in hosts if host.state == "filling"] == [CHUNK] * (HOSTS - 1)

    def test_auto_chooses_by_what_hosts_have_found_out(self) -> None:
        number = self.deploy("auto", limit=SIZE // 100).id  # else all of it may be there before the try ends
        wait_until(lambda: self.origin.deployment(number).method != "auto", "the try ends")
        chosen = self.origin.deployment(number)
        self.assertIn("multicast reaches 100% of them", chosen.why)
        self.assertIn(chosen.method, chosen.predicted)
        self.origin.cancel_deployment(number)
        self.let_go()
        self.assert_whole(self.origin.follow_deployment(self.deploy("auto").id))

    def test_whatever_is_killed_all_hosts_get_all_of_it(self) -> None:
        dice = random.Random(seed := random.randrange(1 << 32))
        self.addDetail("seed", text_content(str(seed)))
        for method in KILLED:
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


def same(one: Path, other: Path) -> bool:
    """Whether two files hold the same."""
    return one.stat().st_size == other.stat().st_size and filecmp.cmp(one, other, shallow=False)


def overwrite(path: Path, data: bytes) -> None:
    """Change the beginning of a file."""
    with path.open("r+b") as file:
        file.write(data)
