"""The lab's network: hosts in network namespaces reach each other, and nothing of it stays."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

from testtools import TestCase

from lab.cluster import Cluster, network_names
from lab.errors import NoNetwork
from lab.network import NAMED, PREFIX, Network, remove_abandoned
from tests.programs import is_running, qemu_io, require_root
from tests.unit.virtman.scene import folder_for
from tests.userspace.test_cluster import wait_fetched

CLOSED_PORT = 1
ASK = """
import socket, sys
print(socket.socket().connect_ex((sys.argv[1], int(sys.argv[2]))))
"""
COUNT = """
import socket
receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
receiver.setsockopt(socket.SOL_SOCKET, 33, 4 << 20)  # SO_RCVBUFFORCE: all of it fits, however busy the machine is
receiver.bind(("", 0))
print(receiver.getsockname()[1], flush=True)
came = 0
while receiver.recv(100) != b"end":
    came += 1
print(came)
"""
SEND = """
import contextlib, socket, sys, time
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sender.connect((sys.argv[1], int(sys.argv[2])))
for number in range(1000):
    with contextlib.suppress(ConnectionRefusedError):
        sender.send(bytes(100))
with contextlib.suppress(ConnectionRefusedError):  # the receiver has ended
    while True:
        sender.send(b"end")
        time.sleep(0.01)
"""
KILLED = """
import os, signal, subprocess, sys
from lab.network import Network
network = Network(["a"])
network.start()
argv = [*network.inside("a"), "sh", "-c", "echo inside; exec tail -f /dev/null"]
process = subprocess.Popen(argv, stdout=subprocess.PIPE)
process.stdout.readline()
print(os.getpid(), process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def machines_links() -> list[str]:
    """The network interfaces where the calling thread is."""
    return subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout.splitlines()


def namespaces_of(pid: int) -> list[Path]:
    """The namespaces of a lab."""
    return list(NAMED.glob(f"{PREFIX}{pid}-*"))


class NetworkTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        require_root(self, "network namespaces")

    def assert_reached(self, network: Network, source: str, target: str) -> None:
        """A refused connection is an answer of the target."""
        argv = [*network.inside(source), sys.executable, "-c", ASK, network.address(target), str(CLOSED_PORT)]
        answer = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
        self.assertEqual(errno.ECONNREFUSED, int(answer))

    def test_hosts_reach_each_other_and_nothing_of_the_machine_changes(self) -> None:
        before = machines_links()
        with Network(["a", "b"]) as network:
            sent = network.sent_bytes("a")
            self.assert_reached(network, "a", "b")
            self.assertGreater(network.sent_bytes("a"), sent)
            subprocess.run([sys.executable, "-c", ASK, network.address("b"), str(CLOSED_PORT)], check=True, timeout=60)
        self.assertEqual(before, machines_links())
        self.assertEqual([], namespaces_of(os.getpid()))

    def test_each_link_has_its_rate_each_way(self) -> None:
        with Network(["a"], rate=80_000_000):
            show = ["tc", "-j", "-n"]
            said = [
                subprocess.run([*show, path.name, "qdisc"], capture_output=True, text=True, check=True).stdout
                for path in namespaces_of(os.getpid())
            ]
            rates = [each["options"]["rate"] for text in said for each in json.loads(text) if each["kind"] == "tbf"]
        self.assertEqual([10_000_000] * 2, rates, "bytes a second")

    def test_a_round_trip_takes_the_delay_at_least(self) -> None:
        with Network(["a", "b"], round_trip=0.2) as network:
            begin = time.monotonic()
            self.assert_reached(network, "a", "b")
            self.assertGreater(time.monotonic() - begin, 0.2)
        self.assertEqual([], namespaces_of(os.getpid()))

    def test_packets_are_lost_one_by_one(self) -> None:
        with Network(["a", "b"], loss=0.2) as network:
            self.assert_reached(network, "a", "b")  # and the addresses are known
            argv = [*network.inside("b"), sys.executable, "-c", COUNT]
            receiver = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
            assert receiver.stdout is not None
            port = receiver.stdout.readline().strip()
            subprocess.run([*network.inside("a"), sys.executable, "-c", SEND, network.address("b"), port], check=True)
            came = int(receiver.communicate()[0])
        self.assertTrue(700 < came < 900, f"{came} of 1000 packets came, and 80 % should")

    def test_hosts_of_a_rack_are_behind_its_uplink(self) -> None:
        with Network(["a", "b", "c"], racks={"b": "r1", "c": "r1"}) as network:
            for source, target, into in (("b", "c", False), ("a", "b", True)):
                self.assert_reached(network, source, target)  # and the addresses are known
                before = network.uplink_bytes("r1")[0]
                send = [sys.executable, "-c", SEND, network.address(target), str(CLOSED_PORT)]
                subprocess.run([*network.inside(source), *send], stderr=subprocess.DEVNULL, check=False)
                crossed = network.uplink_bytes("r1")[0] - before
                self.assertEqual(into, crossed > 50_000, f"{source} to {target}: {crossed} bytes")
        self.assertEqual([], namespaces_of(os.getpid()))

    def test_what_a_killed_lab_left_is_removed_with_its_processes(self) -> None:
        killed = subprocess.run([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True, check=False)
        lab, process = map(int, killed.stdout.split())
        remove_abandoned()  # unless a test beside this one has done it
        self.assertEqual([], namespaces_of(lab))
        self.assertFalse(is_running(process))

    def test_hosts_of_a_cluster_read_from_each_other_over_their_links(self) -> None:
        folder, size = folder_for(self), 4 << 20
        image = folder / "image.raw"
        image.write_bytes(os.urandom(size))
        with (
            Network(network_names(2)) as network,
            Cluster(folder / "cluster", 2, network=network) as cluster,
        ):
            origin, host = cluster.agents
            origin.publish("image", image)
            qemu_io(host.create("vm", "image").disk.path, f"read 0 {size}", options=["-r", "-f", "qcow2"])
            wait_fetched(host, size, "image")
            [stack] = host.status().images
            self.assertEqual([f"nbds://{network.address('origin')}:10809"], [path.address for path in stack.paths])
            self.assertGreater(network.sent_bytes("origin"), size)


class NoNetworkTest(TestCase):
    def test_a_machine_without_the_tools_has_no_network_and_says_so(self) -> None:
        network = Network(["a"])
        with mock.patch.dict(os.environ, PATH="/nonexistent"):
            error = self.assertRaises(NoNetwork, network.__enter__)
        self.assertIn("ip", str(error))
