"""What the agent does unasked."""

from __future__ import annotations

import threading
from collections.abc import Callable

from testtools import TestCase

from drivers.base import CacheStats
from drivers.errors import DriverError
from tests.doubles.drivers import BYTES_PER_FETCH
from tests.doubles.volt import INTERVAL, parent
from tests.unit.virtman.scene import Scene
from virtman.records import ImagePhase, ImageRecord, Role
from virtman.upkeep import NOTHING, Upkeep
from virtman.workers import Job, Workers
from volt.client import Assignment, HeartbeatAnswer, NodeReport

SOON = 10.0
PAUSE = 0.005


def answer(*assignments: Assignment, absent: tuple[str, ...] = ()) -> HeartbeatAnswer:
    return HeartbeatAnswer(
        interval_s=INTERVAL, lease_s=3 * INTERVAL, assignments=list(assignments), absent=list(absent)
    )


class UpkeepTest(TestCase):
    idle_grace = 3600.0

    def setUp(self) -> None:
        super().setUp()
        self.scene = Scene(self)
        self.workers = Workers(threads=4)
        self.addCleanup(self.workers.stop)
        self.changed = 0
        self.drivers = self.scene.drivers
        self.upkeep = Upkeep(self.scene.stacks, self.drivers, self.workers, self.count, self.idle_grace)

    def count(self) -> None:
        self.changed += 1

    def attached(self) -> ImageRecord:
        self.scene.volt.offer("debian")
        return self.scene.stacks.ensure("debian")

    def record(self) -> ImageRecord:
        record = self.scene.stacks.find("debian")
        assert record is not None
        return record

    def done(self) -> None:
        """Wait until all jobs have ended."""
        pause, keys = threading.Event(), [f"{job} debian" for job in ("follow", "rejoin", "tend", "restore")]
        for _ in range(int(SOON / PAUSE)):
            if not any(self.workers.busy(key) for key in (*keys, "report debian other")):
                return
            pause.wait(PAUSE)
        self.fail("the jobs do not end")


class HandleTest(UpkeepTest):
    def test_new_assignments_are_followed_and_volt_told_soon(self) -> None:
        self.attached()
        self.upkeep.handle(answer(self.scene.volt.assign("debian", ["new"])))
        self.done()
        self.assertEqual({parent("new")}, self.scene.host.reading["debian"])
        self.assertEqual(1, self.changed)

    def test_a_forgotten_image_is_joined_again_and_volt_told_soon(self) -> None:
        self.attached()
        self.scene.volt.forget("debian")
        self.upkeep.handle(answer(absent=("debian",)))
        self.done()
        self.assertIn("debian", self.scene.volt.places)
        self.assertEqual(1, self.changed)

    def test_a_place_without_a_stack_is_given_up(self) -> None:
        self.scene.volt.offer("debian")
        self.upkeep.handle(answer(self.scene.volt.assign("debian", ["other"])))
        self.done()
        self.assertEqual({}, self.scene.volt.places)
        self.assertEqual(0, self.changed)

    def test_a_dead_daemon_is_started_again_though_volt_is_silent(self) -> None:
        self.attached()
        self.scene.host.daemon_dies("debian")
        self.upkeep.handle(None)
        self.done()
        self.scene.check(self)

    def test_leaving_is_finished_when_volt_is_back(self) -> None:
        self.attached()
        self.scene.volt.down = True
        self.scene.stacks.remove_if_idle("debian")
        self.scene.volt.down = False
        self.upkeep.handle(answer())
        self.done()
        self.scene.check_empty(self)

    def test_it_returns_at_once_while_an_operation_is_under_way(self) -> None:
        self.attached()
        entered, go = threading.Event(), threading.Event()
        self.addCleanup(go.set)

        def moment(what: str) -> None:
            if what == "before attach.update":
                entered.set()
                go.wait(SOON)

        self.scene.host.moment = moment
        assignment = self.scene.volt.assign("debian", ["new"])
        self.upkeep.handle(answer(assignment))
        self.assertTrue(entered.wait(SOON))
        self.upkeep.handle(answer(assignment))
        go.set()
        self.done()
        self.scene.check(self)

    def test_a_job_that_fails_is_tried_again_with_the_next_answer(self) -> None:
        self.attached()
        assignment = self.scene.volt.assign("debian", ["new"])
        self.scene.volt.moment = self.scene.host.moment = self.fail_once
        self.upkeep.handle(answer(assignment))
        self.done()
        self.assertTrue(self.record().unconfirmed)
        self.upkeep = Upkeep(self.scene.stacks, self.drivers, Workers(), self.count, self.idle_grace)
        self.scene.stacks.follow(assignment)
        self.scene.check(self)

    def fail_once(self, what: str) -> None:
        if what == "before attach.update":
            self.scene.host.moment = lambda _what: None
            raise OSError("disk full")

    def test_after_stop_nothing_is_begun(self) -> None:
        self.attached()
        self.scene.host.calls.clear()
        self.upkeep.stopped = True
        self.upkeep.handle(answer(self.scene.volt.assign("debian", ["new"])))
        self.done()
        self.upkeep.died("debian")
        self.upkeep.parent_lost(self.record().image, parent("other"))
        self.assertEqual([], self.scene.host.calls)


