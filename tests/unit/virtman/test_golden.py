"""State folders that earlier releases wrote open in this one (tests/golden): everything goes on, nothing is lost."""

from __future__ import annotations

import re
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
BOOTING = ("booting", "booting-in-vain", "disk-booting-in-vain")
"""VMs of which 0.1.0 kept no note while they were being started; libvirt got to know only the first. The last one had a
disk before."""
BOOT = Boot(memory=64, cpus=1, network="none")


class Golden(TestCase):
    """What holds for the folder of each release."""

    __test__ = False
    release: str
    disks: tuple[str, ...] = DISKS
    kept = KEPT
    running = frozenset({"machine"})

    def host(self) -> Scene:
        """A host on which that release was killed, with a VM running, in the middle of everything that it can do."""
        scene = Scene(self)
        shutil.copytree(GOLDEN / self.release, scene.folder, dirs_exist_ok=True)
        for name in READ:
            scene.volt.offer(name)
        for name in READ[:2]:
            scene.volt.assign(name, ["other", "spare"], ["child"])
        for name in PUBLISHED:
            scene.put_content(name)
        scene.volt.publish(Image("origin", MIB, digest_of("origin")), "here")
        for name in self.disks:
            size = 5 * MIB if name == "large" else MIB
            scene.host.disks[name] = Disk(size, Device(MIB, node={}), whole=True, writes=f"of {name}")
        for name in (*self.running, "destroying-machine"):
            scene.machines.start(name, scene.drivers.snapshot.open(name), BOOT, [], None)
        return scene

    def test_all_goes_on(self) -> None:
        scene = self.host()
        scene.restart()
        scene.check(self)
        self.assertEqual({"attached", "unconfirmed", *PUBLISHED}, {record.name for record in scene.stacks.records()})
        self.assertEqual(set(PUBLISHED), set(scene.volt.images) - set(READ), "the cut publish went on")
        self.assertEqual(self.kept, {vm.name for vm in scene.vms.shelf.all()})
        self.assertEqual({f"of {name}" for name in self.kept}, {disk.writes for disk in scene.host.disks.values()})
        self.assertEqual(self.running, set(scene.machines.running))
        self.assertEqual({BOOT}, {scene.vms.record(name).boot for name in self.running})
        self.assertEqual(5 * MIB, scene.vms.record("large").size)

    def test_parents_and_children_keep_their_secrets(self) -> None:
        scene = self.host()
        scene.volt.down = True
        self.assertRaises(RepairIncomplete, scene.restart)  # what was being published cannot be announced yet
        (other, _spare), (child,) = scene.host.routes["attached"], scene.host.allowed["attached"]
        self.assertEqual(
            ("whispered of other for attached", "whispered of child for attached"), (other.secret, child.secret)
        )

    def test_what_was_removed_is_not_removed_again(self) -> None:
        record = self.host().stacks.find("leaving")
        assert record is not None
        self.assertTrue(record.leaving)

    def test_the_drivers_are_known(self) -> None:
        self.assertEqual(USERSPACE, made_with(GOLDEN / self.release))


class Golden010Test(Golden):
    __test__ = True
    release = "0.1.0"


class Golden020Test(Golden):
    __test__ = True
    release = "0.2.0"
    disks = DISKS + BOOTING
    kept = KEPT | {"booting", "disk-booting-in-vain"}
    running = frozenset({"machine", "booting"})


class ReleasesTest(TestCase):
    def test_every_release_has_a_folder_and_this_one_too(self) -> None:
        version = re.search(r'version="(.+)"', (GOLDEN.parents[1] / "setup.py").read_text())
        assert version is not None
        self.assertEqual(["0.1.0", version[1]], sorted(path.name for path in GOLDEN.iterdir()))
