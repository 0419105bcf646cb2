"""What the agent does unasked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from testtools import TestCase
from testtools.matchers import Contains

from drivers.base import Image
from drivers.digests import BLAKE3, draw, key_of
from drivers.errors import BadVolume, DriverError
from drivers.manifest import FOLDER, path_of
from tests.doubles.drivers import BYTES_PER_FETCH, POOL, VolumesDouble
from tests.doubles.volt import HERE, INTERVAL, digest_of, link_to, parent
from tests.patience import PATIENCE
from tests.unit.clock import Clock
from tests.unit.virtman import imagefiles
from tests.unit.virtman.scene import MIB, TROUBLE, Scene, await_quiet, damage
from virtman import cleaning, creating, hosting, origins, reading, serving
from virtman.errors import CoordinatorDown, OriginChanged
from virtman.imagekeeper import IDLE_CHECK, USED_CHECK
from virtman.inplace import to_publish
from virtman.records import ImageRecord, InPlace
from virtman.upkeep import Upkeep
from virtman.workqueue import CALM, LONGEST_PAUSE, Pool
from volt.client import Assignment, HeartbeatAnswer, NodeReport
from volt.errors import StoreDown

GRACE = 600.0


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
        self.use(None)

    def use(self, group: VolumesDouble | None) -> None:
        """Look after the host, whose cache has volumes if ``group`` is given."""
        self.upkeep = self.make(group)
        self.scene.released = self.upkeep.released
        self.upkeep.queue.start()
        self.addCleanup(self.upkeep.queue.stop)

    def make(self, group: VolumesDouble | None) -> Upkeep:
        """An agent's upkeep, which is not started."""
        parts = (self.scene.stacks, self.scene.vms, group, self.scene.devices, self.scene.transfers)
        return Upkeep(*parts, GRACE, self.clock)

    def attached(self, name: str = "debian", digest: str = "") -> ImageRecord:
        self.volt.offer(name, digest=digest)
        record = hosting.ensure(self.scene.stacks, name)
        self.settle()
        self.scene.changes = 0
        return record

    def beat(self, times: int = 1, *, after: float = 0.0) -> None:
        """Heartbeats, as Volt answers them, and all that comes of them; ``after``: seconds that pass before."""
        self.clock.advance(after)
        for _ in range(times):
            reports, needed = self.upkeep.news()
            try:
                said: HeartbeatAnswer | None = self.volt.heartbeat(HERE, reports, self.upkeep.kept, needed)
            except StoreDown:
                said = None
            self.upkeep.handle(said)
            self.settle()

    def settle(self) -> None:
        await_quiet(self.upkeep.queue)

    def pass_time(self, seconds: float) -> None:
        """Let time pass, and let all be done that is due then."""
        self.clock.advance(seconds)
        self.upkeep.queue.wake("image time")
        self.settle()


