"""The coordinator on a temporary SQLite database."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from sqlalchemy import Executable, UpdateBase, create_engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session
from testtools import TestCase

from tests.unit.clock import Clock
from tests.unit.logs import Logged
from tests.unit.volt.databases import new_database
from volt.bootsets import GRAIN, MOST_BOOTS
from volt.coordinator import Coordinator
from volt.edgesecrets import ticket
from volt.errors import HostTaken, HostUnknown, ImageInUse, ImageWithdrawn, OriginNeeded
from volt.leases import Policy, steady_clock
from volt.models import Assignment, HeartbeatAnswer, HostState, NodeReport, NodeState, TreeNode
from volt.store import Store

DIGEST = "sha256:" + "a" * 64


class CoordinatorCase(TestCase):
    """A coordinator, and Volt's hosts played by the test."""

    def setUp(self) -> None:
        """An empty store and a clock that stands still."""
        super().setUp()
        self.url = new_database(self)
        self.clock = Clock(1_780_000_000.0)  # some day in 2026
        self.volt = self.start()

    def start(self, policy: Policy | None = None) -> Coordinator:
        store = Store(self.url)
        self.addCleanup(store.close)
        return Coordinator(store, policy or Policy(), self.clock)

    def host(self, *names: str) -> None:
        for name in names:
            self.volt.register(name, f"unix:///run/{name}")

    def publish(self, name: str = "image", origin: str = "origin", digest: str = DIGEST) -> bool:
        self.host(origin)
        return self.volt.publish(name, 1024, digest, origin)[1]

    def grow(self, count: int) -> list[str]:
        """An image with hosts h1, h2, … in slots 1, 2, …, everybody settled."""
        self.publish()
        hosts = [f"h{number}" for number in range(1, count + 1)]
        self.host(*hosts)
        for host in hosts:
            self.volt.join("image", host)
        self.settle("origin", *hosts)
        return hosts

    def settle(self, *hosts: str) -> None:
        for _ in range(3):
            for host in hosts:
                self.obey(host)

    @contextmanager
    def database_away(self) -> Iterator[None]:
        """No transaction succeeds."""
        with create_engine(self.url).connect() as connection:
            connection.execute(text("ALTER TABLE hosts RENAME TO away"))
            connection.commit()
            yield
            connection.execute(text("ALTER TABLE away RENAME TO hosts"))
            connection.commit()

    def obey(self, host: str, image: str = "image") -> HeartbeatAnswer:
        """A host asks for news and confirms them."""
        news = self.beat(host, 0, image)
        newest = max((a.revision for a in news.assignments if a.image == image), default=0)
        return self.beat(host, newest, image)

    def beat(self, host: str, revision: int, image: str = "image") -> HeartbeatAnswer:
        return self.volt.heartbeat(host, [NodeReport(image=image, revision=revision)])

    def parents(self, host: str) -> list[str]:
        return [parent.host for parent in self.current(host).parents]

    def current(self, host: str) -> Assignment:
        return next(a for a in self.beat(host, 0).assignments if a.image == "image")

    def lease_runs_out(self, *but: str) -> None:
        """For all hosts except these."""
        for _ in range(3):
            self.pass_time(4)
            for host in but:
                self.volt.heartbeat(host, [])

    def pass_time(self, seconds: int) -> None:
        """Volt looks for leases that ran out as often as its thread does."""
        for _ in range(seconds):
            self.clock.now += 1
            self.volt.leases.expire()


