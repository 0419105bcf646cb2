"""The whole of a migration, between two hosts in memory; and how the destination is reached."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, BinaryIO, cast

from testtools import TestCase

from virtman import models
from virtman.client import AgentClient, OnProgress
from virtman.errors import AgentFailed, BadRequest, HypervisorError, VirtmanError, VmExists
from virtman.moving import POINT, ROUNDS, Destination, Migration, abort, ssh

URI = "qemu+ssh://b/system"
MIB = 1 << 20
NOW = datetime(2026, 1, 1, tzinfo=UTC)
TRAVELLER = models.Traveller.model_validate(
    {"uuid": "7f3c1d1e-0d3c-4c77-9d3b-1f3f5d0a1b2c", "memory": 64, "cpus": 1, "network": "none", "seed": "AA=="}
)


class World:
    """Two hosts. ``calls``: what was asked of them, in order; ``failing``: what a call raises, once."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing: dict[str, VirtmanError] = {}
        self.changed = [12 * MIB, 8 * MIB, *[MIB] * 9]
        """Bytes of each stream, the first of them whole."""
        self.points = {"here": ["users"], "there": list[str]()}
        self.moved: str | None = None
        self.phase = "ready"
        self.arrives = False
        self.booted = False
        self.there = False
        self.here = True

    def call(self, what: str) -> None:
        """Note a call, and let it fail."""
        self.calls.append(what)
        if (error := self.failing.pop(what.split(maxsplit=1)[0], None)) is not None:
            raise error


def a_vm(phase: str, moved: str | None, *, arriving: bool) -> models.Vm:
    """One that an agent tells of."""
    disk = models.OpenDisk(image="debian", size=MIB, phase=phase, path="/disks/vm", blockdev=None)
    return models.Vm(name="vm", disk=disk, machine=None, moved_to=moved, arriving=arriving)


class Here:
    """The client of the host that the VM leaves."""

    def __init__(self, world: World) -> None:
        self.world = world

    def vm(self, _vm: str) -> models.Vm:
        self.world.call("vm")
        return a_vm(self.world.phase, self.world.moved, arriving=False)

    def snapshots(self, _vm: str) -> list[models.Snapshot]:
        return [
            models.Snapshot(name=name, parent=None, size=MIB, taken=NOW, state="crash", current=False)
            for name in self.world.points["here"]
        ]

    def traveller(self, _vm: str) -> models.Traveller:
        self.world.call("traveller")
        return TRAVELLER

    def take_snapshot(self, _vm: str, name: str) -> None:
        self.world.call("take")
        self.world.points["here"].append(name)

    def delete_snapshot(self, _vm: str, name: str) -> None:
        self.world.points["here"].remove(name)

    def send(
        self, _vm: str, _target: BinaryIO, snapshot: str | None, since: str | None, _tell: OnProgress, **how: bool
    ) -> models.Sent:
        self.world.call(f"send {'point' if snapshot else 'disk'} {'since' if since else 'whole'} {how}")
        if snapshot is not None:
            self.world.points["there"].append(snapshot)
        self.world.there = True
        return models.Sent(total=self.world.changed.pop(0), snapshots=0, state="crash")

    def migrate(self, _vm: str, to: str, domain: str, _tell: OnProgress) -> models.Left:
        self.world.call(f"migrate {domain}")
        self.world.moved, self.world.arrives = to, True
        return models.Left(downtime=0.25)

    def destroy(self, _vm: str) -> None:
        self.world.call("destroy")
        self.world.here = False

    def end_migration(self, _vm: str) -> models.Vm:
        self.world.call("end_migration")
        self.world.moved = None
        return self.vm("vm")


class There(Destination):
    """The agent of the host that it moves to."""

    def __init__(self, world: World) -> None:
        super().__init__(["virtman"])
        self.world = world

    def find(self, vm: str) -> models.Vm | None:
        found = a_vm("ready", None, arriving=self.world.arrives)
        if self.world.booted:
            machine = models.Machine(state="off", memory=64, cpus=1, network="none", console_log="/log", accel="tcg")
            found = found.model_copy(update={"machine": machine})
        return found if self.world.there else None

    def expect(self, vm: str, traveller: models.Traveller) -> str:
        self.world.call("expect")
        return "<domain/>"

    def arrive(self, vm: str, image: str, send: Callable[[BinaryIO], models.Sent]) -> models.Sent:
        self.world.call("arrive")
        self.world.arrives = False
        return send(cast("BinaryIO", None))

    def destroy(self, vm: str) -> None:
        self.world.call("destroy-there")
        self.world.there = self.world.arrives = False
        self.world.points["there"].clear()

    def forget(self, vm: str, point: str) -> None:
        self.world.points["there"].remove(point)

    def points(self, vm: str) -> list[str]:
        return [name for name in self.world.points["there"] if name.startswith(POINT)]

    def receive(self, vm: str, image: str, send: Callable[[BinaryIO], models.Sent]) -> models.Sent:
        self.world.call("receive")
        return send(cast("BinaryIO", None))


class MigrationTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.world = World()
        self.client = cast("AgentClient", Here(self.world))
        self.destination = There(self.world)

    def run_it(self, to: str = URI) -> Any:
        return Migration(self.client, self.destination, "vm", to, lambda *_: None).run()

    def sends(self) -> list[str]:
        return [call for call in self.world.calls if call.startswith("send")]

    def assert_moved(self) -> None:
        self.assertEqual((False, True, False), (self.world.here, self.world.there, self.world.arrives))
        self.assertEqual([], self.world.points["there"])

    def assert_stays(self) -> None:
        self.assertEqual((True, False, None), (self.world.here, self.world.there, self.world.moved))
        self.assertEqual({"here": ["users"], "there": []}, self.world.points)

    def test_disk_memory_and_what_was_written_last(self) -> None:
        moved = self.run_it()
        self.assertEqual(22 * MIB, moved.sent)
        self.assertGreaterEqual(moved.downtime, 0.25)
        self.assertEqual(
            ["send point whole {'with_snapshots': True}", *["send point since {'with_snapshots': False}"] * 2,
             "send disk since {'with_snapshots': False}"],
            self.sends(),
        )  # fmt: skip
        after = self.world.calls[self.world.calls.index("migrate <domain/>") + 1 :]
        self.assertEqual(["arrive", self.sends()[-1], "destroy"], after)
        self.assert_moved()

    def test_what_changes_little_goes_once_more_and_what_changes_a_lot_not_for_ever(self) -> None:
        for changed, streams in (([MIB] * 9, 3), ([9 * MIB] * 9, ROUNDS + 1)):
            self.world = World()
            self.client, self.destination = cast("AgentClient", Here(self.world)), There(self.world)
            self.world.changed = changed
            self.run_it()
            self.assertEqual(streams, len(self.sends()))

    def test_whatever_fails_before_its_memory_went_leaves_it_here(self) -> None:
        for step in ("traveller", "take", "send", "receive", "expect", "migrate"):
            self.world = World()
            self.client, self.destination = cast("AgentClient", Here(self.world)), There(self.world)
            self.world.failing[step] = HypervisorError("no")
            self.assertRaises(HypervisorError, self.run_it)
            self.assert_stays()
            self.run_it()
            self.assert_moved()

    def test_while_it_is_not_known_whether_it_went_nothing_is_destroyed(self) -> None:
        self.world.failing["migrate"] = AgentFailed("ended")
        self.world.phase = "migrating"
        self.assertRaises(AgentFailed, self.run_it)
        self.assertNotIn("destroy-there", self.world.calls)

    def test_asked_again_it_ends_what_was_cut_off(self) -> None:
        for step in ("arrive", "destroy"):
            self.world = World()
            self.client, self.destination = cast("AgentClient", Here(self.world)), There(self.world)
            self.world.failing[step] = AgentFailed("ended")
            self.assertRaises(AgentFailed, self.run_it)
            self.assertTrue(self.world.here)
            self.assertNotIn("destroy-there", self.world.calls)
            self.assertRaises(BadRequest, self.run_it, "qemu+ssh://c/system")
            self.run_it()
            self.assert_moved()
            self.assertEqual(1, sum(call.startswith("migrate") for call in self.world.calls))
            self.assertEqual(1 + (step == "arrive"), self.world.calls.count("arrive"))

    def test_one_that_lost_its_snapshots_meanwhile_is_not_let_go_on(self) -> None:
        self.world.failing["arrive"] = AgentFailed("ended")
        self.assertRaises(AgentFailed, self.run_it)
        self.world.points["here"] = ["users"]
        self.assertRaises(BadRequest, self.run_it)
        self.assertTrue(self.world.arrives)

    def test_a_uri_that_names_a_command_or_a_key_is_refused_before_anything_is_done(self) -> None:
        for uri in (
            "qemu:///system", "qemu+ext://b/system?command=/tmp/x", "qemu+ssh://b/system?keyfile=/etc/shadow",
            "qemu+ssh://-oProxyCommand=x/system", "qemu+ssh://b/system\n", "xen+ssh://b/system", "",
        ):  # fmt: skip
            self.assertRaises(BadRequest, self.run_it, uri)
        self.assertEqual([], self.world.calls)

    def test_a_vm_of_this_name_is_left_alone(self) -> None:
        self.world.there = True
        self.assertRaises(VmExists, self.run_it)
        self.world.points["there"] = [f"{POINT}0-of-another-host"]
        self.assertRaises(VmExists, self.run_it)
        self.world.points["here"].append(f"{POINT}0-of-another-host")
        self.world.booted = True
        self.assertRaises(VmExists, self.run_it)
        self.assertNotIn("destroy-there", self.world.calls)

    def test_what_is_left_there_of_one_that_was_cut_off_goes(self) -> None:
        self.world.failing |= {"migrate": AgentFailed("ended"), "destroy-there": AgentFailed("ended")}
        self.assertRaises(AgentFailed, self.run_it)
        self.assertTrue(self.world.there)
        self.run_it()
        self.assertEqual(2, self.world.calls.count("destroy-there"))
        self.assert_moved()

    def test_one_that_does_not_have_it_after_all(self) -> None:
        self.world.moved = URI
        self.assertRaises(HypervisorError, self.run_it)
        self.assertTrue(self.world.here)

    def test_what_came_is_given_up(self) -> None:
        self.world.failing["arrive"] = AgentFailed("ended")
        self.assertRaises(AgentFailed, self.run_it)
        self.assertRaises(BadRequest, abort, self.client, None, "vm")
        self.assertTrue(self.world.there)
        abort(self.client, self.destination, "vm")
        self.assertEqual((False, None), (self.world.there, self.world.moved))

    def test_one_that_goes_on_there_is_not_given_up(self) -> None:
        self.world.failing["destroy"] = AgentFailed("ended")
        self.assertRaises(AgentFailed, self.run_it)
        self.assertRaises(BadRequest, abort, self.client, self.destination, "vm")
        self.assertEqual((True, URI), (self.world.there, self.world.moved))


