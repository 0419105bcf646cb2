"""Deployments, with Volt's hosts played by the test."""

from __future__ import annotations

from unittest import mock

from tests.doubles.servers import serve_app
from tests.unit.volt.test_coordinator import CoordinatorCase
from volt import legs
from volt.api import create_app
from volt.client import NodeReport, VoltClient
from volt.deploymodels import Deployment, DeploymentRequest, TransferReport, TransferState, TransferTask, TransferTerms
from volt.errors import BadRequest, DeploymentUnknown, HostUnknown, ImageUnknown, ImageWithdrawn
from volt.legs import OFFERED_WITHIN, SHORTEST_WAIT
from volt.models import ImageTree
from volt.planning import END, LONGEST_CHAIN

READY, FILLING, WHOLE, FAILED = (TransferState.READY, TransferState.FILLING, TransferState.WHOLE, TransferState.FAILED)


class DeploymentCase(CoordinatorCase):
    """An image at an origin, and hosts."""

    def setUp(self) -> None:
        super().setUp()
        self.publish()
        self.host("h1", "h2", "h3")

    def deploy(self, *hosts: str, image: str = "image", **more: object) -> Deployment:
        wanted = DeploymentRequest.model_validate({"image": image, "hosts": list(hosts) or None, **more})
        return self.volt.deployments.create(wanted)

    def tell(self, host: str, number: int = 1, state: TransferState = FILLING, **more: object) -> list[TransferTask]:
        """What a host says, and is told then."""
        report = TransferReport.model_validate({"deployment": number, "state": state, **more})
        return self.volt.heartbeat(host, [], transfers=[report]).transfers

    def tasks(self, host: str) -> list[TransferTask]:
        return self.volt.heartbeat(host, []).transfers

    def states(self, number: int = 1) -> dict[str, str]:
        return {host.host: host.state for host in self.volt.deployments.one(number).hosts}