class Hosts(CoordinatorCase):
    """Registering and removing."""

    def test_another_agent_gets_a_hosts_name_when_the_lease_has_run_out(self) -> None:
        first, second = "1" * 32, "2" * 32
        self.volt.register("h1", "unix:///run/h1", agent=first)
        self.volt.heartbeat("h1", [], agent=first)
        self.pass_time(9)
        self.assertRaises(HostTaken, self.volt.heartbeat, "h1", [], agent=second)
        self.pass_time(2)
        self.volt.heartbeat("h1", [], address="unix:///run/new", agent=second)
        self.assertRaises(HostTaken, self.volt.heartbeat, "h1", [], address="unix:///run/h1", agent=first)
        self.assertEqual(["unix:///run/new"], [host.address for host in self.volt.hosts()])

    def test_a_new_address_reaches_the_children(self) -> None:
        self.grow(3)
        for address, tell in (
            ("iscsi://10.0.0.1:3260", lambda address: self.volt.register("h1", address)),
            ("iscsi://10.0.0.2:3260", lambda address: self.volt.heartbeat("h1", [], address=address)),
        ):
            known = self.current("h3").revision
            tell(address)
            (news,) = self.beat("h3", known).assignments
            self.assertIn(address, [parent.address for parent in news.parents])
        self.assertEqual([], self.beat("h2", self.current("h2").revision).assignments)

    def test_a_removed_host_leaves_all_trees(self) -> None:
        self.grow(3)
        for _ in range(2):
            self.volt.remove_host("h1")
        self.assertEqual(["h2", "h3", "origin"], [host.name for host in self.volt.hosts()])
        self.assertEqual(2, self.volt.image("image").nodes)
        self.assertRaises(HostUnknown, self.volt.heartbeat, "h1", [])

    def test_the_last_origin_cannot_be_removed_and_nothing_changes(self) -> None:
        self.publish()
        self.publish("second")
        self.assertRaises(OriginNeeded, self.volt.remove_host, "origin")
        self.assertEqual(["origin"], [host.name for host in self.volt.hosts()])
        self.assertEqual(["origin"], self.volt.image("image").origins)


class Images(CoordinatorCase):
    """Publishing and withdrawing."""

    def test_revisions_go_on_when_a_name_is_used_again(self) -> None:
        self.grow(2)
        self.volt.leave("image", "h1")
        self.volt.leave("image", "h2")
        before = self.volt.image("image").revision
        self.volt.remove_image("image")
        self.publish(digest="sha256:" + "b" * 64)
        self.assertTrue(self.volt.join("image", "h1").revision > before)

    def test_what_is_listed_are_the_numbers_of_the_trees(self) -> None:
        for image in ("second", "first"):
            for origin in ("z", "a", "m"):
                self.publish(image, origin)
        self.host("h1", "h2", "h3")
        for image, host in (("second", "h1"), ("second", "h2"), ("second", "h3"), ("first", "h2")):
            self.volt.join(image, host)
        self.volt.leave("second", "a")
        self.volt.leave("second", "h1")
        expected = [("first", ["z", "a", "m"], 1), ("second", ["z", "m"], 2)]
        listed = self.volt.images()
        self.assertEqual(expected, [(image.name, image.origins, image.nodes) for image in listed])
        self.assertEqual(listed, [self.volt.image(image.name) for image in listed])
        self.assertEqual([self.volt.tree(image.name).revision for image in listed], [i.revision for i in listed])

    def test_the_fanout_of_an_image_is_that_of_its_publishing(self) -> None:
        self.grow(7)
        before = self.parents("h7")
        self.volt = self.start(Policy(fanout=5))
        self.assertEqual(before, self.parents("h7"))
        self.assertEqual(2, self.volt.tree("image").fanout)


