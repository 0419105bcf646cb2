"""The tree's rules, one by one."""

from __future__ import annotations

from copy import deepcopy

from testtools import TestCase

from tests.unit.volt.simulation import ROUNDS, Cluster, heap_height
from volt.models import NodeState
from volt.tree import FAR, Tree, deepest, depth, readers, sources


def grown(hosts: int, fanout: int = 2) -> Tree:
    """A tree of an origin and hosts h1, h2, … in slots 1, 2, …, everybody settled."""
    tree = Tree(fanout)
    tree.publish("origin")
    for number in range(1, hosts + 1):
        tree.join(f"h{number}")
    settle(tree)
    return tree


def settle(tree: Tree, but: frozenset[str] = frozenset()) -> None:
    for _ in range(ROUNDS):
        waiting = [node.host for node in tree.hosts.values() if not node.settled and node.host not in but]
        for host in waiting:
            tree.confirm(host, tree.tell(host).revision)
    assert not waiting, f"{waiting} do not settle"


def parents(tree: Tree, host: str) -> list[str]:
    return list(tree.parents(tree.hosts[host]))


class Slots(TestCase):
    """Arithmetic of the heap."""

    def test_sources_are_heap_parent_then_its_siblings_then_grandparent(self) -> None:
        for slot, fanout, expected in (
            (7, 2, [3, 4, 1]),
            (9, 2, [4, 3, 1]),
            (17, 3, [5, 6, 4, 1]),
            (3, 3, []),  # below the origin
            (5, 1, [4, 3]),  # a chain has no siblings
        ):
            self.assertEqual(expected, sources(slot, fanout))

    def test_readers_is_the_inverse_of_sources(self) -> None:
        for fanout in (1, 2, 3, 5):
            for slot in range(1, 40):
                expected = {reader for reader in range(1, 1100) if slot in sources(reader, fanout)}
                self.assertEqual(expected, set(readers(slot, fanout)))

    def test_depth_is_the_height_of_a_complete_heap(self) -> None:
        for fanout in (1, 2, 3):
            self.assertEqual([heap_height(slot, fanout) for slot in range(60)], [depth(s, fanout) for s in range(60)])


class Joining(TestCase):
    """Places for new hosts."""

    def test_joining_twice_gives_the_same_place_under_a_new_revision_that_only_this_host_hears_of(self) -> None:
        tree = grown(2)
        node, others = tree.hosts["h2"], {host: tree.hosts[host].revision for host in ("origin", "h1")}
        before = (node.slot, node.state, parents(tree, "h2"))
        revision = tree.revision
        self.assertIs(node, tree.join("h2"))
        self.assertEqual(before, (node.slot, node.state, parents(tree, "h2")))
        self.assertEqual((revision + 1, revision + 1), (node.revision, node.awaited))
        self.assertEqual(others, {host: tree.hosts[host].revision for host in others})

    def test_a_host_that_has_just_joined_is_offered_at_once(self) -> None:
        tree = grown(2)
        tree.join("h3")
        for _ in range(4):
            tree.join(f"x{tree.last('')}")
        self.assertEqual(NodeState.JOINING, tree.hosts["h3"].state)
        self.assertEqual("h3", tree.parents(tree.slots["", 7])[0])

    def test_joining_stamps_the_new_host_and_its_parents_only(self) -> None:
        tree = grown(9)
        tree.join("new")
        stamped = {host for host, node in tree.hosts.items() if node.revision == tree.revision}
        self.assertEqual({"new", *parents(tree, "new")}, stamped)


