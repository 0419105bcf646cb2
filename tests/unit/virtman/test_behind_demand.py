"""Hydration and boot sets: what the agent has a source read behind what VMs read."""

from __future__ import annotations

from unittest.mock import Mock

from drivers.base import Filled, Range
from drivers.errors import DriverError
from tests.doubles.drivers import CHUNK, SourceDouble
from tests.doubles.volt import digest_of
from tests.unit.virtman.scene import MIB, Scene, await_quiet
from tests.unit.virtman.test_cut_off import CutOff, offered
from tests.unit.virtman.test_upkeep import GRACE, UpkeepTest
from virtman import cleaning, creating, hosting, hydrating, origins
from virtman.deploying import HYDRATION
from virtman.errors import CallerGone, Conflict, DriverTrouble, NotSupported, UnknownImage
from virtman.hydrating import PIN, STUCK
from virtman.upkeep import Upkeep
from volt import errors

WHOLE = [Range(0, MIB)]
READ_FIRST = [[2 * CHUNK, 3 * CHUNK], [0, CHUNK]]


class HydrationCase(UpkeepTest):
    def hydrate(self) -> None:
        self.volt.offer("debian")
        hydrating.begin(self.scene.stacks, "debian")
        self.settle()


class HydrationTest(HydrationCase):
    def fill_all(self) -> None:
        self.host.filled["debian"] = Filled(done=MIB, whole=True)

    def calls(self, call: str) -> int:
        return self.host.calls.count(call)

    def test_an_image_that_is_not_attached_is_attached_pinned_and_filled_once(self) -> None:
        for _ in range(2):
            self.hydrate()
        self.assertEqual(
            (WHOLE, 1, 1), (self.host.filling["debian"], self.calls("source.fill.idle"), self.calls("source.pin"))
        )
        self.assertEqual({"debian"}, set(self.host.pins))

    def test_what_is_filled_is_told_to_volt_and_stays_though_nobody_uses_it(self) -> None:
        self.hydrate()
        self.beat()
        self.fill_all()
        self.beat(2, after=GRACE)
        self.beat(after=GRACE)
        self.assertEqual([], cleaning.gc(self.scene.stacks).stacks)
        self.assertEqual([False, True], [self.volt.beats[0][0].whole, self.volt.beats[-1][0].whole])
        self.assertEqual(1, self.calls("source.fill.idle"))

    def test_an_agent_and_a_source_that_start_again_go_on(self) -> None:
        self.hydrate()
        self.host.filling.clear()
        self.host.pins.clear()
        self.scene.start()
        self.use(None)
        self.beat()
        self.assertEqual(
            (WHOLE, 2, 2), (self.host.filling["debian"], self.calls("source.fill.idle"), self.calls("source.pin"))
        )

    def test_what_was_lost_is_filled_again(self) -> None:
        self.hydrate()
        self.fill_all()
        self.beat()
        self.host.filled["debian"] = Filled(done=MIB)
        self.beat(after=60)
        self.assertEqual(2, self.calls("source.fill.idle"))

    def test_the_pin_is_told_again_before_it_ends(self) -> None:
        self.hydrate()
        self.fill_all()
        self.beat(3)
        self.assertEqual(1, self.calls("source.pin"))
        self.host.pins["debian"] -= PIN / 2
        self.beat()
        self.assertEqual(2, self.calls("source.pin"))

    def test_a_cancelled_one_goes_like_any_other(self) -> None:
        self.hydrate()
        for _ in range(2):
            hydrating.cancel(self.scene.stacks, "debian")
        self.settle()
        self.assertEqual(([], [0]), (self.host.filling["debian"], list(self.host.pins.values())))
        self.beat()
        self.beat(after=GRACE)
        self.scene.check_empty(self)
        self.assertRaises(UnknownImage, hydrating.cancel, self.scene.stacks, "debian")

    def test_the_longest_time_that_was_asked_for_counts(self) -> None:
        self.volt.offer("debian")
        for asked, counts in ((100.0, 100.0), (50.0, 100.0), (200.0, 200.0), (None, None), (300.0, None)):
            self.assertEqual(counts, hydrating.begin(self.scene.stacks, "debian", asked).hydrate_until)

    def test_a_withdrawn_one_goes(self) -> None:
        self.hydrate()
        self.volt.remove_image("debian", when_unused=True)
        self.beat(3)
        self.assertEqual([], self.scene.image_shelf.names())

    def test_an_origin_has_all(self) -> None:
        origins.add_origin(self.scene.stacks, self.scene.put_content("mine"))
        self.assertFalse(hydrating.begin(self.scene.stacks, "mine").hydrate)
        hydrating.wait(self.scene.stacks, "mine", lambda: "", lambda *_: None)

    def test_another_stack_refuses(self) -> None:
        self.patch(SourceDouble, "fills", False)
        self.volt.offer("debian")
        self.assertRaises(NotSupported, hydrating.begin, self.scene.stacks, "debian")
        self.assertEqual({}, self.host.served)


