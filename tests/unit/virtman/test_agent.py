"""The agent, whole, over doubles."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

from testtools import TestCase
from testtools.matchers import Contains

from drivers.base import VolumeState
from drivers.errors import DriverError
from tests.doubles.drivers import BYTES_PER_FETCH, HIT_BYTES, POOL
from tests.unit.virtman.agents import LIBVIRT, MIB, Site
from tests.unit.virtman.scene import Cut
from virtman.agent import Agent
from virtman.errors import (
    BadImageFile,
    BadSize,
    ConfigError,
    CoordinatorDown,
    DomainForeign,
    HypervisorError,
    ImageExists,
    NotFound,
    NoVolumes,
    RepairIncomplete,
    StateLocked,
    UnknownImage,
    UnknownVm,
    UnknownVolume,
)
from virtman.records import Boot

TROUBLE = DriverError("the device is on fire")
BOOT = Boot(memory=64, cpus=1, network="none")


def nothing(_step: str, _done: int, _total: int) -> None:
    """Nobody looks at the progress."""


class AgentTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.site = Site(self)
        self.host, self.volt = self.site.host, self.site.volt
        self.volt.offer("debian", size=MIB)
        self.agent = self.site.agent()

    def restart(self, **settings: object) -> None:
        self.agent = self.site.restart(**settings)

    def image(self, name: str = "debian") -> dict[str, object]:
        (image,) = [image for image in self.agent.status()["images"] if image["image"] == name]
        return dict(image)

    def stored(self) -> list[str]:
        return sorted(path.name for path in (self.site.config.state / "images").iterdir())


class LifeTest(AgentTest):
    def test_it_registers_and_connects(self) -> None:
        self.assertEqual({"here": "unix:///run/virtman/serve"}, self.volt.hosts)
        self.assertEqual(
            {"url": self.site.config.volt, "connected": True, "trouble": None}, self.agent.status()["volt"]
        )

    def test_a_second_agent_on_the_same_folders_is_refused(self) -> None:
        self.assertRaises(StateLocked, Agent, self.site.config)

    def test_another_one_may_follow(self) -> None:
        self.restart()
        self.assertEqual([], self.agent.vms())

    def test_it_starts_and_works_without_volt(self) -> None:
        self.agent.create("vm", "debian", None)
        self.volt.down = True
        self.agent = self.site.restart(started=False)
        self.agent.start()
        self.site.await_true(lambda: self.agent.status()["volt"]["trouble"] != "not connected yet")
        self.agent.create("other", "debian", None)
        self.assertFalse(self.agent.status()["volt"]["connected"])
        self.assertThat(self.agent.status()["volt"]["trouble"], Contains("store does not answer"))

    def test_a_driver_that_is_not_installed_is_named(self) -> None:
        error = self.assertRaises(ConfigError, self.site.restart, cache="floppy")
        self.assertThat(str(error), Contains("'floppy'"))

    def test_stop_leaves_vms_and_stacks_alone(self) -> None:
        self.agent.create("vm", "debian", None)
        before = (dict(self.host.served), dict(self.host.disks))
        self.agent.boot("vm", "debian", None, BOOT, [], None)
        self.restart()
        self.assertEqual(before, (self.host.served, self.host.disks))
        self.assertEqual("running", self.agent.vms()[0]["state"])

    def test_an_interrupted_import_is_cleaned_at_the_start(self) -> None:
        torn = self.site.config.state / "images" / ".import-x.raw"
        torn.touch()
        self.restart()
        self.assertFalse(torn.exists())


class VmsOfAnAgentTest(AgentTest):
    def test_create_tells_all_that_a_qemu_needs(self) -> None:
        vm = self.agent.create("vm", "debian", 2 * MIB)
        self.assertEqual(("vm", "debian", 2 * MIB, "ready"), (vm["vm"], vm["image"], vm["size"], vm["phase"]))
        self.assertEqual("/disks/vm.qcow2", vm["path"])
        self.assertEqual("qcow2", vm["blockdev"]["driver"])
        self.assertEqual(vm, self.agent.vm("vm"))

    def test_a_create_that_fails_gives_the_image_back_that_it_attached(self) -> None:
        self.assertRaises(BadSize, self.agent.create, "vm", "debian", 512)
        self.assertEqual({}, self.host.leftovers())
        self.assertEqual({}, self.volt.places)

    def test_what_a_damaged_record_may_need_is_kept(self) -> None:
        self.agent.create("vm", "debian", None)
        (self.agent.config.state / "records" / "vms" / "vm.json").write_bytes(b"{")
        self.assertEqual({"stacks": [], "freed_bytes": 0}, self.agent.gc())
        self.assertEqual(["vm"], self.agent.status()["damaged"])
        self.assertEqual({"vm"}, set(self.host.disks))

    def test_the_first_error_of_a_create_is_raised(self) -> None:
        self.host.failing = {"snapshot.create": TROUBLE, "export.withdraw": DriverError("stuck")}
        self.assertIs(TROUBLE, self.assertRaises(DriverError, self.agent.create, "vm", "debian", None))

    def test_a_create_that_fails_leaves_other_vms_of_the_image_alone(self) -> None:
        self.agent.create("old", "debian", None)
        self.assertRaises(BadSize, self.agent.create, "vm", "debian", 512)
        self.assertEqual({"debian"}, set(self.host.served))

    def test_vms_are_listed_with_their_states(self) -> None:
        self.agent.create("disk", "debian", None)
        self.agent.boot("running", "debian", None, BOOT, [], None)
        self.agent.boot("off", "debian", None, BOOT, [], None)
        self.agent.stop_vm("off", force=True)
        states = {vm["vm"]: vm["state"] for vm in self.agent.vms()}
        self.assertEqual({"disk": "disk", "running": "running", "off": "off"}, states)

    def test_without_a_hypervisor_states_are_unknown_and_disks_still_made(self) -> None:
        self.agent.boot("booted", "debian", None, BOOT, [], None)
        self.restart(libvirt="no-such-thing:///x")
        self.agent.create("disk", "debian", None)
        self.assertEqual({"booted": "unknown", "disk": "disk"}, {vm["vm"]: vm["state"] for vm in self.agent.vms()})

    def test_destroy_takes_a_running_vm_away(self) -> None:
        self.agent.boot("vm", "debian", None, BOOT, [], None)
        self.agent.destroy("vm")
        self.assertEqual(([], []), (self.agent.vms(), self.site.domains()))
        self.assertEqual([], list((self.site.config.state / "machines").iterdir()))

    def test_unknown_vms_are_named(self) -> None:
        for call in (
            self.agent.vm,
            self.agent.destroy,
            self.agent.console,
            lambda vm: self.agent.stop_vm(vm, force=False),
        ):
            error = self.assertRaises(UnknownVm, call, "unknown")
            self.assertThat(str(error), Contains("'unknown'"))


class BootTest(AgentTest):
    def test_it_creates_and_starts(self) -> None:
        vm = self.agent.boot("vm", "debian", 2 * MIB, BOOT, ["key"], "#cloud-config\n")
        self.assertEqual((2 * MIB, "tcg"), (vm["size"], vm["accel"]))
        self.assertEqual(["vm"], self.site.domains())
        console = self.agent.console("vm")
        self.assertEqual({"libvirt": LIBVIRT, "domain": "vm", "log": vm["console_log"]}, console)

    def test_a_disk_that_is_there_is_booted(self) -> None:
        self.agent.create("vm", "debian", None)
        self.host.disks["vm"].writes = "precious"
        self.agent.boot("vm", "debian", None, BOOT, [], None)
        self.assertEqual("precious", self.host.disks["vm"].writes)

    def test_a_boot_that_fails_destroys_the_disk_that_it_made(self) -> None:
        self.restart(libvirt="no-such-thing:///x")
        self.assertRaises(HypervisorError, self.agent.boot, "vm", "debian", None, BOOT, [], None)
        self.assertEqual(([], {}), (self.agent.vms(), self.host.disks))

    def test_a_boot_that_fails_keeps_the_disk_that_was_there(self) -> None:
        self.agent.create("vm", "debian", None)
        self.restart(libvirt="no-such-thing:///x")
        self.assertRaises(HypervisorError, self.agent.boot, "vm", "debian", None, BOOT, [], None)
        self.assertEqual({"vm"}, set(self.host.disks))
        self.assertEqual(["disk"], [vm["state"] for vm in self.agent.vms()])

    def test_a_domain_of_somebody_else_is_not_touched(self) -> None:
        self.site.hypervisor.defineXML(
            '<domain type="test"><name>vm</name><memory>1024</memory><os><type>hvm</type></os></domain>'
        )
        self.assertRaises(DomainForeign, self.agent.boot, "vm", "debian", None, BOOT, [], None)
        self.assertEqual(["vm"], self.site.domains())
        self.assertEqual(([], {}), (self.agent.vms(), self.host.disks))

    def test_cut_off_before_a_domain_of_somebody_else_is_found_it_can_be_destroyed(self) -> None:
        self.site.cut_at = "boot:recorded"
        self.assertRaises(Cut, self.agent.boot, "vm", "debian", None, BOOT, [], None)
        self.site.hypervisor.defineXML(
            '<domain type="test"><name>vm</name><memory>1024</memory><os><type>hvm</type></os></domain>'
        )
        self.restart()
        self.agent.destroy("vm")
        self.assertEqual(["vm"], self.site.domains())
        self.assertEqual({}, self.host.disks)

    def test_cut_off_at_every_step_it_is_undone_or_done(self) -> None:
        for step in ("create:recorded", "create:snapshot", "create:done", "boot:recorded", "boot:started"):
            self.site.cut_at = step
            self.assertRaises(Cut, self.agent.boot, "vm", "debian", None, BOOT, [], None)
            self.restart()
            if self.agent.vms():
                self.agent.boot("vm", "debian", None, BOOT, [], None)
                self.assertEqual(["vm"], self.site.domains())
                self.agent.destroy("vm")
            self.assertEqual(([], {}), (self.site.domains(), self.host.disks), step)
            self.assertEqual([], list((self.site.config.state / "machines").iterdir()))


class PublishTest(AgentTest):
    def publish(self, name: str = "mine", seed: int = 1) -> None:
        file = self.site.image_file(seed=seed)
        self.agent.publish(name, file, nothing)

    def test_it_becomes_the_origin_and_tells_volt(self) -> None:
        file = self.site.image_file()
        record = self.agent.publish("mine", file, nothing)
        self.assertEqual(("origin", "attached", MIB), (record.role, record.phase, record.size))
        self.assertEqual(["here"], self.volt.images["mine"].origins)
        self.assertEqual([f"{record.image.key}.raw"], self.stored())
        image = self.image("mine")
        self.assertEqual(([], 0, True), (image["paths"], image["fetched_bytes"], image["serving"]))

    def test_a_second_time_changes_nothing(self) -> None:
        self.publish()
        before = (dict(self.host.served), self.stored())
        self.publish()
        self.assertEqual(before, (self.host.served, self.stored()))

    def test_two_names_share_one_content(self) -> None:
        self.publish("a")
        self.publish("b")
        self.assertEqual(1, len(self.stored()))
        self.assertEqual({"a", "b"}, set(self.host.served))

    def test_a_bad_file_changes_nothing(self) -> None:
        self.site.image_file()
        self.assertRaises(BadImageFile, self.agent.publish, "mine", Path("/nonexistent"), nothing)
        self.assertEqual(([], {}), (self.stored(), self.host.leftovers()))

    def test_a_name_that_is_taken_leaves_no_content(self) -> None:
        self.assertRaises(ImageExists, self.publish, "debian")
        self.assertEqual(([], {}), (self.stored(), self.host.leftovers()))

    def test_a_refused_publish_keeps_content_that_another_image_has(self) -> None:
        self.publish("mine")
        self.assertRaises(ImageExists, self.publish, "debian")
        self.assertEqual(1, len(self.stored()))

    def test_two_names_of_one_content_at_once_of_which_one_is_refused(self) -> None:
        file = self.site.image_file()

        def refused_meanwhile(step: str, done: int, _total: int) -> None:
            if step == "digest" and done == MIB and not refused:
                refused.append(self.assertRaises(ImageExists, self.agent.publish, "debian", file, nothing))

        refused: list[Exception] = []
        record = self.agent.publish("mine", file, refused_meanwhile)
        self.assertEqual([f"{record.image.key}.raw"], self.stored())

    def test_without_volt_nothing_is_left(self) -> None:
        self.volt.down = True
        self.assertRaises(CoordinatorDown, self.publish)
        self.assertEqual(([], {}), (self.stored(), self.host.leftovers()))

    def test_cut_off_at_every_step_it_can_be_asked_for_again(self) -> None:
        for number, step in enumerate(("publish:stored", "publish:recorded", "attach:published", "publish:serving")):
            self.site.cut_at = step
            self.assertRaises(Cut, self.publish, f"image-{number}")
            self.restart()
            self.assertEqual({}, self.host.leftovers(), step)
            self.agent.gc()
            self.assertEqual([], self.stored(), step)
            self.publish(f"image-{number}")
            del self.volt.images[f"image-{number}"], self.volt.places[f"image-{number}"]
            self.agent.gc()
            self.assertEqual(([], {}), (self.stored(), self.host.leftovers()))

    def test_volt_hears_of_the_origin_with_the_next_heartbeat(self) -> None:
        self.publish()
        self.site.await_true(lambda: any(node.image == "mine" for node in self.volt.beats[-1]))


class LookTest(AgentTest):
    def test_images_say_how_far_they_are_here(self) -> None:
        self.volt.offer("alpine")
        self.agent.create("vm", "debian", None)
        self.image()
        images = {image["name"]: image for image in self.agent.images()}
        self.assertEqual(
            ("host (attached)", BYTES_PER_FETCH), (images["debian"]["here"], images["debian"]["held_bytes"])
        )
        self.assertEqual((None, 0), (images["alpine"]["here"], images["alpine"]["held_bytes"]))

    def test_images_and_trees_need_volt(self) -> None:
        self.volt.down = True
        self.assertRaises(CoordinatorDown, self.agent.images)
        self.assertRaises(CoordinatorDown, self.agent.tree, "debian")

    def test_a_tree(self) -> None:
        self.assertEqual("other", self.agent.tree("debian").root.host)
        self.assertRaises(UnknownImage, self.agent.tree, "unknown")

    def test_status_tells_of_stacks_and_vms(self) -> None:
        self.agent.create("vm", "debian", None)
        self.assertEqual(
            {
                "image": "debian", "role": "host", "phase": "attached", "serving": True, "slot": 1, "size": MIB,
                "fetched_bytes": BYTES_PER_FETCH, "cache_file_bytes": 2 * BYTES_PER_FETCH,
                "cache_hit_bytes": HIT_BYTES, "children": [], "vms": ["vm"],
                "paths": [{"host": "other", "address": "unix:///run/other/serve", "state": "active"}],
            },
            self.image(),
        )  # fmt: skip
        self.assertEqual({"use": "tcg", "reason": "set by --accel"}, self.agent.status()["accel"])

    def test_status_tells_of_disks_without_a_record(self) -> None:
        self.agent.create("vm", "debian", None)
        self.host.disks["stray"] = self.host.disks["vm"]
        self.assertEqual(["stray"], self.agent.status()["strays"])

    def test_status_tells_what_keeps_vms_from_writing(self) -> None:
        self.assertIsNone(self.agent.status()["disks"]["trouble"])
        self.host.disk_trouble = "no room"
        self.assertEqual("no room", self.agent.status()["disks"]["trouble"])


class VolumesTest(AgentTest):
    def setUp(self) -> None:
        super().setUp()
        self.restart(cache="group")

    def states(self) -> dict[str, str]:
        """What the status says of the volumes."""
        return {volume["path"]: volume["state"] for volume in self.agent.status()["cache_volumes"]}

    def test_they_are_listed(self) -> None:
        self.host.volumes[POOL.path] = replace(POOL, images=("debian",), state=VolumeState.RUNNING)
        line = {"path": str(POOL.path), "size": POOL.size, "state": "running", "images": ["debian"]}
        self.assertEqual([line], self.agent.volumes())

    def test_they_come_and_go(self) -> None:
        for _ in range(2):
            self.assertEqual("/dev/sdx", self.agent.add_volume(Path("/dev/sdx"))["path"])
        self.agent.remove_volume(POOL.path)
        self.assertEqual(["/dev/sdx"], [volume["path"] for volume in self.agent.volumes()])

    def test_the_status_follows_at_once(self) -> None:
        self.agent.add_volume(Path("/dev/sdx"))
        self.assertIn("/dev/sdx", self.states())
        self.agent.remove_volume(Path("/dev/sdx"))
        self.assertEqual([str(POOL.path)], list(self.states()))

    def test_a_path_that_is_no_volume_is_named_and_no_other(self) -> None:
        error = self.assertRaises(UnknownVolume, self.agent.remove_volume, Path("/dev/sdx"))
        self.assertThat(str(error), Contains("'/dev/sdx'"))
        self.assertNotIn(str(POOL.path), str(error))
        self.assertNotIn("cache.remove_volume", self.host.calls)

    def test_the_status_comes_to_know_of_one_that_fails(self) -> None:
        self.host.volumes[POOL.path] = replace(POOL, state=VolumeState.FAILED)
        self.agent._heartbeat.soon()
        self.site.await_true(lambda: self.states() == {str(POOL.path): "failed"})

    def test_the_status_does_not_look_at_them(self) -> None:
        self.agent.volumes()
        self.host.failing = {"cache.volumes": TROUBLE}
        self.assertEqual({str(POOL.path): "idle"}, self.states())
        self.assertIs(TROUBLE, self.assertRaises(DriverError, self.agent.volumes))

    def test_a_driver_without_volumes_says_so(self) -> None:
        self.restart()
        for call in (
            self.agent.volumes, lambda: self.agent.add_volume(POOL.path), lambda: self.agent.remove_volume(POOL.path),
        ):  # fmt: skip
            error = self.assertRaises(NoVolumes, call)
            self.assertThat(str(error), Contains("double"))
            self.assertThat(str(error), Contains("bcache"))
        self.assertEqual({}, self.states())


class RepairTest(AgentTest):
    def test_nothing_to_do(self) -> None:
        self.agent.create("vm", "debian", None)
        self.assertEqual({"vms": [], "images": [], "strays": []}, self.agent.repair())

    def test_it_tells_what_it_did(self) -> None:
        self.agent.create("vm", "debian", None)
        self.site.cut_at = "destroy:stopped"
        self.assertRaises(Cut, self.agent.destroy, "vm")
        self.host.daemon_dies("debian")
        self.host.endpoints.add("stray")
        self.assertEqual({"vms": ["vm"], "images": ["debian"], "strays": ["stray"]}, self.agent.repair())
        self.assertEqual(({}, {"debian"}), (self.host.disks, set(self.host.served)))

    def test_it_goes_on_after_an_error_and_tells_all(self) -> None:
        for image in ("alpine", "debian"):
            self.volt.offer(image, size=MIB)
            self.agent.create(f"vm-{image}", image, None)
            self.host.daemon_dies(image)
        self.host.endpoints.add("stray")
        self.host.failing = {"export.publish": TROUBLE}
        error = self.assertRaises(RepairIncomplete, self.agent.repair)
        self.assertEqual(2, str(error).count("the device is on fire"))
        self.assertNotIn("stray", self.host.endpoints)
        self.host.failing = {}
        self.assertEqual(["alpine", "debian"], self.agent.repair()["images"])

    def test_a_start_repairs(self) -> None:
        self.agent.create("vm", "debian", None)
        self.host.daemon_dies("debian")
        self.restart()
        self.assertEqual({"debian"}, set(self.host.served))

    def test_repair_goes_through_a_volt_that_is_down(self) -> None:
        self.site.cut_at = "attach:reserved"
        self.assertRaises(Cut, self.agent.create, "vm", "debian", None)
        self.volt.down = True
        self.assertEqual(["debian"], self.agent.repair()["images"])
        self.assertEqual({}, self.host.leftovers())

    def test_a_dead_daemon_is_started_by_its_driver_telling(self) -> None:
        self.agent.create("vm", "debian", None)
        self.host.daemon_dies("debian")
        self.agent._drivers.export.died("debian")  # type: ignore[attr-defined]
        self.site.await_true(lambda: "debian" in self.host.served)

    def test_a_lost_parent_is_reported_by_its_driver_telling(self) -> None:
        self.agent.create("vm", "debian", None)
        (path,) = self.agent._drivers.attach.paths("debian")
        self.agent._drivers.attach.lost(self.agent._stacks.records()[0].image, path.parent)  # type: ignore[attr-defined]
        self.site.await_true(lambda: self.volt.reported == [("debian", "other")])


class GcTest(AgentTest):
    def test_idle_stacks_and_caches_go(self) -> None:
        self.agent.create("vm", "debian", None)
        self.agent.destroy("vm")
        self.assertEqual({"stacks": ["debian"], "freed_bytes": BYTES_PER_FETCH}, self.agent.gc())
        self.assertEqual(({}, {}), (self.host.leftovers(), self.host.caches))

    def test_what_is_needed_stays(self) -> None:
        self.agent.create("vm", "debian", None)
        self.agent.publish("mine", self.site.image_file(), nothing)
        self.assertEqual({"stacks": [], "freed_bytes": 0}, self.agent.gc())
        self.assertEqual({"debian", "mine"}, set(self.host.served))
        self.assertEqual(1, len(self.stored()))

    def test_an_origin_that_volt_lists_no_more_goes_with_its_content(self) -> None:
        self.agent.publish("mine", self.site.image_file(), nothing)
        del self.volt.images["mine"]
        answer = self.agent.gc()
        self.assertEqual(["mine"], answer["stacks"])
        self.assertEqual(MIB, answer["freed_bytes"])
        self.assertEqual([], self.stored())

    def test_without_volt_nothing_is_removed(self) -> None:
        self.agent.create("vm", "debian", None)
        self.agent.destroy("vm")
        self.volt.down = True
        self.assertRaises(CoordinatorDown, self.agent.gc)
        self.assertEqual({"debian"}, set(self.host.served))

    def test_content_that_is_being_published_stays(self) -> None:
        stored, go = threading.Event(), threading.Event()
        self.addCleanup(go.set)

        def wait_at(step: str, _done: int, _total: int) -> None:
            if step == "digest":
                stored.set()
                go.wait(10)

        file = self.site.image_file()
        publishing = threading.Thread(target=self.agent.publish, args=("mine", file, wait_at))
        publishing.start()
        self.addCleanup(publishing.join)
        self.assertTrue(stored.wait(10))
        self.assertEqual(0, self.agent.gc()["freed_bytes"])
        go.set()
        publishing.join()
        self.assertIn("mine", self.host.served)


class SuspendTest(AgentTest):
    def test_all_stops_and_the_next_start_brings_it_back(self) -> None:
        self.agent.create("vm", "debian", None)
        self.host.disks["vm"].writes = "precious"
        self.agent.suspend(force=False)
        self.assertEqual({"disks"}, set(self.host.leftovers()))
        self.restart()
        self.assertEqual({"debian"}, set(self.host.served))
        self.assertEqual("precious", self.host.disks["vm"].writes)

    def test_running_vms_forbid_it(self) -> None:
        self.agent.boot("vm", "debian", None, BOOT, [], None)
        error = self.assertRaises(HypervisorError, self.agent.suspend, force=False)
        self.assertThat(str(error), Contains("vm"))
        self.assertEqual({"debian"}, set(self.host.served))

    def test_running_vms_may_be_made_to_wait(self) -> None:
        self.agent.boot("vm", "debian", None, BOOT, [], None)
        self.agent.suspend(force=True)
        self.assertEqual(set(), set(self.host.served))

    def test_it_goes_on_after_an_error_and_tells_all(self) -> None:
        for image in ("alpine", "debian"):
            self.volt.offer(image, size=MIB)
            self.agent.create(f"vm-{image}", image, None)
        self.host.failing = {"cache.close": TROUBLE}
        error = self.assertRaises(RepairIncomplete, self.agent.suspend, force=False)
        self.assertEqual(2, str(error).count("the device is on fire"))
        self.assertEqual(set(), set(self.host.served))

    def test_nothing_brings_it_back_before_the_next_start(self) -> None:
        self.agent.create("vm", "debian", None)
        self.agent.suspend(force=False)
        self.agent._heartbeat.soon()
        beats = len(self.volt.beats)
        self.site.await_true(lambda: len(self.volt.beats) > beats)
        self.assertEqual(set(), set(self.host.served))


class ErrorsTest(AgentTest):
    def test_not_found_is_one_family(self) -> None:
        self.assertRaises(NotFound, self.agent.vm, "unknown")
        self.assertRaises(NotFound, self.agent.create, "vm", "unknown", None)
