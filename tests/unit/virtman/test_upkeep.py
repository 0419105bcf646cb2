"""What the agent does unasked."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from testtools import TestCase
from testtools.matchers import Contains

from drivers.base import CacheStats, Image, Volume
from drivers.digests import draw
from drivers.errors import DriverError
from lab.process import attempts
from tests.doubles.drivers import BYTES_PER_FETCH, CacheGroupDouble, Host, unnoticed
from tests.doubles.volt import INTERVAL, digest_of, link_to, parent
from tests.unit.logs import Logged
from tests.unit.virtman.clock import Clock
from tests.unit.virtman.scene import Scene
from virtman.errors import CoordinatorDown, HypervisorError, OriginChanged
from virtman.hostdrivers import HostDrivers
from virtman.inplace import to_publish
from virtman.records import DESTROY, DETACH, REMOVED, Boot, ChildRecord, ImageRecord, InPlace, Role
from virtman.upkeep import IDLE_LOOK, NOTHING, USED_LOOK, Upkeep
from virtman.workqueue import FIRST_PAUSE, IN_VAIN, LONGEST_PAUSE, THREADS, Job, Pool
from volt.client import Assignment, HeartbeatAnswer, NodeReport
from volt.models import Child

PATIENCE = 60.0
"""Seconds until a test that hangs is given up; none is measured by it."""

PAUSE = 0.002
GRACE = 600.0
MIB = 1 << 20
TROUBLE = DriverError("the device is on fire")
BOOT = Boot(memory=64, cpus=1, network="none")


def answer(*assignments: Assignment, absent: tuple[str, ...] = ()) -> HeartbeatAnswer:
    return HeartbeatAnswer(
        interval_s=INTERVAL, lease_s=3 * INTERVAL, assignments=list(assignments), absent=list(absent)
    )


class UpkeepTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.scene = Scene(self)
        self.volt, self.host = self.scene.volt, self.scene.host
        self.clock = Clock()
        self.use(self.scene.drivers)

    def use(self, drivers: HostDrivers) -> None:
        """Look after the host with these drivers."""
        self.upkeep = Upkeep(
            self.scene.stacks, self.scene.vms, drivers, self.scene.kept, self.scene.devices, GRACE, self.clock
        )  # fmt: skip
        self.scene.released = self.upkeep.released
        self.upkeep.queue.start()
        self.addCleanup(self.upkeep.queue.stop)

    def attached(self, name: str = "debian") -> ImageRecord:
        self.volt.offer(name)
        record = self.scene.stacks.ensure(name)
        self.settle()
        self.scene.changes = 0
        return record

    def record(self, name: str = "debian") -> ImageRecord:
        record = self.scene.stacks.find(name)
        assert record is not None
        return record

    def tell(self) -> HeartbeatAnswer:
        """A heartbeat, to which Volt answers."""
        reports, needed = self.upkeep.news()
        return self.volt.heartbeat(reports, self.upkeep.kept(), needed)

    def beat(self) -> None:
        """A heartbeat, as Volt answers it, and all that comes of it."""
        try:
            said: HeartbeatAnswer | None = self.tell()
        except Exception:  # noqa: BLE001  Volt is down
            said = None
        self.upkeep.handle(said)
        self.settle()

    def settle(self) -> None:
        """Wait until nothing is under way, and nothing is due."""
        pause, queue = threading.Event(), self.upkeep.queue
        for _ in range(int(PATIENCE / PAUSE)):
            if not any(queue.busy(key) for key in list(queue._entries)):
                return
            pause.wait(PAUSE)
        self.fail("the work does not end")

    def pass_time(self, seconds: float) -> None:
        """Let time pass, and let all be done that is due then."""
        self.clock.advance(seconds)
        self.upkeep.queue.wake("image time")
        self.settle()


class VoltsAnswerTest(UpkeepTest):
    def test_new_assignments_are_followed_and_volt_told_soon(self) -> None:
        self.attached()
        self.volt.assign("debian", ["new"])
        self.beat()
        self.assertEqual({parent("new")}, self.host.reading["debian"])
        self.assertEqual(1, self.scene.changes)
        self.scene.check(self)

    def test_images_whose_records_cannot_be_used_may_be_needed(self) -> None:
        record = self.attached()
        self.assertEqual([], self.upkeep.news()[1])
        self.scene.image_shelf.put("debian", record.begin("attach"))
        self.assertEqual(([], ["debian"]), self.upkeep.news())
        (self.scene.folder / "records" / "images" / "debian.json").write_text("")
        self.assertEqual(([], ["debian"]), self.upkeep.news())
        self.beat()
        self.assertEqual(["debian"], self.volt.needed)

    def test_an_answer_without_news_changes_nothing(self) -> None:
        self.attached()
        self.host.calls.clear()
        for _ in range(3):
            self.beat()
        self.assertEqual(([], 0), (self.host.calls, self.scene.changes))

    def test_children_are_let_in_while_the_stack_is_busy(self) -> None:
        self.attached()
        entered, go = threading.Event(), threading.Event()
        self.addCleanup(go.set)

        def moment(what: str) -> None:
            if what == "before attach.update":
                entered.set()
                go.wait(PATIENCE)

        self.host.moment = moment
        self.upkeep.handle(answer(self.volt.assign("debian", ["new"])))
        self.assertTrue(entered.wait(PATIENCE))
        allowed = threading.Event()
        # The first answer, which names no child, may be being heeded still.
        self.host.moment = lambda what: (
            allowed.set() if what == "after export.allow" and self.host.allowed["debian"] else None
        )
        self.upkeep.handle(answer(self.volt.assign("debian", ["newer"], ["child"])))
        self.assertTrue(allowed.wait(PATIENCE))
        self.assertEqual(["child"], [child.host for child in self.host.allowed["debian"]])
        go.set()
        self.settle()
        self.assertEqual({parent("newer")}, self.host.reading["debian"], "the newest one is followed in the end")

    def test_an_older_answer_that_comes_late_is_ignored(self) -> None:
        self.attached()
        old, new = self.volt.assign("debian", ["old"]), self.volt.assign("debian", ["new"])
        self.upkeep.handle(answer(new))
        self.upkeep.handle(answer(old))
        self.settle()
        self.assertEqual({parent("new")}, self.host.reading["debian"])

    def test_an_assignment_that_comes_while_the_image_is_being_attached_is_followed_after_it(self) -> None:
        self.volt.offer("debian")

        def moment(what: str) -> None:
            if what == "before cache.open":
                self.host.moment = lambda _what: None
                self.upkeep.handle(answer(self.volt.assign("debian", ["new"])))
                self.settle()

        self.host.moment = moment
        self.scene.stacks.ensure("debian")
        self.settle()
        self.assertEqual({parent("new")}, self.host.reading["debian"])

    def test_a_forgotten_image_is_joined_again_and_volt_told_soon(self) -> None:
        self.attached()
        self.volt.forget("debian")
        self.beat()
        self.assertIn("debian", self.volt.places)
        self.assertEqual(1, self.scene.changes)
        self.beat()
        self.assertEqual(1, self.scene.changes)

    def test_an_image_that_volt_has_again_with_this_hosts_place_is_not_joined_again(self) -> None:
        self.attached()
        image, place = self.volt.images.pop("debian"), self.volt.places.pop("debian")
        self.beat()
        self.assertIn("place of debian", self.upkeep.troubles())
        self.volt.images["debian"], self.volt.places["debian"] = image, place  # from a backup, say
        self.beat()
        self.pass_time(LONGEST_PAUSE)
        self.assertEqual({}, self.upkeep.troubles())
        self.assertEqual(1, self.scene.moments.count("before volt.join"), "when it was attached")

    def test_a_place_without_a_stack_is_given_up_once(self) -> None:
        self.volt.offer("debian")
        self.volt.assign("debian", ["other"])
        self.beat()
        self.assertEqual({}, self.volt.places)
        self.assertEqual(0, self.scene.changes)
        leaves = self.scene.moments.count("before volt.leave")
        self.beat()
        self.assertEqual(leaves, self.scene.moments.count("before volt.leave"))

    def test_an_image_whose_only_origin_is_another_agent_of_this_name_stays_and_is_told(self) -> None:
        link_to(self.volt).publish(Image("debian", MIB, digest_of("debian")))
        self.beat()
        self.assertEqual(["here"], self.volt.images["debian"].origins)
        self.assertThat(self.upkeep.troubles()["place of debian"], Contains("--name"))
        link_to(self.volt).withdraw("debian")  # its agent does, say
        self.pass_time(LONGEST_PAUSE)
        self.assertEqual({}, self.upkeep.troubles())

    def test_what_is_given_up_and_whose_last_vm_went_while_no_agent_ran_is_dropped(self) -> None:
        self.scene.stacks.add_origin(self.scene.put_content("mine"))
        record = self.scene.image_shelf.get("mine")
        assert record is not None
        link_to(self.volt).withdraw("mine")
        self.scene.image_shelf.put("mine", record.model_copy(update={"given_up": True}))
        self.clock.advance(IDLE_LOOK)
        self.upkeep.handle(None)  # though Volt is silent
        self.settle()
        self.assertIsNone(self.scene.image_shelf.get("mine"))

    def test_what_is_given_up_is_no_trouble_and_is_dropped_with_its_last_vm(self) -> None:
        self.scene.stacks.add_origin(self.scene.put_content("mine"))
        self.scene.vms.create("vm", "mine", None)
        link_to(self.volt).withdraw("mine")
        self.scene.stacks.drop_origin("mine", given_up=True)
        self.beat()
        self.assertEqual(({}, {"mine"}), (self.upkeep.troubles(), set(self.host.served)))
        self.scene.vms.destroy("vm")
        self.settle()
        self.assertEqual({}, self.upkeep.troubles())
        self.scene.check_empty(self)

    def test_after_stop_nothing_is_begun(self) -> None:
        self.attached()
        image = self.record().image
        self.settle()
        self.host.calls.clear()
        self.upkeep.stopped = True
        self.upkeep.handle(answer(self.volt.assign("debian", ["new"])))
        self.upkeep.died("debian")
        self.upkeep.parent_lost(image, parent("other"))
        self.settle()
        self.assertEqual(([], []), (self.host.calls, self.volt.reported))


class QuietTest(UpkeepTest):
    """What can't be brought in order costs little, and no heartbeat more than usual."""

    def beats_in_vain(self, name: str) -> int:
        """Beat ten times; how often Volt was asked for something besides, and that nobody wants to beat sooner."""
        self.beat()
        asked = len([moment for moment in self.scene.moments if moment.startswith("before volt.")])
        for _ in range(10):
            self.beat()
        self.assertEqual(0, self.scene.changes)
        self.assertIn(f"place of {name}", self.upkeep.troubles())
        return len([moment for moment in self.scene.moments if moment.startswith("before volt.")]) - asked - 10

    def test_an_origin_whose_image_was_removed_at_volt(self) -> None:
        self.scene.stacks.add_origin(self.scene.put_content("mine"))
        self.scene.changes = 0
        self.volt.remove_image("mine")
        self.assertEqual(0, self.beats_in_vain("mine"))
        self.assertIn("mine", self.host.served)

    def test_a_host_whose_image_was_removed_at_volt(self) -> None:
        self.attached()
        self.volt.forget("debian")
        self.volt.remove_image("debian")
        self.assertEqual(0, self.beats_in_vain("debian"))

    def test_a_host_whose_images_name_has_other_content_now(self) -> None:
        self.attached()
        self.volt.forget("debian")
        self.volt.offer("debian", digest=digest_of("later"))
        self.assertEqual(0, self.beats_in_vain("debian"))
        self.assertNotIn("debian", self.volt.places)

    def test_other_content_that_is_assigned_is_left_once(self) -> None:
        self.attached()
        self.volt.offer("debian", digest=digest_of("later"))
        self.volt.assign("debian", ["other"])
        self.assertEqual(0, self.beats_in_vain("debian"))
        self.assertEqual(1, self.scene.moments.count("before volt.leave"))

    def test_the_old_content_under_its_name_again_is_joined_again(self) -> None:
        self.attached()
        self.volt.offer("debian", digest=digest_of("later"))
        self.volt.assign("debian", ["other"])
        self.beats_in_vain("debian")
        self.volt.offer("debian")
        self.pass_time(LONGEST_PAUSE)
        self.beat()
        self.pass_time(LONGEST_PAUSE)
        self.assertIn("debian", self.volt.places)
        self.assertEqual({}, self.upkeep.troubles())