class WaitTest(HydrationCase):
    def wait(self, *done: int) -> list[tuple[int, int]]:
        """Wait until all is there; after these bytes the caller hangs up."""
        self.patch(hydrating, "LOOK", 0)
        self.hydrate()
        told: list[tuple[int, int]] = []

        def tell(step: str, now: int, total: int) -> None:
            told.append((now, total))
            if len(told) > len(done):
                raise CallerGone("the caller hung up")
            after = done[len(told) - 1]
            self.host.filled["debian"] = Filled(done=after, goes_on=after < MIB, whole=after == MIB)

        trouble = lambda: self.upkeep.trouble(HYDRATION + "debian")  # noqa: E731
        hydrating.wait(self.scene.stacks, "debian", trouble, tell)
        return told

    def test_it_ends_when_all_is_there(self) -> None:
        self.assertEqual([(0, MIB), (512, MIB)], self.wait(512, MIB))

    def test_who_hangs_up_ends_no_hydration(self) -> None:
        self.assertRaises(CallerGone, self.wait, 512)
        self.assertTrue(self.scene.record().hydrate)

    def test_a_pool_without_room_is_told(self) -> None:
        self.host.failing["source.fill.idle"] = DriverError("there is no room")
        error = self.assertRaises(DriverTrouble, self.wait, *[0] * STUCK)
        self.assertIn("there is no room", str(error))

    def test_what_is_cancelled_is_waited_for_no_more(self) -> None:
        self.hydrate()
        hydrating.cancel(self.scene.stacks, "debian")
        self.assertRaises(Conflict, hydrating.wait, self.scene.stacks, "debian", lambda: "", lambda *_: None)


class CutOffTest(CutOff):
    def hydrate(self, scene: Scene) -> None:
        hydrating.begin(scene.stacks, "debian")

    def hydrate_and_fill(self, scene: Scene) -> None:
        self.hydrate(scene)
        upkeep = Upkeep(scene.stacks, scene.vms, None, scene.devices, scene.transfers, GRACE)
        upkeep.queue.start()
        upkeep.tend_all()
        await_quiet(upkeep.queue)
        upkeep.queue.stop()

    def cancel(self, scene: Scene) -> None:
        hydrating.cancel(scene.stacks, "debian")

    def test_a_hydration_is_as_if_nobody_had_asked_or_goes_on(self) -> None:
        def again(scene: Scene) -> None:
            self.hydrate_and_fill(scene)
            self.assertEqual((WHOLE, 1), (scene.host.filling["debian"], len(scene.host.pins)))

        moments = self.cut_everywhere(offered, self.hydrate, again)
        self.assertIn("hydrate:recorded", moments)

    def test_what_is_cancelled_in_the_end_is_not_pinned(self) -> None:
        def given(scene: Scene) -> None:
            offered(scene)
            self.hydrate_and_fill(scene)

        def again(scene: Scene) -> None:
            self.cancel(scene)
            self.assertEqual([0], list(scene.host.pins.values()))
            self.assertTrue(hosting.remove_if_idle(scene.stacks, "debian"))

        self.assertIn("hydrate:unpinned", self.cut_everywhere(given, self.cancel, again))


class BootSetTest(UpkeepTest):
    def booted(self) -> None:
        """A VM of this host has booted."""
        creating.create(self.scene.vms, "vm", "debian", None)
        self.host.filled["debian"] = Filled(boot_set=True)

    def told(self) -> int:
        return self.scene.moments.count("after volt.add_boot_set")

    def test_what_vms_read_first_is_told_once_and_by_the_next_agent_not_again(self) -> None:
        self.volt.offer("debian")
        self.booted()
        self.assertNotIn("source.fill", self.host.calls)
        self.beat(3)
        self.scene.start()
        self.use(None)
        self.beat()
        self.assertEqual(({digest_of("debian"): READ_FIRST}, 1), (self.volt.boot_sets, self.told()))

    def test_a_host_that_attaches_the_image_fills_what_others_read_first(self) -> None:
        self.volt.offer("debian")
        self.volt.add_boot_set("debian", READ_FIRST)
        self.attached()
        self.assertEqual([Range(2 * CHUNK, CHUNK), Range(0, CHUNK)], self.host.filling["debian"])

    def test_no_error_of_that_stops_the_attaching(self) -> None:
        self.volt.offer("debian")
        self.volt.add_boot_set("debian", READ_FIRST)
        self.host.failing["source.fill"] = DriverError("there is no room")
        self.assertTrue(hosting.ensure(self.scene.stacks, "debian").steady)

    def test_volt_hears_of_it_when_it_is_back(self) -> None:
        self.volt.offer("debian")
        self.booted()
        self.volt.down = True
        self.beat()
        self.assertEqual({}, self.volt.boot_sets)
        self.volt.down = False
        self.beat(after=60)
        self.assertEqual(1, self.told())

    def test_other_content_under_the_same_name_gets_no_boot_set_of_this(self) -> None:
        self.volt.offer("debian")
        self.booted()
        self.volt.offer("debian", digest=digest_of("other"))
        self.beat()
        self.assertEqual(({}, True), (self.volt.boot_sets, self.scene.record().boot_told))

    def test_a_volt_that_knows_no_boot_sets_is_asked_once(self) -> None:
        self.volt.offer("debian")
        self.booted()
        refused = Mock(side_effect=errors.BadRequest("there is no such path in Volt's API"))
        self.patch(self.volt, "add_boot_set", refused)
        self.beat(2)
        self.assertEqual((1, {}), (refused.call_count, self.upkeep.queue.troubles()))
        self.assertTrue(self.scene.record().boot_told)