class Leaving(TestCase):
    """The last node moves into the hole."""

    def test_nobody_reads_from_a_moved_node_until_it_confirmed(self) -> None:
        tree = grown(7)
        tree.leave("h1")
        self.assertEqual(["h2", "origin"], parents(tree, "h3"))
        tree.confirm("h7", tree.tell("h7").revision)
        self.assertEqual(["h7", "h2", "origin"], parents(tree, "h3"))
        self.assertEqual(tree.revision, tree.hosts["h3"].revision)

    def test_an_older_confirmation_does_not_end_a_move(self) -> None:
        tree = grown(7)
        before = tree.hosts["h7"].revision
        tree.leave("h1")
        tree.confirm("h7", before)
        self.assertEqual(NodeState.MOVING, tree.hosts["h7"].state)

    def test_a_move_to_a_slot_with_the_same_parents_is_confirmed_as_well(self) -> None:
        tree = grown(2)
        tree.leave("h1")
        self.assertEqual((NodeState.MOVING, False), (tree.hosts["h2"].state, tree.hosts["h2"].settled))
        settle(tree)
        self.assertEqual(NodeState.READY, tree.hosts["h2"].state)

    def test_a_death_disturbs_as_many_in_a_large_tree_as_in_a_small_one(self) -> None:
        disturbed = []
        for size in (50, 1500):
            tree = grown(size)
            before = tree.revision
            tree.leave("h5")
            settle(tree)
            disturbed.append(sum(node.revision > before for node in tree.hosts.values()))
        self.assertTrue(max(disturbed) <= 5 * 2 * 2, disturbed)


class Suspecting(TestCase):
    """Reports of dead parents."""

    def test_a_reported_parent_is_offered_to_nobody(self) -> None:
        tree = grown(8)
        tree.suspect("h7", "h3")
        self.assertEqual(NodeState.SUSPECT, tree.hosts["h3"].state)
        self.assertEqual(["h4", "h1", "origin"], parents(tree, "h7"))
        self.assertEqual(["h4", "h1", "origin"], parents(tree, "h8"))

    def test_a_second_report_changes_nothing(self) -> None:
        tree = grown(8)
        tree.suspect("h7", "h3")
        tree.lose("origin")
        revision = tree.revision
        tree.suspect("h2", "origin")
        tree.suspect("h8", "h3")
        self.assertEqual((revision, NodeState.LOST), (tree.revision, tree.hosts["origin"].state))

    def test_it_is_offered_again_after_it_confirmed_a_later_assignment(self) -> None:
        tree = grown(8)
        before = tree.hosts["h3"].revision
        tree.suspect("h7", "h3")
        tree.confirm("h3", before)
        self.assertEqual(NodeState.SUSPECT, tree.hosts["h3"].state)
        tree.confirm("h3", tree.tell("h3").revision)
        self.assertEqual("h3", parents(tree, "h7")[0])


class Whole(TestCase):
    """Hosts that have all of the image."""

    def test_it_comes_first_among_the_parents_and_before_no_host_that_is_no_parent(self) -> None:
        tree = grown(8)
        self.assertEqual(["h3", "h4", "h1", "origin"], parents(tree, "h7"))
        before = {host: node.revision for host, node in tree.hosts.items()}
        tree.note_whole("h4", whole=True)
        self.assertEqual(["h4", "h3", "h1", "origin"], parents(tree, "h7"))
        self.assertEqual((["h1", "h2", "origin"], ["origin"]), (parents(tree, "h3"), parents(tree, "h2")))
        told = {host for host, node in tree.hosts.items() if node.revision > before[host]}
        self.assertEqual({"h7", "h8"}, told)

    def test_the_same_again_changes_nothing_and_without_the_image_the_order_is_that_of_before(self) -> None:
        tree = grown(8)
        tree.note_whole("h4", whole=True)
        revision = tree.revision
        tree.note_whole("h4", whole=True)
        self.assertEqual(revision, tree.revision)
        tree.note_whole("h4", whole=False)
        self.assertEqual(["h3", "h4", "h1", "origin"], parents(tree, "h7"))

    def test_one_that_is_dead_is_offered_to_nobody(self) -> None:
        tree = grown(8)
        tree.note_whole("h4", whole=True)
        tree.suspect("h7", "h4")
        self.assertEqual(["h3", "h1", "origin"], parents(tree, "h7"))