class AgainTest(UpkeepTest):
    """What failed is done again."""

    def test_a_follow_that_failed(self) -> None:
        self.attached()
        self.host.failing = {"attach.update": OSError("disk full")}
        self.volt.assign("debian", ["new"])
        self.beat()
        self.assertTrue(self.record().unconfirmed)
        self.assertEqual(0, self.scene.changes)
        self.host.failing = {}
        self.pass_time(LONGEST_PAUSE)
        self.assertEqual({parent("new")}, self.host.reading["debian"])
        self.scene.check(self)

    def test_a_follow_that_failed_is_not_tried_with_each_heartbeat(self) -> None:
        self.attached()
        self.host.failing = {"attach.update": TROUBLE}
        self.volt.assign("debian", ["new"])
        for _ in range(5):
            self.beat()
        self.assertEqual(1, self.host.calls.count("attach.update"))

    def test_children_who_could_not_be_let_in_are_with_the_next_heartbeat(self) -> None:
        self.attached()
        self.host.failing = {"attach.update": TROUBLE, "export.allow": TROUBLE}
        self.volt.assign("debian", ["new"], ["child"])
        self.beat()
        del self.host.failing["export.allow"]
        self.pass_time(FIRST_PAUSE)
        self.beat()
        self.assertEqual(["child"], [child.host for child in self.host.allowed["debian"]])

    def test_letting_children_in_that_failed(self) -> None:
        self.attached()
        self.host.failing = {"attach.update": TROUBLE, "export.allow": TROUBLE}
        self.volt.assign("debian", ["other"], ["child"])
        self.beat()
        self.assertIn("children of debian", self.upkeep.troubles())
        del self.host.failing["export.allow"]
        self.pass_time(LONGEST_PAUSE)
        self.assertEqual(["child"], [child.host for child in self.host.allowed["debian"]])
        self.assertNotIn("children of debian", self.upkeep.troubles())

    def test_a_removal_that_failed(self) -> None:
        self.attached()
        self.host.failing = {"cache.close": TROUBLE}
        self.assertRaises(DriverError, self.scene.stacks.remove_if_idle, "debian")
        self.settle()
        self.assertEqual({"image debian": "repair: the device is on fire"}, self.upkeep.troubles())
        self.host.failing = {}
        self.pass_time(LONGEST_PAUSE)
        self.scene.check_empty(self)

    def test_a_destroy_that_failed(self) -> None:
        self.attached()
        self.scene.vms.boot("vm", "debian", None, BOOT, [], None)
        self.scene.machines.failing = {"remove": HypervisorError("no libvirt")}
        self.assertRaises(HypervisorError, self.scene.vms.destroy, "vm")
        self.beat()
        self.assertEqual({"vm vm": "repair: no libvirt"}, self.upkeep.troubles())
        self.scene.machines.failing = {}
        self.pass_time(LONGEST_PAUSE)
        self.assertEqual({}, self.host.disks)
        self.assertEqual({}, self.upkeep.troubles())

    def test_a_temporary_point_that_could_not_be_dropped(self) -> None:
        self.attached()
        self.scene.vms.create("vm", "debian", None)
        with self.scene.disks.moment("vm"):
            self.host.failing = {"snapshot.drop": TROUBLE}
        self.host.failing = {}
        self.assertIsNone(self.scene.vms.record("vm").untidy)
        self.beat()
        self.assertEqual({}, self.host.disks["vm"].points)

    def test_a_publish_whose_answer_got_lost(self) -> None:
        self.volt.down = True
        self.assertRaises(CoordinatorDown, self.scene.stacks.add_origin, self.scene.put_content("mine"))
        self.beat()
        self.volt.down = False
        self.beat()
        self.assertIn("mine", self.volt.images)
        self.scene.check(self)

    def test_leaving_when_volt_is_back(self) -> None:
        self.attached()
        self.volt.down = True
        self.scene.stacks.remove_if_idle("debian")
        for _ in range(10):
            self.beat()
        self.volt.down = False
        self.beat()  # whatever pause the last failure had
        self.scene.check_empty(self)

    def test_leaving_is_tried_and_told_of_once(self) -> None:
        self.attached()
        self.volt.down = True
        self.scene.stacks.remove_if_idle("debian")
        self.settle()
        self.assertEqual(["place of debian"], list(self.upkeep.troubles()))
        self.assertEqual(2, self.scene.moments.count("before volt.leave"), "with the removal, and once after it")

    def test_what_somebody_does_with_a_vm_is_not_waited_for(self) -> None:
        self.attached()
        names = [f"vm-{number}" for number in range(THREADS[Pool.LONG])]
        with ExitStack() as held:
            for name in names:
                self.scene.vms.create(name, "debian", None)
                self.scene.vm_shelf.put(name, self.scene.vms.record(name).begin(DESTROY))
                held.enter_context(self.scene.vms.locks.hold(name))
            self.beat()
            self.assertEqual(set(names), set(self.host.disks))
        self.beat()
        self.assertEqual({}, self.host.disks)

    def test_a_dead_daemon_though_volt_is_silent(self) -> None:
        self.attached()
        self.scene.vms.create("vm", "debian", None)
        self.settle()
        self.host.daemon_dies("debian")
        self.upkeep.handle(None)
        self.settle()
        self.assertIn("debian", self.host.served)

    def test_a_daemon_whose_end_nobody_noticed_is_found_later_where_nobody_needs_it(self) -> None:
        self.attached()
        self.beat()
        self.host.daemon_dies("debian")
        self.clock.advance(IDLE_LOOK - 1)
        self.beat()
        self.assertNotIn("debian", self.host.served)
        self.clock.advance(1)
        self.beat()
        self.scene.check(self)

    def test_what_is_done_once_is_done_until_it_succeeds(self) -> None:
        tries: list[int] = []

        def register() -> None:
            tries.append(1)
            if len(tries) < 3:
                raise CoordinatorDown("nobody there")

        self.upkeep.once("Volt", Job("register", register))
        self.settle()
        self.assertEqual({"Volt": "register: nobody there"}, self.upkeep.troubles())
        for _ in range(5):
            self.pass_time(LONGEST_PAUSE)
        self.assertEqual((3, {}), (len(tries), self.upkeep.troubles()))