class DeploymentsTest(DeploymentCase):
    def test_each_host_is_told_what_to_do_until_it_has_all_of_it(self) -> None:
        made = self.deploy("h1", "h2", keep_s=100, limit=1000)
        self.assertEqual(
            (1, "image", "auto", "tree", False), (made.id, made.image, made.asked, made.method, made.ended)
        )
        [task] = self.tasks("h1")
        self.assertEqual((1000, 1000), (made.limit, task.limit))
        self.assertEqual(
            (1, "image", False, self.clock() + 100), (task.deployment, task.image, task.go, task.keep_until)
        )
        self.assertEqual([], self.tasks("h3"))
        self.tell("h1", state=READY)
        self.tell("h2", state=READY)
        self.assertEqual([True], [task.go for task in self.tell("h1", done=5, total=10)])
        [shown, _] = self.volt.deployments.one(1).hosts
        self.assertEqual((FILLING, 5, 10, None), (shown.state, shown.done, shown.total, shown.seconds))
        self.pass_time(3)
        self.assertEqual([], self.tell("h1", state=WHOLE))
        self.assertEqual({"h1": "whole", "h2": "ready"}, self.states())
        self.assertFalse(self.volt.deployments.one(1).ended)
        self.assertEqual([], self.tell("h2", state=FAILED, error="no room"))
        ended = self.volt.deployments.one(1)
        self.assertEqual((True, 3.0, "no room"), (ended.ended, ended.seconds, ended.hosts[1].error))

    def test_hosts_of_a_tree_read_when_all_are_in_their_places_or_have_been_waited_for(self) -> None:
        self.deploy("h1", "h2", "h3")
        for host in ("h1", "h2"):
            self.volt.join("image", host)
            self.tell(host, state=READY)
        self.assertEqual([False], [task.go for task in self.tasks("h1")])
        self.tell("h3", state=FAILED)
        self.assertEqual([False], [task.go for task in self.tell("h1", state=READY)])  # not in its place yet
        revisions = {host: self.volt.join("image", host).revision for host in ("h1", "h2")}
        for host in ("h1", "h2", "h1", "h2", "h1"):
            report = TransferReport(deployment=1, state=READY)
            nodes = [NodeReport(image="image", revision=revisions[host])]
            answer = self.volt.heartbeat(host, nodes, transfers=[report])
            revisions[host] = max([revisions[host], *(each.revision for each in answer.assignments)])
        self.assertEqual([True], [task.go for task in self.tasks("h1")])
        self.deploy("h1", "h2")
        self.pass_time(int(SHORTEST_WAIT))
        self.tell("h1", 2, state=READY)
        self.assertEqual([True], [task.go for task in self.tasks("h1") if task.deployment == 2])

    def test_hosts_are_named_or_those_of_a_place_or_all(self) -> None:
        for host, place in (("h1", "paris/1"), ("h2", "paris"), ("h3", "parish/1")):
            self.volt.register(host, f"unix:///run/{host}", place)
        self.deploy(place="paris")
        self.deploy(place="paris/1")
        self.deploy(everywhere=True)
        self.assertEqual([["h1", "h2"], ["h1"], ["h1", "h2", "h3", "origin"]], [[*self.states(n)] for n in (1, 2, 3)])
        self.assertEqual("whole", self.states(3)["origin"])
        self.lease_runs_out("h1", "origin")
        self.volt.leases.expire()
        self.assertEqual({"h1", "origin"}, {host.host for host in self.deploy(everywhere=True, limit=1000).hosts})

    def test_what_cannot_be_is_refused_and_nothing_is_planned(self) -> None:
        for error, more in (
            (BadRequest, {}),
            (BadRequest, {"place": "rome"}),
            (BadRequest, {"hosts": ["h1"], "everywhere": True}),
            (BadRequest, {"hosts": ["h1"], "method": "pigeon"}),
            (HostUnknown, {"hosts": ["h1", "h9"]}),
            (ImageUnknown, {"hosts": ["h1"], "image": "none"}),
        ):
            self.assertRaises(error, self.deploy, **more)
        self.volt.remove_image("image", when_unused=True)
        self.assertRaises(ImageWithdrawn, self.deploy, "h1")
        for call in (self.volt.deployments.one, self.volt.deployments.cancel):
            self.assertRaises(DeploymentUnknown, call, 1)
        self.assertEqual([], self.volt.deployments.all())

    def test_a_host_that_dies_is_not_waited_for_and_one_that_is_dead_is_not_begun_with(self) -> None:
        self.deploy("h1", "h2")
        self.tell("h1", state=WHOLE)
        self.lease_runs_out("h1", "origin")
        self.volt.leases.expire()
        self.assertEqual({"h1": "whole", "h2": "lost"}, self.states())
        self.assertTrue(self.volt.deployments.one(1).ended)
        self.assertEqual([], self.tasks("h2"))
        self.lease_runs_out("h1", "origin")
        self.volt.leases.expire()
        self.assertTrue(self.deploy("h3").ended)

    def test_a_host_that_is_removed_is_not_waited_for(self) -> None:
        self.deploy("h1")
        self.volt.remove_host("h1")
        self.assertEqual(({"h1": "lost"}, True), (self.states(), self.volt.deployments.one(1).ended))

    def test_a_state_of_a_later_version_ends_nothing(self) -> None:
        self.deploy("h1")
        self.assertEqual([1], [task.deployment for task in self.tell("h1", state=TransferState("later"))])
        self.assertEqual({"h1": "filling"}, self.states())

    def test_a_cancelled_one_is_told_to_hosts_that_have_not_ended(self) -> None:
        self.deploy("h1", "h2")
        self.tell("h1", state=WHOLE)
        self.volt.deployments.cancel(1)
        self.volt.deployments.cancel(1)
        self.assertEqual([], self.tasks("h1"))
        self.assertEqual([True], [task.cancelled for task in self.tell("h2")])
        self.assertEqual({"h1": "whole", "h2": "cancelled"}, self.states())
        self.assertEqual([], self.tell("h2", state=TransferState.CANCELLED))
        shown = self.volt.deployments.one(1)
        self.assertEqual((True, True), (shown.ended, shown.cancelled))

    def test_by_unicast_hosts_have_turns_and_read_from_an_origin_that_lives(self) -> None:
        self.publish(origin="second")
        self.lease_runs_out("h1", "h2", "h3", "second")
        self.volt.leases.expire()
        self.deploy("h1", "h2", "h3", method="unicast", parallel=2)
        self.assertEqual([(False, "second")], [(task.go, task.source) for task in self.tasks("h1")])
        self.assertEqual([True, True, False], [self.tell(host, state=READY)[0].go for host in ("h3", "h2", "h1")])
        self.tell("h3")
        self.assertFalse(self.tell("h1", state=READY)[0].go)
        self.tell("h2", state=WHOLE)
        self.assertTrue(self.tasks("h1")[0].go)

    def test_by_unicast_nobody_waits_for_a_host_that_does_not_get_ready(self) -> None:
        self.deploy("h1", "h2", method="unicast")
        self.assertEqual([False], [task.go for task in self.tell("h1", state=TransferState.WAITING)])
        self.assertEqual([True], [task.go for task in self.tell("h2", state=READY)])

    def test_the_same_again_goes_on_unless_the_image_is_to_stay_longer(self) -> None:
        first = self.deploy("h1", "h2", keep_s=100)
        self.pass_time(5)
        again = self.deploy("h2", "h1", keep_s=100)
        self.assertEqual((first.id, 100), (again.id, again.keep_s))
        self.assertEqual(2, self.deploy("h1", "h2", keep_s=100, limit=1000).id)
        self.assertEqual(3, self.deploy("h1", "h2", keep_s=101).id)

    def test_a_volt_that_was_killed_before_it_ended_one_ends_it(self) -> None:
        self.deploy("h1")
        with mock.patch.object(self.volt.deployments, "settle"):
            self.tell("h1", state=WHOLE)
        self.assertFalse(self.volt.deployments.one(1).ended)
        self.volt.leases.expire()
        self.assertTrue(self.volt.deployments.one(1).ended)

    def test_an_agent_of_an_earlier_release_is_not_waited_for(self) -> None:
        self.deploy("h1", "h2")
        self.tell("h2", state=WHOLE)
        self.assertEqual([], self.volt.heartbeat("h1", [], transfers=None).transfers)
        made = self.volt.deployments.one(1)
        self.assertEqual((True, "failed"), (made.ended, made.hosts[0].state))
        self.assertIn("earlier release", made.hosts[0].error)

    def test_hosts_that_are_under_way_report_often_however_many_there_are(self) -> None:
        self.deploy("h1")
        self.assertEqual([0.5, 2.0], [self.volt.heartbeat(host, []).interval_s for host in ("h1", "h2")])
        self.tell("h1", state=FILLING)
        self.assertEqual(1.0, self.volt.heartbeat("h1", []).interval_s)
        many = [f"n{number}" for number in range(100)]
        self.host(*many)
        self.deploy(*many)
        self.assertEqual(101 / 50, self.volt.heartbeat("h1", []).interval_s)

    def test_the_newest_comes_first(self) -> None:
        self.deploy("h1")
        self.deploy("h2", method="lazy")
        self.assertEqual([(2, "lazy"), (1, "tree")], [(one.id, one.method) for one in self.volt.deployments.all()])


