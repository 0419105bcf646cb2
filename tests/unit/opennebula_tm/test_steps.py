"""What ``host.sh`` does on a host, with a stand-in for virtman."""

from __future__ import annotations

import fcntl
import os
import shlex
import tarfile
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

from testtools import TestCase

from opennebula_tm.driver.errors import HostFailed, NotThere
from opennebula_tm.driver.remote import Hosts
from opennebula_tm.driver.settings import Settings
from tests.unit.opennebula_tm.scene import write
from tests.unit.virtman.scene import folder_for

VIRTMAN = """#!/bin/sh
cd "$(dirname "$0")" || exit
[ ! -e /proc/self/fd/9 ] || echo "with the lock" >>asked
echo "$*" >>asked
[ ! -e "says.$1" ] || . "./says.$1"
"""
IMAGE = "one-7-0a1b2c3d"


class StepsTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = folder_for(self)
        self.lock = (str(self.folder / "locks"), "42-0")
        self.link = self.folder / "ds/0/42/disk.0"
        write(self.folder / "virtman", VIRTMAN, 0o755)
        write(self.folder / "ssh", '#!/bin/sh\nexec sh -c "$2"\n', 0o755)
        self.enterContext(mock.patch.dict(os.environ, SSH=str(self.folder / "ssh")))
        self.hosts = Hosts(Settings(virtman=str(self.folder / "virtman")))

    def says(self, command: str, text: str, code: int = 0) -> None:
        """What virtman answers, in words and by its exit code."""
        stream = ">&2" if code else ""
        write(self.folder / f"says.{command}", f"printf %s {shlex.quote(text)} {stream}; exit {code}")

    def run_step(self, action: str, *arguments: str) -> str:
        return self.hosts.run("h", action, *arguments)

    def fails(self, action: str, *arguments: str) -> str:
        return str(self.assertRaises(HostFailed, self.run_step, action, *arguments))

    def asked(self) -> list[str]:
        """What virtman was called with since the last call."""
        notes = self.folder / "asked"
        lines = notes.read_text().splitlines() if notes.exists() else []
        notes.unlink(missing_ok=True)
        return lines

    def test_a_sweep_removes_what_is_of_the_image_and_not_named(self) -> None:
        ours = (IMAGE, f"{IMAGE}-k1", f"{IMAGE}-k10", f"{IMAGE}-g2")
        others = (f"{IMAGE}e", "one-70-0a1b2c3d", f"x{IMAGE}-k1", "one-7-0a1b2c3")
        for command in ("list", "images"):
            self.says(command, "".join(f"{name}  {IMAGE}-k1\n" for name in ("NAME", *ours, *others)))
        self.run_step("sweep", str(self.folder / "locks"), IMAGE, f"{IMAGE}-k10", f"{IMAGE}-g2")
        gone = (IMAGE, f"{IMAGE}-k1")
        self.assertEqual(
            ["list", *(f"destroy {name}" for name in gone), "images", *(f"unpublish {n} --when-unused" for n in gone)],
            self.asked(),
        )
        self.run_step("sweep", str(self.folder / "locks"), IMAGE)
        self.assertEqual(2 * len(ours), len([line for line in self.asked() if line.startswith(("destroy", "unpub"))]))

    def test_the_newest_deployment_of_an_image_is_described(self) -> None:
        rows = ("NUMBER  IMAGE", f"9  {IMAGE}-g1", f"8  {IMAGE}", f"7  {IMAGE}")
        self.says("deployments", "".join(f"{row}  tree  ended  1.0 s\n" for row in rows))
        self.run_step("deployment", IMAGE)
        self.assertEqual(["deployments", "deployments 8 --json"], self.asked())
        self.assertEqual("", self.run_step("deployment", "one-7"))
        self.assertEqual(["deployments"], self.asked())
        self.says("deployments", "Volt is away", 1)
        self.assertEqual("h: Volt is away", self.fails("deployment", IMAGE))

    def test_an_image_is_deployed_to_all_hosts_without_waiting(self) -> None:
        self.says("deploy", "deployment 3")
        self.assertEqual("deployment 3", self.run_step("deploy", IMAGE, "tree"))
        self.assertEqual([f"deploy {IMAGE} --all --method tree --detach"], self.asked())
        self.says("deploy", "there is no method 'x'", 1)
        self.assertEqual("h: there is no method 'x'", self.fails("deploy", IMAGE, "x"))

    def test_an_agent_that_does_not_answer_is_no_empty_answer(self) -> None:
        self.says("list", "no agent", 1)
        self.assertEqual("h: no agent", self.fails("sweep", str(self.folder / "locks"), IMAGE))
        self.assertEqual(["list"], self.asked())
        self.says("show", "there is no such VM", 3)
        self.assertEqual("", self.run_step("describe", "name"))
        self.says("show", "no agent", 1)
        self.assertEqual("h: no agent", self.fails("describe", "name"))

    def test_what_is_gone_can_be_destroyed_and_what_cannot_be_keeps_its_link(self) -> None:
        write(self.link, "x")
        destroy = ("destroy", *self.lock, str(self.link), "name", "")
        self.says("destroy", "it is in use", 1)
        self.assertEqual(("h: it is in use", True), (self.fails(*destroy), self.link.exists()))
        self.says("destroy", "there is no such VM", 3)
        self.run_step(*destroy)
        self.assertEqual(([], False), (list((self.folder / "locks").iterdir()), self.link.exists()))

    def test_virtman_does_not_hold_the_lock(self) -> None:
        self.says("create", "/file")
        self.run_step("create", *self.lock, str(self.link), "name", IMAGE, "", "qcow2", "", "")
        self.run_step("resize", *self.lock, "name", "5")
        self.assertEqual([f"create name {IMAGE}", "resize name 5"], self.asked())
        self.assertEqual([], list((self.folder / "locks").iterdir()))

    def test_a_disk_is_destroyed_under_an_action_that_goes_on(self) -> None:
        self.hosts = Hosts(Settings(virtman=str(self.folder / "virtman"), lock=60))
        pipe = self.folder / "pipe"
        os.mkfifo(pipe)
        write(self.folder / "says.resize", f"read -r never <{pipe}")
        with ThreadPoolExecutor(1) as pool:
            resized = pool.submit(self.fails, "resize", *self.lock, "name", "5")
            with pipe.open("w"):  # opened when the resize opens it
                self.run_step("destroy", *self.lock, str(self.link), "name", "end")
            resized.result()
        self.assertEqual(["resize name 5", "destroy name"], self.asked())
        self.assertEqual([], list((self.folder / "locks").iterdir()))

    def test_a_disk_of_another_format_does_not_stay(self) -> None:
        said = self.fails("create", *self.lock, str(self.link), "name", IMAGE, "", "raw", "", "")
        self.assertIn("makes disks of format qcow2", said)
        self.assertEqual([f"create name {IMAGE}", "destroy name"], self.asked())
        self.assertFalse(self.link.is_symlink())

    def test_a_link_is_made_only_in_a_folder_that_is_there(self) -> None:
        for made in (False, True):
            self.run_step("moved", *self.lock, str(self.link), "/to", "")
            self.assertEqual((made, made), (self.link.parent.exists(), self.link.is_symlink()))
            self.link.parent.mkdir(parents=True, exist_ok=True)
        self.assertEqual([], self.asked())
        self.run_step("moved", *self.lock, str(self.link), "/to", "name")
        self.assertEqual(["destroy name"], self.asked())

    def test_the_mark_for_opennebulas_probe_is_that_of_its_own_drivers(self) -> None:
        store = self.link.parents[1]
        self.run_step("link", *self.lock, str(self.link), "/to", "ssh")
        self.assertEqual(("ssh\n", False), ((store / ".monitor").read_text(), (store / ".virtman").exists()))
        (store / ".monitor").unlink()
        self.run_step("link", *self.lock, str(self.link), "/to", "")
        self.assertEqual((False, True), ((store / ".monitor").exists(), (store / ".virtman").is_dir()))

    def test_a_snapshot_may_be_gone_but_not_its_disk(self) -> None:
        write(self.folder / "says.snapshot", '[ "$2" != create ] || { echo full >&2; exit 1; }')
        self.assertEqual("h: full", self.fails("snapshot", *self.lock, "name", "snap-0", "", ""))
        self.assertEqual(["snapshot delete name snap-0", "snapshot create name snap-0"], self.asked())
        self.says("snapshot", "there is no such snapshot", 3)
        self.run_step("forget", *self.lock, "name", "snap-0")
        self.says("show", "there is no such VM", 3)
        self.assertRaises(NotThere, self.run_step, "forget", *self.lock, "name", "snap-0")
        self.assertEqual(["show name", "snapshot delete name snap-0", "show name"], self.asked())
        for command, code in (("snapshot", 0), ("show", 1)):
            self.says(command, "no agent", code)
        self.assertEqual("h: no agent", self.fails("revert", *self.lock, str(self.link), "name", "snap-0"))

    def test_an_upload_removes_what_killed_ones_left_and_nothing_of_others(self) -> None:
        locks, archive = self.folder / "locks", self.folder / "archive"
        write(locks / "killed.upload/disk", "x")
        write(locks / "goes-on.upload/disk", "x")
        write(self.folder / "disk", "content")
        with tarfile.open(archive, "w") as tar:
            tar.add(self.folder / "disk", "disk")
        write(self.folder / "says.publish", 'cat "$3"')
        with (locks / "goes-on.lock").open("w") as held, archive.open("rb") as stdin:
            fcntl.flock(held, fcntl.LOCK_EX)
            said = self.hosts.transfer("h", "upload", str(locks), IMAGE, IMAGE, stdin=stdin)
        self.assertEqual("content", said)
        self.assertEqual({"goes-on.upload"}, {path.name for path in locks.glob("*.upload")})