class DriversCallTest(UpkeepTest):
    def test_a_lost_parent_is_reported_and_the_answer_followed(self) -> None:
        image = self.attached().image
        self.volt.assign("debian", ["dead", "spare"])
        self.beat()
        self.upkeep.parent_lost(image, parent("dead"))
        self.settle()
        self.assertEqual([("debian", "dead")], self.volt.reported)
        self.assertEqual({parent("spare")}, self.host.reading["debian"])

    def test_a_lost_parent_is_reported_though_letting_go_of_it_failed_at_first(self) -> None:
        image = self.attached().image
        self.host.failing = {"export.publish": TROUBLE}
        self.upkeep.parent_lost(image, parent("other"))
        self.settle()
        self.assertEqual({"lost parents of debian": "report: the device is on fire"}, self.upkeep.troubles())
        self.host.failing = {}
        self.pass_time(LONGEST_PAUSE)
        self.assertEqual([("debian", "other")], self.volt.reported)
        self.assertEqual({}, self.upkeep.troubles())

    def test_a_parent_that_is_lost_after_a_report_that_failed_is_let_go_of_at_once(self) -> None:
        image = self.attached().image
        self.host.failing = {"export.publish": TROUBLE}
        self.upkeep.parent_lost(image, parent("other"))
        self.settle()
        self.host.failing = {}
        self.upkeep.parent_lost(image, parent("spare"))
        self.settle()
        self.assertEqual([("debian", "other"), ("debian", "spare")], self.volt.reported)

    def test_a_report_that_fails_keeps_nobody_from_taking_a_place_again(self) -> None:
        image = self.attached().image
        self.host.failing = {"attach.connect": TROUBLE}
        self.upkeep.parent_lost(image, parent("other"))
        self.settle()
        self.volt.forget("debian")
        self.beat()
        self.assertIn("debian", self.volt.places)
        self.assertEqual(["lost parents of debian"], list(self.upkeep.troubles()))

    def test_a_place_that_cannot_be_taken_again_keeps_nobody_from_letting_go_of_a_lost_parent(self) -> None:
        image = self.attached().image
        self.volt.forget("debian")
        self.volt.remove_image("debian")
        self.beat()
        self.host.calls.clear()
        self.upkeep.parent_lost(image, parent("other"))
        self.settle()
        self.assertIn("export.publish", self.host.calls)
        self.assertEqual(["place of debian"], list(self.upkeep.troubles()))

    def test_a_parent_that_a_stack_lost_before_it_went_is_not_reported_by_a_later_one(self) -> None:
        for moment in ("after attach.connect", "before volt.leave"):
            image = self.attached().image
            self.scene.stacks.remove_if_idle("debian")
            self.host.failing = {"export.publish": TROUBLE}

            def lose(what: str, at: str = moment, image: Image = image) -> None:
                if what == at:
                    self.upkeep.parent_lost(image, parent("other"))

            self.host.moment = self.volt.moment = lose
            self.assertRaises(DriverError, self.scene.stacks.ensure, "debian")
            self.host.moment = self.volt.moment = unnoticed
            self.settle()
            self.host.failing = {}
            self.attached()
            self.assertEqual([], self.volt.reported, moment)

    def test_a_parent_that_a_stack_lost_while_volt_did_not_hear_that_it_went_is_not_reported_either(self) -> None:
        image = self.attached().image
        self.volt.down = True
        self.scene.stacks.remove_if_idle("debian")
        self.upkeep.parent_lost(image, parent("other"))
        self.settle()
        self.volt.down = False
        self.attached()
        self.assertEqual([], self.volt.reported)

    def test_a_better_parent_that_is_well_again_is_read_from_with_the_next_heartbeat(self) -> None:
        record = self.attached()
        for unsettled, connected in ((False, 0), (True, 1), (False, 0)):
            self.host.unsettled = {record.name} if unsettled else set()
            before = self.host.calls.count("attach.connect")
            self.clock.advance(IDLE_LOOK)
            self.beat()
            self.assertEqual(connected, self.host.calls.count("attach.connect") - before)
        self.assertEqual([], self.volt.reported)

    def test_a_driver_that_cannot_look_for_better_parents_is_told_of(self) -> None:
        self.attached()
        self.host.failing = {"attach.unsettled": TROUBLE}
        self.clock.advance(IDLE_LOOK)
        self.beat()
        self.assertEqual({"image debian": "tend: the device is on fire"}, self.upkeep.troubles())

    def test_a_stack_that_is_being_removed_is_not_moved(self) -> None:
        record = self.attached()
        self.scene.image_shelf.put(record.name, record.begin(DETACH))
        self.host.unsettled = {record.name}
        self.host.calls.clear()
        self.scene.stacks.settle_parents(record)
        self.assertEqual(["attach.unsettled"], self.host.calls)

    def test_a_stack_that_somebody_else_changes_is_not_moved_meanwhile(self) -> None:
        record = self.attached()
        self.host.unsettled = {record.name}
        self.host.calls.clear()
        moving = threading.Thread(target=self.scene.stacks.settle_parents, args=(record,))
        with self.scene.stacks._locks.hold(record.name):
            moving.start()
            moving.join(0.2)
            self.assertNotIn("attach.connect", self.host.calls)
        moving.join(PATIENCE)
        self.assertIn("export.publish", self.host.calls)

    def test_a_move_to_a_better_parent_that_failed_half_way_is_finished_with_the_next_heartbeat(self) -> None:
        record = self.attached()
        self.host.unsettled, self.host.failing = {record.name}, {"cache.open": TROUBLE}
        for published in (0, 1, 0):
            before = self.host.calls.count("export.publish")
            self.clock.advance(IDLE_LOOK)
            self.beat()
            self.assertEqual(published, self.host.calls.count("export.publish") - before)
            self.host.failing = {}

    def test_all_parents_that_are_lost_are_reported(self) -> None:
        image = self.attached().image
        with self.scene.stacks._locks.hold("debian"):  # so that both wait
            for host in ("other", "spare"):
                self.upkeep.parent_lost(image, parent(host))
            self.settle()
        self.settle()
        self.assertEqual([("debian", "other"), ("debian", "spare")], self.volt.reported)

    def test_a_daemon_that_died_is_started_again_at_once(self) -> None:
        self.attached()
        self.host.daemon_dies("debian")
        self.upkeep.died("debian")
        self.settle()
        self.scene.check(self)

    def test_a_daemon_that_died_is_started_again_at_once_whatever_volt_says(self) -> None:
        self.attached()
        self.scene.vms.create("vm", "debian", None)
        del self.volt.images["debian"], self.volt.places["debian"]
        for _ in range(10):
            self.beat()
            self.pass_time(LONGEST_PAUSE)
        self.assertIn("place of debian", self.upkeep.troubles())
        self.host.daemon_dies("debian")
        self.upkeep.died("debian")
        self.settle()
        self.assertIn("debian", self.host.served)

    def slow_to_start(self) -> list[str]:
        """Images whose daemons are being started until the test ends, as many as there are threads to plan with."""
        go, waiting = threading.Event(), threading.Semaphore(0)
        self.addCleanup(go.set)
        names = [f"image-{number}" for number in range(THREADS[Pool.SHORT])]
        for name in names:
            self.attached(name)

        def moment(what: str) -> None:
            if what == "before export.publish":
                waiting.release()
                go.wait()

        self.host.moment = moment
        for name in names:
            self.host.daemon_dies(name)
            self.upkeep.died(name)
        for _ in names:
            self.assertTrue(waiting.acquire(timeout=PATIENCE))
        self.host.moment = lambda _what: None
        return names

    def test_a_dead_daemon_is_started_however_many_children_wait_for_others(self) -> None:
        self.attached()
        names, served = self.slow_to_start(), threading.Event()
        self.upkeep.handle(answer(*(self.volt.assign(name, ["other"], ["child"]) for name in names)))
        queue = self.upkeep.queue
        for _ in attempts(PATIENCE):
            if all((entry := queue._entries.get(f"children of {name}")) and entry.running for name in names):
                break
        else:
            self.fail("the children do not wait")
        self.host.moment = lambda what: served.set() if what == "after export.publish" else None
        self.host.daemon_dies("debian")
        self.upkeep.died("debian")
        self.assertTrue(served.wait(PATIENCE))

    def test_children_are_let_in_however_many_daemons_are_slow_to_start(self) -> None:
        self.attached()
        self.slow_to_start()
        allowed = threading.Event()
        self.host.moment = lambda what: allowed.set() if what == "after export.allow" else None
        self.upkeep.handle(answer(self.volt.assign("debian", ["other"], ["child"])))
        self.assertTrue(allowed.wait(PATIENCE))
        self.assertEqual(["child"], [child.host for child in self.host.allowed["debian"]])

    def test_a_daemon_that_dies_again_and_again_is_started_after_pauses(self) -> None:
        self.attached()
        for _ in range(5):
            if "debian" in self.host.served:
                self.host.daemon_dies("debian")
            self.upkeep.died("debian")
            self.settle()
        self.assertNotIn("debian", self.host.served)
        self.pass_time(LONGEST_PAUSE)
        self.assertIn("debian", self.host.served)


