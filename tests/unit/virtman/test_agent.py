"""The agent, whole, over doubles."""

from __future__ import annotations

from collections.abc import Callable

from testtools.matchers import Contains

from drivers.digests import PIECES, Sum, key_of
from tests.doubles.drivers import BYTES_PER_FETCH, Host, unnoticed
from tests.doubles.volt import digest_of
from tests.patience import wait_until
from tests.unit.virtman.agents import MIB, SiteCase
from tests.unit.virtman.hypervisor import LIBVIRT
from tests.unit.virtman.scene import BOOT, TROUBLE, Cut, await_quiet, damage
from virtman import booting, cleaning, creating, models
from virtman.agent import Agent
from virtman.client import silently
from virtman.errors import (
    BadImageFile,
    BadRequest,
    BadSize,
    ConfigError,
    CoordinatorDown,
    HostTaken,
    HypervisorError,
    ImageExists,
    Suspended,
    UnknownImage,
    VirtmanError,
    VmMoving,
)
from virtman.imagefile import LARGEST


class AgentTest(SiteCase):
    def setUp(self) -> None:
        super().setUp()
        self.host, self.volt = self.site.host, self.site.volt

    def restart(self, **settings: object) -> None:
        self.agent = self.site.restart(**settings)

    def image(self, name: str = "debian") -> models.Stack:
        (image,) = [image for image in self.agent.overview.status().images if image.name == name]
        return image

    def stored(self) -> list[str]:
        return sorted(path.name for path in (self.site.config.state / "images").iterdir())


class LifeTest(AgentTest):
    def test_a_second_agent_on_the_same_folders_is_refused(self) -> None:
        self.assertRaises(ConfigError, Agent, self.site.config)

    def test_a_second_agent_on_other_folders_is_refused_by_volt_and_says_so(self) -> None:
        run = self.site.folder / "run2"
        Host.known[state := self.site.folder / "state2"] = self.site.host
        self.addCleanup(Host.known.pop, state)
        second = self.site.agent(started=False, state=state, run=run, cache=self.cache)
        second.start()
        said = "Volt: another agent runs under the host name here"
        wait_until(lambda: said in (second.overview.status().volt.trouble or ""))
        self.assertThat(
            str(self.assertRaises(HostTaken, creating.create, second.vms, "vm", "debian", None)), Contains(said)
        )
        self.assertRaises(HostTaken, second.publishing.publish, "mine", self.site.image_file(), silently)
        self.assertEqual(({}, [], {}), (self.volt.places, second.overview.vms(), self.host.leftovers()))

    def test_it_starts_and_works_without_volt(self) -> None:
        creating.create(self.agent.vms, "vm", "debian", None)
        self.volt.down = True
        self.agent = self.site.restart(started=False)
        self.agent.start()
        wait_until(lambda: self.agent.overview.status().volt.trouble != "not connected yet")
        creating.create(self.agent.vms, "other", "debian", None)
        self.assertFalse(self.agent.overview.status().volt.connected)
        self.assertThat(self.agent.overview.status().volt.trouble, Contains("store does not answer"))

    def test_stop_leaves_vms_and_stacks_alone(self) -> None:
        creating.create(self.agent.vms, "vm", "debian", None)
        before = (dict(self.host.served), dict(self.host.disks))
        booting.boot(self.agent.vms, "vm", "debian", None, BOOT, [], None)
        self.restart()
        self.assertEqual(before, (self.host.served, self.host.disks))
        self.assertEqual("running", self.agent.overview.vms()[0].state)


