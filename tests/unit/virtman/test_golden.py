"""State folders that earlier releases wrote open in this one (tests/golden): everything goes on, nothing is lost."""

from __future__ import annotations

import shutil
from pathlib import Path

from testtools import TestCase

from drivers.base import Device, Image
from tests.doubles.drivers import Disk
from tests.doubles.volt import digest_of
from tests.unit.virtman.scene import Scene
from virtman.errors import RepairIncomplete
from virtman.records import Boot
from virtman.stackchoice import USERSPACE, made_with

GOLDEN = Path(__file__).parents[2] / "golden"
MIB = 1 << 20
READ = ("attached", "unconfirmed", "attaching", "joined", "detaching", "leaving")
PUBLISHED = ("origin", "publishing")
DISKS = ("disk", "large", "of-the-origin", "machine", "creating", "destroying", "destroying-machine")
KEPT = {"disk", "large", "of-the-origin", "machine"}
BOOT = Boot(memory=64, cpus=1, network="none")


class GoldenTest(TestCase):
    def host_of(self, release: str) -> Scene:
        """A host on which that release was killed, with a VM running, in the middle of everything that it can do."""
        scene = Scene(self)
        shutil.copytree(GOLDEN / release, scene.folder, dirs_exist_ok=True)
        for name in READ:
            scene.volt.offer(name)
        for name in READ[:2]:
            scene.volt.assign(name, ["other", "spare"], ["child"])
        for name in PUBLISHED:
            scene.put_content(name)
        scene.volt.publish(Image("origin", MIB, digest_of("origin")), "here")
        for name in DISKS:
            scene.host.disks[name] = Disk(MIB, Device(MIB, node={}), whole=True, writes=f"of {name}")
        for name in ("machine", "destroying-machine"):
            scene.machines.running[name] = Device(MIB)
            scene.machines.files.add(name)
        return scene

    def test_every_release_has_a_folder(self) -> None:
        self.assertEqual(["0.1.0"], sorted(path.name for path in GOLDEN.iterdir()))

    def test_all_of_0_1_0_goes_on(self) -> None:
        scene = self.host_of("0.1.0")
        scene.restart()
        scene.check(self)
        self.assertEqual({"attached", "unconfirmed", *PUBLISHED}, {record.name for record in scene.stacks.records()})
        self.assertEqual(set(PUBLISHED), set(scene.volt.images) - set(READ), "the cut publish went on")
        self.assertEqual(KEPT, {vm.name for vm in scene.vms.records()})
        self.assertEqual({f"of {name}" for name in KEPT}, {disk.writes for disk in scene.host.disks.values()})
        self.assertEqual(({"machine"}, BOOT), (set(scene.machines.running), scene.vms.record("machine").boot))
        self.assertEqual(5 * MIB, scene.vms.record("large").size)

    def test_parents_and_children_of_0_1_0_keep_their_secrets(self) -> None:
        scene = self.host_of("0.1.0")
        scene.volt.down = True
        self.assertRaises(RepairIncomplete, scene.restart)  # what was being published cannot be announced yet
        (other, _spare), (child,) = scene.host.routes["attached"], scene.host.allowed["attached"]
        self.assertEqual(
            ("whispered of other for attached", "whispered of child for attached"), (other.secret, child.secret)
        )

    def test_what_0_1_0_had_removed_is_not_removed_again(self) -> None:
        record = self.host_of("0.1.0").stacks.find("leaving")
        assert record is not None
        self.assertTrue(record.leaving)

    def test_the_drivers_of_0_1_0_are_known(self) -> None:
        self.assertEqual(USERSPACE, made_with(GOLDEN / "0.1.0"))