class NewsAfterFailureTest(UpkeepTest):
    """What comes new does not wait for the pause after what failed."""

    def test_parents_that_volt_names_anew_are_followed_at_once(self) -> None:
        self.attached()
        self.host.failing = {"attach.update": TROUBLE}
        self.volt.assign("debian", ["new"])
        self.beat()
        self.assertNotEqual({}, self.upkeep.troubles())
        self.host.failing = {}
        self.volt.assign("debian", ["newer"])
        self.beat()
        self.assertEqual({parent("newer")}, self.host.reading["debian"])

    def test_children_that_volt_named_while_letting_others_in_failed_are_let_in(self) -> None:
        self.attached()
        self.host.failing = {"attach.update": TROUBLE}  # or who follows the new list lets them in
        old, new = (
            self.volt.assign("debian", ["other"]).model_copy(update={"children": [Child(host=host, secret="s")]})
            for host in ("old", "new")
        )

        def fail_once(what: str) -> None:
            if what == "before export.allow":
                self.host.moment = unnoticed
                self.upkeep.handle(answer(new))
                raise TROUBLE

        self.host.moment = fail_once
        self.upkeep.handle(answer(old))
        self.settle()
        self.pass_time(LONGEST_PAUSE)
        self.assertEqual({"new"}, {child.host for child in self.host.allowed["debian"]})


