"""What an agent's link may rely on: the same for Volt's double and for Volt over HTTP.

Each test speaks as one host, ``here``, that is registered; ``other`` is another host that publishes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from testtools import TestCase

from drivers import base
from tests.doubles.servers import serve_app
from tests.doubles.volt import SERVE, Calls, VoltDouble, digest_of
from tests.unit.volt.databases import new_database
from volt.api import create_app
from volt.client import Assignment, HeartbeatAnswer, Image, NodeReport, VoltClient
from volt.coordinator import Coordinator
from volt.errors import (
    HostHasNode,
    HostTaken,
    HostUnknown,
    ImageConflict,
    ImageInUse,
    ImageUnknown,
    ImageWithdrawn,
    NodeUnknown,
    OriginNeeded,
)
from volt.store import Store

HERE, OTHER = "here", "other"
ADDRESS = "unix:///run/here/serve"
DEBIAN = base.Image("debian", 1 << 20, digest_of("debian"))
ELSEWHERE = "unix:///run/elsewhere/serve"
ONE, TWO = "1" * 32, "2" * 32
"""Agents."""
MINE = base.Image("mine", 1 << 20, digest_of("mine"))


class Seat:
    """The calls of the host at Volt, its double or its client; ``by`` names the agent, for a client has its own."""

    def __init__(self, volt: Any, host: str = HERE, **by: str) -> None:
        self._host, self._by = host, by
        self.remove_image, self.images, self.image, self.tree = volt.remove_image, volt.images, volt.image, volt.tree
        self.boot_set, self.add_boot_set = volt.boot_set, volt.add_boot_set
        self._volt = volt

    def register(self, address: str, place: str | None = None) -> None:
        self._volt.register(self._host, address, place, **self._by)

    def heartbeat(
        self, nodes: list[NodeReport], kept: Sequence[str] = (), address: str | None = None, place: str | None = None
    ) -> HeartbeatAnswer:
        told = {"address": address, "place": place}
        answer: HeartbeatAnswer = self._volt.heartbeat(self._host, nodes, kept, **told, **self._by)
        return answer

    def publish(self, image: base.Image, parent: str | None = None) -> Image:
        answer = self._volt.publish(image.name, image.size, image.digest, self._host, parent, **self._by)
        return answer if isinstance(answer, Image) else answer[0]

    def join(self, image: str, *, moving: bool = False) -> Assignment:
        assignment: Assignment = self._volt.join(image, self._host, moving=moving, **self._by)
        return assignment

    def leave(self, image: str, dropped: int = -1, *, needed: bool = False) -> None:
        self._volt.leave(image, self._host, dropped, needed=needed, **self._by)

    def report(self, image: str, dead: str) -> Assignment:
        assignment: Assignment = self._volt.report_dead(image, self._host, dead, **self._by)
        return assignment


class ContractTests(TestCase):
    """The tests; not collected itself. ``seat`` is the host's, of no agent that has an id."""

    __test__ = False
    seat: Seat

    def seat_of(self, agent: str, host: str = HERE) -> Seat:
        """The host's seat, taken by this agent."""
        raise NotImplementedError

    def address(self) -> str:
        """Where children look for the host."""
        raise NotImplementedError

    def offer(self, image: base.Image) -> None:
        """The other host publishes an image."""
        raise NotImplementedError

    def current(self) -> Assignment:
        """What the host has to follow now."""
        (assignment,) = self.seat.heartbeat([]).assignments
        return assignment

    def beat(self, image: str, revision: int) -> HeartbeatAnswer:
        return self.seat.heartbeat([NodeReport(image=image, revision=revision)])

    def test_nobody_reads_and_nothing_is_published_at_first(self) -> None:
        answer = self.seat.heartbeat([])
        self.assertEqual(([], [], []), (answer.assignments, answer.absent, self.seat.images()))
        self.assertTrue(0 < answer.interval_s < answer.lease_s)

    def test_a_joiner_gets_content_parents_and_a_slot(self) -> None:
        self.offer(DEBIAN)
        got = self.seat.join("debian")
        self.assertEqual((DEBIAN.name, DEBIAN.size, DEBIAN.digest), (got.image, got.size, got.digest))
        self.assertEqual((1, [OTHER], []), (got.slot, [p.host for p in got.parents], got.children))
        self.assertEqual(SERVE, got.parents[0].address)
        self.assertTrue(got.parents[0].secret and got.parents[0].ticket and got.serving_key)
        self.assertTrue(got.revision > 0)

    def test_joining_again_gives_the_same_place_under_a_greater_revision(self) -> None:
        self.offer(DEBIAN)
        once, again = self.seat.join("debian"), self.seat.join("debian")
        self.assertTrue(again.revision > once.revision)
        before, after = once.parents[0], again.parents[0]
        self.assertNotEqual(before.ticket, after.ticket, "a ticket is that of its revision")
        self.assertEqual(before, after.model_copy(update={"ticket": before.ticket}))
        self.assertEqual(once, again.model_copy(update={"revision": once.revision, "parents": once.parents}))

    def test_a_heartbeat_tells_what_is_newer_than_what_it_reports(self) -> None:
        self.offer(DEBIAN)
        joined = self.seat.join("debian")
        self.assertEqual([], self.beat("debian", joined.revision).assignments)
        again = self.seat.join("debian")
        (told,) = self.beat("debian", joined.revision).assignments
        self.assertEqual((again.revision, again.parents), (told.revision, told.parents))

    def test_what_is_reported_without_a_place_is_absent(self) -> None:
        self.offer(DEBIAN)
        answer = self.seat.heartbeat([NodeReport(image=name, revision=0) for name in ("nothing", "debian")])
        self.assertEqual((["debian", "nothing"], []), (answer.absent, answer.assignments))

    def test_a_boot_set_is_what_hosts_told(self) -> None:
        self.offer(DEBIAN)
        self.assertEqual([], self.seat.boot_set("debian").ranges)
        for ranges in ([[1 << 20, 2 << 20], [0, 65536]], [[0, 65536]]):
            self.seat.add_boot_set("debian", ranges)
        self.assertEqual([[0, 65536], [1 << 20, 2 << 20]], self.seat.boot_set("debian").ranges)
        self.assertRaises(ImageUnknown, self.seat.boot_set, "nothing")
        self.assertRaises(ImageUnknown, self.seat.add_boot_set, "nothing", [])

    def test_a_published_image_has_this_host_as_its_origin(self) -> None:
        published = self.seat.publish(MINE)
        self.assertEqual((MINE.name, MINE.size, MINE.digest), (published.name, published.size, published.digest))
        self.assertEqual(([HERE], 0), (published.origins, published.nodes))
        got = self.seat.join("mine")
        self.assertEqual((0, []), (got.slot, got.parents))

    def test_publishing_the_same_again_changes_nothing(self) -> None:
        once = self.seat.publish(MINE)
        before = self.current()
        self.assertEqual(once, self.seat.publish(MINE))
        self.assertEqual(before, self.current())

    def test_the_same_content_from_one_more_host_has_two_origins(self) -> None:
        self.offer(DEBIAN)
        self.assertEqual([OTHER, HERE], self.seat.publish(DEBIAN).origins)
        self.assertEqual([OTHER, HERE], self.seat.image("debian").origins)
        got = self.seat.join("debian")
        self.assertEqual((-1, []), (got.slot, got.parents))

    def test_one_of_two_origins_may_leave(self) -> None:
        self.offer(DEBIAN)
        self.seat.publish(DEBIAN)
        self.seat.leave("debian", needed=True)
        self.assertEqual([OTHER], self.seat.image("debian").origins)
        self.withdraw(DEBIAN)
        self.assertEqual("debian", self.seat.join("debian").image)

    def test_other_content_under_a_name_is_a_conflict(self) -> None:
        self.offer(DEBIAN)
        for content in (base.Image("debian", DEBIAN.size, digest_of("x")), base.Image("debian", 512, DEBIAN.digest)):
            error = self.assertRaises(ImageConflict, self.seat.publish, content)
            self.assertEqual(f"image debian is published with digest {DEBIAN.digest}, size {DEBIAN.size}", str(error))

    def test_who_reads_an_image_cannot_publish_it(self) -> None:
        self.offer(DEBIAN)
        self.seat.join("debian")
        error = self.assertRaises(HostHasNode, self.seat.publish, DEBIAN)
        self.assertEqual("host here reads image debian from the tree: leave first", str(error))

    def test_a_host_that_left_has_no_place_until_it_joins_again_under_a_greater_revision(self) -> None:
        self.offer(DEBIAN)
        joined = self.seat.join("debian")
        self.seat.leave("debian", joined.revision)
        self.assertEqual(["debian"], self.beat("debian", joined.revision).absent)
        self.assertEqual([], self.seat.heartbeat([]).assignments)
        self.assertTrue(self.seat.join("debian").revision > joined.revision)

    def test_a_hosts_name_belongs_to_one_agent_and_calls_of_others_change_nothing(self) -> None:
        self.offer(DEBIAN)
        self.seat_of(ONE).register(ADDRESS)
        joined = self.seat_of(ONE).join("debian")
        for agent in (TWO, ""):
            seat = self.seat_of(agent)
            for call in (
                lambda seat=seat: seat.register(ELSEWHERE),
                lambda seat=seat: seat.heartbeat([], address=ELSEWHERE),
                lambda seat=seat: seat.publish(MINE),
                lambda seat=seat: seat.join("debian"),
                lambda seat=seat: seat.leave("debian", joined.revision),
                lambda seat=seat: seat.report("debian", OTHER),
            ):
                error = self.assertRaises(HostTaken, call)
                self.assertIn(f"another agent runs under the host name here, at {ADDRESS}", str(error))
        self.assertEqual(ADDRESS, self.address())
        self.assertEqual(["debian"], [image.name for image in self.seat.images()])
        self.assertEqual(joined, self.seat_of(ONE).heartbeat([]).assignments[0])

    def test_a_host_has_to_register(self) -> None:
        self.offer(DEBIAN)
        stranger = self.seat_of("", "stranger")
        for call in (
            lambda: stranger.heartbeat([]),
            lambda: stranger.publish(MINE),
            lambda: stranger.join("debian"),
            lambda: stranger.leave("debian"),
            lambda: stranger.report("debian", OTHER),
        ):
            error = self.assertRaises(HostUnknown, call)
            self.assertEqual("host stranger is not registered", str(error))

    def test_a_heartbeat_corrects_the_hosts_address(self) -> None:
        self.seat.heartbeat([])
        self.assertEqual(ADDRESS, self.address())
        self.seat.heartbeat([], address=ELSEWHERE)
        self.assertEqual(ELSEWHERE, self.address())

    def test_a_host_in_another_place_joins_again(self) -> None:
        self.offer(DEBIAN)
        self.seat.register(ADDRESS, "paris/1")
        joined = self.seat.join("debian")
        report = NodeReport(image="debian", revision=joined.revision)
        self.seat.register(ADDRESS)
        self.assertEqual([], self.seat.heartbeat([report], place="paris/1").absent)
        self.assertEqual(["debian"], self.seat.heartbeat([report], place="paris/2").absent)
        self.seat.join("debian")
        self.seat.register(ADDRESS, "rome")
        self.assertEqual(["debian"], self.seat.heartbeat([report]).absent)

    def test_a_parent_in_another_place_is_far(self) -> None:
        self.offer(DEBIAN)
        for place, far in (("", False), ("paris/1", True)):
            self.seat.register(ADDRESS, place)
            self.assertEqual([far], [parent.far for parent in self.seat.join("debian").parents])

    def test_leaving_what_one_does_not_have_is_done(self) -> None:
        self.offer(DEBIAN)
        for image in ("debian", "nothing"):
            self.seat.leave(image)

    def test_the_last_origin_cannot_leave_and_stays(self) -> None:
        self.seat.publish(MINE)
        error = self.assertRaises(OriginNeeded, self.seat.leave, "mine")
        self.assertEqual("host here is the last origin of image mine: remove the image instead", str(error))
        self.assertEqual("mine", self.current().image)

    def test_the_parent_that_an_origin_named_stays_also_when_another_one_knows_none(self) -> None:
        self.assertIsNone(self.seat.publish(MINE).parent)
        self.assertEqual("debian", self.seat.publish(MINE, "debian").parent)  # which nobody has published
        self.seat.publish(MINE)
        self.assertEqual("debian", self.seat.image("mine").parent)
        self.assertEqual(["debian"], [image.parent for image in self.seat.images()])

    def test_a_parent_can_be_removed_and_a_name_that_is_used_again_has_none(self) -> None:
        self.seat.publish(DEBIAN)
        self.seat.publish(MINE, "debian")
        self.seat.remove_image("debian")
        self.assertEqual("debian", self.seat.image("mine").parent)
        self.seat.remove_image("mine")
        self.assertIsNone(self.seat.publish(MINE).parent)

    def test_an_image_that_is_removed_is_gone_with_its_origins_place(self) -> None:
        self.seat.publish(MINE)
        self.seat.remove_image("mine")
        self.assertEqual([], self.seat.images())
        self.assertEqual(["mine"], self.beat("mine", 0).absent)
        self.assertRaises(ImageUnknown, self.seat.remove_image, "mine")

    def test_an_image_that_somebody_reads_cannot_be_removed(self) -> None:
        self.offer(DEBIAN)
        self.seat.join("debian")
        error = self.assertRaises(ImageInUse, self.seat.remove_image, "debian")
        self.assertEqual(("image debian is in use by here", (HERE,)), (str(error), error.hosts))
        self.assertEqual("debian", self.current().image)

    def withdraw(self, image: base.Image) -> None:
        self.seat.remove_image(image.name, when_unused=True)

    def test_what_is_withdrawn_is_listed_and_hosts_that_have_it_keep_their_places(self) -> None:
        self.offer(DEBIAN)
        self.assertFalse(self.seat.image("debian").withdrawn)
        joined = self.seat.join("debian")
        for _ in range(2):
            self.withdraw(DEBIAN)
        self.assertEqual([True], [image.withdrawn for image in self.seat.images()])
        self.assertTrue(self.seat.image("debian").withdrawn)
        again = self.seat.join("debian")
        self.assertEqual([each.host for each in joined.parents], [each.host for each in again.parents])

    def test_no_further_host_gets_what_is_withdrawn_but_for_a_disk_that_moves(self) -> None:
        self.offer(DEBIAN)
        joined = self.seat.join("debian")
        self.withdraw(DEBIAN)
        self.seat.leave("debian", joined.revision)
        error = self.assertRaises(ImageWithdrawn, self.seat.join, "debian")
        self.assertEqual("image debian is withdrawn: only hosts that have it may use it", str(error))
        self.assertEqual("debian", self.seat.join("debian", moving=True).image)

    def test_hosts_and_origins_hear_of_what_is_withdrawn_and_of_nothing_else(self) -> None:
        self.offer(DEBIAN)
        reports = [
            NodeReport(image="debian", revision=self.seat.join("debian").revision),
            NodeReport(image="mine", revision=self.seat.publish(MINE).revision),
            NodeReport(image="nothing", revision=0),
        ]
        self.assertEqual([], self.seat.heartbeat(reports).withdrawn)
        for image in (DEBIAN, MINE):
            self.withdraw(image)
        self.assertEqual(["debian", "mine"], self.seat.heartbeat(reports).withdrawn)
        self.assertEqual([], self.seat.heartbeat([]).withdrawn)

    def test_what_is_published_again_is_not_withdrawn(self) -> None:
        revision = self.seat.publish(MINE).revision
        self.withdraw(MINE)
        self.assertFalse(self.seat.publish(MINE).withdrawn)
        answer = self.seat.heartbeat([NodeReport(image="mine", revision=revision)], [MINE.digest])
        self.assertEqual(([], []), (answer.withdrawn, answer.discard))

    def test_other_content_has_to_wait_until_what_is_withdrawn_is_gone(self) -> None:
        self.seat.publish(MINE)
        self.withdraw(MINE)
        other = base.Image("mine", MINE.size, digest_of("x"))
        error = self.assertRaises(ImageConflict, self.seat.publish, other)
        self.assertIn("image mine is being withdrawn, and not gone yet,", str(error))
        self.seat.remove_image("mine")
        self.assertEqual([], self.seat.heartbeat([], [other.digest]).discard)
        self.assertEqual(other.digest, self.seat.publish(other).digest)

    def test_content_is_kept_until_its_image_is_withdrawn(self) -> None:
        self.offer(DEBIAN)
        kept = [DEBIAN.digest, digest_of("unknown")]
        self.assertEqual([], self.seat.heartbeat([], kept).discard)
        self.withdraw(DEBIAN)
        self.assertEqual([DEBIAN.digest], self.seat.heartbeat([], kept).discard)
        self.seat.remove_image("debian")
        self.assertEqual([DEBIAN.digest], self.seat.heartbeat([], kept).discard)
        self.assertEqual([], self.seat.heartbeat([], []).discard)

    def test_content_that_another_image_has_is_kept(self) -> None:
        for name in ("debian", "alias"):
            self.offer(base.Image(name, DEBIAN.size, DEBIAN.digest))
        self.withdraw(DEBIAN)
        self.assertEqual([], self.seat.heartbeat([], [DEBIAN.digest]).discard)

    def test_what_is_removed_without_being_withdrawn_may_be_kept(self) -> None:
        self.offer(DEBIAN)
        self.seat.remove_image("debian")
        self.assertEqual([], self.seat.heartbeat([], [DEBIAN.digest]).discard)

    def test_a_reported_parent_that_is_the_only_origin_stays_the_last_resort(self) -> None:
        self.offer(DEBIAN)
        before = self.seat.join("debian")
        got = self.seat.report("debian", OTHER)
        self.assertEqual(before.slot, got.slot)
        self.assertEqual([each.host for each in before.parents], [each.host for each in got.parents])
        self.assertTrue(got.revision >= before.revision)

    def test_a_report_of_nobodys_parent_changes_nothing(self) -> None:
        self.offer(DEBIAN)
        before = self.seat.join("debian")
        self.assertEqual(before, self.seat.report("debian", "stranger"))

    def test_a_report_needs_a_place(self) -> None:
        self.offer(DEBIAN)
        error = self.assertRaises(NodeUnknown, self.seat.report, "debian", OTHER)
        self.assertEqual("host here is not in the tree of image debian", str(error))

    def test_images_are_listed_by_name(self) -> None:
        self.offer(DEBIAN)
        self.offer(base.Image("alpine", 512, digest_of("alpine")))
        self.seat.join("debian")
        listed = [(image.name, image.size, image.origins, image.nodes) for image in self.seat.images()]
        self.assertEqual([("alpine", 512, [OTHER], 0), ("debian", DEBIAN.size, [OTHER], 1)], listed)
        self.assertEqual(1, self.seat.image("debian").nodes)

    def test_the_tree_shows_origin_and_host(self) -> None:
        self.offer(DEBIAN)
        joined = self.seat.join("debian")
        tree = self.seat.tree("debian")
        self.assertEqual(("debian", DEBIAN.size, DEBIAN.digest), (tree.image, tree.size, tree.digest))
        self.assertEqual((OTHER, 0, 0), (tree.root.host, tree.root.slot, tree.root.depth))
        (below,) = tree.root.children
        self.assertEqual((HERE, joined.slot, joined.revision, 1), (below.host, below.slot, below.revision, below.depth))

    def test_what_is_not_published_is_unknown(self) -> None:
        for call in (self.seat.join, self.seat.tree, self.seat.image, self.seat.remove_image):
            error = self.assertRaises(ImageUnknown, call, "nothing")
            self.assertEqual("no image nothing is published", str(error))
        self.assertRaises(ImageUnknown, self.seat.report, "nothing", OTHER)
        self.assertRaises(ImageUnknown, self.seat.remove_image, "nothing", when_unused=True)


