"""What the agent does of deployments, as Volt's answers say."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

from drivers.base import Filled, Image, Place, Range
from drivers.errors import DriverError, NoSpace
from drivers.host.watch import Watch
from drivers.transfer.contract import Content, Terms
from tests.doubles.drivers import SourceDouble
from tests.doubles.transfer import TransferDouble
from tests.doubles.volt import digest_of
from tests.patience import wait_until
from tests.unit.virtman.scene import MIB, damage
from tests.unit.virtman.test_upkeep import UpkeepTest
from virtman import hydrating, origins, serving, transferring
from virtman.records import ImageRecord
from volt.client import TransferReport, TransferState, TransferTask

HALF = MIB // 2
WHOLE = [Range(0, MIB)]
SOON = 3600.0
"""Seconds from now on that tests have a host keep an image."""


class DeployingCase(UpkeepTest):
    def setUp(self) -> None:
        super().setUp()
        self.volt.offer("debian")
        self.keep_until = time.time() + SOON

    def task(self, number: int = 1, **more: Any) -> TransferTask:
        fields = {"image": "debian", "digest": digest_of("debian"), "method": "tree", "go": True}
        fields |= {"deployment": number, "keep_until": self.keep_until, **more}
        return TransferTask.model_validate(fields)

    def told(self, *tasks: TransferTask) -> list[TransferReport]:
        """What the host says after Volt has told it this twice."""
        self.volt.tasks = list(tasks)
        self.beat(2)
        return self.upkeep.deployments.reports()

    def state(self, *tasks: TransferTask) -> str:
        [report] = self.told(*tasks)
        return report.state

    def record(self) -> ImageRecord:
        return self.scene.record()

    def fill_all(self) -> None:
        self.host.filled["debian"] = Filled(done=MIB, whole=True)


class DeployingTest(DeployingCase):
    def test_the_image_is_attached_kept_until_then_and_filled_and_volt_hears_how_far_that_is(self) -> None:
        task = self.task()
        self.volt.tasks = [task]
        self.upkeep.handle(self.volt.heartbeat("here", []))
        [report] = self.upkeep.deployments.reports()
        self.assertIn(report.state, (TransferState.WAITING, TransferState.FILLING))
        self.settle()
        self.host.filled["debian"] = Filled(done=512, goes_on=True)
        [report] = self.told(task)
        expected = TransferReport(deployment=1, method="tree", state=TransferState.FILLING, done=512, total=MIB)
        self.assertEqual(expected, report)
        self.assertEqual((WHOLE, task.keep_until), (self.host.filling["debian"], self.record().hydrate_until))
        self.fill_all()
        [report] = self.told(task)
        self.assertEqual((TransferState.WHOLE, MIB), (report.state, report.done))
        self.assertEqual([], self.told())
        self.assertTrue(self.record().hydrate)

    def test_a_tree_is_filled_as_fast_as_may_be_and_a_lazy_one_behind_all(self) -> None:
        self.told(self.task(method="lazy"))
        self.assertIn("source.fill.idle", self.host.calls)
        hydrating.cancel(self.scene.stacks, "debian")
        self.host.calls.clear()
        self.told(self.task(2, method="tree"))
        self.assertEqual(["source.fill"], [call for call in self.host.calls if call.startswith("source.fill")])

    def test_it_is_filled_no_faster_than_the_limit_says(self) -> None:
        self.told(self.task(limit=1000), self.task(2, limit=500))
        self.assertEqual(1000, self.host.rates["debian"])
        hydrating.cancel(self.scene.stacks, "debian")
        self.told(self.task(3, limit=1000), self.task(4))
        self.assertEqual(None, self.host.rates["debian"])

    def test_who_has_no_turn_is_ready_and_fills_nothing(self) -> None:
        self.assertEqual("ready", self.state(self.task(method="unicast", go=False)))
        self.assertNotIn("debian", self.host.filling)
        self.assertEqual("filling", self.state(self.task(method="unicast")))
        self.assertEqual(WHOLE, self.host.filling["debian"])
        self.told(self.task(method="unicast"), self.task(2, method="unicast", go=False))
        self.told(self.task(2, method="unicast", go=False))
        self.assertEqual(WHOLE, self.host.filling["debian"], "what is on its way goes on")

    def test_the_source_is_read_from_before_all_other_parents(self) -> None:
        self.told(self.task(go=False))
        self.volt.assign("debian", ["other", "origin"])
        self.told(self.task(go=False))
        self.told(self.task(go=False, source="origin"))
        self.assertEqual(["origin", "other"], [parent.host for parent in self.host.routes["debian"]])
        self.host.routes.clear()
        serving.build(self.scene.stacks, self.record())
        self.assertEqual(["origin", "other"], [parent.host for parent in self.host.routes["debian"]])
        self.volt.assign("debian", ["third", "origin"])
        self.told(self.task(source="origin"))
        self.assertEqual(["origin", "third"], [parent.host for parent in self.host.routes["debian"]])

    def test_without_room_the_hosts_part_ends_and_nothing_is_kept_for_it(self) -> None:
        fill, tried = SourceDouble.fill, []

        def full(source: SourceDouble, image: Image, ranges: Sequence[Range], **more: Any) -> None:
            tried.append(len(ranges))
            if ranges:
                raise NoSpace(self.scene.folder, 1, 2)
            fill(source, image, ranges, **more)

        self.patch(SourceDouble, "fill", full)
        [report] = self.told(self.task())
        self.assertEqual(TransferState.FAILED, report.state)
        self.assertIn("no room", report.error)
        self.assertFalse(self.record().hydrate)
        self.beat(3)
        self.assertEqual([1, 0], tried)
        hydrating.begin(self.scene.stacks, "debian")
        self.assertEqual("failed", self.state(self.task(2)))
        self.assertTrue(self.record().hydrate)  # as somebody else has asked
        self.told()
        self.patch(SourceDouble, "fill", fill)
        self.assertEqual("filling", self.state(self.task(3)))

    def test_what_no_try_would_end_ends_the_hosts_part_and_what_may_pass_is_tried_again(self) -> None:
        self.assertEqual("failed", self.state(self.task(image="none")))
        self.assertEqual("failed", self.state(self.task(2, digest=digest_of("other"))))
        self.told()
        hydrating.cancel(self.scene.stacks, "debian")
        self.host.failing["source.fill"] = DriverError("it is away")
        [report] = self.told(self.task(3))
        self.assertEqual((TransferState.FILLING, True), (report.state, "it is away" in report.error))
        self.host.failing.clear()
        self.pass_time(600)
        self.assertEqual(WHOLE, self.host.filling["debian"])

    def test_a_cancelled_one_lets_go_of_what_is_not_whole(self) -> None:
        self.told(self.task())
        self.assertEqual("cancelled", self.state(self.task(cancelled=True)))
        self.assertFalse(self.record().hydrate)
        self.assertEqual("cancelled", self.state(self.task(2, image="none", cancelled=True)))

    def test_what_is_whole_or_was_asked_for_by_others_stays_when_it_is_cancelled(self) -> None:
        self.told(self.task())
        self.fill_all()
        self.assertEqual("whole", self.state(self.task(cancelled=True)))
        self.assertTrue(self.record().hydrate)
        self.host.filled["debian"] = Filled(done=512, goes_on=True)
        hydrating.begin(self.scene.stacks, "debian")
        self.assertEqual("cancelled", self.state(self.task(cancelled=True)))
        self.assertTrue(self.record().hydrate)

    def test_a_suspended_host_says_so(self) -> None:
        self.scene.stacks.suspended = True
        [report] = self.told(self.task())
        self.assertEqual((TransferState.WAITING, True), (report.state, "suspended" in report.error))

    def test_a_record_that_cannot_be_read_stops_no_heartbeat(self) -> None:
        self.told(self.task())
        damage(self.scene.image_shelf, "debian")
        [report] = self.told(self.task())
        self.assertEqual((TransferState.WAITING, True), (report.state, "debian" in report.error))

    def test_an_origin_has_all_of_it(self) -> None:
        origins.add_origin(self.scene.stacks, self.scene.put_content("mine"))
        self.assertEqual("whole", self.state(self.task(image="mine", digest=self.scene.record("mine").digest)))

    def test_other_content_under_the_name_is_never_whole_and_is_not_kept(self) -> None:
        other = self.task(digest=digest_of("other"))
        self.assertEqual("failed", self.state(other))
        self.told()
        self.assertFalse(self.record().hydrate)
        hydrating.begin(self.scene.stacks, "debian")
        self.fill_all()
        [report] = self.told(self.task(2, digest=digest_of("other")))
        self.assertEqual((TransferState.FAILED, True), (report.state, "other content" in report.error))

    def test_it_goes_when_its_time_is_over_but_for_what_was_asked_for_longer(self) -> None:
        [report] = self.told(self.task(keep_until=time.time() - 1))
        self.assertEqual((TransferState.FAILED, True), (report.state, "is over" in report.error))
        self.told()
        long = self.task(2, keep_until=self.keep_until + 1)
        self.told(long, self.task(3))
        self.assertEqual(long.keep_until, self.record().hydrate_until)
        hydrating.begin(self.scene.stacks, "debian")
        self.told(self.task(4))
        self.assertEqual((True, None), (self.record().hydrate, self.record().hydrate_until))


class ProbeDouble:
    """Finds out that links carry a MB a second."""

    made: ClassVar[list[ProbeDouble]] = []

    def __init__(self, place: Place, source: Content, image: Image) -> None:
        self.heard = self.stopped = False
        self.findings = {"link": 1e6}
        self.made.append(self)

    def expect(self) -> None:
        self.heard = True

    def stop(self) -> None:
        self.stopped = True


class TogetherTest(DeployingCase):
    """By a method by which hosts begin together."""

    def setUp(self) -> None:
        super().setUp()
        self.patch(TransferDouble, "made", [])
        self.patch(ProbeDouble, "made", [])
        self.addCleanup(self.upkeep.deployments.transfers.stop)

    def udpcast(self, *, go: bool = False, **more: Any) -> TransferTask:
        return self.task(method="udpcast", go=go, **more)

    def begun(self, report: TransferReport, **more: Any) -> TransferTask:
        """Volt says that the hosts begin with what was reported."""
        terms = {"number": 7, "ranges": [[HALF, MIB]], "sender": "s", "receivers": ["r"], "attempt": report.attempt}
        return self.udpcast(go=True, terms=terms, **more)

    def wait_state(self, state: TransferState, *tasks: TransferTask) -> TransferReport:
        """What the host says as soon as it is that far."""
        wait_until(lambda: self.state(*tasks) == state, f"it is {state}")
        [report] = self.upkeep.deployments.reports()
        return report

    def ready(self, **more: Any) -> TransferReport:
        return self.wait_state(TransferState.READY, self.udpcast(**more))

    def test_it_tells_what_it_lacks_and_receives_when_all_begin_and_then_reads_the_rest(self) -> None:
        report = self.ready()
        self.assertEqual(("a receiver", [[HALF, MIB]]), (report.contact, report.lacks))
        [report] = self.told(self.begun(report, limit=1000))  # what links carry is known only now
        [transfer] = TransferDouble.made
        wait_until(transfer.begun.is_set)
        self.assertEqual(Terms(7, [Range(HALF, HALF)], "s", ["r"], 1000), transfer.terms)
        self.assertEqual((TransferState.FILLING, HALF), (report.state, report.done))
        self.assertNotIn("debian", self.host.filling)
        transfer.end()
        wait_until(lambda: self.told(self.begun(report)) and "debian" in self.host.filling, "the rest is read")
        [report] = self.upkeep.deployments.reports()
        self.assertEqual((TransferState.FILLING, MIB, ""), (report.state, report.done, report.error))
        self.fill_all()
        self.assertEqual("whole", self.state(self.begun(report)))
        self.told()
        wait_until(lambda: transfer.stopped, "it ends")

    def test_what_is_to_be_encrypted_is_so_for_the_method(self) -> None:
        self.patch(TransferDouble, "encrypts", True)
        self.told(self.begun(self.ready(encrypt=True), encrypt=True))
        [transfer] = TransferDouble.made
        wait_until(transfer.begun.is_set)
        assert transfer.terms is not None
        self.assertTrue(transfer.terms.encrypt)

    def test_another_method_or_part_takes_the_place_of_the_one_before(self) -> None:
        self.ready()
        self.told(self.udpcast(sends=True))
        wait_until(lambda: [each.stopped for each in TransferDouble.made] == [True, False], "it gets ready to send")
        self.upkeep.deployments.transfers._drivers = {"udpcast": TransferDouble, "auto": TransferDouble}
        self.told(self.task(method="auto", go=False))
        self.told(self.udpcast())
        wait_until(
            lambda: [each.stopped for each in TransferDouble.made] == [True] * 3 + [False], "it gets ready again"
        )

    def test_a_try_reads_from_the_tree_and_that_goes_on_or_ends_as_the_method_wants(self) -> None:
        self.upkeep.deployments.transfers._drivers = {"udpcast": TransferDouble, "auto": TransferDouble}
        self.wait_state(TransferState.READY, self.task(method="auto", go=False))
        self.assertNotIn("debian", self.host.filling)
        for method in ("auto", "tree"):
            self.told(self.task(method=method))
            self.assertEqual(WHOLE, self.host.filling["debian"])
        self.assertEqual(1, self.host.calls.count("source.fill"))
        self.told(self.udpcast())
        self.assertEqual([], self.host.filling["debian"])

    def test_a_multicast_is_tried_until_all_begin_or_this_host_cannot(self) -> None:
        self.patch(TransferDouble, "multicasts", True)
        self.patch(transferring, "Probe", ProbeDouble)
        report = self.ready()
        self.assertEqual(1e6, report.link)
        [probe] = ProbeDouble.made
        self.assertEqual((True, False), (probe.heard, probe.stopped))
        self.told(self.begun(report))
        wait_until(TransferDouble.made[-1].begun.is_set)
        self.assertTrue(probe.stopped)
        self.told()
        self.patch(TransferDouble, "trouble", "no address")
        self.ready()
        self.assertTrue(ProbeDouble.made[-1].stopped)

    def test_what_fails_is_told_and_the_rest_is_read(self) -> None:
        report = self.ready()
        self.told(self.begun(report))
        TransferDouble.made[-1].end("nobody sends")
        wait_until(lambda: self.told(self.begun(report)) and "debian" in self.host.filling, "the rest is read")
        self.assertEqual("nobody sends", self.told(self.begun(report))[0].error)

    def test_who_cannot_get_ready_says_so_and_holds_nobody_up(self) -> None:
        self.patch(TransferDouble, "trouble", "no address")
        report = self.ready()
        self.assertEqual(("", "no address"), (report.contact, report.error))
        self.told(self.task(method="tree"))
        self.assertEqual(WHOLE, self.host.filling["debian"])

    def test_who_got_ready_again_is_no_part_of_what_was_agreed_on(self) -> None:
        report = self.ready()
        self.told()
        again = self.ready()
        self.assertNotEqual(report.attempt, again.attempt)
        self.told(self.begun(report))
        self.assertEqual((True, None), (TransferDouble.made[0].stopped, TransferDouble.made[1].terms))
        self.told(self.task(method="tree"))
        self.assertEqual((True, WHOLE), (TransferDouble.made[1].stopped, self.host.filling["debian"]))

    def test_an_origin_sends_and_says_how_that_ended(self) -> None:
        image = self.scene.put_content("mine")
        origins.add_origin(self.scene.stacks, image)
        more: dict[str, Any] = {"image": "mine", "digest": image.digest, "sends": True}
        report = self.wait_state(TransferState.READY, self.udpcast(**more))
        self.assertEqual((True, "the sender"), (report.sends, report.contact))
        self.wait_state(TransferState.FILLING, self.begun(report, **more))
        TransferDouble.made[-1].end()
        report = self.wait_state(TransferState.WHOLE, self.begun(report, **more))
        self.assertEqual(HALF, report.sent)
        self.told()
        report = self.wait_state(TransferState.READY, self.udpcast(**more))
        TransferDouble.made[-1].end("it broke")
        self.assertEqual("it broke", self.wait_state(TransferState.FAILED, self.begun(report, **more)).error)

    def test_who_has_not_the_image_does_not_send_it(self) -> None:
        tasks: tuple[dict[str, Any], ...] = ({"image": "none"}, {"digest": digest_of("other")})
        for more in tasks:
            self.told()
            report = self.wait_state(TransferState.FAILED, self.udpcast(sends=True, **more))
            self.assertIn("has not the content", report.error)

    def test_what_is_to_be_encrypted_does_not_travel_in_the_clear(self) -> None:
        report = self.wait_state(TransferState.FAILED, self.udpcast(encrypt=True))
        self.assertIn("cannot encrypt", report.error)
        self.assertEqual([], TransferDouble.made)

    def test_a_cancelled_one_ends_what_runs(self) -> None:
        report = self.ready()
        self.told(self.begun(report))
        self.assertEqual("cancelled", self.state(self.begun(report, cancelled=True)))
        self.assertTrue(TransferDouble.made[-1].stopped)

    def test_a_suspended_host_ends_all_also_while_volt_ends_one(self) -> None:
        self.told(self.udpcast(), self.udpcast(deployment=2))
        transfers, end = self.upkeep.deployments.transfers, transferring.Part.end
        first, second = transfers.part(1), transfers.part(2)

        def ended(part: transferring.Part) -> Watch:
            if part is first:
                transfers.hear([self.udpcast()])
            return end(part)

        self.patch(transferring.Part, "end", ended)
        transfers.stop()
        self.assertIsNone(transfers.part(2))
        self.assertEqual([True, True], [part is not None and part.over for part in (first, second)])

    def test_what_a_killed_agent_left_is_deleted(self) -> None:
        left = self.scene.folder / "transfer" / "udpcast-1"
        left.mkdir(parents=True)
        self.upkeep.deployments.transfers.clean()
        self.assertFalse(left.exists())