class AskVoltTest(UpkeepTest):
    """Volt is asked by threads for that: while it does not answer, a process that died is started again by others."""

    def asked_by(self, act: Callable[[], object]) -> set[str]:
        """What kinds of threads ask Volt because of an act."""
        kinds: set[str] = set()
        self.volt.moment = lambda _what: kinds.add(threading.current_thread().name.partition("-")[0])
        act()
        self.settle()
        return kinds

    def test_reports_of_lost_parents(self) -> None:
        image = self.attached().image
        self.assertEqual({Pool.VOLT}, self.asked_by(lambda: self.upkeep.parent_lost(image, parent("other"))))

    def test_joins_of_images_that_volt_forgot(self) -> None:
        self.attached()
        self.assertEqual({Pool.VOLT}, self.asked_by(lambda: self.upkeep.handle(answer(absent=("debian",)))))

    def test_places_that_are_given_up(self) -> None:
        self.volt.offer("debian")
        place = self.volt.assign("debian", ["other"])
        self.assertEqual({Pool.VOLT}, self.asked_by(lambda: self.upkeep.handle(answer(place))))

    def test_stacks_that_nobody_needs_any_more(self) -> None:
        self.attached()
        self.beat()
        self.clock.advance(GRACE)
        self.assertEqual({Pool.VOLT}, self.asked_by(self.upkeep.tend_all))
        self.scene.check_empty(self)

    def test_what_is_done_without_volt_is_done_by_others(self) -> None:
        self.attached()
        kinds: dict[str, str] = {}

        def note(what: str) -> None:
            kinds[what] = threading.current_thread().name.partition("-")[0]

        self.host.moment = note
        self.host.daemon_dies("debian")
        self.upkeep.died("debian")
        self.settle()
        self.assertEqual(Pool.LONG, kinds["before export.publish"])
        self.volt.assign("debian", ["new"])
        self.beat()
        self.assertEqual(Pool.LONG, kinds["before attach.update"])

    def test_a_second_loss_of_a_parent_while_the_first_is_told_is_told_too(self) -> None:
        image, reports = self.attached().image, list[str]()

        def lose_again(what: str) -> None:
            if what == "before volt.report":
                reports.append(what)
                if len(reports) == 1:
                    self.upkeep.parent_lost(image, parent("other"))

        self.volt.moment = lose_again
        self.upkeep.parent_lost(image, parent("other"))
        self.settle()
        self.assertEqual(2, len(reports))

    def test_removals(self) -> None:
        for half_removed in (self.attached().begin(DETACH), self.attached().begin(DETACH).reached(REMOVED)):
            self.scene.image_shelf.put("debian", half_removed)
            self.assertEqual({Pool.VOLT}, self.asked_by(self.upkeep.tend_all))


class NewerTest(UpkeepTest):
    """Operations of a release that comes later."""

    def test_a_stack_in_the_middle_of_one_is_left_alone_and_reported(self) -> None:
        later = self.attached().begin("convert", to="chunks")
        self.scene.image_shelf.put("debian", later)
        self.host.calls.clear()
        for _ in range(3):
            self.beat()
        self.scene.restart()
        self.assertEqual(later, self.record())
        self.assertEqual([], self.host.calls)
        self.assertEqual({}, self.upkeep.troubles(), "nobody tries anything with it")
        self.assertIn("'convert'", self.scene.stacks.troubles()["debian"])

    def test_a_record_of_a_newer_version_is_left_alone_and_reported(self) -> None:
        self.attached()
        path = self.scene.folder / "records" / "images" / "debian.json"
        path.write_text(path.read_text().replace('"version":2', '"version":4'))
        before = path.read_text()
        for _ in range(3):
            self.beat()
        self.scene.restart()
        self.assertEqual(before, path.read_text())
        self.assertIn("debian", self.host.served)
        self.assertEqual(["debian"], list(self.scene.stacks.troubles()))
        self.assertEqual({}, self.upkeep.troubles())


class InPlaceTest(UpkeepTest):
    def setUp(self) -> None:
        super().setUp()
        self.image, in_place = self.scene.put_in_place("mine")
        self.file = self.scene.folder / "mine.raw"
        self.scene.stacks.add_origin(self.image, in_place)
        self.settle()
        self.beat()

    def test_with_each_heartbeat_it_is_looked_at_and_what_has_changed_is_served_no_more(self) -> None:
        self.beat()
        self.assertIn("mine", self.host.served)
        self.file.write_bytes(bytes(1 << 20))
        self.beat()
        self.assertEqual({}, self.host.leftovers())
        (trouble,) = self.upkeep.troubles().values()
        self.assertIn("has changed since it was published", trouble)
        self.assertIn("has changed since it was published", self.scene.stacks.flaws["mine"])

    def test_storage_that_is_silent_keeps_nothing_else_from_being_done(self) -> None:
        self.attached()
        for number in range(THREADS[Pool.LONG]):
            self.scene.stacks.add_origin(*self.scene.put_in_place(f"other-{number}"))
        self.settle()
        begun, go = threading.Semaphore(0), threading.Event()
        self.addCleanup(go.set)

        def look(record: ImageRecord) -> None:
            begun.release()
            go.wait(PATIENCE)

        self.scene.stacks.look = look  # type: ignore[method-assign]
        self.hear()
        for _ in range(THREADS[Pool.PLACE]):
            self.assertTrue(begun.acquire(timeout=PATIENCE))
        self.volt.assign("debian", ["new"])
        self.hear()
        for _ in attempts(PATIENCE / 2):
            if self.host.reading["debian"] == {parent("new")}:
                break
        self.assertEqual({parent("new")}, self.host.reading["debian"])
        go.set()
        self.settle()

    def hear(self) -> None:
        """A heartbeat; what comes of it is not waited for."""
        self.upkeep.handle(self.tell())

    def test_it_is_said_in_the_log_once(self) -> None:
        logged = Logged(self, "virtman")
        self.file.unlink()
        for _ in range(5):
            self.beat()
            self.pass_time(LONGEST_PAUSE)
        self.assertEqual(1, sum("cannot open" in line for line in logged.lines), str(logged.lines))

    def test_what_is_back_is_served_with_the_next_heartbeat(self) -> None:
        aside = self.scene.folder / "aside"
        aside.mkdir()
        image, _in_place = self.publish_at(aside / "place")
        for _ in range(3):
            (aside / "place").rename(aside / "away")
            for _ in range(3):
                self.beat()
            self.assertNotIn(image.name, self.host.served)
            (aside / "away").rename(aside / "place")
            self.beat()
            self.assertIn(image.name, self.host.served)
        self.assertEqual({}, self.upkeep.troubles())

    def publish_at(self, folder: Path) -> tuple[Image, InPlace]:
        folder.mkdir()
        file = folder / "disk"
        file.write_bytes(bytes(1 << 20))
        with to_publish(file, []) as (found, _fd):
            image = Image("other", found.size, draw())
        self.scene.stacks.add_origin(image, found)
        self.settle()
        return image, found

    def test_who_does_not_serve_it_confirms_nothing_by_which_others_would_read_here(self) -> None:
        self.file.unlink()
        self.beat()
        before = self.record("mine").revision
        self.volt.assign("mine", [], ["child"])
        self.beat()
        self.assertEqual((before, {}), (self.record("mine").revision, self.host.leftovers()))

    def test_the_digest_is_computed_when_it_is_asked_for(self) -> None:
        record = self.record("mine")
        assert record.in_place is not None
        wanted = record.in_place.model_copy(update={"digest": True})
        self.scene.stacks.add_origin(self.image, wanted)
        self.settle()
        known = self.record("mine").in_place
        assert known is not None
        self.assertEqual(f"sha256:{hashlib.sha256(self.file.read_bytes()).hexdigest()}", known.content)
        self.assertIn("mine", self.host.served)
        self.assertEqual({}, self.upkeep.troubles())

    def test_nobody_reads_it_any_more_when_it_is_let_go_of(self) -> None:
        file = self.scene.folder / "large"
        file.touch()
        os.truncate(file, 1 << 40)  # so that reading it takes longer than the test
        with to_publish(file, []) as (found, _fd):
            wanted = found.model_copy(update={"digest": True})
        self.scene.stacks.add_origin(Image("large", wanted.size, draw()), wanted)
        self.until(lambda: "large" in self.scene.stacks.readers.names())
        del self.volt.images["large"], self.volt.places["large"]
        self.assertIn("large", self.scene.stacks.held())
        self.scene.stacks.drop_origin("large")
        self.assertEqual((frozenset(), {"mine"}), (self.scene.stacks.readers.names(), self.scene.stacks.held()))

    def until(self, condition: Callable[[], bool]) -> None:
        pause = threading.Event()
        for _ in range(int(PATIENCE / PAUSE)):
            if condition():
                return
            pause.wait(PAUSE)
        self.fail("it does not happen")

    def test_a_digest_of_what_changed_meanwhile_is_none(self) -> None:
        record = self.record("mine")
        assert record.in_place is not None
        self.upkeep.stopped = True
        self.scene.stacks.add_origin(self.image, record.in_place.model_copy(update={"digest": True}))
        self.file.write_bytes(bytes(1 << 20))
        self.assertRaises(OriginChanged, self.scene.stacks.compute_digest, "mine")
        known = self.record("mine").in_place
        assert known is not None
        self.assertIsNone(known.content)