class Withdrawing(CoordinatorCase):
    """An image that goes when nobody needs it."""

    def setUp(self) -> None:
        """An image that one host has."""
        super().setUp()
        self.grow(1)
        self.volt.remove_image("image", when_unused=True)

    def told(self, host: str) -> list[str]:
        return self.beat(host, 0).withdrawn

    def test_hosts_hear_of_it_at_once_and_its_origins_when_no_host_has_it(self) -> None:
        self.assertEqual((["image"], []), (self.told("h1"), self.told("origin")))
        self.volt.leave("image", "h1")
        self.assertEqual(["image"], self.told("origin"))

    def test_a_host_that_comes_back_after_its_lease_ran_out_gets_its_place_and_is_awaited(self) -> None:
        self.lease_runs_out("origin")
        self.assertEqual(0, self.volt.image("image").nodes)
        self.assertEqual([], self.told("origin"), "the host may have VMs that need it")
        self.assertEqual(["image"], self.beat("h1", 0).absent)
        self.assertEqual(["origin"], [parent.host for parent in self.volt.join("image", "h1").parents])
        self.volt.leave("image", "h1")
        self.assertEqual(["image"], self.told("origin"))
        self.assertRaises(ImageWithdrawn, self.volt.join, "image", "h1")

    def test_a_host_that_moves_to_another_place_is_awaited(self) -> None:
        self.volt.register("h1", "unix:///run/h1", "paris")
        self.assertEqual([], self.told("origin"))
        self.assertEqual(["image"], self.beat("h1", 0).absent)
        self.volt.join("image", "h1")

    def test_who_was_evicted_and_says_that_it_has_nothing_of_it_is_not_awaited(self) -> None:
        for forget in (
            lambda: self.volt.leave("image", "h1"),
            lambda: self.volt.remove_host("h1"),
            lambda: self.volt.heartbeat("h1", [NodeReport(image="another", revision=0)]),
        ):
            self.lease_runs_out("origin")
            self.assertEqual([], self.told("origin"))
            forget()
            self.assertEqual(["image"], self.told("origin"))
            self.publish()
            self.host("h1")
            self.volt.join("image", "h1")
            self.volt.remove_image("image", when_unused=True)

    def test_an_origin_that_leaves_and_may_need_it_is_awaited_unless_it_publishes_again(self) -> None:
        self.volt.leave("image", "h1")
        self.publish(origin="second")
        for _ in range(2):
            self.volt.leave("image", "second", needed=True)
            self.assertEqual(("second",), self.assertRaises(ImageInUse, self.volt.remove_image, "image").hosts)
        self.publish(origin="second")
        self.volt.remove_image("image", when_unused=True)
        self.assertEqual(["image"], self.told("second"))
        self.volt.leave("image", "second", needed=True)
        self.assertEqual([], self.told("origin"))
        self.volt.heartbeat("second", [])
        self.assertEqual(["image"], self.told("origin"))

    def test_a_host_that_is_lost_keeps_no_image_from_being_removed(self) -> None:
        self.lease_runs_out("origin")
        self.volt.remove_image("image")
        self.assertEqual([], self.volt.images())
        self.publish()
        self.volt.remove_image("image", when_unused=True)
        self.assertEqual(["image"], self.told("origin"), "the new image does not wait for the host either")

    def test_who_was_evicted_and_cannot_say_whether_it_needs_it_is_awaited(self) -> None:
        self.lease_runs_out("origin")
        self.volt.heartbeat("h1", [], (), ["image"])
        self.assertEqual([], self.told("origin"))
        self.volt.heartbeat("h1", [])
        self.assertEqual(["image"], self.told("origin"))


class Nodes(CoordinatorCase):
    """Joining, leaving, reports."""

    def test_a_reported_host_that_lives_is_offered_after_two_heartbeats(self) -> None:
        self.grow(3)
        told = self.volt.report_dead("image", "h3", "h1")
        self.assertEqual(["h2", "origin"], [parent.host for parent in told.parents])
        self.obey("h1")
        self.assertEqual(["h1", "h2", "origin"], self.parents("h3"))

    def test_a_host_that_has_dropped_its_parents_comes_back_like_a_new_one(self) -> None:
        self.grow(7)
        self.volt.leave("image", "h7", dropped=self.current("h7").revision)
        again = self.volt.join("image", "h7")
        self.assertEqual(NodeState.JOINING, again.state)
        self.assertEqual(["h3", "h4", "h1", "origin"], [parent.host for parent in again.parents])