class Sites(TestCase):
    """Hosts with a site and a rack."""

    def tree(self, *hosts: tuple[str, str], home: str = "b/2") -> Tree:
        """An origin at home, and hosts with their places, everybody settled."""
        tree = Tree(2, home=home)
        tree.publish("origin", home)
        for host, place in hosts:
            tree.join(host, place)
        settle(tree)
        return tree

    def test_places_are_a_chain_from_home_through_its_site_to_the_others_whoever_came_first(self) -> None:
        places = ["a/1", "b/1", "", "b/3", "c", "b/2"]
        tree = self.tree(*((place or "nowhere", place) for place in places))
        first = {host: parents(tree, host)[0] for host in tree.hosts if host != "origin"}
        chain = ["b/2", "b/3", "b/1", "c", "nowhere", "a/1"]
        self.assertEqual(dict(zip(chain, ["origin", *chain[:-1]], strict=True)), first)

    def test_in_a_place_only_the_gate_reads_from_elsewhere(self) -> None:
        tree = self.tree(*((f"a{number}", "a/1") for number in range(1, 8)))
        self.assertEqual(["origin"], parents(tree, "a1"))
        for host, expected in {"a2": ["a1"], "a3": ["a1"], "a4": ["a2", "a3", "a1"], "a7": ["a3", "a2", "a1"]}.items():
            self.assertEqual([*expected, "origin"], parents(tree, host))

    def test_a_gate_reads_from_the_gate_before_it_else_from_the_one_before_that(self) -> None:
        tree = self.tree(("h", "b/2"), ("x", "b/3"), ("y", "c/1"), ("z", "c/2"))
        self.assertEqual(["y", "x", "origin"], parents(tree, "z"))
        tree.leave("y")
        self.assertEqual(["x", "h", "origin"], parents(tree, "z"))
        tree.join("y", "c/1")
        self.assertEqual(["origin"], parents(tree, "y"))  # it returns
        settle(tree)
        self.assertEqual(["y", "x", "origin"], parents(tree, "z"))

    def test_a_place_that_gets_its_first_host_is_news_for_the_two_gates_after_it(self) -> None:
        tree = self.tree(("h", "b/2"), ("y", "c/1"), ("z", "c/2"), ("w", "c/3"))
        before = {host: node.revision for host, node in tree.hosts.items()}
        tree.join("x", "b/3")
        self.assertEqual(
            {"x", "h", "y", "z", "origin"}, {h for h, n in tree.hosts.items() if n.revision > before.get(h, 0)}
        )
        self.assertEqual((["x", "h", "origin"], ["y", "x", "origin"]), (parents(tree, "y"), parents(tree, "z")))

    def test_chains_of_places_are_one_chain(self) -> None:
        hosts = ["h1", "h2", "x1", "x2", "y1", "y2"]
        tree = self.tree(*zip(hosts, ["b/2", "b/2", "b/3", "b/3", "c", "c"], strict=True))
        tree.note_whole("h2", whole=True)
        tree.reshape(1)
        settle(tree)
        first = {host: parents(tree, host)[0] for host in hosts}
        self.assertEqual(dict(zip(hosts, ["origin", *hosts[:-1]], strict=True)), first)
        self.assertEqual([["x1"], ["y1"]], [[node.host for node in tree.below(tree.hosts[h])] for h in ("h2", "x2")])
        tree.join("x3", "b/3")
        self.assertEqual("x3", parents(tree, "y1")[0])
        tree.leave("x3")
        self.assertEqual(["x2", "h2", "origin"], parents(tree, "y1"))

    def test_who_becomes_gate_is_asked_once_it_has_confirmed(self) -> None:
        tree = self.tree(("x1", "b/3"), ("x2", "b/3"), ("x3", "b/3"), ("y", "c"))
        tree.leave("x1")
        self.assertEqual(("b/3", 1), tree.hosts["x3"].spot)
        self.assertEqual(["origin"], parents(tree, "y"))
        tree.confirm("x3", tree.tell("x3").revision)
        self.assertEqual(["x3", "origin"], parents(tree, "y"))

    def test_an_origin_in_the_place_comes_first_and_may_move(self) -> None:
        tree = self.tree(("h", "b/2"), ("x", "b/3"))
        tree.publish("near", "b/3")
        self.assertEqual(["near", "h", "origin"], parents(tree, "x"))
        before = tree.hosts["x"].revision
        tree.note_place("near", "c")
        self.assertEqual(["h", "origin", "near"], parents(tree, "x"))
        self.assertTrue(tree.hosts["x"].revision > before)

    def test_the_tree_is_drawn_by_who_is_read_from_first(self) -> None:
        tree = self.tree(("h1", "b/2"), ("h2", "b/2"), ("x1", "b/3"), ("x2", "b/3"), ("y", "c"))
        tree.publish("near", "c")
        below = {host: [node.host for node in tree.below(tree.hosts[host])] for host in tree.hosts}
        expected = {"origin": ["h1", "h2"], "h1": ["x1"], "x1": ["x2"], "near": ["y"]}
        self.assertEqual(expected, {host: hosts for host, hosts in below.items() if hosts})

    def test_the_deepest_host_is_as_deep_as_the_chain_and_a_heap(self) -> None:
        for last, expected in (
            ({"b/2": 0}, 0),
            ({"b/2": 3}, 2),
            ({"b/2": -1, "c": 1}, 1),
            ({"b/2": 2, "c": 1, "a": 4}, 5),
            ({"b/2": 1, "c": 8, "a": 1}, 5),
        ):
            self.assertEqual(expected, deepest(last, 2, "b/2"), str(last))
        self.assertEqual(7, deepest({"b/2": 2, "c": 1, "a": 4}, 1, "b/2"))


