"""VMs go from host to host as streams, with the real drivers of the userspace stack."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from tests.patience import wait_until
from tests.programs import private_daemons, require_root
from tests.sweeps import kills
from tests.userspace.test_agent_killed import KilledTestCase
from tests.userspace.test_cluster import ClusterTestCase
from tests.userspace.test_copies import write
from virtman import errors
from virtman.client import AgentClient

KIB, MIB = 1 << 10, 1 << 20


def sent(client: AgentClient, **what: str | bool) -> bytes:
    """The stream of the VM."""
    target = io.BytesIO()
    client.send("vm", target, **what)  # type: ignore[arg-type]
    return target.getvalue()


def assert_same(one: AgentClient, other: AgentClient) -> None:
    """The disks of the VM are the same on both hosts."""
    disks = [client.vm("vm").disk.path for client in (one, other)]
    subprocess.run(["qemu-img", "compare", "-f", "qcow2", "-F", "qcow2", *disks], check=True)


class StreamsTestCase(ClusterTestCase):
    """Two hosts; on the first one a VM whose disk is larger than its image and was written to.

    ``here``, ``there``: their agents.
    """

    def setUp(self) -> None:
        super().setUp()
        [(_, self.here), (self.other, self.there)] = self.hosts(2)
        self.vm = self.here.create("vm", "img", 12 * MIB)
        write(self.vm, 0x77, 2 * MIB, MIB)
        write(self.vm, 0x11, 11 * MIB + 512, 512)

    def receive(self, stream: bytes) -> None:
        self.there.receive("vm", "img", io.BytesIO(stream))

    def assert_arrived(self) -> None:
        """The disks are the same on both hosts."""
        assert_same(self.here, self.there)
        self.assertEqual(12 * MIB, self.there.vm("vm").disk.size)

    def assert_refused(self, error: type[errors.VirtmanError], stream: bytes, said: str) -> None:
        refused = self.assertRaises(error, self.receive, stream)
        self.assertIn(said, str(refused))
        self.assertEqual([], self.there.vms())

    def assert_nothing_left(self) -> None:
        self.assertEqual([], [*(self.other.state / "snapshots").glob("[!.]*")])
        self.assertEqual([], [*self.other.run.glob("stream-*")])


class WholeTest(StreamsTestCase):
    def test_every_byte_arrives_and_only_private_ones_are_sent(self) -> None:
        write(self.vm, 0, 0, 2 * MIB)  # zeros are not the image again
        stream, told = io.BytesIO(), list[tuple[str, int, int]]()
        answer = self.here.send("vm", stream, on_progress=lambda *how: told.append(how))
        self.assertEqual((0, "crash"), (answer.snapshots, answer.state))
        self.assertEqual(("send", answer.total, answer.total), told[-1])
        self.assertLess(len(stream.getvalue()), MIB + 128 * KIB)
        vm = self.there.receive("vm", "img", io.BytesIO(stream.getvalue()), lambda *how: told.append(how))
        self.assertEqual(("receive", answer.total, answer.total), told[-1])
        self.assertEqual(("vm", "ready", "img"), (vm.name, vm.disk.phase, vm.disk.image))
        self.assert_arrived()
        self.assertEqual([], self.here.snapshots("vm") + self.there.snapshots("vm"))
        self.assertEqual([], [*self.other.run.glob("stream-*")])

    def test_a_tree_of_snapshots(self) -> None:
        for number, name in enumerate(("root", "left", "right")):
            write(self.vm, 0x20 + number, number * MIB, MIB // 2)
            self.here.take_snapshot("vm", name)
            if name == "left":
                self.here.revert("vm", "root")
        write(self.vm, 0x30, 5 * MIB, MIB)
        self.receive(sent(self.here, with_snapshots=True))
        self.assert_arrived()
        self.assertEqual(self.here.snapshots("vm"), self.there.snapshots("vm"))
        for name in ("left", "root", "right"):
            for client in (self.here, self.there):
                client.revert("vm", name)
            self.assert_arrived()


class SinceTest(StreamsTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.here.take_snapshot("vm", "first")
        self.receive(sent(self.here, snapshot="first"))
        write(self.vm, 0x55, 6 * MIB, MIB)

    def test_only_what_changed_goes(self) -> None:
        stream = sent(self.here, since="first")
        self.assertLess(len(stream), 1.05 * MIB)
        self.receive(stream)
        self.assert_arrived()


class RefusedTest(StreamsTestCase):
    def test_a_receiver_whose_disks_have_no_room(self) -> None:
        folder = self.other.state / "snapshots/.layers"
        require_root(self, "a small file system is mounted")
        write(self.vm, 0x66, 4 * MIB, 4 * MIB)
        stream = sent(self.here)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(folder)], check=True)
        self.addCleanup(subprocess.run, ["umount", str(folder)], check=True)
        self.assert_refused(errors.NoRoom, stream, "no space left")
        self.assert_nothing_left()
        self.there.create("other", "img")

    def test_a_target_that_is_full(self) -> None:
        with Path("/dev/full").open("wb", buffering=0) as full:
            self.assertRaises(errors.NoRoom, self.here.send, "vm", full)
        self.receive(sent(self.here))
        self.assert_arrived()


class KilledTest(KilledTestCase):
    """kill -9 of the agent that receives, at its steps."""

    def setUp(self) -> None:
        super().setUp()
        self.source = self.host("source").start()
        vm = self.source.create("vm", "img")
        write(vm, 0x77, 2 * MIB, MIB)
        self.source.take_snapshot("vm", "first")
        self.whole = sent(self.source, snapshot="first")
        write(vm, 0x55, 6 * MIB, MIB)
        self.source.take_snapshot("vm", "second")
        write(vm, 0x56, 7 * MIB, MIB)
        self.changes = sent(self.source, since="first", with_snapshots=True)

    def receive_changes(self, client: AgentClient) -> None:
        client.receive("vm", "img", io.BytesIO(self.changes))

    def receive_whole(self, client: AgentClient) -> None:
        client.receive("vm", "img", io.BytesIO(self.whole))

    def test_a_new_vm_is_there_whole_or_not_at_all(self) -> None:
        for number, step in enumerate(kills(self.steps_of(self.receive_whole))):
            host = self.host(f"n{number}")
            client = self.interrupt(host, step, self.receive_whole)
            if client.vms():
                self.assertEqual("create:done", step)
                client.destroy("vm")
            self.assert_nothing_left_over(host, client)
            self.receive_whole(client)
            host.tear_down()

    def test_a_vm_has_all_that_changed_or_nothing(self) -> None:
        for number, step in enumerate(kills(self.steps_of(self.receive_changes, self.receive_whole))):
            host = self.host(f"c{number}")
            client = self.interrupt(host, step, self.receive_changes, self.receive_whole)
            self.assert_nothing_left_over(host, client)
            names = [one.name for one in client.snapshots("vm")]
            self.assertEqual(["first", "second"] if step == "receive:done" else ["first"], names, step)
            if step != "receive:done":
                self.receive_changes(client)
            assert_same(self.source, client)
            host.tear_down()

    def test_one_that_sends_leaves_no_snapshot(self) -> None:
        host = self.host("s")
        client = self.interrupt(host, "send:section", sent, self.receive_whole)
        self.assertEqual(["first"], [one.name for one in client.snapshots("vm")])
        self.assert_nothing_left_over(host, client)
        self.assertEqual([], [*host.run.glob("stream-*")])


class CallerTest(StreamsTestCase):
    def test_who_hangs_up_stops_the_sending(self) -> None:
        write(self.vm, 0x66, 0, 8 * MIB)

        class Gone(io.BytesIO):
            def write(self, _data: object) -> int:
                raise BrokenPipeError("nobody reads")

        self.assertRaises(errors.HostTrouble, self.here.send, "vm", Gone())
        snapshots = Path(self.vm.disk.path).parent / "snapshots.json"
        wait_until(lambda: "moment" not in snapshots.read_text(), "the snapshot that was sent is dropped")

    def received_slowly(self, error: type[errors.VirtmanError], first: int) -> threading.Event:
        """Begin to receive so many bytes of a stream; the rest comes, and is refused, when the event is set."""
        stream, rest = sent(self.here), threading.Event()
        parts = iter([stream[:first], stream[first:], b""])

        class Slow(io.BytesIO):
            def read(self, _size: int | None = -1) -> bytes:
                part = next(parts)
                if part == stream[first:]:
                    rest.wait()
                return part

        thread = threading.Thread(target=lambda: self.assertRaises(error, self.there.receive, "vm", "img", Slow()))
        thread.start()
        self.addCleanup(thread.join)
        self.addCleanup(rest.set)
        wait_until(lambda: [vm.disk.phase for vm in self.there.vms()] == ["creating"], "it is told of")
        return rest

    def test_a_storage_daemon_that_is_killed_costs_the_stream_and_nothing_else(self) -> None:
        write(self.vm, 0x66, 4 * MIB, 4 * MIB)
        rest = self.received_slowly(errors.DriverTrouble, 3 * MIB)
        agent = self.there.status().pid
        wait_until(lambda: private_daemons(agent), "the disk is being written")
        for pid in private_daemons(agent):
            os.kill(pid, signal.SIGKILL)
        rest.set()
        wait_until(lambda: self.there.vms() == [], "the VM is gone")
        self.assert_nothing_left()
        self.receive(sent(self.here))
        self.assert_arrived()

    def test_a_source_may_say_nothing_for_longer_than_a_call_may_take(self) -> None:
        stream = sent(self.here)
        hasty = AgentClient(self.other.run / "agent.sock", timeout=0.2)

        class Late(io.BytesIO):
            def read(self, size: int | None = -1) -> bytes:
                threading.Event().wait(1)
                return super().read(size)

        hasty.receive("vm", "img", Late(stream))
        self.assert_arrived()


class CommandTest(StreamsTestCase):
    def command(self, client: AgentClient, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "virtman.cli", "--socket", str(client._socket), *arguments]

    def test_from_one_command_into_the_other(self) -> None:
        pipe = subprocess.PIPE
        send = subprocess.Popen(self.command(self.here, "send", "vm"), stdout=pipe, stderr=pipe)
        argv = self.command(self.there, "receive", "vm", "img")
        receive = subprocess.run(argv, stdin=send.stdout, capture_output=True, text=True, check=False)
        _, said = send.communicate()
        self.assertEqual((0, 0), (send.returncode, receive.returncode), receive.stderr + said.decode())
        self.assertEqual(self.there.vm("vm").disk.path, receive.stdout.strip())
        self.assertIn("sent 1M", said.decode())
        self.assert_arrived()