class BootSets(CoordinatorCase):
    """What VMs read while they boot."""

    def known(self, image: str = "image") -> list[list[int]]:
        return self.volt.boot_set(image).ranges

    def test_it_belongs_to_the_content_and_goes_with_the_last_image_of_that(self) -> None:
        self.publish()
        self.publish("copy")
        self.volt.add_boot_set("image", [[0, GRAIN]])
        self.assertEqual([[0, GRAIN]], self.known("copy"))
        self.volt.remove_image("image")
        self.assertEqual([[0, GRAIN]], self.known("copy"))
        self.volt.remove_image("copy")
        self.publish()
        self.assertEqual([], self.known())

    def test_only_the_first_boots_count(self) -> None:
        self.publish()
        for number in range(MOST_BOOTS + 1):
            self.volt.add_boot_set("image", [[number * GRAIN, (number + 1) * GRAIN]])
        self.assertEqual([[0, MOST_BOOTS * GRAIN]], self.known())


class Heartbeats(CoordinatorCase):
    """Renewing, reporting, hearing news."""

    def test_bytes_and_parent_are_shown_in_the_tree(self) -> None:
        self.grow(1)
        revision = self.current("h1").revision
        self.volt.heartbeat("h1", [NodeReport(image="image", revision=revision, fetched_bytes=4096, parent="origin")])
        (child,) = self.volt.tree("image").root.children
        self.assertEqual(
            (4096, "origin", 1, revision), (child.fetched_bytes, child.parent, child.depth, child.revision)
        )
        for fetched, sent in ((8192, 0), (8192, 512)):
            report = NodeReport(
                image="image", revision=revision, fetched_bytes=fetched, sent_bytes=sent, parent="origin"
            )
            self.volt.heartbeat("h1", [report])
            (child,) = self.volt.tree("image").root.children
            self.assertEqual((fetched, sent), (child.fetched_bytes, child.sent_bytes))

    def test_a_host_that_keeps_all_of_an_image_comes_first_until_it_does_not(self) -> None:
        self.grow(8)
        for whole, wanted in ((True, ["h4", "h3", "h1", "origin"]), (False, ["h3", "h4", "h1", "origin"])):
            report = NodeReport(image="image", revision=self.current("h4").revision, whole=whole)
            self.volt.heartbeat("h4", [report])
            self.assertEqual(wanted, self.parents("h7"))
            self.volt.heartbeat("h4", [report])
            self.settle("h7", "h8")
            self.assertEqual([], self.beat("h7", self.current("h7").revision).assignments)

    def test_the_interval_grows_with_the_number_of_hosts(self) -> None:
        self.host(*(f"h{number}" for number in range(100)))
        answer = self.volt.heartbeat("h1", [])
        self.assertEqual((4.0, 20.0), (answer.interval_s, answer.lease_s))

    def test_revisions_grow_with_time(self) -> None:
        self.publish()
        self.assertTrue(self.current("origin").revision >= self.clock.now * 1000)
        self.clock.now += 1
        self.assertEqual(self.clock.now * 1000, self.volt.join("image", "origin").revision)
        self.assertEqual(self.clock.now * 1000 + 1, self.volt.join("image", "origin").revision)

    def test_a_revision_that_nobody_can_have_changes_nothing(self) -> None:
        self.grow(3)
        self.host("stray")
        nonsense = 2**63 - 2
        before, known = self.volt.tree("image"), self.current("h2").revision
        logged = Logged(self, "volt.coordinator")
        for host in ("h1", "origin", "stray"):
            self.assertEqual([], self.beat(host, nonsense).assignments)
        self.assertEqual(before, self.volt.tree("image"))
        self.assertEqual([], self.beat("h2", known).assignments)
        self.assertEqual(3, len([line for line in logged.lines if str(nonsense) in line]))
        self.assertEqual(NodeState.JOINING, self.volt.join("image", "stray").state)
        self.volt.leave("image", "h1")
        self.settle("origin", "h2", "h3", "stray")
        self.assertEqual({NodeState.READY}, {node.state for node in _nodes(self.volt.tree("image").root)})


