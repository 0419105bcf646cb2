"""One host's stacks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from testtools import TestCase
from testtools.matchers import MatchesStructure

from drivers.base import Image
from drivers.errors import DriverError
from drivers.host.locks import NamedLocks
from tests.doubles.drivers import unnoticed
from tests.doubles.volt import child, digest_of, parent, secret_of
from tests.unit.virtman.scene import TROUBLE, Scene
from virtman import creating, following, hosting, origins, serving
from virtman.errors import Conflict, ContentChanged, CoordinatorDown, ImageExists, ImageInUse, Suspended
from virtman.records import ImageRecord, Role
from volt.client import Child

CHILD = Child(host="child", secret=secret_of("debian", "child"))
CHILD_OF_MINE = Child(host="child", secret=secret_of("mine", "child"))


class StacksTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.scene = Scene(self)
        self.stacks, self.host, self.volt = self.scene.stacks, self.scene.host, self.scene.volt

    def attached(self, name: str = "debian") -> ImageRecord:
        self.volt.offer(name)
        return hosting.ensure(self.stacks, name)


class EnsureTest(StacksTest):
    def test_it_attaches_and_confirms_the_parents(self) -> None:
        record = self.attached()
        self.assertThat(
            record,
            MatchesStructure.byEquality(role=Role.HOST, steady=True, slot=1, size=1 << 20, digest=digest_of("debian")),
        )
        self.assertFalse(record.unconfirmed)
        self.assertEqual(1, self.scene.changes, "Volt hears of it soon")
        self.scene.check(self)

    def test_the_endpoint_exists_before_volt_can_name_it(self) -> None:
        self.attached()
        moments = self.scene.moments
        self.assertLess(moments.index("after export.reserve"), moments.index("before volt.join"))

    def test_asked_again_it_builds_nothing_but_what_has_died_and_needs_no_volt(self) -> None:
        record = self.attached()
        self.host.calls.clear()
        self.volt.down = True
        self.assertEqual(record, hosting.ensure(self.stacks, "debian"))
        self.assertEqual([], self.host.calls)
        self.host.daemon_dies("debian")
        hosting.ensure(self.stacks, "debian")
        self.scene.check(self)

    def test_without_volt_nothing_is_attached(self) -> None:
        self.volt.offer("debian")
        self.volt.down = True
        self.assertRaises(CoordinatorDown, hosting.ensure, self.stacks, "debian")
        self.assertEqual({}, self.host.leftovers())
        self.volt.down = False
        hosting.leave_later(self.stacks, "debian")
        self.scene.check_empty(self)

    def test_a_driver_that_fails_leaves_nothing(self) -> None:
        for call in ("export.reserve", "attach.connect", "cache.open", "export.publish", "export.allow"):
            self.volt.offer("debian")
            self.host.failing = {call: TROUBLE}
            self.assertIs(TROUBLE, self.assertRaises(DriverError, hosting.ensure, self.stacks, "debian"), call)
            self.scene.check_empty(self)

    def test_the_first_error_is_raised_when_the_undoing_fails_too(self) -> None:
        self.volt.offer("debian")
        self.host.failing = {"cache.open": TROUBLE, "export.withdraw": DriverError("stuck")}
        self.assertIs(TROUBLE, self.assertRaises(DriverError, hosting.ensure, self.stacks, "debian"))
        self.assertEqual({}, self.host.routes, "the undoing went on after its error")
        self.host.failing = {}
        self.scene.restart()
        self.scene.check_empty(self)

    def test_a_child_that_volt_names_meanwhile_is_let_in_at_once_and_stays(self) -> None:
        self.volt.offer("debian")
        let_in = []

        def moment(what: str) -> None:
            if what == "before cache.open":
                place = self.volt.places["debian"]
                following.admit(
                    self.stacks, place.model_copy(update={"revision": place.revision + 1, "children": [CHILD]})
                )
                let_in.append(list(self.host.allowed["debian"]))

        self.host.moment = moment
        hosting.ensure(self.stacks, "debian")
        self.assertEqual([[child("child")]], let_in)
        self.assertEqual([child("child")], self.host.allowed["debian"])

    def test_children_of_other_content_under_the_name_are_not_let_in(self) -> None:
        self.attached()
        before = list(self.host.allowed["debian"])
        place = self.volt.places["debian"].model_copy(update={"digest": digest_of("other"), "children": [CHILD]})
        following.admit(self.stacks, place.model_copy(update={"revision": place.revision + 1}))
        self.assertEqual(before, self.host.allowed["debian"])


class OriginTest(StacksTest):
    def publish(self, name: str = "mine") -> ImageRecord:
        return origins.add_origin(self.stacks, self.scene.put_content(name))

    def test_it_serves_the_content_and_announces_it(self) -> None:
        record = self.publish()
        self.assertThat(record, MatchesStructure.byEquality(role=Role.ORIGIN, steady=True, slot=0))
        self.assertEqual(digest_of("mine"), self.volt.images["mine"].digest)
        self.scene.check(self)

    def test_children_find_it_served_when_volt_names_it(self) -> None:
        self.publish()
        moments = self.scene.moments
        self.assertLess(moments.index("after export.publish"), moments.index("before volt.publish"))

    def test_volt_is_told_the_parent_also_later_and_by_who_does_not_say_it_again(self) -> None:
        image = self.scene.put_content("mine")
        self.volt.down = True
        self.assertRaises(CoordinatorDown, origins.add_origin, self.stacks, image, parent="debian")
        self.volt.down = False
        serving.restore(self.stacks, "mine")
        self.assertEqual("debian", self.volt.images["mine"].parent)
        self.volt.images.clear()
        origins.add_origin(self.stacks, image)
        self.assertEqual("debian", self.volt.images["mine"].parent)
        origins.add_origin(self.stacks, image, parent="other")
        self.assertEqual(("other", "other"), (self.volt.images["mine"].parent, self.scene.record("mine").parent))

    def test_a_taken_name_leaves_nothing(self) -> None:
        self.volt.offer("mine", digest=digest_of("theirs"))
        self.assertRaises(ImageExists, self.publish)
        self.assertEqual({}, self.host.leftovers())
        self.assertEqual([], self.scene.image_shelf.names())
        self.assertNotIn("before volt.leave", self.scene.moments, "it never had a place in that tree")

    def test_publishing_it_again_while_it_is_removed_leaves_volt_with_an_origin_whatever_fails(self) -> None:
        self.scene.image_shelf.put("mine", self.publish().begin("detach", told=True))
        self.host.failing = {"export.publish": TROUBLE}
        self.assertRaises(DriverError, self.publish)
        self.host.failing = {}
        serving.restore(self.stacks, "mine")
        self.assertEqual(["here"], self.volt.images["mine"].origins)
        self.scene.check(self)

    def test_without_volt_it_is_kept_and_announced_later(self) -> None:
        self.volt.down = True
        error = self.assertRaises(CoordinatorDown, self.publish)
        self.assertIn("virtman unpublish mine", str(error))
        self.assertEqual("publishing", self.scene.record("mine").phase)
        self.volt.down = False
        serving.restore(self.stacks, "mine")
        self.assertEqual({"mine"}, set(self.volt.images))
        self.scene.check(self)

    def test_a_vm_of_an_image_that_is_yet_to_be_announced_announces_it(self) -> None:
        self.volt.down = True
        self.assertRaises(CoordinatorDown, self.publish)
        self.assertRaises(CoordinatorDown, creating.create, self.scene.vms, "vm", "mine", None)
        self.assertIn("mine", self.host.served)
        self.volt.down = False
        creating.create(self.scene.vms, "vm", "mine", None)
        self.assertEqual(Role.ORIGIN, self.scene.record("mine").role)
        self.scene.check(self)

    def test_a_publish_that_volt_refuses_later_is_taken_back(self) -> None:
        self.volt.down = True
        self.assertRaises(CoordinatorDown, self.publish)
        self.volt.down = False
        self.volt.offer("mine", digest=digest_of("theirs"))
        serving.restore(self.stacks, "mine")
        self.assertEqual({}, self.host.leftovers())
        self.assertEqual([], self.scene.image_shelf.names())
        self.assertEqual(["other"], self.volt.images["mine"].origins, "theirs is not withdrawn")

    def publish_without_an_answer(self) -> None:
        """Volt takes the image and goes before it can say so."""
        self.volt.moment = self.volt.lose_the_answer
        self.assertRaises(CoordinatorDown, self.publish)
        self.volt.moment = unnoticed

    def test_a_publish_that_is_yet_to_be_announced_is_taken_back_when_volt_answers(self) -> None:
        self.publish_without_an_answer()
        before = self.scene.record("mine")
        error = self.assertRaises(CoordinatorDown, origins.take_back, self.stacks, "mine")
        self.assertIn("other hosts may read it", str(error))
        self.assertEqual((before, {"mine"}), (self.scene.record("mine"), set(self.host.served)))
        self.volt.down = False
        self.assertTrue(origins.take_back(self.stacks, "mine"))
        self.assertEqual({}, self.volt.images, "Volt had it")
        self.scene.check_empty(self)

    def test_a_publish_whose_answer_got_lost_is_not_taken_back_from_those_that_read_it(self) -> None:
        self.publish_without_an_answer()
        self.volt.down = False
        self.volt.read_by_others("mine")
        self.assertRaises(ImageInUse, origins.take_back, self.stacks, "mine")
        self.assertIn("mine", self.host.served)
        serving.restore(self.stacks, "mine")
        self.scene.check(self)

    def test_a_publish_that_a_vm_reads_is_not_taken_back(self) -> None:
        self.publish()
        creating.create(self.scene.vms, "vm", "mine", None)
        self.scene.image_shelf.put("mine", self.scene.record("mine").begin("publish"))
        self.assertRaises(ImageInUse, origins.take_back, self.stacks, "mine")
        self.assertIn("mine", self.host.served)

    def test_other_content_under_the_same_name_is_refused_and_never_served(self) -> None:
        self.publish()
        other = self.scene.put_content("other")
        self.host.calls.clear()
        self.assertRaises(ImageExists, origins.add_origin, self.stacks, Image("mine", other.size, other.digest))
        self.assertEqual([], self.host.calls)
        self.scene.check(self)

    def test_an_image_that_this_host_reads_from_others_is_refused_and_its_vms_left_alone(self) -> None:
        self.attached()
        creating.create(self.scene.vms, "vm", "debian", None)
        other = self.scene.put_content("other")
        self.host.calls.clear()
        for digest in (other.digest, digest_of("debian")):
            self.assertRaises(ImageExists, origins.add_origin, self.stacks, Image("debian", other.size, digest))
        self.assertEqual([], self.host.calls)
        self.scene.check(self)

    def test_a_driver_that_fails_leaves_nothing(self) -> None:
        for call in ("export.reserve", "attach.origin", "export.publish", "export.allow"):
            self.host.failing = {call: TROUBLE}
            self.assertIs(TROUBLE, self.assertRaises(DriverError, self.publish), call)
            self.scene.check_empty(self)

    def join(self, moment: str) -> None:
        if moment == "after volt.publish":
            place = self.volt.places["mine"]
            self.volt.places["mine"] = place.model_copy(update={"children": [CHILD_OF_MINE]})

    def test_a_child_that_joined_before_volt_answered_is_allowed(self) -> None:
        self.volt.moment = self.join
        self.publish()
        self.assertEqual([child("child", "mine")], self.host.allowed["mine"])

    def test_a_volt_that_counts_revisions_anew_is_believed_when_its_image_is_published_again(self) -> None:
        self.volt._revision = 7
        self.publish()
        self.volt._revision, self.volt.moment = 0, self.join
        self.publish()
        self.assertEqual([child("child", "mine")], self.host.allowed["mine"])

    def test_an_origin_that_volt_forgot_is_kept(self) -> None:
        self.publish()
        self.assertRaises(Conflict, following.rejoin, self.stacks, "mine")
        self.assertIn("mine", self.host.served)


class FollowTest(StacksTest):
    def test_new_alternates_alone_do_not_start_the_daemon_again(self) -> None:
        self.attached()
        self.host.calls.clear()
        following.follow(self.stacks, self.volt.assign("debian", ["other", "alternate"], ["child"]))
        self.assertNotIn("export.publish", self.host.calls)
        self.assertFalse(self.scene.record().unconfirmed)
        self.assertEqual([child("child")], self.host.allowed["debian"])

    def test_an_old_assignment_is_ignored(self) -> None:
        self.attached()
        old = self.volt.assign("debian", ["old"])
        following.follow(self.stacks, self.volt.assign("debian", ["new"]))
        before = self.scene.record()
        following.follow(self.stacks, old)
        self.assertEqual(before, self.scene.record())

    def test_a_failed_move_is_not_confirmed_and_done_again(self) -> None:
        self.attached()
        for call in ("attach.connect", "cache.open", "export.publish"):
            assignment = self.volt.assign("debian", [f"new-for-{call}"])
            self.host.failing = {call: TROUBLE}
            self.assertRaises(DriverError, following.follow, self.stacks, assignment)
            self.assertTrue(self.scene.record().unconfirmed)
            self.host.failing = {}
            following.follow(self.stacks, assignment)
            self.scene.check(self)
            self.assertEqual({parent(f"new-for-{call}")}, self.host.reading["debian"])

    def test_an_origin_learns_its_children(self) -> None:
        origins.add_origin(self.stacks, self.scene.put_content("mine"))
        self.host.calls.clear()
        following.follow(
            self.stacks, self.volt.places["mine"].model_copy(update={"revision": 99, "children": [CHILD_OF_MINE]})
        )
        self.assertEqual(["export.allow"], self.host.calls)
        self.assertEqual([child("child", "mine")], self.host.allowed["mine"])
        self.assertEqual((child("child", "mine"),), self.scene.record("mine").children)

    def test_other_content_under_the_same_name_is_not_followed(self) -> None:
        before = self.attached()
        self.volt.forget("debian")
        self.volt.offer("debian", digest="sha256:" + "f" * 64)
        self.assertRaises(ContentChanged, following.rejoin, self.stacks, "debian")
        self.assertEqual(before, self.scene.record())
        self.assertNotIn("debian", self.volt.places, "it does not even join")
        self.assertNotIn("before volt.join", self.scene.moments[self.scene.moments.index("attach:done") :])

    def test_an_assignment_of_other_content_makes_it_leave_the_tree(self) -> None:
        before = self.attached()
        self.volt.offer("debian", digest="sha256:" + "f" * 64)
        self.assertRaises(ContentChanged, following.follow, self.stacks, self.volt.assign("debian", ["new"]))
        self.assertEqual(before, self.scene.record())
        self.assertNotIn("debian", self.volt.places)
        self.assertEqual({"debian": -1}, self.volt.dropped)

    def test_a_lost_parent_is_let_go_of_though_volt_cannot_be_told(self) -> None:
        record = self.attached()
        self.volt.down = True
        self.host.daemon_dies("debian")  # it did not survive its parent
        following.report_lost(self.stacks, "debian", "other")
        self.scene.check(self)
        self.assertEqual(record, self.scene.record())


class RemovalTest(StacksTest):
    def test_a_vm_and_a_child_keep_the_stack(self) -> None:
        self.attached()
        creating.create(self.scene.vms, "vm", "debian", None)
        self.assertFalse(hosting.remove_if_idle(self.stacks, "debian"))
        self.assertFalse(hosting.remove_withdrawn(self.stacks, "debian"))
        following.follow(self.stacks, self.volt.assign("debian", ["other"], ["child"]))
        creating.destroy(self.scene.vms, "vm")
        self.assertFalse(hosting.remove_if_idle(self.stacks, "debian"))
        self.scene.check(self)

    def test_layers_are_removed_in_the_order_in_which_none_waits_for_another(self) -> None:
        self.attached()
        self.host.calls.clear()
        hosting.remove_if_idle(self.stacks, "debian")
        self.assertEqual(["attach.abandon", "export.withdraw", "cache.close", "attach.disconnect"], self.host.calls)

    def test_every_layer_is_removed_though_one_fails(self) -> None:
        own = {
            "export.withdraw": {"reading", "endpoints", "served", "allowed"},
            "cache.close": {"open_caches"},
            "attach.disconnect": {"routes"},
        }
        for call, left in own.items():
            self.attached()
            self.host.failing = {call: TROUBLE}
            self.assertIs(TROUBLE, self.assertRaises(DriverError, hosting.remove_if_idle, self.stacks, "debian"))
            self.assertEqual(left, set(self.host.leftovers()))
            self.assertIn("debian", self.volt.places, "the place is kept until all is gone")
            self.host.failing = {}
            hosting.remove_if_idle(self.stacks, "debian")
            self.scene.check_empty(self)

    def test_volt_is_told_later_when_it_is_down(self) -> None:
        self.attached()
        self.volt.down = True
        self.assertTrue(hosting.remove_if_idle(self.stacks, "debian"))
        self.assertEqual({}, self.host.leftovers())
        self.assertTrue(self.scene.record().leaving)
        self.assertRaises(CoordinatorDown, hosting.leave_later, self.stacks, "debian")
        self.volt.down = False
        newest = self.scene.record().assigned
        hosting.leave_later(self.stacks, "debian")
        self.assertEqual({"debian": newest}, self.volt.dropped)
        self.scene.check_empty(self)

    def test_a_stack_that_is_leaving_can_be_attached_again(self) -> None:
        self.attached()
        self.volt.down = True
        hosting.remove_if_idle(self.stacks, "debian")
        self.volt.down = False
        hosting.ensure(self.stacks, "debian")
        hosting.leave_later(self.stacks, "debian")
        self.scene.check(self)

    def test_suspend_stops_serving_and_restore_brings_it_back_without_volt(self) -> None:
        self.attached()
        place = self.volt.places["debian"]
        self.volt.down = True
        self.stacks.suspended = True
        serving.suspend(self.stacks, "debian")
        self.assertEqual({}, self.host.leftovers())
        self.assertFalse(self.stacks.source.serving("debian"))
        for act in (serving.restore, hosting.ensure):
            self.assertRaises(Suspended, act, self.stacks, "debian")
        self.assertEqual({}, self.host.leftovers())
        self.scene.restart()
        self.assertEqual(place, self.volt.places["debian"])
        self.scene.check(self)


class RestoreTest(StacksTest):
    def test_parents_are_watched_again_after_a_restart(self) -> None:
        self.attached()
        [served] = self.host.served.values()
        self.host.calls.clear()
        self.scene.restart()
        self.assertIn("attach.connect", self.host.calls)
        self.assertIs(served, next(iter(self.host.served.values())), "the daemon is left alone")

    def test_parents_and_children_are_known_by_their_secrets_without_volt(self) -> None:
        self.attached()
        following.follow(self.stacks, self.volt.assign("debian", ["new"], ["child"]))
        self.host.routes.clear()
        self.host.allowed.clear()
        self.host.daemon_dies("debian")
        self.volt.down = True
        self.scene.restart()
        self.assertEqual([parent("new")], self.host.routes["debian"])
        self.assertEqual([child("child")], self.host.allowed["debian"])

    def test_layers_without_a_record_are_removed_and_no_others(self) -> None:
        self.attached()
        self.host.endpoints.add("stray")
        self.host.routes["other-stray"] = []
        self.assertEqual({"stray", "other-stray"}, self.stacks.orphans())
        self.host.calls.clear()
        for name in ("stray", "other-stray", "debian"):
            serving.remove_orphan(self.stacks, name)
        self.assertEqual("attach.abandon", self.host.calls[0], "nobody waits in it for a parent")
        self.scene.check(self)


class ContentTest(StacksTest):
    def test_an_image_of_another_digest_has_another_cache(self) -> None:
        first = self.attached()
        hosting.remove_if_idle(self.stacks, "debian")
        self.volt.images.clear()
        self.volt.offer("debian", digest=digest_of("later"))
        second = hosting.ensure(self.stacks, "debian")
        self.assertEqual({first.image.key, second.image.key}, set(self.host.caches))
        self.assertEqual({Image("debian", 1 << 20, digest_of("later")).key}, self.host.open_caches)

    def test_what_is_left_of_other_content_is_removed_before_the_image_is_attached_again(self) -> None:
        self.attached()
        self.host.failing = {"cache.close": TROUBLE}
        self.assertRaises(DriverError, hosting.remove_if_idle, self.stacks, "debian")
        self.host.failing = {}
        self.volt.forget("debian")
        self.volt.offer("debian", digest=digest_of("later"))
        hosting.ensure(self.stacks, "debian")
        self.scene.check(self)


class AtOnceTest(StacksTest):
    """Two operations on one image, or one VM: the second begins in the middle of the first."""

    def meanwhile(self, where: str, locks: NamedLocks, name: str, act: Callable[[], object]) -> None:
        """Once the agent gets there, begin ``act`` in a thread, and go on when it waits for the lock of a name."""

        def moment(what: str) -> None:
            if what == where:
                self.host.moment = self.volt.moment = unnoticed
                self.second.start()
                while self.second.is_alive() and locks._locks.get(name, (None, 0))[1] < 2:
                    pause.wait(0.001)

        pause = threading.Event()
        self.second = threading.Thread(target=act)
        self.addCleanup(self.second.join)
        self.host.moment = self.volt.moment = moment

    def test_a_vm_has_a_stack_though_another_call_removes_the_stack(self) -> None:
        create = partial(creating.create, self.scene.vms, "vm", "debian", None)
        remove = partial(hosting.remove_if_idle, self.stacks, "debian")
        self.volt.offer("debian")
        for first, second, places in (
            (create, remove, ("before cache.open", "before volt.join", "before snapshot.create")),
            (
                remove,
                create,
                ("before attach.abandon", "after export.withdraw", "before volt.leave", "after volt.leave"),
            ),
        ):
            for where in places:
                if first is remove:
                    hosting.ensure(self.stacks, "debian")
                self.meanwhile(where, self.stacks.locks, "debian", second)
                first()
                self.second.join()
                self.assertIn("debian", self.host.served, where)
                self.scene.repair()
                self.scene.check(self)
                creating.destroy(self.scene.vms, "vm")
                remove()

    def test_a_vm_is_made_anew_or_gone_as_the_second_call_asks(self) -> None:
        vms = self.scene.vms
        create, destroy = partial(creating.create, vms, "vm", "debian", None), partial(creating.destroy, vms, "vm")
        self.volt.offer("debian")
        for where in ("before volt.join", "within snapshot.create", "after snapshot.create"):
            self.meanwhile(where, vms.locks, "vm", destroy)
            create()
            self.second.join()
            self.assertEqual({}, self.host.disks)
            hosting.remove_if_idle(self.stacks, "debian")
            self.scene.check_empty(self)
        for where in ("before snapshot.delete", "after snapshot.delete"):
            create()
            self.host.disks["vm"].writes = "secret"
            self.meanwhile(where, vms.locks, "vm", create)
            destroy()
            self.second.join()
            self.assertEqual("", self.host.disks["vm"].writes)
            self.scene.check(self)