class ReportsTest(UpkeepTest):
    def test_nothing_here_is_nothing_to_report(self) -> None:
        self.assertEqual([], self.upkeep.news()[0])

    def test_an_attached_image_is_reported_with_its_parent_and_bytes(self) -> None:
        record = self.attached()
        self.upkeep.refresh(record)
        self.assertEqual(
            [NodeReport(image="debian", revision=record.revision, fetched_bytes=BYTES_PER_FETCH, parent="other")],
            self.upkeep.news()[0],
        )

    def test_bytes_are_those_of_the_last_look(self) -> None:
        self.assertEqual(NOTHING, self.upkeep.stats("debian"))
        record = self.attached()
        self.settle()
        seen = self.upkeep.stats("debian")
        self.host.caches[record.image.key] *= 3
        self.assertEqual((seen, seen.held_bytes), (self.upkeep.stats("debian"), self.upkeep.news()[0][0].fetched_bytes))
        self.host.caches[record.image.key] = BYTES_PER_FETCH
        self.beat()
        self.assertEqual(CacheStats(BYTES_PER_FETCH, 2 * BYTES_PER_FETCH), self.upkeep.stats("debian"))
        self.assertEqual(CacheStats(BYTES_PER_FETCH, 2 * BYTES_PER_FETCH), self.upkeep.refresh(record))

    def test_a_cache_that_cannot_be_looked_at_now_holds_what_it_held(self) -> None:
        record = self.attached()
        seen = self.upkeep.refresh(record)
        for error in (DriverError("its daemon is being started again"), OSError("its disk is dying")):
            self.scene.host.failing = {"cache.stats": error}
            self.assertEqual(seen, self.upkeep.refresh(record))

    def test_of_an_image_that_is_only_being_attached_there_is_no_cache_to_look_at(self) -> None:
        self.volt.offer("debian")
        self.upkeep.stopped = True  # or it is repaired meanwhile
        self.scene.cut(lambda scene: scene.stacks.ensure("debian"), 1)
        self.assertEqual("attaching", self.record().phase)
        self.assertEqual(NOTHING, self.upkeep.refresh(self.record()))

    def test_an_origin_reads_from_nobody(self) -> None:
        record = self.scene.stacks.add_origin(self.scene.put_content("mine"))
        self.assertEqual(Role.ORIGIN, record.role)
        report = self.upkeep.news()[0][0]
        self.assertIsNone(report.parent)
        self.assertEqual(NOTHING, self.upkeep.refresh(record))

    def test_a_stack_that_the_new_agent_has_not_restored_yet_reads_from_nobody_that_is_known(self) -> None:
        self.attached()
        self.scene.start()
        scene = self.scene
        upkeep = Upkeep(scene.stacks, scene.vms, scene.drivers, scene.kept, scene.devices, GRACE)
        self.assertEqual([None], [report.parent for report in upkeep.news()[0]])

    def test_only_attached_images_are_reported(self) -> None:
        self.attached()
        self.scene.volt.down = True
        self.scene.stacks.remove_if_idle("debian")
        self.assertTrue(self.record().leaving)
        self.assertEqual([], self.upkeep.news()[0])

    def test_a_follow_that_is_not_done_is_not_reported(self) -> None:
        before = self.attached().revision
        assignment = self.scene.volt.assign("debian", ["new"])
        self.scene.cut(lambda scene: scene.stacks.follow(assignment), 4)
        self.assertEqual([before], [report.revision for report in self.upkeep.news()[0]])