class SetBack(CoordinatorCase):
    """The database was set back to an old copy."""

    def setUp(self) -> None:
        """Seven hosts and a copy; then two leave, two join, and all follow; then Volt starts on the copy."""
        super().setUp()
        self.grow(7)
        path = Path(self.url.removeprefix("sqlite:///"))
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("VACUUM INTO ?", (f"{path}-copy",))
        self.clock.now += 60
        for number in (1, 2):
            self.volt.leave("image", f"h{number}")
        self.host("h8", "h9")
        for number in (8, 9):
            self.volt.join("image", f"h{number}")
        self.hosts = ["origin", *(f"h{number}" for number in range(3, 10))]
        self.settle(*self.hosts)
        self.revisions = {host: self.current(host).revision for host in self.hosts}
        self.volt.store.close()
        for name in (f"{path}-wal", f"{path}-shm"):
            Path(name).unlink(missing_ok=True)
        Path(f"{path}-copy").rename(path)
        self.clock.now += 60
        self.logged = Logged(self, "volt.coordinator")
        self.volt = self.start()

    def alarms(self) -> int:
        return sum("was set back" in line for line in self.logged.lines)

    def test_no_host_stays_on_a_list_that_is_lost(self) -> None:
        for host, revision in self.revisions.items():
            if host in ("h8", "h9"):
                self.assertRaises(HostUnknown, self.beat, host, revision)
                self.host(host)
                self.assertEqual(["image"], self.beat(host, revision).absent)
                self.volt.join("image", host)
            else:
                (told,) = self.beat(host, revision).assignments
                self.assertTrue(told.revision > max(self.revisions.values()), host)
        self.assertEqual(1, self.alarms())
        tree = self.volt.tree("image")
        confirmed = {node.host: node.confirmed for node in _nodes(tree.root)}
        self.assertEqual({0}, {confirmed[host] for host in self.hosts if host not in ("h8", "h9")})
        self.settle(*self.hosts, "h1", "h2")
        self.assertEqual({NodeState.READY}, {node.state for node in _nodes(self.volt.tree("image").root)})
        self.assertEqual(["h3", "h4", "h1", "origin"], self.parents("h7"))

    def test_an_image_that_is_not_published_gives_no_alarm(self) -> None:
        newer = int(self.clock() * 1000) + 10**6  # revisions are made from the time; what is far ahead is nobody's
        self.volt.heartbeat("h7", [NodeReport(image="nothing", revision=newer)])
        self.publish("short")
        self.volt.remove_image("short")
        self.volt.heartbeat("h7", [NodeReport(image="short", revision=newer)])
        self.assertEqual(0, self.alarms())


class UnlistedImages(CoordinatorCase):
    """Hosts that have images of another database, or removed ones."""

    def test_they_cost_no_look_at_a_tree(self) -> None:
        self.publish()
        self.host("h1")
        with patch.object(self.volt, "_hear", wraps=self.volt._hear) as hear:
            answer = self.beat("h1", 5, "unlisted")
            self.assertEqual((["unlisted"], []), (answer.absent, hear.mock_calls))
            self.beat("h1", 5)
            hear.assert_called_once_with("h1", "image", 5)
            self.volt.remove_image("image")
            self.host("h2")
            self.beat("h2", 5)
            hear.assert_called_once()