class DestinationTest(TestCase):
    def of(self, script: str) -> Destination:
        return Destination(["sh", "-c", script])

    def test_its_last_line_says_why_it_failed(self) -> None:
        error = self.assertRaises(AgentFailed, self.of("echo one >&2; echo two >&2; exit 1").find, "vm")
        self.assertEqual("sh -c echo one >&2; echo two >&2; exit 1: two", str(error))
        self.assertIn("without a word", str(self.assertRaises(AgentFailed, self.of("exit 1").find, "vm")))

    def test_a_command_that_is_not_there(self) -> None:
        self.assertRaises(BadRequest, Destination(["/none"]).find, "vm")
        self.assertRaises(BadRequest, Destination(["/none"]).receive, "vm", "debian", lambda _target: None)

    def test_what_is_no_agent(self) -> None:
        for said in ("hello", "[1]", '{"a": 1}'):
            self.assertRaises(AgentFailed, self.of(f"echo '{said}'").find, "vm")
        self.assertRaises(AgentFailed, self.of("echo '[]'").expect, "vm", TRAVELLER)

    def test_one_that_does_not_have_it(self) -> None:
        self.assertIsNone(self.of('echo \'[{"name": "vm1"}]\'').find("vm"))

    def test_why_it_does_not_receive_is_told_rather_than_that_it_hung_up(self) -> None:
        def send(_target: BinaryIO) -> models.Sent:
            raise HypervisorError("it hung up")

        error = self.assertRaises(AgentFailed, self.of("echo full >&2; exit 1").receive, "vm", "debian", send)
        self.assertIn("full", str(error))
        self.assertRaises(HypervisorError, self.of("cat").receive, "vm", "debian", send)

    def test_the_host_is_that_of_the_uri(self) -> None:
        for uri, command in (
            ("qemu+ssh://b/system", ["ssh", "--", "b", "virtman"]),
            ("qemu+ssh://root@b:22/system", ["ssh", "-p", "22", "--", "root@b", "virtman"]),
            ("qemu+tls://b/system", None),
            ("qemu+unix:///system?socket=/s", None),
        ):
            self.assertEqual(command, ssh(uri))