class WithdrawnTest(UpkeepTest):
    def withdraw(self, name: str = "debian") -> None:
        self.volt.remove_image(name, when_unused=True)

    def published(self) -> Image:
        image = self.scene.put_content("mine")
        self.scene.stacks.add_origin(image)
        self.settle()
        return image

    def assert_gone(self) -> None:
        """No stack, no cache, no content."""
        self.assertEqual(({}, {}, []), (self.host.leftovers(), self.host.caches, list(self.scene.store.keys())))
        self.assertEqual({}, self.upkeep.troubles())

    def test_a_stack_that_nobody_needs_goes_without_any_grace_and_its_cache_with_the_next_heartbeat(self) -> None:
        self.attached()
        self.beat()
        self.withdraw()
        self.beat()
        self.scene.check_empty(self)
        self.beat()
        self.assert_gone()

    def test_a_stack_goes_with_its_last_vm(self) -> None:
        self.attached()
        self.scene.vms.create("vm", "debian", None)
        self.withdraw()
        for _ in range(3):
            self.beat()
        self.assertIn("debian", self.host.served)
        self.scene.vms.destroy("vm")
        self.settle()
        self.scene.check_empty(self)
        self.beat()
        self.assert_gone()

    def test_a_vm_that_comes_meanwhile_keeps_its_stack(self) -> None:
        self.attached()
        self.withdraw()
        self.scene.vms.create("vm", "debian", None)
        self.assertFalse(self.scene.stacks.let_go("debian"))
        self.assertIn("debian", self.host.served)

    def test_a_stack_goes_with_its_last_child(self) -> None:
        self.attached()
        self.volt.assign("debian", ["other"], ["child"])
        self.beat()
        self.withdraw()
        for _ in range(3):
            self.beat()
        self.assertIn("debian", self.host.served)
        self.volt.assign("debian", ["other"], [])
        self.beat()
        self.scene.check_empty(self)

    def test_a_cache_that_was_kept_since_its_stack_went_is_deleted(self) -> None:
        self.attached()
        self.scene.stacks.remove_if_idle("debian")
        for _ in range(3):
            self.beat()
        self.assertEqual(1, len(self.host.caches), "somebody may attach it again")
        self.withdraw()
        self.beat()
        self.assert_gone()

    def test_also_one_that_a_former_agent_kept(self) -> None:
        self.attached()
        self.scene.stacks.remove_if_idle("debian")
        self.withdraw()
        self.scene.start()
        self.use(self.scene.drivers)
        for _ in range(2):
            self.beat()
        self.assert_gone()

    def test_what_an_image_of_this_host_has_is_not_kept_without_a_stack(self) -> None:
        image = self.attached().image
        self.beat()
        self.assertEqual((), self.upkeep.kept())
        self.upkeep.handle(answer().model_copy(update={"discard": [image.digest]}))
        self.settle()
        self.assertEqual({image.key}, set(self.host.caches))

    def test_what_cannot_be_deleted_is_deleted_later(self) -> None:
        self.attached()
        self.scene.stacks.remove_if_idle("debian")
        self.withdraw()
        self.host.failing = {"cache.remove": TROUBLE}
        for _ in range(2):
            self.beat()
        self.assertEqual(1, len(self.host.caches))
        self.assertIn("the device is on fire", self.upkeep.troubles()["data without a stack"])
        self.host.failing = {}
        self.pass_time(LONGEST_PAUSE)
        self.beat()
        self.pass_time(LONGEST_PAUSE)
        self.assert_gone()

    def test_content_is_not_deleted_while_something_is_published_and_is_later(self) -> None:
        self.published()
        self.withdraw("mine")
        with self.scene.publishing.hold("another"):
            for _ in range(3):
                self.beat()
            self.assertEqual(({}, 1), (self.host.leftovers(), len(list(self.scene.store.keys()))))
        self.beat()
        self.assert_gone()

    def test_an_origin_goes_when_no_other_host_has_the_image(self) -> None:
        self.published()
        self.volt.read_by_others("mine")
        self.withdraw("mine")
        for _ in range(3):
            self.beat()
        self.assertIn("mine", self.host.served)
        self.volt.read_by_others("mine", 0)
        self.beat()
        self.assertEqual(({}, {}), (self.host.leftovers(), self.volt.images))
        self.beat()
        self.assert_gone()

    def test_an_origin_goes_with_its_last_vm(self) -> None:
        self.published()
        self.scene.vms.create("vm", "mine", None)
        self.withdraw("mine")
        for _ in range(3):
            self.beat()
        self.assertEqual(({"mine"}, {"mine"}), (set(self.host.served), set(self.volt.images)))
        self.scene.vms.destroy("vm")
        self.settle()
        for _ in range(2):
            self.beat()
        self.assert_gone()
        self.assertEqual({}, self.volt.images)

    def test_an_origin_that_publishes_it_again_goes_on_though_an_answer_of_before_comes_late(self) -> None:
        image = self.published()
        self.withdraw("mine")
        late = self.volt.heartbeat(self.upkeep.news()[0])
        self.scene.stacks.add_origin(image)
        self.upkeep.handle(late)
        self.settle()
        self.assertEqual(({"mine"}, {"mine"}), (set(self.host.served), set(self.volt.images)))

    def test_an_origin_whose_image_is_missing_at_volt_goes_on(self) -> None:
        self.published()
        self.withdraw("mine")
        late = self.volt.heartbeat(self.upkeep.news()[0])
        self.volt.remove_image("mine")  # its database was set back to a backup
        self.upkeep.handle(late)
        self.settle()
        self.assertEqual({"mine"}, set(self.host.served))

    def test_an_origin_that_cannot_tell_volt_has_let_go_and_tells_it_later(self) -> None:
        self.published()
        self.withdraw("mine")
        self.host.moment = lambda what: setattr(self.volt, "down", True) if what == "after export.withdraw" else None
        self.beat()
        self.host.moment = unnoticed
        self.assertEqual(({}, {"mine"}), (self.host.leftovers(), set(self.volt.images)))
        self.volt.down = False
        self.pass_time(LONGEST_PAUSE)
        for _ in range(3):
            self.beat()
        self.assert_gone()
        self.assertEqual({}, self.volt.images)

    def test_while_volt_is_away_a_stack_still_goes(self) -> None:
        self.attached()
        self.scene.vms.create("vm", "debian", None)
        self.withdraw()
        self.beat()
        self.volt.down = True
        self.beat()
        self.scene.vms.destroy("vm")
        self.beat()
        self.assertNotIn("debian", self.host.served)


class IdleTest(UpkeepTest):
    def test_an_idle_stack_goes_when_its_grace_is_over(self) -> None:
        self.attached()
        self.beat()
        self.clock.advance(GRACE - 1)
        self.beat()
        self.assertIn("debian", self.host.served)
        self.clock.advance(1)
        self.beat()
        self.scene.check_empty(self)

    def test_a_stack_in_use_stays(self) -> None:
        self.attached()
        self.scene.vms.create("vm", "debian", None)
        for _ in range(3):
            self.beat()
            self.clock.advance(GRACE)
        self.scene.check(self)
        self.assertIn("debian", self.host.served)

    def test_a_vm_in_between_begins_the_grace_anew(self) -> None:
        self.attached()
        self.beat()
        self.clock.advance(GRACE - 1)
        self.scene.vms.create("vm", "debian", None)
        self.beat()
        self.scene.vms.destroy("vm")
        self.clock.advance(GRACE - 1)
        self.beat()
        self.clock.advance(GRACE - 1)
        self.beat()
        self.assertIn("debian", self.host.served)

    def test_a_vm_between_two_heartbeats_begins_the_grace_anew(self) -> None:
        self.attached()
        self.beat()
        self.clock.advance(GRACE - 1)
        self.scene.vms.create("vm", "debian", None)
        self.settle()
        self.scene.vms.destroy("vm")
        self.clock.advance(GRACE - 1)
        self.beat()
        self.assertIn("debian", self.host.served)

    def test_an_image_that_nobody_uses_is_looked_at_less_often(self) -> None:
        record = self.attached()
        self.beat()
        self.host.caches[record.image.key] *= 2
        self.clock.advance(IDLE_LOOK - 1)
        self.beat()
        self.assertEqual(BYTES_PER_FETCH, self.upkeep.stats("debian").held_bytes)
        self.clock.advance(1)
        self.beat()
        self.assertEqual(2 * BYTES_PER_FETCH, self.upkeep.stats("debian").held_bytes)

    def test_an_origins_image_that_nobody_reads_is_looked_at_less_often_and_stays(self) -> None:
        self.scene.stacks.add_origin(self.scene.put_content("mine"))
        for _ in range(3):
            self.clock.advance(GRACE)
            self.beat()
            self.host.daemon_dies("mine")
            self.clock.advance(IDLE_LOOK - 1)
            self.beat()
            self.assertNotIn("mine", self.host.served)
            self.clock.advance(1)
            self.beat()
            self.assertIn("mine", self.host.served)
        self.scene.check(self)

    def test_an_origins_image_that_a_vm_reads_is_served_again_by_the_next_look(self) -> None:
        self.scene.stacks.add_origin(self.scene.put_content("mine"))
        self.scene.vms.create("vm", "mine", None)
        self.beat()
        for _ in range(2):
            del self.host.served["mine"]  # as in the kernel: no process tells of it
            self.clock.advance(USED_LOOK)
            self.beat()
            self.assertIn("mine", self.host.served)

    def test_an_origins_image_that_a_vm_with_a_damaged_record_may_read_is_served_again_as_soon(self) -> None:
        self.scene.stacks.add_origin(self.scene.put_content("mine"))
        self.scene.vms.create("vm", "mine", None)
        self.beat()
        (self.scene.folder / "records" / "vms" / "vm.json").write_bytes(b"{")
        for _ in range(2):
            del self.host.served["mine"]
            self.clock.advance(USED_LOOK)
            self.beat()
            self.assertIn("mine", self.host.served)

    def test_a_heartbeat_reads_vms_records_once_for_all_images(self) -> None:
        self.scene.stacks.add_origin(self.scene.put_content("mine"))
        images = ["debian", "fedora", "mine"]
        for image in images:
            if image != "mine":
                self.attached(image)
            self.scene.vms.create(f"vm-of-{image}", image, None)
        self.attached("unused")
        self.beat()
        self.scene.vm_shelf.asked.clear()
        self.beat()
        self.assertEqual([f"vm-of-{image}" for image in images], self.scene.vm_shelf.asked)

    def test_an_image_that_a_vm_uses_is_looked_at_every_few_seconds(self) -> None:
        record = self.attached()
        self.scene.vms.create("vm", "debian", None)
        self.beat()
        self.host.caches[record.image.key] *= 2
        for seconds, times in ((0.9 * USED_LOOK, 1), (0.1 * USED_LOOK, 2)):
            self.clock.advance(seconds)
            self.beat()
            self.assertEqual(times * BYTES_PER_FETCH, self.upkeep.stats("debian").held_bytes)

    def test_an_image_that_children_read_is_looked_at_as_often(self) -> None:
        record = self.attached()
        children = (ChildRecord(host="child", secret="s"),)
        self.scene.image_shelf.put("debian", record.model_copy(update={"children": children}))
        self.clock.advance(IDLE_LOOK)
        self.beat()
        self.host.caches[record.image.key] *= 2
        self.clock.advance(USED_LOOK)
        self.beat()
        self.assertEqual(2 * BYTES_PER_FETCH, self.upkeep.stats("debian").held_bytes)

    def test_an_image_that_volt_does_not_list_is_looked_after_and_let_go_of(self) -> None:
        record = self.attached()
        del self.volt.images["debian"], self.volt.places["debian"]
        self.scene.vms.create("vm", "debian", None)
        self.beat()
        self.host.caches[record.image.key] *= 2
        self.clock.advance(USED_LOOK)
        self.beat()
        self.assertEqual(2 * BYTES_PER_FETCH, self.upkeep.stats("debian").held_bytes)
        self.scene.vms.destroy("vm")
        self.beat()
        self.clock.advance(GRACE)
        self.beat()
        self.assertNotIn("debian", self.host.served)

    def test_an_image_that_comes_back_has_all_its_grace(self) -> None:
        self.attached()
        self.beat()
        self.clock.advance(GRACE - 1)
        self.scene.stacks.remove_if_idle("debian")
        self.settle()
        self.assertEqual(NOTHING, self.upkeep.stats("debian"))
        self.attached()
        self.clock.advance(2)
        self.beat()
        self.assertIn("debian", self.host.served)