class Leases(CoordinatorCase):
    """Hosts that fall silent."""

    def lost(self) -> set[str]:
        return {host.name for host in self.volt.hosts() if host.state is HostState.LOST}

    def test_a_silent_host_leaves_all_trees(self) -> None:
        self.grow(3)
        self.publish("second")
        self.volt.join("second", "h2")
        self.lease_runs_out("origin", "h1", "h3")
        self.assertEqual({"h2"}, self.lost())
        self.assertEqual([2, 0], [image.nodes for image in self.volt.images()])

    def test_a_lost_host_that_returns_is_taken_back(self) -> None:
        self.grow(3)
        self.lease_runs_out("origin", "h1", "h3")
        self.assertEqual(["image"], self.beat("h2", 5).absent)
        self.assertEqual(HostState.ALIVE, next(host.state for host in self.volt.hosts() if host.name == "h2"))
        self.assertEqual(3, self.volt.join("image", "h2").slot)

    def test_a_lost_origin_keeps_its_place_and_comes_back(self) -> None:
        self.grow(2)
        self.lease_runs_out("h1", "h2")
        self.assertEqual(NodeState.LOST, self.volt.tree("image").root.state)
        self.assertEqual(["origin"], self.parents("h1"))
        self.obey("origin")
        self.assertEqual(NodeState.READY, self.volt.tree("image").root.state)

    def hosts_in_state(self, state: HostState) -> int:
        return sum(host.state is state for host in self.volt.hosts())

    def test_a_host_keeps_the_lease_that_it_was_told_when_most_others_die(self) -> None:
        hosts = [f"h{number}" for number in range(200)]
        self.host(*hosts)
        lease = {self.volt.heartbeat(host, []).lease_s for host in hosts}
        self.assertEqual({40.0}, lease)
        self.pass_time(10)
        for host in hosts[:20]:  # the last that is heard of the others was 10 s ago
            self.volt.heartbeat(host, [])
        self.pass_time(30)
        self.assertEqual(200, self.hosts_in_state(HostState.ALIVE))
        self.pass_time(1)
        self.assertEqual(180, self.hosts_in_state(HostState.LOST))
        self.pass_time(9)
        self.assertEqual(20, self.hosts_in_state(HostState.ALIVE), "they have what they were told")
        self.pass_time(1)
        self.assertEqual(0, self.hosts_in_state(HostState.ALIVE))

    def test_a_host_that_calls_while_silent_ones_are_evicted_stays(self) -> None:
        self.grow(1)
        self.pass_time(10)
        was_away, silent = self.volt.leases._was_away, ["h1"]

        def call_meanwhile() -> bool:
            for host in [silent.pop() for _ in silent]:
                self.volt.heartbeat(host, [])
            return was_away()

        self.patch(self.volt.leases, "_was_away", call_meanwhile)
        self.pass_time(1)
        self.assertEqual(({"origin"}, 1), (self.lost(), self.volt.image("image").nodes))

    def test_a_restart_evicts_nobody(self) -> None:
        self.grow(3)
        before = self.volt.tree("image")
        self.clock.now += 3600
        self.volt = self.start()
        self.pass_time(10)
        self.assertEqual(before, self.volt.tree("image"))
        self.pass_time(1)
        self.assertEqual(0, self.volt.image("image").nodes)

    def test_a_full_disk_evicts_nobody_before_all_had_a_lease_since(self) -> None:
        hosts = self.grow(3)
        with patch.object(Session, "execute", self.refuse_writes(Session.execute)):
            for _ in range(9):
                self.clock.now += 1
                self.assertRaises(OperationalError, self.volt.leases.expire)
            self.clock.now += 1.5
        self.volt.leases.expire()
        self.assertEqual(len(hosts) + 1, self.hosts_in_state(HostState.ALIVE))

    @staticmethod
    def refuse_writes(execute: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(session: Session, statement: Executable, *more: Any) -> Any:
            if isinstance(statement, UpdateBase):
                raise OperationalError("UPDATE", {}, Exception("database or disk is full"))
            return execute(session, statement, *more)

        return refuse

    def test_a_store_that_was_away_evicts_nobody_before_all_had_a_lease_since(self) -> None:
        hosts = self.grow(10)
        self.pass_time(9)
        with self.database_away():
            self.clock.now += 1
            self.assertRaises(OperationalError, self.volt.leases.expire)
        self.pass_time(10)
        self.assertEqual(10, self.volt.image("image").nodes)
        for host in hosts[1:]:
            self.volt.heartbeat(host, [])
        self.pass_time(2)
        self.assertEqual(9, self.volt.image("image").nodes, "who is dead is evicted then")

    def test_a_volt_that_stood_still_evicts_nobody_before_all_had_a_lease_since(self) -> None:
        self.grow(3)
        self.clock.now += 12
        self.volt.leases.expire()
        self.pass_time(10)
        self.assertEqual(3, self.volt.image("image").nodes)
        self.pass_time(1)
        self.assertEqual(0, self.volt.image("image").nodes)

    def test_the_clock_starts_at_the_time_of_day_and_only_goes_on(self) -> None:
        times_of_day, steady = iter([1_000_000_000.0, 0.0, 0.0]), iter([100.0, 100.0, 107.0])  # it is set back to 0
        now = steady_clock(lambda: next(times_of_day), lambda: next(steady))
        self.assertEqual((1_000_000_000.0, 1_000_000_007.0), (now(), now()))


class Trees(CoordinatorCase):
    """The nested tree."""

    def test_further_origins_stand_beside_the_root(self) -> None:
        self.grow(1)
        self.publish(origin="second")
        tree = self.volt.tree("image")
        self.assertEqual(
            ("origin", [("second", -1, [])]), (tree.root.host, [(o.host, o.slot, o.children) for o in tree.origins])
        )


class Secrets(CoordinatorCase):
    """What the two hosts of an edge know, and nobody else."""

    def told(self, *hosts: str, image: str = "image") -> dict[tuple[str, str, str], set[str]]:
        """The secrets by parent, child and the host that is told of them."""
        told: dict[tuple[str, str, str], set[str]] = {}
        for host in hosts:
            for assignment in self.beat(host, 0, image).assignments:
                for parent in assignment.parents:
                    told.setdefault((parent.host, host, host), set()).add(parent.secret)
                for child in assignment.children:
                    told.setdefault((host, child.host, host), set()).add(child.secret)
        return told

    def test_both_hosts_of_every_edge_are_told_the_same_and_no_others_are(self) -> None:
        told = self.told("origin", *self.grow(12))
        edges = {(parent, child) for parent, child, _ in told}
        self.assertTrue(len(edges) > 12, "alternates are edges as well")
        for parent, child in edges:
            self.assertEqual(told[parent, child, parent], told[parent, child, child], f"{parent} and {child}")
        self.assertEqual(len(edges), len(set().union(*told.values())))

    def test_a_parent_knows_a_child_by_its_ticket_until_the_child_leaves(self) -> None:
        hosts = self.grow(12)
        heard = {host: self.current(host) for host in ("origin", *hosts)}
        for name in ("late1", "late2", "late3", "late4"):
            self.host(name)
            heard[name] = child = self.volt.join("image", name)
            for parent in child.parents:
                self.assertEqual(parent.ticket, ticket(heard[parent.host].serving_key, name, child.revision))
                for known in (heard[parent.host], self.current(parent.host)):
                    self.assertTrue(admits(known, name, child.revision), "before and after the parent hears of it")
        self.volt.leave("image", "late4")
        for parent in heard["late4"].parents:
            self.assertFalse(admits(self.current(parent.host), "late4", heard["late4"].revision))

    def test_they_are_not_in_what_an_assignment_looks_like(self) -> None:
        self.grow(3)
        assignment = self.volt.join("image", "h1")
        secrets = [p.secret for p in assignment.parents] + [c.secret for c in assignment.children]
        secrets += [assignment.serving_key, *(p.ticket for p in assignment.parents)]
        self.assertTrue(assignment.parents)
        self.assertTrue(assignment.children)
        for shown in (assignment, assignment.parents[0], assignment.children[0], self.beat("h1", 0)):
            self.assertEqual([], [secret for secret in secrets if secret in f"{shown!r} {shown}"])


def admits(known: Assignment, child: str, revision: int) -> bool:
    """Whether a parent that has heard this assignment lets in a child with a ticket of this revision."""
    return child in [each.host for each in known.children] or revision > known.revision


def _nodes(root: TreeNode) -> list[TreeNode]:
    return [root, *(node for child in root.children for node in _nodes(child))]
