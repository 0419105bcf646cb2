"""What the transfer manager decides by what OpenNebula says of a VM."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from opennebula_tm.driver import names
from opennebula_tm.driver.card import Card, Kept
from opennebula_tm.driver.disks import Ref
from opennebula_tm.driver.errors import NotThere, Refused
from opennebula_tm.driver.moving import Stored
from opennebula_tm.driver.nebula import DISK_RESIZE, DISK_RESIZE_UNDEPLOYED
from opennebula_tm.driver.settings import Settings
from opennebula_tm.driver.tm import TransferManager
from tests.unit.opennebula_tm.scene import write
from tests.unit.opennebula_tm.steps import StepsTestCase, vm_on

NAME = "one-7-0a1b2c3d"


class TransferManagerTest(StepsTestCase):
    def manager(self, *hosts: str, state: int = 3, driver: str = "raw") -> TransferManager:
        return TransferManager(Settings(), vm_on(*hosts, state=state, driver=driver))

    def card(self, kept_of: str = "") -> str:
        """The card of an image; ``kept_of``: the VM's disk that it keeps."""
        card = Card(NAME, "raw", ("o",), NAME, kept=Kept(f"{NAME}-k1", ("o",), NAME, kept_of) if kept_of else None)
        write(self.datastores / "100" / NAME, json.dumps(asdict(card)))
        return str(self.datastores / "100" / NAME)

    def stored(self, host: str = "fe") -> Stored:
        """What a stop left on the front end."""
        stored = Stored(Ref(names.place(self.at(host)), 42, 0))
        write(stored.file, "stream")
        stored.note("img")
        return stored

    def test_a_disk_of_a_host_that_is_lost_does_not_move(self) -> None:
        for state in (16, 60, 61):
            manager = self.manager("host-1", "host-2", state=state)
            error = self.assertRaises(Refused, manager.mv, self.at("host-1"), self.at("host-2"), "42", "100")
            self.assertIn("only on host-1", str(error))
        self.assertEqual([], self.steps())

    def test_a_disk_goes_from_where_it_is_to_the_vms_host_and_else_to_the_front_end(self) -> None:
        for vms_hosts, here, there, act in (
            (("host-1", "host-2"), "host-1", "host-2", "forward"),
            (("host-1", "host-2", "host-1"), "host-2", "host-1", "forward"),  # where the VM has been
            (("host-1",), "host-1", "fe", "send"),
            (("fe", "host-1"), "host-1", "fe", "send"),  # which was its host once
        ):
            self.has(here)
            self.says(here, "send", "stream")
            self.manager(*vms_hosts).mv(self.at(here), self.at(there), "42", "100")
            self.assertEqual([f"{here} describe", f"{here} {act}", f"{here} moved"], self.done())

    def test_from_the_front_end_it_is_resumed_and_no_agent_asked_there_unless_it_is_a_host(self) -> None:
        for vms_hosts, there, steps in (
            (("host-1", "host-2"), "host-2", ["host-2 receive"]),
            (("fe",), "fe", ["fe describe", "fe describe", "fe receive"]),
        ):
            stored = self.stored()
            self.manager(*vms_hosts).mv(self.at("fe"), self.at(there), "42", "100")
            self.assertEqual((steps, False), (self.done(), stored.there))

    def test_it_stays_where_it_was_until_its_folder_has_moved_in_a_system_datastore_of_ours(self) -> None:
        vm = replace(vm_on("host-1", "host-2")(42), system="virtman")
        manager, steps = TransferManager(Settings(), lambda _: vm), ["host-1 folder"]
        self.has("host-1")
        manager.mv(self.at("host-1"), self.at("host-2"), "42", "100")
        self.assertEqual(["host-1 describe", "host-1 forward"], self.done())
        self.has("host-2", path="/dev/new")
        self.says("host-1", "folder", "yes")
        here, there = self.at("host-1", disk=None), self.at("host-2", disk=None)
        self.assertRaises(SystemExit, manager.mv_folder, here, there, "42", move=lambda: 1)
        self.assertEqual(steps, self.done())
        steps += ["host-2 describe", "host-2 moved", "host-1 destroy"]
        manager.mv_folder(here, there, "42", move=lambda: 0)
        self.assertEqual(steps, self.done())
        self.says("host-1", "folder")
        manager.mv_folder(here, there, "42", move=lambda: self.fail("the folder is not there any more"))
        self.assertEqual(steps, self.done())
        self.says("host-2", "describe")
        write(self.folder / "says" / "host-2.resize", "exit 3")
        self.assertRaises(NotThere, manager.resize, self.at("host-2"), "2048", "42", "100")
        self.assertEqual(["host-2 resize", "host-2 describe"], self.done(), "what host-1 has is old")

    def test_to_another_datastore_of_its_host_only_the_link_goes(self) -> None:
        self.has("host-1", path="/dev/x")
        self.manager("host-1", "host-1").mv(self.at("host-1"), self.at("host-1", 105), "42", "100")
        moved = self.steps()[-1]
        self.assertEqual(("moved", f"{self.datastores}/105/42/disk.0", "/dev/x", ""), (moved[1], *moved[4:]))

    def test_a_disk_is_deleted_at_all_hosts_where_it_may_be(self) -> None:
        for vms_hosts, at, cleaned in (
            (("host-1",), "fe", ["host-1"]),
            (("host-1",), "host-1", ["host-1"]),
            (("host-2", "host-1"), "host-1", ["host-1", "host-2"]),  # where a failed move left it
            (("host-1", "host-2"), "host-1", ["host-1"]),  # which the VM has left
        ):
            stored = self.stored()
            self.manager(*vms_hosts).delete(self.at(at), "42", "100")
            done = [f"{host} destroy" for host in cleaned]
            self.assertEqual((done, False), (self.done(), stored.there), at)

    def test_a_disk_that_a_move_left_elsewhere_is_brought_to_its_vm(self) -> None:
        manager = self.manager("host-2", "host-1")
        for step, act in (("resize", manager.resize), ("forget", manager.snap_delete)):
            write(self.folder / "says" / f"host-1.{step}", "exit 3")
            self.says("host-2", "describe")
            self.assertRaises(NotThere, act, self.at("host-1"), "2048", "42", "100")
            self.assertEqual([f"host-1 {step}", "host-1 describe", "host-2 describe"], self.done())
            self.has("host-2")
            self.assertRaises(NotThere, act, self.at("host-1"), "2048", "42", "100")
            self.assertEqual(["host-2 forward", "host-2 moved", f"host-1 {step}"], self.done()[3:])

    def test_nothing_is_made_for_a_vm_that_was_deleted_meanwhile(self) -> None:
        self.has("host-1")
        manager = self.manager("host-1", "host-2", state=23)  # CLEANUP_DELETE
        self.assertRaises(Refused, manager.mv, self.at("host-1"), self.at("host-2"), "42", "100")
        self.assertEqual({"host-1 destroy", "host-2 destroy"}, set(self.done()[3:]))
        for act in (manager.clone, manager.ln):
            self.assertRaises(Refused, act, f"fe:{self.card()}", self.at("host-2"), "42", "100")
            self.assertEqual(["host-2 create", "host-2 destroy"], self.done())

    def test_a_file_is_not_resized_while_its_vm_runs(self) -> None:
        running = self.manager("host-1", state=DISK_RESIZE, driver="qcow2")
        self.assertRaises(Refused, running.resize, self.at("host-1"), "2048", "42", "100")
        self.assertEqual([], self.done())
        for state, driver in ((DISK_RESIZE, "raw"), (0, "qcow2")):
            self.manager("host-1", state=state, driver=driver).resize(self.at("host-1"), "2048", "42", "100")
            self.assertEqual(["resize", str(2 << 30)], self.steps()[-1][1::4])

    def test_a_disk_on_the_front_end_is_resized_later_and_not_saved_at_a_snapshot(self) -> None:
        self.stored()
        manager = self.manager("host-1")
        manager.resize(self.at("fe"), "2048", "42", "100")
        self.manager("host-1", state=DISK_RESIZE_UNDEPLOYED).resize(self.at("host-1"), "2048", "42", "100")
        error = self.assertRaises(Refused, manager.cpds, self.at("fe"), self.card(), "3", "42", "100")
        self.assertIn("before its snapshot 3 is saved", str(error))
        self.assertEqual([], self.done(), "it need not have an agent")

    def test_a_vm_that_is_made_anew_gets_a_fresh_disk_and_not_what_it_had_when_it_was_stopped(self) -> None:
        stored = self.stored("host-1")
        self.manager("host-1").clone(f"fe:{self.card()}", self.at("host-1"), "42", "100", system="ssh")
        (step,) = self.steps()
        self.assertEqual([NAME, "", "raw", "ssh", "fresh"], step[6:])
        self.assertFalse(stored.there)

    def test_the_image_is_deployed_before_the_disk_is_made_which_does_not_fail_with_it(self) -> None:
        vm = vm_on("host-1")(42)
        vm = replace(vm, disks=(replace(vm.disks[0], method="tree"),))
        manager = TransferManager(Settings(), lambda _: vm)
        clone = (f"fe:{self.card()}", self.at("host-1"), "42", "100")
        manager.clone(*clone)
        asked, deployed, created = self.steps()
        self.assertEqual(["host-1", "deployment", NAME], asked)
        self.assertEqual(["host-1", "deploy", NAME, "tree"], deployed)
        self.assertEqual("create", created[1])
        for step in ("deploy", "deployment"):
            self.says("host-1", step, "Volt is away", fails=True)
            manager.clone(*clone)
            self.assertEqual("host-1 create", self.done()[-1])

    def test_any_snapshot_can_be_saved_and_also_what_the_disk_holds_now(self) -> None:
        self.has("host-1")
        self.says("o", "publish", '{"digest": "x"}')
        for snapshot, options in (
            ("0", ["--snapshot", "snap-0"]), ("7", ["--snapshot", "snap-7"]), ("-1", []),
        ):  # fmt: skip
            self.manager("host-1").cpds(self.at("host-1"), self.card(), snapshot, "42", "100")
            (sent,) = (step for step in self.steps() if step[1] == "forward")
            self.assertEqual(options, sent[7:])

    def test_a_persistent_disk_that_is_taken_back_goes_where_it_was(self) -> None:
        self.has("host-1")
        self.manager("host-1").mvds(self.at("host-1"), self.card(), "42", "100")
        first = ["host-1 describe", "host-1 drop-system-snapshots", "host-1 forward"]
        self.assertEqual([*first, "o sweep", "host-1 destroy"], self.done())
        stored = self.stored()
        self.manager("host-1").mvds(self.at("fe"), self.card(), "42", "100")
        self.assertEqual((["o receive", "o sweep", "host-1 destroy"], False), (self.done(), stored.there))

    def test_a_persistent_disk_that_is_nowhere_was_taken_back_before_or_is_lost(self) -> None:
        manager = self.manager("host-1")
        manager.mvds(self.at("host-1"), self.card(kept_of="one-42-0-host-1"), "42", "100")
        self.assertEqual(["host-1 describe", "host-1 destroy"], self.done())
        for other in ("one-41-0-host-1", ""):
            self.assertRaises(NotThere, manager.mvds, self.at("host-1"), self.card(kept_of=other), "42", "100")
        self.assertEqual({"host-1 describe"}, set(self.done()))