class WholeTest(DeploymentCase):
    def test_hosts_tell_of_which_images_they_have_all(self) -> None:
        self.publish("other", "second", "id:other")
        self.volt.join("image", "h1")
        self.volt.join("image", "h2")
        self.volt.heartbeat("h1", [NodeReport(image="image", revision=0, whole=True)])
        whole = {host.name: host.whole for host in self.volt.hosts()}
        self.assertEqual({"h1": ["image"], "h2": [], "h3": [], "origin": ["image"], "second": ["other"]}, whole)


class ShapeTest(DeploymentCase):
    """The tree of an image while it is deployed."""

    def setUp(self) -> None:
        super().setUp()
        self.volt.publish("large", 1 << 30, "id:large", "origin")

    def join(self, *hosts: str) -> None:
        for host in hosts:
            self.volt.join("large", host)

    def fanout(self) -> int:
        return self.volt.tree("large").fanout

    def test_it_is_a_chain_until_the_deployment_ends(self) -> None:
        self.deploy("h1", "h2", "h3", image="large")
        self.join("h1", "h2", "h3")
        [first] = self.volt.tree("large").root.children
        self.assertEqual((1, "h1", ["h2"]), (self.fanout(), first.host, [node.host for node in first.children]))
        for host in ("h1", "h2", "h3"):
            self.assertEqual(1, self.fanout())
            self.tell(host, state=WHOLE)
        self.assertEqual(2, self.fanout())
        self.assertEqual({"h1", "h2"}, {node.host for node in self.volt.tree("large").root.children})

    def test_it_is_none_as_soon_as_another_host_joins(self) -> None:
        self.deploy("h1", "h2", image="large")
        self.join("h1", "h2")
        self.assertEqual(1, self.fanout())
        self.join("h3")
        self.assertEqual(2, self.fanout())

    def test_it_is_none_for_hosts_that_have_a_part_of_the_image(self) -> None:
        self.join("h3")
        self.deploy("h1", image="large")
        self.assertEqual(2, self.fanout())
        self.volt.heartbeat("h3", [NodeReport(image="large", revision=0, whole=True)])
        self.deploy("h2", image="large")
        self.assertEqual(1, self.fanout())
        self.volt.deployments.cancel(2)
        self.assertEqual(1, self.fanout())  # the first one needs it
        self.volt.deployments.cancel(1)
        self.assertEqual(2, self.fanout())

    def test_it_is_none_of_more_hosts_than_a_tree_can_be_told_with(self) -> None:
        for count, fanout in ((LONGEST_CHAIN, 1), (LONGEST_CHAIN + 1, 2)):
            hosts = [f"n{number}" for number in range(count)]
            self.host(*hosts)
            self.deploy(*hosts, image="large")
            self.join(*hosts)
            tree = self.volt.tree("large")
            self.assertEqual(fanout, tree.fanout)
            self.assertEqual(tree, ImageTree.model_validate_json(tree.model_dump_json()))
            self.volt.deployments.cancel(1)

    def test_small_images_and_other_methods_leave_it(self) -> None:
        self.deploy("h1", "h2", "h3")
        self.deploy("h1", image="large", method="lazy")
        self.assertEqual([2, 2], [self.volt.tree(image).fanout for image in ("image", "large")])