class VmsOfAnAgentTest(AgentTest):
    def test_a_create_that_fails_gives_the_image_back_that_it_attached(self) -> None:
        self.assertRaises(BadSize, creating.create, self.agent.vms, "vm", "debian", 512)
        self.assertEqual(({}, {}), (self.host.leftovers(), self.volt.places))
        creating.create(self.agent.vms, "other", "debian", None)
        creating.destroy(self.agent.vms, "other")
        self.assertRaises(BadSize, creating.create, self.agent.vms, "vm", "debian", 512)
        self.assertIn("debian", self.host.served, "it was attached before")

    def test_what_a_damaged_record_may_need_is_kept(self) -> None:
        creating.create(self.agent.vms, "vm", "debian", None)
        damage(self.agent.vms.records, "vm")
        self.assertEqual(models.Removed(stacks=[], freed_bytes=0), cleaning.gc(self.agent.stacks))
        self.assertEqual(["vm vm"], list(self.agent.overview.status().damaged))
        self.assertEqual({"vm"}, set(self.host.disks))

    def states(self) -> dict[str, str]:
        return {vm.name: vm.state for vm in self.agent.overview.vms()}

    def test_vms_are_listed_with_their_states_which_are_unknown_without_a_hypervisor(self) -> None:
        for name in ("running", "off"):
            booting.boot(self.agent.vms, name, "debian", None, BOOT, [], None)
        booting.stop(self.agent.vms, "off", force=True)
        self.assertEqual({"running": "running", "off": "off"}, self.states())
        self.restart(libvirt="no-such-thing:///x")
        creating.create(self.agent.vms, "disk", "debian", None)
        self.assertEqual({"running": "unknown", "off": "unknown", "disk": "disk"}, self.states())

    def test_a_vm_that_arrives_or_went_is_not_stopped(self) -> None:
        booting.boot(self.agent.vms, "vm", "debian", None, BOOT, [], None)
        records = self.agent.vms.records
        record = records.get("vm")
        assert record is not None
        for where in ({"arriving": True}, {"moved": "qemu+ssh://there/system"}):
            records.put("vm", record.model_copy(update=where))
            for force in (False, True):
                self.assertRaises(VmMoving, booting.stop, self.agent.vms, "vm", force=force)
        records.put("vm", record)
        self.assertEqual("running", self.agent.overview.vm("vm").state)

    def test_a_boot_that_is_cut_off_before_a_domain_of_somebody_else_is_found_it_is_undone(self) -> None:
        self.site.cut_at = "boot:recorded"
        self.assertRaises(Cut, booting.boot, self.agent.vms, "vm", "debian", None, BOOT, [], None)
        self.site.hypervisor.defineXML(
            '<domain type="test"><name>vm</name><memory>1024</memory><os><type>hvm</type></os></domain>'
        )
        self.restart()
        self.assertEqual(["vm"], self.site.domains())
        self.assertEqual({}, self.host.disks)


class UnpublishTest(AgentTest):
    def setUp(self) -> None:
        super().setUp()
        self.agent.publishing.publish("mine", self.site.image_file(), silently)

    def test_it_can_be_given_up_twice_and_published_again(self) -> None:
        creating.create(self.agent.vms, "vm", "mine", None)
        for _ in range(2):
            self.assertTrue(self.agent.publishing.unpublish("mine").serving)
        self.agent.publishing.publish("mine", self.site.image_file(), silently)
        creating.destroy(self.agent.vms, "vm")
        await_quiet(self.agent.upkeep.queue)
        self.assertEqual((["here"], {"mine"}), (self.volt.images["mine"].origins, set(self.host.served)))

    def test_what_this_host_did_not_publish_is_not_touched(self) -> None:
        creating.create(self.agent.vms, "vm", "debian", None)
        for name in ("debian", "unknown"):
            self.assertRaises(UnknownImage, self.agent.publishing.unpublish, name)
        self.assertEqual({"debian", "mine"}, set(self.volt.images))

    def test_without_volt_nothing_changes(self) -> None:
        self.volt.down = True
        self.assertRaises(CoordinatorDown, self.agent.publishing.unpublish, "mine")
        self.assertEqual({"mine"}, set(self.host.served))

    def beat_until(self, condition: Callable[[], object]) -> None:
        def beat() -> object:
            self.agent.heartbeat.soon()
            return condition()

        wait_until(beat)

    def test_one_of_several_origins_gives_itself_up_and_volt_hears_that_its_own_vms_need_it(self) -> None:
        creating.create(self.agent.vms, "vm", "mine", None)
        self.volt.images["mine"].origins.append("other")
        said = self.agent.publishing.unpublish("mine", when_unused=True)
        self.assertEqual(models.Unpublished(name="mine", serving=True), said)
        self.assertEqual((["other"], {"mine"}), (self.volt.images["mine"].origins, self.volt.forgotten))
        creating.destroy(self.agent.vms, "vm")
        self.beat_until(lambda: not self.host.leftovers())

    def test_one_of_several_origins_gives_itself_up_and_leaves_its_content_to_gc_unless_it_is_to_go(self) -> None:
        self.volt.images["mine"].origins.append("other")
        self.volt.read_by_others("mine")
        for when_unused, left in ((False, 1), (True, 0)):
            said = self.agent.publishing.unpublish("mine", when_unused=when_unused)
            self.assertEqual(models.Unpublished(name="mine", serving=False), said)
            self.assertFalse(self.volt.images["mine"].withdrawn)
            self.assertEqual((["other"], left), (self.volt.images["mine"].origins, len(self.stored())))
            self.assertNotIn("mine", self.host.served)
            self.agent.publishing.publish("mine", self.site.image_file(), silently)


