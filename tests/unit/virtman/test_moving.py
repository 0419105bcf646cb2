"""The whole of a migration, between two hosts in memory; and how the destination is reached."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, BinaryIO, cast
from uuid import UUID, uuid4

from testtools import TestCase

from virtman import models
from virtman.client import AgentClient, OnProgress
from virtman.errors import (
    AgentFailed,
    AgentUnreachable,
    BadRequest,
    Conflict,
    HypervisorError,
    UnknownSnapshot,
    UnknownVm,
    VmExists,
    VmMoving,
)
from virtman.moving import ROUNDS, SSH, Destination, Migration, Send, Take, abort, ssh
from virtman.names import TRAVELLING

URI = "qemu+ssh://b/system"
MIB = 1 << 20
NOW = datetime(2026, 1, 1, tzinfo=UTC)
TRAVELLER = models.MigrationSource(
    uuid=uuid4(), memory=64, cpus=1, network="direct", seed="AA==", hardware="pc-q35-7.2"
)


class World:
    """Two hosts. ``calls``: what was asked of them, in order; ``failing``: what a call raises, once.

    ``meanwhile``: what else happens at a call, once.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing: dict[str, BaseException] = {}
        self.meanwhile: dict[str, Callable[[], None]] = {}
        self.changed = [12 * MIB, 8 * MIB, *[MIB] * 9]
        """Bytes of each stream, the first of them whole."""
        self.snapshots = {"here": ["users"], "there": list[str]()}
        self.moved: str | None = None
        self.phase = "ready"
        self.here = True
        self.there = ""
        """What the destination has: nothing, a "disk", what is "arriving", the VM as it "runs"; or "another" VM."""

    def call(self, what: str) -> None:
        """Note a call, and let it fail."""
        self.calls.append(what)
        name = what.split(maxsplit=1)[0]
        if (happens := self.meanwhile.pop(name, None)) is not None:
            happens()
        if (error := self.failing.pop(name, None)) is not None:
            raise error


def a_vm(phase: str, moved: str | None, *, arriving: bool = False, uuid: UUID = TRAVELLER.uuid) -> models.Vm:
    """One that an agent tells of."""
    disk = models.OpenDisk(image="debian", size=MIB, phase=phase, path="/disks/vm", blockdev=None)
    return models.Vm(name="vm", uuid=uuid, disk=disk, machine=None, moved_to=moved, arriving=arriving)


class Here:
    """The client of the host that the VM leaves."""

    def __init__(self, world: World) -> None:
        self.world = world

    def vm(self, _vm: str) -> models.Vm:
        self.world.call("vm")
        if not self.world.here:
            raise UnknownVm("vm")
        return a_vm(self.world.phase, self.world.moved)

    def snapshots(self, _vm: str) -> list[models.Snapshot]:
        return [
            models.Snapshot(name=name, parent=None, size=MIB, taken=NOW, state="crash", current=False)
            for name in self.world.snapshots["here"]
        ]

    def migration_source(self, _vm: str) -> models.MigrationSource:
        self.world.call("migration_source")
        return TRAVELLER

    def take_snapshot(self, _vm: str, name: str) -> None:
        self.world.call("take")
        self.world.snapshots["here"].append(name)

    def delete_snapshot(self, _vm: str, name: str) -> None:
        if name not in self.world.snapshots["here"]:
            raise UnknownSnapshot(name)
        self.world.snapshots["here"].remove(name)

    def send(
        self, _vm: str, _target: BinaryIO, snapshot: str | None, since: str | None, _tell: OnProgress, **how: bool
    ) -> models.Sent:
        self.world.call(f"send {'snapshot' if snapshot else 'disk'} {'since' if since else 'whole'} {how}")
        if snapshot is not None:
            self.world.snapshots["there"].append(snapshot)
            self.world.there = "disk"
        return models.Sent(total=self.world.changed.pop(0), snapshots=0, state="crash")

    def migrate(self, _vm: str, to: str, domain: str, snapshot: str, _tell: OnProgress) -> models.Left:
        self.world.call(f"migrate {domain}")
        self.vm("vm")
        if self.world.snapshots["here"][-1] != snapshot:
            raise Conflict("changed")
        self.world.moved = to
        return models.Left(downtime=0.25)

    def finish_migration(self, _vm: str, to: str) -> None:
        self.world.call("finish")
        if self.world.moved != to:
            raise VmMoving("it did not go there")
        self.world.here = False

    def end_migration(self, _vm: str) -> models.Vm:
        self.world.call("end_migration")
        self.world.phase = "ready"
        return self.vm("vm")

    def take_back(self, _vm: str, uri: str) -> models.Vm:
        self.world.call("take_back")
        if self.world.moved != uri:
            raise BadRequest("it did not go there")
        self.world.moved = None
        return self.vm("vm")