class VoltsAnswerTest(UpkeepTest):
    def test_images_whose_records_cannot_be_used_may_be_needed(self) -> None:
        record = self.attached()
        self.assertEqual([], self.upkeep.news()[1])
        self.scene.image_shelf.put("debian", record.begin("attach"))
        self.assertEqual(([], ["debian"]), self.upkeep.news())
        damage(self.scene.image_shelf, "debian")
        self.assertEqual(([], ["debian"]), self.upkeep.news())
        self.beat()
        self.assertEqual(["debian"], self.volt.needed)

    def test_an_answer_without_news_changes_nothing(self) -> None:
        self.attached()
        self.host.calls.clear()
        self.beat(3)
        self.assertEqual(([], 0), (self.host.calls, self.scene.changes))

    def test_a_forgotten_image_is_joined_again_and_volt_told_soon(self) -> None:
        self.attached()
        self.volt.forget("debian")
        self.beat()
        self.assertIn("debian", self.volt.places)
        self.assertEqual(1, self.scene.changes)
        self.beat()
        self.assertEqual(1, self.scene.changes)

    def test_an_older_answer_that_comes_late_is_ignored(self) -> None:
        self.attached()
        older, newer = self.volt.assign("debian", ["older"]), self.volt.assign("debian", ["newer"])
        self.host.failing = {"attach.update": TROUBLE}
        for assignment in (newer, older):
            self.upkeep.handle(answer(assignment))
            self.settle()
        self.host.failing = {}
        self.pass_time(1)
        self.assertEqual({parent("newer")}, self.host.reading["debian"])

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
        self.assertThat(self.upkeep.queue.troubles()["place of debian"], Contains("volt images remove debian"))
        link_to(self.volt).withdraw("debian")  # its agent does, say
        self.pass_time(LONGEST_PAUSE)
        self.assertEqual({}, self.upkeep.queue.troubles())

    def test_what_is_given_up_is_no_trouble_and_is_dropped_with_its_last_vm(self) -> None:
        origins.add_origin(self.scene.stacks, self.scene.put_content("mine"))
        creating.create(self.scene.vms, "vm", "mine", None)
        link_to(self.volt).withdraw("mine")
        origins.drop_origin(self.scene.stacks, "mine", given_up=True)
        self.beat()
        self.assertEqual(({}, {"mine"}), (self.upkeep.queue.troubles(), set(self.host.served)))
        creating.destroy(self.scene.vms, "vm")
        self.settle()
        self.assertEqual({}, self.upkeep.queue.troubles())
        self.scene.check_empty(self)

    def test_after_stop_nothing_is_begun(self) -> None:
        self.attached()
        image = self.scene.record().image
        self.settle()
        self.host.calls.clear()
        self.upkeep.stopped = True
        self.upkeep.handle(answer(self.volt.assign("debian", ["new"])))
        self.upkeep.images.died("debian")
        self.upkeep.places.parent_lost(image.name, "other")
        self.settle()
        self.assertEqual(([], []), (self.host.calls, self.volt.reported))


class QuietTest(UpkeepTest):
    """What can't be brought in order costs little, and no heartbeat more than usual."""

    def beats_in_vain(self, name: str) -> int:
        """Beat ten times; how often Volt was asked for something besides, and that nobody wants to beat sooner."""
        self.beat()
        asked = len([moment for moment in self.scene.moments if moment.startswith("before volt.")])
        self.beat(10)
        self.assertEqual(0, self.scene.changes)
        self.assertIn(f"place of {name}", self.upkeep.queue.troubles())
        return len([moment for moment in self.scene.moments if moment.startswith("before volt.")]) - asked - 10

    def test_an_origin_whose_image_was_removed_at_volt(self) -> None:
        origins.add_origin(self.scene.stacks, self.scene.put_content("mine"))
        self.scene.changes = 0
        self.volt.remove_image("mine")
        self.assertEqual(0, self.beats_in_vain("mine"))
        self.assertIn("mine", self.host.served)

    def test_other_content_that_is_assigned_is_left_once(self) -> None:
        self.attached()
        self.volt.offer("debian", digest=digest_of("later"))
        self.volt.assign("debian", ["other"])
        self.assertEqual(0, self.beats_in_vain("debian"))
        self.assertEqual(1, self.scene.moments.count("before volt.leave"))