class PublishInPlaceTest(AgentTest):
    def setUp(self) -> None:
        super().setUp()
        self.file = self.site.folder / "mine.raw"
        self.file.write_bytes(b"1" * MIB)

    def publish(self, name: str = "mine", trust: str | None = None) -> models.Published:
        return self.agent.publishing.publish_in_place(name, self.file, trust, silently, digest=False)

    def here(self) -> models.InPlace:
        found = self.image("mine").in_place
        assert found is not None
        return found

    def test_again_it_is_the_same_and_another_file_is_refused(self) -> None:
        first = self.publish()
        self.assertEqual(first, self.publish(trust=first.digest))
        self.assertRaises(ImageExists, self.publish, trust=digest_of("other"))
        self.file.write_bytes(b"2" * MIB)
        error = self.assertRaises(ImageExists, self.publish)
        self.assertThat(str(error), Contains("virtman unpublish mine"))
        self.agent.publishing.unpublish("mine")
        self.assertNotEqual(first.digest, self.publish().digest)

    def test_what_holds_the_same_takes_its_place_if_that_is_said(self) -> None:
        first = self.publish()
        before = self.host.served["mine"]
        self.file.write_bytes(b"2" * MIB)  # from here on the agent may notice, and serve it no more
        self.assertEqual(first, self.publish(trust=first.digest))
        self.assertNotEqual(before, self.host.served["mine"])
        await_quiet(self.agent.upkeep.queue)
        self.assertEqual((True, None), (self.here().held, self.here().trouble))
        self.file.write_bytes(b"3" * 2 * MIB)
        self.assertRaises(ImageExists, self.publish, trust=first.digest)

    def test_what_volt_lists_is_trusted_only_by_its_digest(self) -> None:
        error = self.assertRaises(ImageExists, self.publish, "debian")
        digest = self.volt.images["debian"].digest
        self.assertThat(str(error), Contains(f"virtman publish debian {self.file} --in-place --trust {digest}"))
        self.assertEqual(digest, self.publish("debian", digest).digest)
        self.assertEqual(["other", "here"], self.volt.images["debian"].origins)

    def test_a_refusal_of_volt_leaves_nothing(self) -> None:
        self.assertRaises(ImageExists, self.publish, "debian", digest_of("something else"))
        self.assertEqual({}, self.host.leftovers())
        self.assertEqual(b"1" * MIB, self.file.read_bytes())

    def test_a_copy_and_what_is_in_place_are_not_taken_for_each_other(self) -> None:
        copied = self.agent.publishing.publish("mine", self.file, silently)
        error = self.assertRaises(ImageExists, self.publish, trust=copied.digest)
        self.assertThat(str(error), Contains("virtman unpublish mine"))
        self.agent.publishing.unpublish("mine")
        self.publish(trust=copied.digest)
        error = self.assertRaises(ImageExists, self.agent.publishing.publish, "mine", self.file, silently)
        self.assertThat(str(error), Contains(f"in place, from {self.file}"))
        self.assertEqual(str(self.file), self.here().path)