class LegsCase(DeploymentCase):
    """An image whose digest proves it, and hosts with methods."""

    def setUp(self) -> None:
        super().setUp()
        self.methods: dict[str, list[str]] = {}
        self.publish("proven", "origin", "blake3-64k:1")

    def can(self, method: str, *hosts: str) -> None:
        for host in hosts:
            self.methods.setdefault(host, []).append(method)
            self.hear(host)

    def hear(self, host: str, *reports: TransferReport) -> list[TransferTask]:
        return self.volt.heartbeat(host, [], transfers=reports, methods=self.methods.get(host, [])).transfers

    def say(self, host: str, state: TransferState, **more: object) -> list[TransferTask]:
        """What a host says of the first deployment, and what it is told then."""
        told = {"deployment": 1, "method": self.volt.deployments.one(1).method, "state": state, **more}
        return self.hear(host, TransferReport.model_validate(told))

    def ready(self, host: str, attempt: str = "1", **more: object) -> list[TransferTask]:
        told = {"attempt": attempt, "contact": f"contact of {host}", "link": 10e6, **more}
        return self.say(host, READY, **told)

    def terms(self, host: str) -> TransferTerms:
        """With what a host begins."""
        [task] = self.hear(host)
        assert task.terms is not None
        return task.terms

    def offer(self, host: str = "origin") -> list[TransferTask]:
        return self.ready(host, sends=True)

    def told(self, host: str) -> list[tuple[str, bool]]:
        return [(task.method, task.go) for task in self.hear(host)]

    def udpcast(self, *hosts: str, method: str = "udpcast", **more: object) -> Deployment:
        return self.deploy(*hosts, image="proven", method=method, **more)