class There(Destination):
    """The agent of the host that it moves to."""

    def __init__(self, world: World) -> None:
        super().__init__(["virtman"])
        self.world = world

    def find(self, vm: str) -> models.Vm | None:
        uuid = uuid4() if self.world.there == "another" else TRAVELLER.uuid
        return a_vm("ready", None, arriving=self.world.there == "arriving", uuid=uuid) if self.world.there else None

    def check(self, migration_source: models.MigrationSource) -> None:
        self.world.call("check")

    def expect(self, vm: str, migration_source: models.MigrationSource) -> str:
        self.world.call("expect")
        self.world.there = "arriving"
        return "<domain/>"

    @contextmanager
    def arrival(self, vm: str, image: str) -> Iterator[Take]:
        self.world.call("arrival")
        try:
            yield self.take_last
        finally:
            self.world.calls.append("ended")

    def take_last(self, send: Send) -> models.Sent:
        self.world.call("take-last")
        sent = send(cast("BinaryIO", None))
        self.world.there = "runs"
        self.world.call("answer")
        return sent

    def give_up(self, vm: str, snapshots: Sequence[str]) -> str:
        self.world.call("give-up")
        if not self.world.there:
            return "absent"
        if self.world.there == "another" or not set(snapshots) & set(self.world.snapshots["there"]):
            return "another"
        if self.world.there == "runs":
            return "arrived"
        self.world.there = ""
        self.world.snapshots["there"].clear()
        return "given up"

    def forget(self, vm: str, snapshot: str) -> None:
        self.world.snapshots["there"].remove(snapshot)

    def snapshots(self, vm: str) -> list[str]:
        return [name for name in self.world.snapshots["there"] if name.startswith(TRAVELLING)]

    def receive(self, vm: str, image: str, send: Send) -> models.Sent:
        self.world.call("receive")
        if self.world.there == "another":
            raise AgentFailed("it exists")
        return send(cast("BinaryIO", None))