class PublishTest(AgentTest):
    def publish(self, name: str = "mine", seed: int = 1) -> None:
        file = self.site.image_file(seed=seed)
        self.agent.publishing.publish(name, file, silently)

    def test_a_second_time_changes_nothing(self) -> None:
        self.publish()
        before = (dict(self.host.served), self.stored())
        seen = set[str]()
        self.agent.publishing.publish("mine", self.site.image_file(), lambda step, *_: seen.add(step))
        self.assertEqual((before, {"compare"}), ((self.host.served, self.stored()), seen))

    def test_a_further_origin_computes_the_kind_of_digest_that_volt_lists(self) -> None:
        total = Sum(PIECES)
        total.add(self.site.image_file().read_bytes())
        self.volt.offer("mine", digest=total.digest())
        self.publish()
        self.assertEqual(["other", "here"], self.volt.images["mine"].origins)

    def test_two_names_share_one_content(self) -> None:
        self.publish("a")
        self.publish("b")
        self.assertEqual(1, len(self.stored()))
        self.assertEqual({"a", "b"}, set(self.host.served))

    def publish_of(self, parent: str) -> models.Published:
        return self.agent.publishing.publish("mine", self.site.image_file(), silently, parent)

    def test_a_parent_is_told_and_not_attached_for_a_file_that_stands_alone(self) -> None:
        self.publish_of("debian")
        self.assertEqual("debian", self.volt.images["mine"].parent)
        self.assertNotIn("debian", self.host.served)

    def test_a_parent_that_cannot_be_is_refused(self) -> None:
        self.assertRaises(BadRequest, self.publish_of, "mine")
        self.assertRaises(UnknownImage, self.publish_of, "nothing")
        self.assertEqual([], self.stored())

    def test_the_parent_of_a_vms_disk_is_its_image(self) -> None:
        creating.create(self.agent.vms, "vm", "debian", None)
        self.agent.publishing.publish_vm("copy", "vm", silently)
        self.assertEqual("debian", self.volt.images["copy"].parent)

    def refused(self, name: str, size: int) -> list[str]:
        """The steps before a name is refused."""
        file, seen = self.site.image_file("other.raw", seed=2, size=size), list[str]()
        self.assertRaises(ImageExists, self.agent.publishing.publish, name, file, lambda step, *_: seen.append(step))
        return seen

    def test_what_is_known_to_be_something_else_is_refused_before_it_is_copied(self) -> None:
        self.publish("mine")
        before = self.stored()
        self.assertEqual([], self.refused("debian", 2 * MIB))
        self.assertEqual([], self.refused("mine", 2 * MIB))
        self.assertEqual({"compare"}, set(self.refused("mine", MIB)))
        creating.create(self.agent.vms, "vm", "debian", LARGEST + (1 << 40))
        self.assertRaises(BadImageFile, self.agent.publishing.publish_vm, "large", "vm", silently)
        self.assertEqual([], self.refused("debian", MIB))
        self.assertEqual(before, self.stored())

    def test_a_refused_publish_leaves_no_content_but_what_another_image_has(self) -> None:
        self.assertRaises(ImageExists, self.publish, "debian")
        self.assertEqual(([], {}), (self.stored(), self.host.leftovers()))
        self.publish("mine")
        self.assertRaises(ImageExists, self.publish, "debian")
        self.assertEqual(1, len(self.stored()))

    def test_content_that_is_about_to_get_its_record_outlives_gc(self) -> None:
        self.site.at["publish:stored"] = lambda: cleaning.gc(self.agent.stacks)
        self.publish("mine")
        self.assertEqual(1, len(self.stored()))

    def test_cut_off_before_the_record_it_can_be_asked_for_again(self) -> None:
        self.site.cut_at = "publish:stored"
        self.assertRaises(Cut, self.publish)
        self.restart()
        self.assertEqual({}, self.host.leftovers())
        cleaning.gc(self.agent.stacks)
        self.assertEqual([], self.stored())
        self.publish()