class AgainTest(UpkeepTest):
    """What failed is done again."""

    def test_letting_children_in_that_failed(self) -> None:
        self.attached()
        self.host.failing = {"attach.update": TROUBLE, "export.allow": TROUBLE}
        self.volt.assign("debian", ["other"], ["child"])
        self.beat()
        self.assertIn("children of debian", self.upkeep.queue.troubles())
        del self.host.failing["export.allow"]
        self.pass_time(LONGEST_PAUSE)
        self.assertEqual(["child"], [child.host for child in self.host.allowed["debian"]])
        self.assertNotIn("children of debian", self.upkeep.queue.troubles())

    def test_a_removal_that_failed(self) -> None:
        self.attached()
        self.host.failing = {"cache.close": TROUBLE}
        self.assertRaises(DriverError, hosting.remove_if_idle, self.scene.stacks, "debian")
        self.settle()
        self.assertEqual({"image debian": "repair: the device is on fire"}, self.upkeep.queue.troubles())
        self.host.failing = {}
        self.pass_time(LONGEST_PAUSE)
        self.scene.check_empty(self)

    def test_leaving_when_volt_is_back(self) -> None:
        self.attached()
        self.volt.down = True
        hosting.remove_if_idle(self.scene.stacks, "debian")
        self.beat(10)
        self.volt.down = False
        self.beat()  # whatever pause the last failure had
        self.scene.check_empty(self)

    def test_a_repair_does_not_wait_for_a_silent_volt(self) -> None:
        self.attached()
        self.volt.down = True
        hosting.remove_if_idle(self.scene.stacks, "debian")
        answers, answered = threading.Event(), list[bool]()
        self.addCleanup(answers.set)
        self.volt.moment = lambda _what: answered.append(answers.wait(PATIENCE))
        self.assertEqual([], self.upkeep.repair()["images"])
        self.assertEqual([], answered)

    def test_a_publish_when_volt_is_back(self) -> None:
        self.volt.down = True
        image = self.scene.put_content("mine")
        self.assertRaises(CoordinatorDown, origins.add_origin, self.scene.stacks, image)
        self.beat()
        self.volt.down = False
        self.beat()
        self.assertIn("mine", self.volt.images)

    def test_a_dead_daemon_though_volt_is_silent(self) -> None:
        self.attached()
        creating.create(self.scene.vms, "vm", "debian", None)
        self.settle()
        self.host.daemon_dies("debian")
        self.clock.advance(USED_CHECK)
        self.upkeep.handle(None)
        self.settle()
        self.assertIn("debian", self.host.served)

    def test_a_host_is_registered_until_that_succeeds(self) -> None:
        self.volt.down = True
        self.upkeep.queue.wake("Volt", ask="register")
        for _ in range(3):
            self.pass_time(LONGEST_PAUSE)
        self.assertEqual(["Volt"], list(self.upkeep.queue.troubles()))
        self.volt.down = False
        for _ in range(3):
            self.pass_time(LONGEST_PAUSE)
        self.assertEqual((["here"], {}), (list(self.volt.hosts), self.upkeep.queue.troubles()))


class DriversCallTest(UpkeepTest):
    def test_a_lost_parent_is_reported_once_and_the_answer_followed(self) -> None:
        image = self.attached().image
        self.volt.assign("debian", ["dead", "spare"])
        self.beat()
        self.host.failing = {"attach.connect": TROUBLE, "attach.update": TROUBLE}
        self.upkeep.places.parent_lost(image.name, "dead")
        self.settle()
        self.assertEqual([], self.volt.reported)
        del self.host.failing["attach.connect"]
        self.pass_time(1)
        self.host.failing = {}
        self.pass_time(LONGEST_PAUSE)
        self.assertEqual([("debian", "dead")], self.volt.reported)
        self.assertEqual({parent("spare")}, self.host.reading["debian"])

    def test_a_parent_that_was_left_and_is_well_again_is_read_from_until_that_succeeds(self) -> None:
        self.attached()
        self.host.unsettled, self.host.failing = {"debian"}, {"export.publish": TROUBLE}
        self.beat(after=IDLE_CHECK)
        self.assertEqual({"image debian": "check: the device is on fire"}, self.upkeep.queue.troubles())
        self.host.unsettled, self.host.failing = set(), {}
        for published in (True, False):
            self.host.calls.clear()
            self.pass_time(LONGEST_PAUSE)
            self.assertEqual(published, "export.publish" in self.host.calls)

    def test_a_daemon_that_dies_again_and_again_is_started_after_pauses(self) -> None:
        self.attached()
        for _ in range(5):
            if "debian" in self.host.served:
                self.host.daemon_dies("debian")
            self.upkeep.images.died("debian")
            self.settle()
        self.assertNotIn("debian", self.host.served)
        self.pass_time(LONGEST_PAUSE)
        self.assertIn("debian", self.host.served)


class OpenDisksTest(UpkeepTest):
    """After a reboot a disk is usable once the stack below it is served."""

    def test_a_disk_is_opened_when_its_stack_is_served_again_and_not_before(self) -> None:
        self.attached()
        creating.create(self.scene.vms, "vm", "debian", None)
        self.host.daemon_dies("debian")
        self.host.failing = {"export.publish": TROUBLE}
        self.upkeep.vms.open_all()
        for key in ("image debian", "vm vm"):
            self.upkeep.queue.wake(key)
        self.settle()
        opened: list[str] = []
        self.patch(self.scene.vms.vmdisks, "open", opened.append)
        self.pass_time(LONGEST_PAUSE)
        self.assertEqual([], opened)
        self.host.failing = {}
        self.pass_time(LONGEST_PAUSE)
        self.assertEqual(["vm"], opened)