class LegsTest(LegsCase):
    """By methods by which hosts begin together."""

    def setUp(self) -> None:
        super().setUp()
        self.can("udpcast", "origin", "h1", "h2", "h3")

    def all_ready(self, number: int = 1, **links: float | None) -> None:
        """The sender and these hosts get ready, and say what their links carry."""
        for host, link in {"origin": None, **links}.items():
            told = {"deployment": number, "method": "udpcast", "state": READY, "attempt": "1", "contact": "c"}
            self.hear(host, TransferReport.model_validate({**told, "link": link, "sends": host == "origin"}))

    def test_a_multicast_sends_what_links_carry_and_no_more_than_is_allowed(self) -> None:
        for number, (limit, pace) in enumerate(((None, 9_500_000), (1000, 1000), (10**9, 9_500_000)), start=1):
            self.udpcast("h1", "h2", "h3", limit=limit)
            self.all_ready(number, h1=10e6, h2=9e6, h3=99e6)
            told = [task for host in ("origin", "h1") for task in self.hear(host) if task.deployment == number]
            self.assertEqual([pace] * 2, [task.limit for task in told])
            self.volt.deployments.cancel(number)

    def test_who_would_hold_a_multicast_up_takes_the_tree(self) -> None:
        self.udpcast("h1", "h2", "h3")
        self.all_ready(h1=10e6, h2=4.9e6, h3=10e6)
        self.assertEqual([("tree", True), ("udpcast", True)], [self.told(host)[0] for host in ("h2", "h3")])

    def test_nobody_holds_a_multicast_up_that_is_slow_enough_for_all(self) -> None:
        self.udpcast("h1", "h2", "h3", limit=1_000_000)
        self.all_ready(h1=10e6, h2=1e6, h3=10e6)
        self.assertEqual(("udpcast", True), self.told("h2")[0])

    def test_who_hears_no_multicast_is_waited_for_a_while_and_takes_the_tree(self) -> None:
        self.udpcast("h1", "h2", "h3")
        self.all_ready(h1=10e6, h2=0.0, h3=10e6)
        self.assertEqual(("udpcast", False), self.told("h1")[0])
        self.pass_time(2)
        self.all_ready(h1=10e6)
        self.assertEqual([("udpcast", True), ("tree", True)], [self.told(host)[0] for host in ("h1", "h2")])
        [leg] = self.volt.deployments.one(1).legs
        self.assertEqual(2, leg.receivers)

    def test_many_receivers_have_time_to_tell_what_they_hear(self) -> None:
        self.patch(legs, "BEATS_PER_SECOND", 1)
        self.udpcast("h1", "h2", "h3")
        self.all_ready(h1=10e6, h2=0.0, h3=10e6)
        self.pass_time(5)
        self.all_ready(h1=10e6)
        self.assertEqual(("udpcast", False), self.told("h1")[0])

    def test_a_multicast_begins_when_all_have_heard_the_sender(self) -> None:
        self.udpcast("h1", "h2")
        self.all_ready(h1=None, h2=0.0)
        self.assertEqual([("udpcast", False)] * 2, [self.told(host)[0] for host in ("h1", "h2")])
        self.all_ready(h1=10e6, h2=10e6)
        self.assertEqual([("udpcast", True)] * 2, [self.told(host)[0] for host in ("h1", "h2")])

    def test_a_host_that_does_not_know_its_link_yet_is_waited_for(self) -> None:
        self.udpcast("h1", "h2")
        self.all_ready(h1=None, h2=10e6)
        self.pass_time(9)
        self.all_ready(h1=None)
        self.assertEqual([("udpcast", False)] * 2, [self.told(host)[0] for host in ("h1", "h2")])

    def test_the_hosts_of_a_rack_are_together_in_the_list_of_receivers(self) -> None:
        for host, rack in (("h1", "b"), ("h2", "a"), ("h3", "b")):
            self.volt.register(host, f"unix:///run/{host}", f"/{rack}")
        self.udpcast("h1", "h2", "h3")
        self.offer()
        for host in ("h1", "h2", "h3"):
            self.ready(host)
        self.assertEqual([f"contact of {host}" for host in ("h2", "h1", "h3")], self.terms("origin").receivers)

    def test_all_begin_when_all_are_ready_with_what_any_of_them_lacks(self) -> None:
        self.udpcast("h1", "h2", limit=1000)
        self.assertEqual([[("udpcast", False)]] * 3, [self.told(host) for host in ("origin", "h1", "h2")])
        self.assertEqual([True, False], [self.hear(host)[0].sends for host in ("origin", "h1")])
        self.ready("h1", lacks=[[0, 10], [30, 40]])
        self.offer()
        self.assertEqual([("udpcast", False)], self.told("h1"))
        self.ready("h2", lacks=[[5, 20]])
        terms = self.terms("origin")
        self.assertEqual(([[0, 20], [30, 40]], "contact of origin"), (terms.ranges, terms.sender))
        self.assertEqual((["contact of h1", "contact of h2"], terms), (terms.receivers, self.terms("h2")))
        self.assertEqual([(True, 1000)], [(task.go, task.limit) for task in self.hear("h2")])
        self.assertEqual([None], [task.terms for task in self.say("h2", FILLING, attempt="1")])  # it knows them
        self.say("origin", FILLING, sends=True, attempt="1", sent=5)
        for host in ("h1", "h2"):
            self.assertEqual([], self.say(host, WHOLE, attempt="1"))
        shown = self.volt.deployments.one(1)
        self.assertEqual(
            (True, [("origin", 5, True)]), (shown.ended, [(x.source, x.sent, x.ended) for x in shown.legs])
        )
        self.assertEqual([], self.hear("origin"))

    def test_who_is_not_ready_in_time_takes_the_tree(self) -> None:
        self.udpcast("h1", "h2")
        self.offer()
        self.ready("h1")
        self.pass_time(int(SHORTEST_WAIT))
        self.ready("h1")
        self.assertEqual([[("udpcast", True)], [("tree", True)]], [self.told(host) for host in ("h1", "h2")])

    def test_who_cannot_get_ready_is_not_waited_for(self) -> None:
        self.udpcast("h1", "h2")
        self.offer()
        self.say("h1", READY, attempt="1", error="no address")
        self.ready("h2")
        self.assertEqual([[("tree", True)], [("udpcast", True)]], [self.told(host) for host in ("h1", "h2")])

    def test_who_is_one_too_many_takes_the_tree(self) -> None:
        self.patch(legs, "MOST_RECEIVERS", 1)
        self.udpcast("h1", "h2")
        self.offer()
        self.ready("h1")
        self.ready("h2")
        self.assertEqual([[("udpcast", True)], [("tree", True)]], [self.told(host) for host in ("h1", "h2")])
        self.assertEqual(["contact of h1"], self.terms("origin").receivers)

    def test_a_sender_that_does_not_get_ready_is_given_up(self) -> None:
        self.udpcast("h1", "h2")
        self.wait_ready("h1", "h2", beat="origin")
        self.assertEqual([[("tree", True)], [("tree", True)], []], [self.told(host) for host in ("h1", "h2", "origin")])

    def wait_ready(self, *hosts: str, beat: str) -> None:
        """Hosts say for longer than a sender may take that they are ready, and another one only that it lives."""
        for _ in range(int(OFFERED_WITHIN) + 1):
            self.pass_time(1)
            self.hear(beat)
            for host in hosts:
                self.ready(host)

    def test_what_is_to_be_encrypted_is_so_for_all(self) -> None:
        self.can("uftp", "origin", "h1")
        self.udpcast("h1", "h2", method="uftp", encrypt=True)
        self.assertEqual([[True], [True]], [[task.encrypt for task in self.hear(host)] for host in ("origin", "h1")])

    def two_sites(self) -> None:
        """h2 is to send to h3, in a site where nobody has the image."""
        for host, place in {"origin": "here/1", "h1": "here/2", "h2": "there/1", "h3": "there/2"}.items():
            self.volt.register(host, f"unix:///run/{host}", place)
        self.udpcast("h1", "h2", "h3")

    def test_a_site_waits_for_its_first_host_as_long_as_that_gets_the_image(self) -> None:
        self.two_sites()
        self.say("h2", FILLING, method="tree", done=7)  # by which it gets the image
        self.assertEqual(7, self.volt.deployments.one(1).hosts[1].done)
        self.wait_ready("h3", "h1", "origin", beat="h2")
        self.assertEqual([("udpcast", False)], self.told("h3"))
        self.say("h2", WHOLE)
        self.offer("h2")
        self.assertEqual([("udpcast", True)], self.told("h3"))

    def test_a_site_does_not_wait_for_a_first_host_that_does_not_even_begin(self) -> None:
        self.two_sites()
        self.wait_ready("h3", "h1", "origin", beat="h2")
        self.assertEqual([("tree", True)], self.told("h3"))

    def test_hosts_without_the_method_take_the_tree(self) -> None:
        self.methods["h2"] = []
        self.hear("h2")
        self.udpcast("h1", "h2")
        self.assertEqual([[("udpcast", False)], [("tree", True)]], [self.told(host) for host in ("h1", "h2")])

    def test_who_starts_again_after_all_have_begun_takes_the_tree(self) -> None:
        self.udpcast("h1", "h2")
        self.ready("h1")
        self.ready("h1", "2")  # it may as often as it likes before
        self.ready("h2")
        self.offer()
        self.assertEqual(("2", True), (self.terms("h1").attempt, self.hear("h1")[0].go))
        self.assertEqual([("tree", True)], [(task.method, task.go) for task in self.ready("h1", "3")])
        self.assertEqual([("udpcast", True)], self.told("h2"))
        self.ready("origin", "2", sends=True)
        self.assertEqual([[("tree", True)], []], [self.told(host) for host in ("h2", "origin")])

    def begin(self) -> None:
        """A sender and a receiver have begun."""
        self.udpcast("h1")
        self.offer()
        self.ready("h1")
        self.assertEqual([("udpcast", True)], self.told("h1"))

    def test_what_a_sender_has_sent_still_arrives(self) -> None:
        self.begin()
        self.assertEqual([], self.say("origin", WHOLE, sends=True, attempt="1"))
        self.assertEqual([("udpcast", True)], self.told("h1"))

    def test_a_sender_that_fails_ends_it_for_all(self) -> None:
        self.begin()
        self.assertEqual([], self.say("origin", FAILED, sends=True, attempt="1"))
        self.assertEqual([("tree", True)], self.told("h1"))

    def test_a_lost_sender_is_replaced_before_and_not_afterwards(self) -> None:
        self.udpcast("h1", "h2", "h3")
        for host in ("h1", "h2", "h3"):
            self.ready(host)
        self.lease_runs_out("h1", "h2", "h3")
        self.volt.leases.expire()
        self.assertEqual([("tree", True)], self.told("h1"))  # until it has all of the image
        self.say("h1", WHOLE)
        self.assertEqual([True], [task.sends for task in self.hear("h1")])
        self.offer("h1")
        self.assertEqual([("udpcast", True)], self.told("h2"))
        self.lease_runs_out("h2", "h3")
        self.volt.leases.expire()
        self.assertEqual([[("tree", True)]] * 2, [self.told(host) for host in ("h2", "h3")])

    def test_each_site_has_a_sender_of_its_own(self) -> None:
        self.host("h4")
        self.can("udpcast", "h4")
        places = {"origin": "here/1", "h1": "here/2", "h2": "there/1", "h3": "there/2", "h4": "far"}
        for host, place in places.items():
            self.volt.register(host, f"unix:///run/{host}", place)
        self.udpcast("h1", "h2", "h3", "h4")
        told = {host: self.told(host) for host in places}
        together, tree = [("udpcast", False)], [("tree", True)]
        self.assertEqual({"origin": together, "h1": together, "h2": tree, "h3": together, "h4": tree}, told)
        self.ready("h1")
        self.offer()
        self.assertEqual(([("udpcast", True)], together), (self.told("h1"), self.told("h3")))
        self.say("h2", WHOLE)
        self.offer("h2")
        self.ready("h3")
        self.assertEqual([("udpcast", True)], self.told("h3"))
        legs = self.volt.deployments.one(1).legs
        self.assertEqual([("origin", 1), ("h2", 1)], [(leg.source, leg.receivers) for leg in legs])

    def test_an_origin_sends_else_another_host_that_has_all_of_it(self) -> None:
        self.volt.join("proven", "h2")
        self.volt.heartbeat("h2", [NodeReport(image="proven", revision=0, whole=True)], methods=["udpcast"])
        self.assertEqual("origin", self.udpcast("h1", "h2", "h3").legs[0].source)
        self.methods["origin"] = []
        self.hear("origin")
        self.assertEqual("h2", self.udpcast("h1", "h2", "h3", limit=1000).legs[0].source)
        self.methods["origin"] = ["udpcast"]
        self.hear("origin")
        for _ in range(11):
            self.pass_time(1)
            for host in ("h1", "h2", "h3"):
                self.hear(host)
        self.assertEqual("h2", self.udpcast("h1", "h2", "h3", limit=2000).legs[0].source)

    def test_seeds_go_on_until_all_have_all_of_it(self) -> None:
        self.can("bittorrent", "origin", "h1", "h2")
        self.udpcast("h1", "h2", method="bittorrent")
        self.offer()
        self.ready("h1")
        self.ready("h2")
        self.say("h1", WHOLE, attempt="1")
        self.assertEqual([("bittorrent", True)], self.told("h1"))
        self.say("h1", WHOLE, attempt="1", sent=7)
        self.say("h2", WHOLE, attempt="1")
        self.assertEqual([[]] * 3, [self.told(host) for host in ("origin", "h1", "h2")])
        self.assertEqual([7, 0], [host.sent for host in self.volt.deployments.one(1).hosts])

    def test_a_cancelled_one_has_nobody_send(self) -> None:
        self.udpcast("h1")
        self.volt.deployments.cancel(1)
        self.assertEqual([], self.told("origin"))

    def test_what_cannot_be_is_refused(self) -> None:
        self.host("h5")
        for said, more in (
            ("none of these hosts", {"hosts": ["h5"]}),
            ("cannot encrypt", {"hosts": ["h1"], "encrypt": True}),
            ("nothing proves", {"hosts": ["h1"], "image": "image"}),
        ):
            wanted = DeploymentRequest.model_validate({"image": "proven", "method": "udpcast", **more})
            self.assertIn(said, str(self.assertRaises(BadRequest, self.volt.deployments.create, wanted)))
        self.assertEqual([], self.volt.deployments.all())