class DriversCallTest(UpkeepTest):
    def test_a_lost_parent_is_reported_and_volt_told_soon(self) -> None:
        image = self.attached().image
        self.upkeep.parent_lost(image, parent("other"))
        self.done()
        self.assertEqual([("debian", "other")], self.scene.volt.reported)
        self.assertEqual(1, self.changed)

    def test_a_daemon_that_died_is_started_again(self) -> None:
        self.attached()
        self.scene.host.daemon_dies("debian")
        self.upkeep.died("debian")
        self.done()
        self.scene.check(self)


class ReportsTest(UpkeepTest):
    def test_nothing_here_is_nothing_to_report(self) -> None:
        self.assertEqual([], self.upkeep.reports())

    def test_an_attached_image_is_reported_with_its_parent_and_bytes(self) -> None:
        record = self.attached()
        self.upkeep.refresh(record)
        self.assertEqual(
            [NodeReport(image="debian", revision=record.revision, fetched_bytes=BYTES_PER_FETCH, parent="other")],
            self.upkeep.reports(),
        )

    def test_bytes_are_those_of_the_last_look(self) -> None:
        record = self.attached()
        self.assertEqual(0, self.upkeep.reports()[0].fetched_bytes)
        self.assertEqual(NOTHING, self.upkeep.stats("debian"))
        self.upkeep.tend_all()
        self.done()
        self.assertEqual(CacheStats(BYTES_PER_FETCH, 2 * BYTES_PER_FETCH), self.upkeep.stats("debian"))
        self.assertEqual(CacheStats(BYTES_PER_FETCH, 2 * BYTES_PER_FETCH), self.upkeep.refresh(record))

    def test_a_cache_that_cannot_be_looked_at_now_holds_what_it_held(self) -> None:
        record = self.attached()
        seen = self.upkeep.refresh(record)
        for error in (DriverError("its daemon is being started again"), OSError("its disk is dying")):
            self.scene.host.failing = {"cache.stats": error}
            self.assertEqual(seen, self.upkeep.refresh(record))

    def test_an_origin_reads_from_nobody(self) -> None:
        record = self.scene.stacks.add_origin(self.scene.put_content("mine"))
        self.assertEqual(Role.ORIGIN, record.role)
        report = self.upkeep.reports()[0]
        self.assertIsNone(report.parent)
        self.assertEqual(NOTHING, self.upkeep.refresh(record))

    def test_a_stack_that_the_new_agent_has_not_restored_yet_reads_from_nobody_that_is_known(self) -> None:
        self.attached()
        self.scene.start()
        upkeep = Upkeep(self.scene.stacks, self.scene.drivers, self.workers, self.count, self.idle_grace)
        self.assertEqual([None], [report.parent for report in upkeep.reports()])

    def test_only_attached_images_are_reported(self) -> None:
        self.attached()
        self.scene.volt.down = True
        self.scene.stacks.remove_if_idle("debian")
        self.assertEqual(ImagePhase.LEAVING, self.record().phase)
        self.assertEqual([], self.upkeep.reports())

    def test_a_follow_that_is_not_done_is_not_reported(self) -> None:
        before = self.attached().revision
        assignment = self.scene.volt.assign("debian", ["new"])
        self.scene.cut(lambda scene: scene.stacks.follow(assignment), 4)
        self.assertEqual([before], [report.revision for report in self.upkeep.reports()])


class ImpatientTest(UpkeepTest):
    idle_grace = 0.0

    def test_an_idle_stack_goes_when_its_grace_is_over(self) -> None:
        self.attached()
        self.upkeep.tend_all()
        self.done()
        self.scene.check_empty(self)

    def test_a_stack_in_use_stays(self) -> None:
        self.attached()
        self.scene.vms.create("vm", "debian", None)
        self.upkeep.tend_all()
        self.done()
        self.scene.check(self)
        self.assertIn("debian", self.scene.host.served)


class PatientTest(UpkeepTest):
    def test_an_idle_stack_stays_during_its_grace(self) -> None:
        self.attached()
        self.upkeep.tend_all()
        self.done()
        self.assertIn("debian", self.scene.host.served)

    def test_a_vm_in_between_begins_the_grace_anew(self) -> None:
        record = self.attached()
        upkeep = Upkeep(self.scene.stacks, self.drivers, Inline(), self.count, idle_grace=0.2)
        upkeep.tend_all()
        self.scene.vms.create("vm", "debian", None)
        threading.Event().wait(0.25)  # the grace itself is what is tested
        upkeep.tend_all()
        self.scene.vms.destroy("vm")
        upkeep.tend_all()
        self.assertEqual(record, self.record())

    def test_an_image_that_went_meanwhile_is_nothing_to_tend(self) -> None:
        self.attached()
        inline = Inline()
        inline.before = lambda: self.scene.stacks.remove_if_idle("debian")
        Upkeep(self.scene.stacks, self.drivers, inline, self.count, idle_grace=0.0).tend_all()
        self.scene.check_empty(self)


class Inline(Workers):
    """Runs each job at once, after ``before``."""

    def __init__(self) -> None:
        super().__init__(threads=1)
        self.before: Callable[[], object] = lambda: None

    def submit(self, key: str, job: Job) -> None:
        self.before()
        job()