class NewsAfterFailureTest(UpkeepTest):
    """What comes new does not wait for the pause after what failed."""

    def test_parents_that_volt_names_anew_are_followed_at_once(self) -> None:
        self.attached()
        self.host.failing = {"attach.update": TROUBLE}
        self.volt.assign("debian", ["new"])
        self.beat()
        self.assertNotEqual({}, self.upkeep.queue.troubles())
        self.host.failing = {}
        self.volt.assign("debian", ["newer"])
        self.beat()
        self.assertEqual({parent("newer")}, self.host.reading["debian"])


class AskVoltTest(UpkeepTest):
    """Volt is asked by threads for that: while it does not answer, a process that died is started again by others."""

    def asked_by(self, act: Callable[[], object]) -> set[str]:
        """What kinds of threads ask Volt because of an act."""
        kinds: set[str] = set()
        self.volt.moment = lambda _what: kinds.add(threading.current_thread().name.partition("-")[0])
        act()
        self.settle()
        return kinds

    def test_what_asks_volt_is_done_by_threads_for_that(self) -> None:
        image = self.attached().image
        self.assertEqual({Pool.VOLT}, self.asked_by(lambda: self.upkeep.places.parent_lost(image.name, "other")))
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
        self.upkeep.images.died("debian")
        self.settle()
        self.assertEqual(Pool.LONG, kinds["before export.publish"])
        self.volt.assign("debian", ["new"])
        self.beat()
        self.assertEqual(Pool.LONG, kinds["before attach.update"])


class InPlaceTest(UpkeepTest):
    def setUp(self) -> None:
        super().setUp()
        self.image, self.in_place = self.scene.put_in_place("mine")
        self.file = self.scene.folder / "mine.raw"
        origins.add_origin(self.scene.stacks, self.image, self.in_place)
        self.settle()
        self.beat()

    def test_with_each_heartbeat_it_is_looked_at_and_what_has_changed_is_served_no_more(self) -> None:
        self.beat()
        self.assertIn("mine", self.host.served)
        self.file.write_bytes(bytes(1 << 20))
        self.beat()
        self.assertEqual({}, self.host.leftovers())
        self.assertEqual([], self.upkeep.repair()["images"])  # which is no error
        (trouble,) = self.upkeep.queue.troubles().values()
        self.assertIn("has changed since it was published", trouble)

    def test_a_heartbeat_waits_for_no_daemon(self) -> None:
        source, asking, serving = self.scene.stacks.source, set[threading.Thread](), self.scene.stacks.source.serving

        def ask(name: str) -> bool:
            asking.add(threading.current_thread())
            return serving(name)

        with patch.object(source, "serving", ask):
            self.beat()
        self.assertNotIn(threading.current_thread(), asking)
        self.assertNotEqual(set(), asking)

    def test_what_is_back_is_served_with_the_next_heartbeat(self) -> None:
        aside = self.scene.folder / "aside"
        aside.mkdir()
        image, _in_place = self.publish_at(aside / "place")
        for _ in range(3):
            self.clock.advance(CALM + 1)
            (aside / "place").rename(aside / "away")
            self.beat(3)
            self.assertNotIn(image.name, self.host.served)
            (aside / "away").rename(aside / "place")
            self.beat()
            self.assertIn(image.name, self.host.served)
        self.assertEqual({}, self.upkeep.queue.troubles())

    def publish_at(self, folder: Path) -> tuple[Image, InPlace]:
        folder.mkdir()
        file = folder / "disk"
        file.write_bytes(bytes(1 << 20))
        with to_publish(file, []) as (found, _fd):
            image = Image("other", found.size, draw())
        origins.add_origin(self.scene.stacks, image, found)
        self.settle()
        return image, found

    def test_who_does_not_serve_it_confirms_nothing_by_which_others_would_read_here(self) -> None:
        self.file.unlink()
        self.beat()
        before = self.scene.record("mine").revision
        self.volt.assign("mine", [], ["child"])
        self.beat()
        self.assertEqual((before, {}), (self.scene.record("mine").revision, self.host.leftovers()))

    def test_the_digest_is_computed_when_it_is_asked_for(self) -> None:
        origins.add_origin(self.scene.stacks, self.image, self.in_place.model_copy(update={"digest": True}))
        self.settle()
        known = self.scene.record("mine").in_place
        assert known is not None
        self.assertEqual(imagefiles.digest_of(self.file.read_bytes()), known.content)
        self.assertIn("mine", self.host.served)
        self.assertEqual({}, self.upkeep.queue.troubles())

    def test_the_manifest_of_what_was_read_stays_until_the_image_is_gone(self) -> None:
        origins.add_origin(self.scene.stacks, self.image, self.in_place.model_copy(update={"digest": True}))
        self.settle()
        file = path_of(self.scene.folder, key_of(imagefiles.digest_of(self.file.read_bytes())))
        self.assertTrue(cleaning.gc(self.scene.stacks).freed_bytes == 0 and file.exists())
        del self.volt.images["mine"], self.volt.places["mine"]
        self.assertGreater(cleaning.gc(self.scene.stacks).freed_bytes, 0)
        self.assertFalse(file.exists())

    def test_a_digest_of_what_changed_meanwhile_is_none(self) -> None:
        self.upkeep.stopped = True
        origins.add_origin(self.scene.stacks, self.image, self.in_place.model_copy(update={"digest": True}))

        def read_and_change(*given: Any) -> str | None:
            found = reading.digest_of(*given)
            self.file.write_bytes(bytes(1 << 20))
            return found

        self.patch(serving, "digest_of", read_and_change)
        self.assertRaises(OriginChanged, serving.compute_digest, self.scene.stacks, "mine")
        known = self.scene.record("mine").in_place
        assert known is not None
        self.assertIsNone(known.content)
        self.assertEqual([], [*(self.scene.folder / FOLDER).iterdir()])