class AutoTest(LegsCase):
    """Hosts try the network, and the method is chosen by what they found."""

    def setUp(self) -> None:
        super().setUp()
        for method in ("auto", "udpcast", "uftp", "bittorrent"):
            self.can(method, "origin", "h1", "h2")

    def try_all(self, number: int = 1, rate: float = 1e6, loss: float | None = 0.0) -> None:
        """The hosts of a deployment have tried the network."""
        self.found(number, "origin", sends=True)
        for host in ("h1", "h2"):
            self.found(number, host, lacks=[[0, 1 << 30]])
        for host, faster in (("h1", 10), ("h2", 1)):
            self.found(number, host, state=FILLING, rate=faster * rate, delay=0.1, loss=loss, link=10e6)
        self.pass_time(2)
        self.found(number, "h2", state=FILLING, rate=rate, delay=0.1, loss=loss, link=10e6)

    def found(self, number: int, host: str, **more: object) -> None:
        fields = {"deployment": number, "method": "auto", "state": READY, "attempt": "1", "contact": "c", **more}
        self.hear(host, TransferReport.model_validate(fields))

    def auto(self, **more: object) -> Deployment:
        made = self.deploy("origin", "h1", "h2", image="proven", **more)
        self.found(made.id, "origin", state=WHOLE)
        return made

    def test_hosts_try_the_network_and_then_get_the_best_method(self) -> None:
        self.assertEqual("auto", self.auto(encrypt=False).method)
        self.assertEqual([[("auto", False)]] * 3, [self.told(host) for host in ("origin", "h1", "h2")])
        self.try_all()
        made = self.volt.deployments.one(1)
        self.assertEqual("udpcast", made.method)
        self.assertEqual({"tree", "lazy", "unicast", "bittorrent", "udpcast", "uftp"}, set(made.predicted))
        self.assertEqual("udpcast", min(made.predicted, key=made.predicted.__getitem__))
        self.assertAlmostEqual(0.1 + (1 << 30) / 5.5e6 + END, made.predicted["tree"])
        self.assertIn("1074 MB to 2 hosts, 5.5 MB/s by the tree, links of 10.0 MB/s, multicast reaches 100%", made.why)
        self.assertEqual([[("udpcast", False)]] * 3, [self.told(host) for host in ("origin", "h1", "h2")])

    def test_the_last_host_is_as_late_as_the_try_has_shown(self) -> None:
        self.can("auto", "h3")
        self.deploy("origin", "h1", "h2", "h3", image="proven")
        self.found(1, "origin", sends=True)
        for state in (READY, FILLING, FILLING):
            self.pass_time(1)
            for host, delay in (("h1", 1), ("h2", 2), ("h3", 4)):  # h3 is two hops away
                self.found(1, host, state=state, rate=1e6, delay=delay, lacks=[[0, 1_000_000]])
        self.assertEqual(1 + 4 + 1 + END, self.volt.deployments.one(1).predicted["tree"])

    def chosen(self) -> None:
        """udpcast is chosen, and nobody has heard that yet."""
        self.auto(encrypt=False)
        self.try_all()
        for host in ("origin", "h1", "h2"):
            self.found(1, host, sends=host == "origin")

    def test_what_receivers_said_of_the_try_is_not_of_the_method_that_was_chosen(self) -> None:
        self.chosen()
        self.offer()
        self.assertEqual([("udpcast", False)], self.told("h1"))
        self.ready("h1")
        self.ready("h2")
        self.assertEqual(["contact of h1", "contact of h2"], self.terms("h1").receivers)

    def test_what_the_sender_said_of_the_try_is_not_of_the_method_that_was_chosen(self) -> None:
        self.chosen()
        self.ready("h1")
        self.ready("h2")
        self.assertEqual([("udpcast", False)], self.told("h1"))
        self.offer()
        self.assertEqual("contact of origin", self.terms("h1").sender)

    def test_without_leave_nothing_travels_unencrypted(self) -> None:
        self.auto()
        self.try_all(rate=110e6)
        self.assertEqual("tree", self.volt.deployments.one(1).method)
        self.assertEqual([[], [("tree", True)], [("tree", True)]], [self.told(h) for h in ("origin", "h1", "h2")])
        self.volt.deployments.cancel(1)
        self.auto()
        self.try_all(2)
        told = [task for host in ("origin", "h1", "h2") for task in self.hear(host) if task.deployment == 2]
        self.assertEqual([("uftp", True)] * 3, [(task.method, task.encrypt) for task in told])

    def test_what_multicast_does_not_reach_gets_no_multicast(self) -> None:
        self.auto(encrypt=False)
        self.try_all(loss=None)
        made = self.volt.deployments.one(1)
        self.assertEqual((True, set()), ("none of them" in made.why, {"udpcast", "uftp"} & set(made.predicted)))

    def method_after(self, *trying: str, seconds: int) -> str:
        """What becomes of auto when so long ago all were ready, and these hosts have told what they found."""
        self.auto(encrypt=False)
        self.found(1, "origin", sends=True)
        for host in ("h1", "h2"):
            self.found(1, host)
        self.pass_time(seconds)
        for host in trying:
            self.found(1, host, state=FILLING, rate=1e6)
        return self.volt.deployments.one(1).method

    def test_a_try_has_its_time(self) -> None:
        self.assertEqual("auto", self.method_after("h1", "h2", seconds=1))

    def test_a_try_lasts_until_all_hosts_have_told_what_they_found(self) -> None:
        self.assertEqual("auto", self.method_after("h1", seconds=9))

    def test_no_host_holds_a_try_up_for_long(self) -> None:
        self.assertNotEqual("auto", self.method_after("h1", seconds=10))

    def test_hosts_read_from_the_tree_while_they_try(self) -> None:
        self.auto(encrypt=False)
        self.found(1, "origin", sends=True)
        for host in ("h1", "h2"):
            self.found(1, host)
        self.assertEqual([("auto", True)] * 2, [self.told(host)[0] for host in ("h1", "h2")])

    def test_who_has_all_of_it_within_the_try_has_it_by_the_tree(self) -> None:
        self.auto(encrypt=False)
        self.found(1, "origin", sends=True)
        for host in ("h1", "h2"):
            self.found(1, host)
        for host in ("h1", "h2"):
            self.found(1, host, state=WHOLE)
        made = self.volt.deployments.one(1)
        self.assertEqual(("tree", True, True), (made.method, made.ended, "before the try" in made.why))

    def test_what_has_ended_corrects_the_next_prediction(self) -> None:
        self.methods = {host: ["auto"] for host in self.methods}
        for number in (1, 2, 3):
            self.auto()
            self.try_all(number, rate=20e6)
            for _ in range(18):
                self.pass_time(1)
                for host in ("origin", "h1", "h2"):
                    self.hear(host)
            for host in ("h1", "h2"):
                self.hear(host, TransferReport(deployment=number, state=WHOLE))
        found = [self.volt.deployments.one(number) for number in (1, 2, 3)]
        first, second, third = (made.predicted["tree"] for made in found)
        self.assertAlmostEqual(found[0].seconds, second, delta=0.1)
        self.assertAlmostEqual(second, third, delta=0.1)
        self.assertEqual(["tree"] * 3, [made.method for made in found])
        self.assertGreater(second, 1.5 * first)

    def test_where_nobody_has_the_image_nobody_tries(self) -> None:
        for host, place in (("origin", "here"), ("h1", "there"), ("h2", "there")):
            self.volt.register(host, f"unix:///run/{host}", place)
        self.assertEqual("tree", self.auto(encrypt=False).method)

    def test_hosts_that_cannot_try_take_the_tree(self) -> None:
        self.methods.clear()
        for host in ("h1", "h2", "origin"):
            self.hear(host)
        made = self.auto()
        self.assertEqual(("tree", "no two hosts could try the network"), (made.method, made.why))

    def test_where_all_hosts_are_lost_it_ends(self) -> None:
        self.deploy("h1", "h2", image="proven")
        self.lease_runs_out("h3", "origin")
        self.volt.leases.expire()
        self.assertTrue(self.volt.deployments.one(1).ended)

    def test_when_all_trying_fails_it_is_the_tree(self) -> None:
        self.auto()
        self.found(1, "origin", sends=True)
        self.pass_time(2)
        for host in ("h1", "h2"):
            self.found(1, host, contact="", error="no address")
        self.assertEqual("tree", self.volt.deployments.one(1).method)


class HttpTest(DeploymentCase):
    """The same calls by a client."""

    def test_a_client_has_all_calls(self) -> None:
        url = serve_app(self, create_app(self.volt))
        client = self.enterContext(VoltClient(url))
        made = client.deploy(DeploymentRequest(image="image", hosts=["h1"], encrypt=True))
        self.assertEqual(made.hosts, client.deployment(made.id).hosts)
        self.assertEqual([made.id], [one.id for one in client.deployments()])
        report = TransferReport(deployment=made.id, state=FILLING, done=1, total=2)
        [task] = client.heartbeat("h1", [], transfers=[report]).transfers
        self.assertEqual((made.id, False), (task.deployment, task.cancelled))
        client.cancel_deployment(made.id)
        self.assertRaises(DeploymentUnknown, client.deployment, made.id + 1)
        self.assertRaises(BadRequest, client.deploy, DeploymentRequest(image="image"))