class Moving(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.anew()

    def anew(self) -> None:
        self.world = World()
        self.client = cast("AgentClient", Here(self.world))
        self.destination = There(self.world)

    def run_it(self, to: str = URI) -> Any:
        return Migration(self.client, self.destination, "vm", to, lambda *_: None).run()

    def abort(self, *, force: bool = False) -> None:
        abort(self.client, self.destination, "vm", force=force)

    def sends(self) -> list[str]:
        return [call for call in self.world.calls if call.startswith("send")]

    def assert_moved(self) -> None:
        self.assertEqual((False, "runs"), (self.world.here, self.world.there))
        self.assertEqual([], self.destination.snapshots("vm"))

    def assert_stays(self) -> None:
        self.assertEqual((True, None), (self.world.here, self.world.moved))
        self.assertEqual({"here": ["users"], "there": []}, self.world.snapshots)

    def cut_off(self, step: str = "finish") -> None:
        """Its memory went, and then nothing more."""
        self.world.failing[step] = AgentUnreachable("away")
        self.assertRaises(AgentUnreachable, self.run_it)
        self.assertEqual((True, URI), (self.world.here, self.world.moved))


class MigrationTest(Moving):
    def test_disk_memory_and_what_was_written_last(self) -> None:
        moved = self.run_it()
        self.assertEqual(22 * MIB, moved.sent)
        self.assertGreaterEqual(moved.downtime, 0.25)
        self.assertEqual(
            ["send snapshot whole {'with_snapshots': True}", *["send snapshot since {'with_snapshots': True}"] * 2,
             "send disk since {'with_snapshots': False}"],
            self.sends(),
        )  # fmt: skip
        went = self.world.calls.index("migrate <domain/>")
        self.assertEqual(["expect", "arrival"], self.world.calls[went - 2 : went])
        self.assertEqual(
            ["vm", "take-last", self.sends()[-1], "answer", "ended", "finish"], self.world.calls[went + 1 :]
        )
        self.assert_moved()

    def test_what_changes_little_goes_once_more_and_what_changes_a_lot_not_for_ever(self) -> None:
        for changed, streams in (([MIB] * 9, 3), ([9 * MIB] * 9, ROUNDS + 1)):
            self.anew()
            self.world.changed = changed
            self.run_it()
            self.assertEqual(streams, len(self.sends()))

    def test_whatever_fails_before_its_memory_went_leaves_it_here(self) -> None:
        for step in ("migration_source", "check", "take", "send", "receive", "expect", "arrival", "migrate"):
            for error in (HypervisorError("no"), KeyboardInterrupt()):
                self.anew()
                self.world.failing[step] = error
                self.assertRaises(type(error), self.run_it)
                self.assert_stays()
                self.assertEqual("", self.world.there)
                waiting = self.world.calls.count("arrival") - (step == "arrival")
                self.assertEqual(waiting, self.world.calls.count("ended"))
                self.run_it()
                self.assert_moved()

    def test_nothing_goes_where_it_cannot_run(self) -> None:
        self.world.failing["check"] = HypervisorError("no such machine")
        self.assertRaises(HypervisorError, self.run_it)
        self.assertEqual(["vm", "migration_source", "check"], self.world.calls)

    def test_ctrl_c_ends_the_move_of_its_memory(self) -> None:
        self.world.failing["migrate"] = KeyboardInterrupt()
        self.world.phase = "migrating"
        self.assertRaises(KeyboardInterrupt, self.run_it)
        self.assertIn("end_migration", self.world.calls)
        self.assert_stays()

    def test_ctrl_c_when_its_memory_has_just_gone_leaves_it_there(self) -> None:
        def goes() -> None:
            self.world.moved = URI

        self.world.meanwhile["migrate"] = goes
        self.world.failing["migrate"] = KeyboardInterrupt()
        self.assertRaises(KeyboardInterrupt, self.run_it)
        self.assertEqual((URI, "arriving"), (self.world.moved, self.world.there))
        self.run_it()
        self.assert_moved()

    def test_while_it_is_not_known_whether_it_went_nothing_is_destroyed(self) -> None:
        self.world.failing["migrate"] = AgentFailed("ended")
        self.world.phase = "migrating"
        self.assertRaises(AgentFailed, self.run_it)
        self.assertEqual("arriving", self.world.there)
        self.world.failing |= {"migrate": KeyboardInterrupt(), "end_migration": AgentUnreachable("away")}
        self.world.phase, self.world.there = "ready", ""
        error = self.assertRaises(KeyboardInterrupt, self.run_it)
        self.assertIn("is not known: away", error.__notes__[0])
        self.assertEqual("arriving", self.world.there)

    def test_asked_again_it_ends_what_was_cut_off(self) -> None:
        for step in ("take-last", "answer", "finish"):
            self.anew()
            self.cut_off(step)
            self.assertRaises(BadRequest, self.run_it, "qemu+ssh://c/system")
            self.run_it()
            self.assert_moved()
            self.assertNotIn("give-up", self.world.calls)
            self.assertEqual(1, sum(call.startswith("migrate") for call in self.world.calls))
            self.assertEqual(1 + (step == "take-last"), self.world.calls.count("take-last"))

    def test_a_uri_that_names_a_command_or_a_key_is_refused_before_anything_is_done(self) -> None:
        for uri in (
            "qemu:///system", "qemu+ext://b/system?command=/tmp/x", "qemu+ssh://b/system?keyfile=/etc/shadow",
            "qemu+ssh://-oProxyCommand=x/system", "qemu+ssh://b/system\n", "xen+ssh://b/system", "",
        ):  # fmt: skip
            self.assertRaises(BadRequest, self.run_it, uri)
        self.assertEqual([], self.world.calls)

    def test_a_vm_of_this_name_is_left_alone(self) -> None:
        self.world.there = "another"
        self.assertRaises(VmExists, self.run_it)
        self.assertEqual("another", self.world.there)
        self.assert_stays()

    def test_the_host_that_it_is_on_already(self) -> None:
        self.world.there = "runs"
        self.world.snapshots["there"] = self.world.snapshots["here"]  # it is the same
        error = self.assertRaises(BadRequest, self.run_it)
        self.assertIn("another host than this one", str(error))
        self.assertEqual(("runs", ["users"]), (self.world.there, self.world.snapshots["here"]))

    def test_what_is_left_there_of_one_that_was_cut_off_goes(self) -> None:
        self.world.failing |= {"migrate": AgentFailed("ended"), "give-up": AgentFailed("ended")}
        self.assertRaises(AgentFailed, self.run_it)
        self.assertEqual("arriving", self.world.there)
        old = self.world.snapshots["here"][1:]
        self.run_it()
        self.assert_moved()
        self.assertEqual(set(), {*old} & {*self.world.snapshots["here"]})

    def test_one_that_does_not_have_it_after_all(self) -> None:
        self.cut_off()
        for there, error in (("", HypervisorError), ("another", VmExists)):
            self.world.there = there
            self.assertRaises(error, self.run_it)
            self.assertEqual((True, there), (self.world.here, self.world.there))


class AbortTest(Moving):
    def test_what_came_is_given_up(self) -> None:
        self.cut_off("take-last")
        self.assertRaises(BadRequest, abort, self.client, None, "vm")
        self.assertEqual("arriving", self.world.there)
        self.abort()
        self.assert_stays()
        self.assertEqual("", self.world.there)

    def test_one_that_goes_on_there_is_not_given_up(self) -> None:
        self.cut_off("answer")
        self.assertIn("has arrived", str(self.assertRaises(VmMoving, self.abort)))
        self.assertEqual(("runs", URI), (self.world.there, self.world.moved))

    def test_one_that_is_not_found_there_is_given_up_by_force_only(self) -> None:
        for there in ("", "another"):
            self.anew()
            self.cut_off("take-last")
            self.world.there = there
            self.assertRaises(VmMoving, self.abort)
            self.assertEqual(URI, self.world.moved)
            calls = self.world.calls.count("give-up")
            self.abort(force=True)
            self.assertEqual((None, there), (self.world.moved, self.world.there))
            self.assertEqual(calls, self.world.calls.count("give-up"))

    def test_what_was_left_before_its_memory_went_goes(self) -> None:
        self.world.failing |= {"migrate": AgentFailed("ended"), "give-up": AgentFailed("ended")}
        self.assertRaises(AgentFailed, self.run_it)
        self.abort()
        self.assert_stays()
        self.assertEqual("", self.world.there)
        self.assertRaises(BadRequest, self.abort)

    def test_one_whose_memory_moves(self) -> None:
        self.world.phase = "migrating"
        self.abort()
        self.assertEqual(1, self.world.calls.count("end_migration"))
        self.assert_stays()


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
        self.assertIsNone(self.of("echo '[]'").find("vm"))

    def test_why_it_does_not_receive_is_told_rather_than_that_it_hung_up(self) -> None:
        def send(_target: BinaryIO) -> models.Sent:
            raise HypervisorError("it hung up")

        error = self.assertRaises(AgentFailed, self.of("echo full >&2; exit 1").receive, "vm", "debian", send)
        self.assertIn("full", str(error))
        self.assertRaises(HypervisorError, self.of("cat").receive, "vm", "debian", send)

    def test_the_host_is_that_of_the_uri(self) -> None:
        for uri, command in (
            ("qemu+ssh://b/system", [*SSH, "--", "b", "virtman"]),
            ("qemu+ssh://root@b:22/system", [*SSH, "-p", "22", "--", "root@b", "virtman"]),
            ("qemu+tls://b/system", None),
            ("qemu+unix:///system?socket=/s", None),
        ):
            self.assertEqual(command, ssh(uri))