class RepairTest(AgentTest):
    def setUp(self) -> None:
        """Nobody repairs before it is asked for."""
        super().setUp()
        self.site.hold_still(self.agent)

    def test_it_tells_what_it_did(self) -> None:
        creating.create(self.agent.vms, "vm", "debian", None)
        self.site.cut_at = "destroy:stopped"
        self.assertRaises(Cut, creating.destroy, self.agent.vms, "vm")
        self.host.daemon_dies("debian")
        self.host.endpoints.add("stray")
        self.assertEqual(models.Repaired(vms=["vm"], images=["debian"], orphans=["stray"]), self.agent.repair())
        self.assertEqual(({}, {"debian"}), (self.host.disks, set(self.host.served)))

    def test_it_goes_on_after_an_error_and_tells_all(self) -> None:
        for image in ("alpine", "debian"):
            self.volt.offer(image, size=MIB)
            creating.create(self.agent.vms, f"vm-{image}", image, None)
            self.host.daemon_dies(image)
        self.host.endpoints.add("stray")
        self.host.failing = {"export.publish": TROUBLE}
        error = self.assertRaises(VirtmanError, self.agent.repair)
        self.assertEqual(2, str(error).count("the device is on fire"))
        self.assertNotIn("stray", self.host.endpoints)
        self.host.failing = {}
        self.assertEqual(["alpine", "debian"], self.agent.repair().images)

    def test_a_disk_that_cannot_be_opened_again_is_told_of(self) -> None:
        creating.create(self.agent.vms, "vm", "debian", None)
        self.host.disks.clear()
        self.assertIn("vm", str(self.assertRaises(VirtmanError, self.agent.repair)))

    def test_repair_goes_through_a_volt_that_is_down(self) -> None:
        self.site.cut_at = "attach:reserved"
        self.assertRaises(Cut, creating.create, self.agent.vms, "vm", "debian", None)
        self.volt.down = True
        self.assertEqual(["debian"], self.agent.repair().images)
        self.assertEqual({}, self.host.leftovers())


class ReconcilerTest(AgentTest):
    def test_a_dead_daemon_is_started_by_its_driver_telling(self) -> None:
        creating.create(self.agent.vms, "vm", "debian", None)
        await_quiet(self.agent.upkeep.queue)
        self.host.daemon_dies("debian")
        self.agent.stacks.source._export.died("debian")  # type: ignore[attr-defined]
        wait_until(lambda: "debian" in self.host.served)

    def test_a_lost_parent_is_reported_by_its_driver_telling(self) -> None:
        creating.create(self.agent.vms, "vm", "debian", None)
        (path,) = self.agent.stacks.source.paths("debian")
        self.agent.stacks.source._attach.lost(self.agent.stacks.records.all()[0].name, path.parent.host)  # type: ignore[attr-defined]
        wait_until(lambda: self.volt.reported == [("debian", "other")])


