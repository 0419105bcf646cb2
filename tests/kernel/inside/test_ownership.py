"""Two agents with other state folders on one machine, and a state folder that is lost.

Each agent is a process of its own (other.py beside this), killed when it has done one thing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from testtools import TestCase

from drivers.host.command import run
from drivers.kernel import loopdev
from tests.kernel.inside import iscsi_tools
from tests.kernel.inside.disks import write
from tests.kernel.inside.other import IMAGE, SIZE
from tests.patience import PATIENCE

PROGRAM = Path(__file__).with_name("other.py")


class OwnerCase(TestCase):
    """Two empty state folders, ``one`` and ``two``, and a device ``origin``. Nothing is left afterwards."""

    def setUp(self) -> None:
        super().setUp()
        self.folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
        self.addCleanup(shutil.rmtree, self.folder)
        self.one, self.two = self.folder / "one", self.folder / "two"
        self.agent(self.one, "reserve")  # makes the folders of the iSCSI fabric, which stay
        self.agent(self.one, "withdraw")
        before = iscsi_tools.what_is_there()
        self.addCleanup(lambda: self.assertEqual(before, iscsi_tools.what_is_there()))
        self.content = os.urandom(SIZE)
        self.file = self.folder / "image"
        self.file.write_bytes(self.content)
        self.origin = loopdev.attach(self.file, read_only=True)
        self.addCleanup(loopdev.detach, self.file)

    def agent(self, state: Path, verb: str, *words: object) -> Any:
        """What an agent said to one call; the test fails if that was an error."""
        told = self.told(state, verb, *words)
        self.assertIn("result", told)
        return told["result"]

    def refused(self, state: Path, verb: str, *words: object) -> tuple[str, str]:
        """The kind of the error and its words."""
        told = self.told(state, verb, *words)
        self.assertIn("error", told)
        return told["error"], told["words"]

    def told(self, state: Path, verb: str, *words: object) -> dict[str, Any]:
        argv = [sys.executable, "-W", "ignore", str(PROGRAM), str(state), verb, *map(str, words)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=PATIENCE)
        self.assertEqual(0, done.returncode, done.stderr)
        told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return told

    def maps(self) -> dict[str, str]:
        """The UUIDs of all maps of ours."""
        columns = ["--columns", "--noheadings", "--separator", " ", "--options", "name,uuid"]
        rows = [line.partition(" ") for line in run(["dmsetup", "info", *columns]).stdout.splitlines()]
        return {name: uuid.strip() for name, _, uuid in rows if name.startswith("virtman-")}

    def vm_with_data(self) -> Path:
        """A disk of the VM ``a`` of agent one, in which ``a wrote this`` stands."""
        disk = Path(self.agent(self.one, "create", "a", self.origin))
        self.addCleanup(self.agent, self.one, "delete", "a")
        write(disk, 0, b"a wrote this")
        return disk

    def assert_untouched(self, disk: Path, maps: dict[str, str]) -> None:
        self.assertEqual(maps, self.maps())
        self.assertEqual(b"a wrote this" + self.content[12:], disk.read_bytes())


class ProbesTest(OwnerCase):
    def test_udev_leaves_the_files_of_the_folder_alone_that_an_agent_works_for(self) -> None:
        self.vm_with_data()
        run(["udevadm", "settle"])
        ours = [loop for loop, backing in loopdev.backings().items() if Path(backing.path).is_relative_to(self.one)]
        self.assertNotEqual([], ours)
        for loop in ours:
            self.assertIn("SYSTEMD_READY=0", run(["udevadm", "info", str(loop)]).stdout)


class LvmTest(OwnerCase):
    """With deploy/lvm/lvmlocal.conf, as in every guest."""

    def setUp(self) -> None:
        """Have a volume group inside of the image, as many a VM's disk has."""
        super().setUp()
        made = self.folder / "made"
        with made.open("wb") as file:
            file.truncate(SIZE)
        loop = run(["losetup", "--find", "--show", str(made)]).stdout.strip()
        run(["vgcreate", "--quiet", "--physicalextentsize", "128k", "inside", loop])
        run(["losetup", "--detach", loop])
        with self.file.open("r+b") as file:
            file.write(made.read_bytes())
            os.fsync(file.fileno())

    def test_lvm_waits_for_no_parent_and_takes_no_image_for_a_part_of_the_host(self) -> None:
        waiting: list[subprocess.Popen[str]] = []
        self.addCleanup(lambda: [process.communicate() for process in waiting])
        self.agent(self.one, "create", "a", self.origin)
        self.addCleanup(self.agent, self.one, "delete", "a")
        published = self.one / "published"
        published.write_bytes(self.file.read_bytes())
        self.agent(self.one, "publish", published)
        self.addCleanup(self.agent, self.one, "withdraw")
        self.agent(self.one, "connect")
        self.addCleanup(self.agent, self.one, "disconnect")
        run(["udevadm", "settle"])
        argv = ["pvs", "--noheadings", "--options", "pv_name,vg_name"]
        waiting.append(subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        # The test's own loop device, and nothing that an agent has made.
        self.assertEqual([str(self.origin), "inside"], waiting[0].communicate(timeout=PATIENCE)[0].split())


class OneAtATimeTest(OwnerCase):
    def test_a_second_agent_is_refused_while_the_first_is_there_and_is_told_its_folder(self) -> None:
        argv = [sys.executable, "-W", "ignore", str(PROGRAM), str(self.one), "hold"]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
            assert first.stdout is not None
            self.assertEqual("ready\n", first.stdout.readline())
            kind, words = self.refused(self.two, "existing")
            first.kill()
        self.assertEqual("DriverError", kind)
        self.assertIn(f"{self.one} (process {first.pid})", words)
        self.assertEqual([], self.agent(self.two, "existing"))


class OtherFolderTest(OwnerCase):
    def test_another_agents_disks_are_neither_seen_nor_used_nor_removed(self) -> None:
        disk = self.vm_with_data()
        maps = self.maps()
        self.assertEqual([], self.agent(self.two, "existing"))
        for verb, words in (("create", ("b", self.origin)), ("create", ("a", self.origin))):
            kind, said = self.refused(self.two, verb, *words)
            self.assertEqual("NotOurs", kind)
            self.assertIn(str(self.one), said)
        self.agent(self.two, "delete", "a")
        self.assertIn(str(self.one), self.agent(self.two, "trouble"))
        self.assertEqual([], list((self.two / "thin").iterdir()))
        self.assert_untouched(disk, maps)

    def test_a_lost_state_folder_does_not_give_its_pool_to_the_next_one_of_the_same_name(self) -> None:
        disk = self.vm_with_data()
        maps, kept = self.maps(), self.folder / "kept"
        self.one.rename(kept)
        kind, _ = self.refused(self.one, "create", "b", self.origin)
        self.assertEqual(("NotOurs", []), (kind, self.agent(self.one, "existing")))
        self.assert_untouched(disk, maps)
        shutil.rmtree(self.one)
        kept.rename(self.one)

    def test_a_volume_of_the_pool_that_no_record_tells_of_is_given_to_nobody(self) -> None:
        disk = self.vm_with_data()
        maps, record = self.maps(), self.one / "thin" / "a.json"
        lost = record.read_bytes()
        record.unlink()
        other = Path(self.agent(self.one, "create", "b", self.origin))
        self.assertEqual(self.content, other.read_bytes())
        self.agent(self.one, "delete", "b")  # the last that is written down: the pool stays nevertheless
        record.write_bytes(lost)
        self.assertEqual(["a"], self.agent(self.one, "existing"))
        self.assert_untouched(disk, maps)

    def test_another_agents_targets_are_left_alone(self) -> None:
        self.agent(self.one, "publish", self.file)
        self.addCleanup(self.agent, self.one, "withdraw")
        there = iscsi_tools.what_is_there()
        self.assertEqual([], self.agent(self.two, "existing"))
        for verb in ("reserve", "allow", "withdraw"):
            self.assertEqual("NotOurs", self.refused(self.two, verb)[0])
        self.assertEqual(there, iscsi_tools.what_is_there())
        self.assertEqual([IMAGE.name], self.agent(self.one, "existing"))

    def test_another_agents_ways_to_its_parents_are_left_alone(self) -> None:
        self.agent(self.one, "connect")
        self.addCleanup(self.agent, self.one, "disconnect")
        maps = self.maps()
        self.assertEqual([], self.agent(self.two, "existing"))
        for verb in ("connect", "disconnect"):
            self.assertEqual("NotOurs", self.refused(self.two, verb)[0])
        self.assertEqual(maps, self.maps())
        self.assertEqual([IMAGE.name], self.agent(self.one, "existing"))