class BusyCache(CacheGroupDouble):
    """While one looks at it something happens, as often as ``waves`` says."""

    waves = 2 * IN_VAIN

    def __init__(self, host: Host, wave: Callable[[], object]) -> None:
        super().__init__(host)
        self._wave = wave

    def stats(self, image: Image) -> CacheStats:
        self._happen()
        return super().stats(image)

    def volumes(self) -> list[Volume]:
        self._happen()
        return super().volumes()

    def _happen(self) -> None:
        if self.waves:
            self.waves -= 1
            self._wave()


class WaveTest(UpkeepTest):
    """What is asked for again and again while it is done, as when many VMs start, is no trouble."""

    def test_looks_at_an_image_that_vms_come_to(self) -> None:
        self.attached()
        self.use(replace(self.scene.drivers, cache=BusyCache(self.host, lambda: self.upkeep.released("debian"))))
        self.beat()
        self.assertEqual({}, self.upkeep.troubles())

    def test_looks_at_volumes_that_take_longer_than_a_heartbeat(self) -> None:
        cache = BusyCache(self.host, lambda: self.upkeep.handle(answer()))
        self.use(replace(self.scene.drivers, cache=cache))
        self.beat()
        self.assertEqual((0, {}), (cache.waves, self.upkeep.troubles()))

    def test_parents_that_change_while_the_last_ones_are_being_followed(self) -> None:
        self.attached()
        lists = [[f"h{number}"] for number in range(2 * IN_VAIN)]

        def another_list(what: str) -> None:
            if what == "before attach.update" and lists:
                self.upkeep.handle(answer(self.volt.assign("debian", lists.pop())))

        self.host.moment = another_list
        self.upkeep.handle(answer(self.volt.assign("debian", ["new"])))
        self.settle()
        self.assertEqual({}, self.upkeep.troubles())
        self.assertEqual({parent("h0")}, self.host.reading["debian"])

    def test_children_that_come_one_after_the_other(self) -> None:
        self.attached()
        children: list[str] = []

        def another_child(what: str) -> None:
            if what == "after export.allow" and len(children) < 2 * IN_VAIN:
                children.append(f"h{len(children)}")
                self.upkeep.handle(answer(self.volt.assign("debian", ["other"], children)))

        self.host.moment = another_child
        another_child("after export.allow")
        self.settle()
        self.assertEqual(children, [child.host for child in self.host.allowed["debian"]])
        self.assertEqual({}, self.upkeep.troubles())


class VolumesTest(UpkeepTest):
    def test_they_are_looked_at_with_each_heartbeat(self) -> None:
        drivers = self.scene.drivers
        group = CacheGroupDouble(self.host)
        self.use(HostDrivers(drivers.attach, group, drivers.export, drivers.snapshot))
        self.assertEqual([], self.upkeep.volumes)
        self.beat()
        self.assertEqual(group.volumes(), self.upkeep.volumes)

    def test_a_look_that_fails_is_told(self) -> None:
        drivers = self.scene.drivers
        self.use(HostDrivers(drivers.attach, CacheGroupDouble(self.host), drivers.export, drivers.snapshot))
        self.host.failing = {"cache.volumes": TROUBLE}
        self.beat()
        self.assertEqual({"volumes of the cache": "look: the device is on fire"}, self.upkeep.troubles())


class DevicesTest(UpkeepTest):
    """Devices of others that are read through the cache; a file that says a number stands for one."""

    def setUp(self) -> None:
        super().setUp()
        self.device = self.scene.folder / "disk"
        self.device.write_text("8:16")
        self.name = self.scene.devices.attach(self.device).name

    def test_they_are_looked_at_with_each_heartbeat(self) -> None:
        for times in range(1, 3):
            self.beat()
            self.assertEqual(times, self.host.calls.count("cache.tend_device"))

    def test_a_look_that_fails_is_told(self) -> None:
        self.host.failing = {"cache.tend_device": TROUBLE}
        self.beat()
        self.assertEqual({f"device {self.name}": "look: the device is on fire"}, self.upkeep.troubles())

    def test_what_did_not_end_is_tried_again(self) -> None:
        self.host.open_devices.add(self.name)
        self.host.silent = True
        self.assertRaises(DriverError, self.scene.devices.detach, self.device, force=True)
        self.beat()
        self.assertThat(self.upkeep.troubles()[f"device {self.name}"], Contains("the storage has begun"))
        self.host.silent = False
        self.pass_time(300)
        self.assertEqual(({}, []), (self.host.devices, self.scene.devices.records()))