class GcTest(AgentTest):
    def assert_foretold(self) -> None:
        """What gc would remove is told, nothing has changed by that, and gc removes just that."""
        before = (dict(self.host.leftovers()), dict(self.host.caches), self.stored(), set(self.volt.places))
        told = cleaning.would_remove(self.agent.stacks)
        self.assertEqual(
            before, (dict(self.host.leftovers()), dict(self.host.caches), self.stored(), set(self.volt.places))
        )
        self.assertEqual(told, cleaning.gc(self.agent.stacks))

    def bytes_of(self, name: str) -> int:
        """The disk space of an image's content and manifest."""
        size = self.agent.stacks.store.size(key_of(self.volt.images[name].digest))
        self.assertGreater(size, MIB)
        return size

    def test_what_it_would_remove_is_told_before(self) -> None:
        self.assert_foretold()
        creating.create(self.agent.vms, "vm", "debian", None)
        self.agent.publishing.publish("mine", self.site.image_file(), silently)
        self.agent.publishing.publish("needed", self.site.image_file(seed=2), silently)
        creating.create(self.agent.vms, "other", "needed", None)
        self.assert_foretold()
        creating.destroy(self.agent.vms, "vm")
        content = self.bytes_of("mine")
        for name in ("mine", "needed"):
            del self.volt.images[name]
        self.assertEqual(
            models.Removed(stacks=["debian", "mine"], freed_bytes=content + BYTES_PER_FETCH),
            cleaning.would_remove(self.agent.stacks),
        )
        self.assert_foretold()
        self.assert_foretold()

    def test_what_other_hosts_read_stays_though_volt_does_not_list_it_until_it_is_given_up(self) -> None:
        self.agent.publishing.publish("mine", self.site.image_file(), silently)
        self.volt.assign("mine", [], ["child"])
        self.agent.repair()  # it asks for a heartbeat
        self.site.await_child(self.agent, "mine")
        content = self.bytes_of("mine")
        self.volt.remove_image("mine")  # its database was set back to a backup
        kept = models.Removed(stacks=[], freed_bytes=0, kept=["mine"])
        self.assertEqual((kept, kept), (cleaning.would_remove(self.agent.stacks), cleaning.gc(self.agent.stacks)))
        self.assertEqual((["mine"], 1), (list(self.host.served), len(self.stored())))
        self.assertFalse(self.agent.publishing.unpublish("mine").serving)
        self.assertEqual(models.Removed(stacks=[], freed_bytes=content), cleaning.gc(self.agent.stacks))

    def test_what_is_published_again_after_volt_was_asked_stays(self) -> None:
        def publish(what: str = "after volt.images") -> None:
            if what == "after volt.images":
                self.volt.moment = unnoticed
                self.agent.publishing.publish("mine", file, silently)

        file = self.site.image_file()
        publish()
        del self.volt.images["mine"], self.volt.places["mine"]  # it was set back to a backup
        self.volt.moment = publish
        cleaning.gc(self.agent.stacks)
        self.assertEqual((["mine"], 1), (list(self.host.served), len(self.stored())))

    def test_what_the_damaged_record_of_an_image_may_need_is_kept(self) -> None:
        self.agent.publishing.publish("mine", self.site.image_file(), silently)
        creating.create(self.agent.vms, "vm", "debian", None)
        creating.destroy(self.agent.vms, "vm")
        for content in (b"{", b'{"version": 3}'):
            damage(self.agent.stacks.records, "mine", content)
            del self.volt.images["mine"]
            for _ in range(2):
                self.assertEqual(0, cleaning.gc(self.agent.stacks).freed_bytes, "nobody knows what it needs")
                self.restart()
            self.assertEqual(1, len(self.stored()), "the only content of the image")
            self.assertIn("mine", self.host.served)
            self.assertEqual(["image mine"], list(self.agent.overview.status().damaged))
            self.volt.offer("mine")

    def test_without_volt_nothing_is_removed(self) -> None:
        creating.create(self.agent.vms, "vm", "debian", None)
        creating.destroy(self.agent.vms, "vm")
        self.volt.down = True
        self.assertRaises(CoordinatorDown, cleaning.gc, self.agent.stacks)
        self.assertEqual({"debian"}, set(self.host.served))


class SuspendTest(AgentTest):
    def test_vms_that_run_or_may_run_forbid_it_unless_they_are_made_to_wait(self) -> None:
        booting.boot(self.agent.vms, "vm", "debian", None, BOOT, [], None)
        for libvirt, state in (("no-such-thing:///x", "unknown"), (LIBVIRT, "running")):
            self.restart(libvirt=libvirt)
            error = self.assertRaises(HypervisorError, self.agent.suspend, force=False)
            self.assertThat(str(error), Contains(f"vm ({state})"))
            self.assertEqual({"debian"}, set(self.host.served))
        self.agent.suspend(force=True)
        self.assertEqual(set(), set(self.host.served))

    def test_a_host_without_images_gets_none_either(self) -> None:
        self.agent.suspend(force=False)
        self.assertRaises(Suspended, creating.create, self.agent.vms, "vm", "debian", None)
        self.assertRaises(Suspended, self.agent.publishing.publish, "mine", self.site.image_file(), silently)
        self.assertEqual(({}, {}), (self.host.leftovers(), self.volt.places))

    def test_nothing_brings_it_back_before_the_next_start(self) -> None:
        creating.create(self.agent.vms, "vm", "debian", None)
        self.assertFalse(self.agent.overview.status().suspended)
        self.agent.suspend(force=False)
        self.assertTrue(self.agent.overview.status().suspended)
        beats = len(self.volt.beats)
        self.agent.heartbeat.soon()
        wait_until(lambda: len(self.volt.beats) > beats)
        self.agent.upkeep.tend_all()  # as the beat's answer has it done
        await_quiet(self.agent.upkeep.queue)
        # What was planned before is refused, and not planned again.
        wait_until(lambda: not self.agent.overview.status().troubles)
        self.assertEqual(set(), set(self.host.served))