class Origins(TestCase):
    """More than one host with the whole image."""

    def test_a_host_that_left_and_publishes_does_not_count_as_one_that_left(self) -> None:
        tree = grown(2)
        tree.leave("h2")
        tree.publish("h2")
        self.assertEqual([], list(tree.departures))

    def test_who_reads_from_origins_only_gets_the_living_ones_first(self) -> None:
        tree = grown(3)
        tree.publish("second")
        settle(tree)
        tree.lose("origin")
        self.assertEqual(["second", "origin"], parents(tree, "h1"))
        self.assertEqual(["h1", "h2", "origin", "second"], parents(tree, "h3"))
        self.assertEqual(tree.revision, tree.hosts["h1"].revision)

    def test_a_changed_address_is_news_for_the_children_only(self) -> None:
        tree = grown(9)
        tree.readdress("h3")
        stamped = {host for host, node in tree.hosts.items() if node.revision == tree.revision}
        self.assertEqual(set(tree.children(tree.hosts["h3"])), stamped)


class Returning(TestCase):
    """Hosts that come back while somebody may still read from them."""

    def test_it_reads_from_origins_only_and_nobody_is_sent_to_it(self) -> None:
        tree = grown(7)
        tree.leave("h1")
        tree.join("h1")
        self.assertEqual(NodeState.RETURNING, tree.hosts["h1"].state)
        self.assertEqual(["origin"], parents(tree, "h1"))
        for number in range(12):
            self.assertNotIn("h1", tree.parents(tree.join(f"late{number}")))

    def test_it_gets_normal_parents_when_the_last_host_that_may_read_from_it_confirmed_or_left(self) -> None:
        for end in (lambda tree: None, lambda tree: tree.leave("h3")):
            tree = grown(7)
            tree.leave("h1")
            tree.join("h1")
            settle(tree, but=frozenset({"h3"}))
            self.assertEqual(["origin"], parents(tree, "h1"))
            end(tree)
            settle(tree)
            node = tree.hosts["h1"]
            self.assertEqual((NodeState.READY, None), (node.state, node.returned))
            self.assertEqual(tree.slots["", (node.slot - 1) // 2].host, tree.parents(node)[0])

    def test_who_has_dropped_all_holds_nobody_back(self) -> None:
        tree = grown(7)
        tree.leave("h1")
        tree.join("h1")
        settle(tree, but=frozenset({"h3"}))
        tree.leave("h3", dropped=tree.hosts["h3"].awaited)
        self.assertIsNone(tree.hosts["h1"].returned)

    def test_what_was_dropped_before_the_newest_list_says_nothing_of_that_list(self) -> None:
        tree = grown(7)
        tree.leave("h7", dropped=tree.hosts["h7"].awaited - 1)
        self.assertEqual(NodeState.MOVING, tree.join("h7").state)

    def test_an_evicted_host_that_comes_back_may_still_read_by_its_old_list(self) -> None:
        """Here h2 would read from h3, which reads from h2 as it did before it was evicted."""
        cluster = Cluster.grown(5, fanout=1)
        cluster.tree.leave("h3")
        cluster.leave("h2")
        cluster.settle()
        cluster.join("h3")
        cluster.join("h2")
        cluster.deliver_answer(-1)
        self.assertEqual("h3", cluster.tree.slots["", cluster.tree.hosts["h2"].slot - 1].host)
        cluster.check()
        self.assertEqual(["origin"], parents(cluster.tree, "h2"))

    def test_the_first_of_two_evicted_hosts_comes_back_while_somebody_may_still_read_from_the_second(self) -> None:
        """Here h3 would read from h2, which reads from h1 as it did before h1 was evicted; h1 would read from h3."""
        cluster = Cluster.grown(5, fanout=1)
        tree = cluster.tree
        tree.leave("h1")
        cluster.settle(but=["h2"])
        tree.leave("h2")  # neither was told
        cluster.join("h1")
        cluster.deliver_answer(-1)
        self.assertEqual("h3", tree.slots["", tree.hosts["h1"].slot - 1].host)
        self.assertEqual(["origin"], parents(tree, "h1"))
        cluster.check()
        cluster.settle()
        self.assertEqual("h3", parents(tree, "h1")[0])
        cluster.check()

    def test_who_left_without_news_holds_it_back_as_long_as_somebody_may_read_from_that_one(self) -> None:
        """Here h7 reads from the evicted h3, which reads from h1, which returns into a slot below h7."""
        cluster = Cluster.grown(17, fanout=2)
        tree = cluster.tree
        tree.leave("h1")
        for host in list(tree.hosts):  # all but h3 hear that h1 left
            if host != "h3":
                cluster.ask(host)
                cluster.deliver_answer(0)
                cluster.send_confirmation(host)
                cluster.deliver_confirmation(0)
        tree.leave("h3")
        cluster.join("h1")
        cluster.deliver_answer(0)
        self.assertEqual("h7", tree.slots["", (tree.hosts["h1"].slot - 1) // 2].host)
        cluster.check()
        self.assertEqual(["origin"], parents(tree, "h1"))
        cluster.settle()
        self.assertEqual("h7", parents(tree, "h1")[0])
        cluster.check()


class SetBack(TestCase):
    """A tree that was set back to an old copy, while the hosts keep what they were told since."""

    def setUp(self) -> None:
        """Twelve hosts, a copy; then h1 to h4 leave without being told, and h13 to h15 join."""
        super().setUp()
        self.cluster = Cluster.grown(12, fanout=2)
        self.cluster.back_up()
        for number in range(1, 5):
            self.cluster.tree.leave(f"h{number}")
        for number in range(13, 16):
            self.cluster.join(f"h{number}")
        self.cluster.settle()
        self.lost = {host: self.cluster.agents[host].newest for host in ("h7", "h9", "h15")}

    def set_back(self) -> Tree:
        """The tree as of the copy, on which an address has changed since: its revision is above all that were lost."""
        tree = deepcopy(self.cluster.backup)
        tree.floor = self.cluster.tree.revision + 1
        tree.readdress("origin")
        return tree

    def test_all_read_from_origins_until_they_confirm_and_then_from_their_heap_parents(self) -> None:
        self.cluster.set_back(0)
        tree = self.cluster.tree
        members = self.cluster.members
        self.assertEqual({NodeState.MOVING}, {tree.hosts[host].state for host in members})
        self.assertEqual({("origin",)}, {tree.parents(tree.hosts[host]) for host in members})
        self.cluster.settle()
        self.cluster.check()
        self.assertEqual({NodeState.READY}, {node.state for node in tree.hosts.values()})
        self.assertEqual(["h3", "h4", "h1", "origin"], parents(tree, "h7"))
        for host in members:
            using = self.cluster.agents[host].using
            self.assertEqual({tree.parents(tree.hosts[host])}, set(using.values()), host)

    def test_whoever_speaks_first_with_a_lost_list_gives_the_alarm(self) -> None:
        for host, revision in self.lost.items():
            tree = self.set_back()
            say = tree.confirm if host in tree.hosts else tree.note_orphan
            self.assertFalse(say(host, revision), host)
            self.assertEqual(tree.revision, tree.begun)
            self.assertEqual({tree.begun}, {node.revision for node in tree.hosts.values()})
            self.assertEqual(("origin",), tree.parents(tree.hosts["h12"]))

    def test_what_comes_after_the_alarm_is_above_all_that_was_lost(self) -> None:
        tree = deepcopy(self.cluster.backup)
        tree.confirm("h7", self.lost["h7"])
        self.assertEqual(self.lost["h7"] + 1, tree.tell("h7").revision)
        tree = self.set_back()
        given = tree.revision
        tree.confirm("h7", self.lost["h7"])
        self.assertTrue(tree.tell("h7").revision > given > max(self.lost.values()))

    def test_an_orphan_is_not_new(self) -> None:
        tree = self.set_back()
        tree.note_orphan("h15", self.lost["h15"])
        settle(tree)
        self.assertEqual(NodeState.MOVING, tree.join("h15").state)
        self.assertEqual(NodeState.JOINING, tree.join("new").state)

    def test_an_orphan_stays_awaited(self) -> None:
        tree = grown(3)
        tree.leave("h3")
        tree.departures["h3"].awaited = True
        self.assertFalse(tree.note_orphan("h3", tree.revision + 1))
        self.assertTrue(tree.departures["h3"].awaited)

    def test_a_host_that_was_evicted_and_says_so_late_gives_no_alarm(self) -> None:
        tree = grown(5)
        revision = tree.hosts["h5"].revision
        tree.leave("h5")
        self.assertTrue(tree.note_orphan("h5", revision))
        self.assertTrue(tree.note_orphan("new", 0))
        self.assertEqual((0, ["h5"]), (tree.begun, list(tree.departures)))

    def test_a_revision_that_nobody_can_have_is_not_credible(self) -> None:
        tree = grown(3)
        for floor in (0, 10**12):
            tree.floor = floor
            newest = max(tree.revision, floor)
            self.assertEqual([True, False], [tree.credible(newest + FAR + more) for more in (0, 1)])

    def test_a_volt_with_a_new_database_and_a_clock_that_was_never_set_believes_revisions_of_today(self) -> None:
        self.assertTrue(Tree(2).credible(1_780_000_000_000))

    def test_revisions_follow_their_floor(self) -> None:
        tree = grown(3)
        tree.floor = 1000
        self.assertEqual(1000, tree.join("h4").revision)
        self.assertEqual(1001, tree.join("h4").revision)
        tree.floor = 2000
        tree.readdress("h1")
        self.assertEqual(2000, tree.revision)
        tree.floor = 3000
        tree.leave("h4")
        self.assertEqual((3000, 3000), (tree.revision, tree.departures["h4"].revision))