class ReportsTest(UpkeepTest):
    def test_an_attached_image_is_reported_with_its_parent_and_bytes(self) -> None:
        record = self.attached()
        self.upkeep.images.inspect(record)
        mine = origins.add_origin(self.scene.stacks, self.scene.put_content("mine"))
        self.assertEqual(
            [
                NodeReport(image="debian", revision=record.revision, fetched_bytes=BYTES_PER_FETCH, parent="other"),
                NodeReport(image="mine", revision=mine.revision, fetched_bytes=0, parent=None),
            ],
            self.upkeep.news()[0],
        )

    def test_only_attached_images_are_reported(self) -> None:
        self.attached()
        self.scene.volt.down = True
        hosting.remove_if_idle(self.scene.stacks, "debian")
        self.assertTrue(self.scene.record().leaving)
        self.assertEqual([], self.upkeep.news()[0])


class WithdrawnTest(UpkeepTest):
    def withdraw(self, name: str = "debian") -> None:
        self.volt.remove_image(name, when_unused=True)

    def published(self) -> Image:
        image = self.scene.put_content("mine")
        origins.add_origin(self.scene.stacks, image)
        self.settle()
        return image

    def assert_gone(self) -> None:
        """No stack, no cache, no content."""
        self.assertEqual(({}, {}, []), (self.host.leftovers(), self.host.caches, list(self.scene.store.keys())))
        self.assertEqual({}, self.upkeep.queue.troubles())

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
        creating.create(self.scene.vms, "vm", "debian", None)
        self.withdraw()
        self.beat(3)
        self.assertIn("debian", self.host.served)
        creating.destroy(self.scene.vms, "vm")
        self.settle()
        self.scene.check_empty(self)
        self.beat()
        self.assert_gone()

    def test_a_cache_that_was_kept_since_its_stack_went_is_deleted(self) -> None:
        self.attached()
        hosting.remove_if_idle(self.scene.stacks, "debian")
        self.beat(3)
        self.assertEqual(1, len(self.host.caches), "somebody may attach it again")
        self.withdraw()
        self.beat()
        self.assert_gone()

    def test_a_cache_that_was_kept_before_the_agent_started_anew_is_deleted(self) -> None:
        self.attached()
        hosting.remove_if_idle(self.scene.stacks, "debian")
        self.settle()
        self.upkeep = self.make(None)
        self.addCleanup(self.upkeep.queue.stop)
        self.upkeep.start()
        self.settle()
        self.withdraw()
        self.beat()
        self.assert_gone()

    def test_what_an_image_of_this_host_has_is_not_kept_without_a_stack(self) -> None:
        image = self.attached().image
        self.beat()
        self.assertEqual((), self.upkeep.kept)
        self.upkeep.handle(answer().model_copy(update={"discard": [image.digest]}))
        self.settle()
        self.assertEqual({image.key}, set(self.host.caches))

    def test_content_is_not_deleted_while_something_is_published_and_is_later(self) -> None:
        self.published()
        self.withdraw("mine")
        with self.scene.store.publishing.hold("another"):
            self.beat(3)
            self.assertEqual(({}, 1), (self.host.leftovers(), len(list(self.scene.store.keys()))))
        self.beat()
        self.assert_gone()

    def test_a_cache_with_a_manifest_is_not_deleted_while_something_is_published_and_is_later(self) -> None:
        """What is published may have the same content, and so the same manifest."""
        image = self.attached(digest=BLAKE3 + "1" * 64).image
        self.withdraw()
        with self.scene.store.publishing.hold("another"):
            self.beat(3)
            self.assertEqual(({}, {image.key}), (self.host.leftovers(), set(self.host.caches)))
        self.beat()
        self.assert_gone()

    def test_an_origin_goes_when_no_other_host_has_the_image(self) -> None:
        self.published()
        self.volt.read_by_others("mine")
        self.withdraw("mine")
        self.beat(3)
        self.assertIn("mine", self.host.served)
        self.volt.read_by_others("mine", 0)
        self.beat()
        self.assertEqual(({}, {}), (self.host.leftovers(), self.volt.images))
        self.beat()
        self.assert_gone()

    def test_an_origin_goes_on_if_a_late_answer_says_what_is_not_so_any_more(self) -> None:
        image = self.published()
        for act in (
            lambda: origins.add_origin(self.scene.stacks, image),
            lambda: self.volt.read_by_others("mine"),  # a disk of the image came to another host
            lambda: self.volt.remove_image("mine"),  # its database was set back to a backup
        ):
            self.volt.read_by_others("mine", 0)
            self.withdraw("mine")
            late = self.volt.heartbeat(HERE, self.upkeep.news()[0])
            act()
            self.upkeep.handle(late)
            self.settle()
            self.assertEqual({"mine"}, set(self.host.served))