class TestDouble(ContractTests):
    """The double."""

    __test__ = True

    def setUp(self) -> None:
        super().setUp()
        self.volt = VoltDouble()
        self.volt.register(HERE, ADDRESS)
        self.seat = self.seat_of("")

    def seat_of(self, agent: str, host: str = HERE) -> Seat:
        return Seat(Calls(self.volt), host, agent=agent)

    def offer(self, image: base.Image) -> None:
        self.volt.offer(image.name, image.size, image.digest)

    def address(self) -> str:
        return self.volt.hosts[HERE]


class TestVolt(ContractTests):
    """Volt as agents reach it: over HTTP."""

    __test__ = True

    def setUp(self) -> None:
        super().setUp()
        store = Store(new_database(self))
        self.addCleanup(store.close)
        self.volt = Coordinator(store)
        self.volt.register(HERE, ADDRESS)
        self.volt.register(OTHER, SERVE)
        self.url = serve_app(self, create_app(self.volt))
        self.seat = self.seat_of("")

    def seat_of(self, agent: str, host: str = HERE) -> Seat:
        return Seat(self.enterContext(VoltClient(self.url, agent=agent)), host)

    def offer(self, image: base.Image) -> None:
        self.volt.publish(image.name, image.size, image.digest, OTHER)

    def address(self) -> str:
        return next(host.address for host in self.volt.hosts() if host.name == HERE)