class IdleTest(UpkeepTest):
    def test_an_idle_stack_goes_when_its_grace_is_over(self) -> None:
        self.attached()
        self.beat()
        self.beat(after=GRACE - 1)
        self.assertIn("debian", self.host.served)
        self.beat(after=1)
        self.scene.check_empty(self)

    def test_a_vm_in_between_begins_the_grace_anew(self) -> None:
        self.attached()
        self.beat()
        self.clock.advance(GRACE - 1)
        creating.create(self.scene.vms, "vm", "debian", None)
        self.beat()
        creating.destroy(self.scene.vms, "vm")
        self.beat(after=GRACE - 1)
        self.beat(after=GRACE - 1)
        self.assertIn("debian", self.host.served)

    def test_an_origins_image_that_nobody_reads_is_looked_at_less_often_and_stays(self) -> None:
        origins.add_origin(self.scene.stacks, self.scene.put_content("mine"))
        for _ in range(3):
            self.beat(after=GRACE)
            self.host.daemon_dies("mine")
            self.beat(after=IDLE_CHECK - 1)
            self.assertNotIn("mine", self.host.served)
            self.beat(after=1)
            self.assertIn("mine", self.host.served)
        self.scene.check(self)

    def test_an_image_that_a_vm_uses_is_looked_at_every_few_seconds(self) -> None:
        record = self.attached()
        creating.create(self.scene.vms, "vm", "debian", None)
        self.beat()
        self.host.caches[record.image.key] *= 2
        for seconds, times in ((0.9 * USED_CHECK, 1), (0.1 * USED_CHECK, 2)):
            self.beat(after=seconds)
            self.assertEqual(times * BYTES_PER_FETCH, self.upkeep.images.stats("debian").held_bytes)


class VolumesTest(UpkeepTest):
    def test_one_that_fails_is_tended_until_it_does_not(self) -> None:
        self.use(VolumesDouble(self.host))
        self.host.failing["cache.tend_volume"] = BadVolume(Path(POOL.path), "a test")
        self.beat()
        self.assertEqual([f"volume {POOL.path}"], list(self.upkeep.queue.troubles()))
        self.host.failing.clear()
        self.pass_time(LONGEST_PAUSE)
        self.assertEqual({}, self.upkeep.queue.troubles())


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
