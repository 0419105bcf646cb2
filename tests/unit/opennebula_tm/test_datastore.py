"""What the datastore makes of requests, before and without anything is done on hosts."""

from __future__ import annotations

import base64
import fcntl
import io
import json
import os
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from unittest import mock

from opennebula_tm.driver.card import Card, Kept
from opennebula_tm.driver.datastore import Datastore, Request
from opennebula_tm.driver.errors import FrontendFailed, HostFailed, Refused
from opennebula_tm.driver.nebula import Vm, VmDisk
from opennebula_tm.driver.settings import Settings
from tests.unit.opennebula_tm.scene import write
from tests.unit.opennebula_tm.steps import StepsTestCase

NAME = "one-7-0a1b2c3d"


def encoded(base: str = "/ds/100", template: str = "", image: str = "") -> bytes:
    """A request; ``template``: of the datastore."""
    store = f"<DATASTORE><BASE_PATH>{base}</BASE_PATH><TEMPLATE>{template}</TEMPLATE></DATASTORE>"
    return base64.b64encode(f"<DS_DRIVER_ACTION_DATA>{store}<IMAGE>{image}</IMAGE></DS_DRIVER_ACTION_DATA>".encode())


class RequestTest(StepsTestCase):
    def test_each_origin_counts_once_and_is_a_host(self) -> None:
        for hosts, origins in (("b a b", ("b", "a")), (" a\nb ", ("a", "b"))):
            self.assertEqual(origins, Request(encoded(template=f"<BRIDGE_LIST>{hosts}</BRIDGE_LIST>")).origins)
        for hosts in ("", "a -oProxyCommand=x"):
            request = Request(encoded(template=f"<BRIDGE_LIST>{hosts}</BRIDGE_LIST>"))
            self.assertRaises(Refused, lambda request=request: request.origins)

    def test_a_folder_that_opennebula_cannot_hand_over_is_refused(self) -> None:
        self.assertEqual("/ds/100", str(Request(encoded("/ds//x/../100/")).folder))
        for base in ("", "ds/100", "/d s/100", "/ds:1/100"):
            self.assertRaises(Refused, lambda base=base: Request(encoded(base)).folder)

    def test_a_card_of_another_datastore_is_refused(self) -> None:
        request = Request(encoded())
        self.assertEqual(f"/ds/100/{NAME}", str(request.card_at(f"fe:/ds//100/{NAME}")))
        for source in (f"/ds/101/{NAME}", f"/ds/100/more/{NAME}", f"/ds/100/../101/{NAME}", NAME, ""):
            self.assertRaises(Refused, request.card_at, source)


class DatastoreTest(StepsTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.remotes = self.folder / "var/remotes"
        self.store = Datastore(Settings(), self.remotes)
        self.base = str(self.datastores / "100")

    def run_action(self, action: str, template: str = "", image: str = "") -> str:
        """What it answers."""
        hosts = "<BRIDGE_LIST>o1 o2</BRIDGE_LIST>"
        with redirect_stdout(io.StringIO()) as out:
            self.store.run(action, encoded(self.base, hosts + template, image))
        return out.getvalue()

    def test_the_room_is_that_of_the_origin_that_has_least(self) -> None:
        mib = 1 << 20
        for host, free in (("o1", 5), ("o2", 3)):
            self.says(host, "status", f'{{"disks": {{"total": {10 * mib}, "free": {free * mib}}}}}')
        self.assertEqual("USED_MB=7\nFREE_MB=3\nTOTAL_MB=10\n", self.run_action("monitor"))
        self.says("o2", "status", "away", fails=True)
        self.assertEqual("USED_MB=5\nFREE_MB=5\nTOTAL_MB=10\n", self.run_action("monitor"))
        self.says("o1", "status", "away, too", fails=True)
        self.assertEqual("o1: away, too; o2: away", str(self.assertRaises(HostFailed, self.run_action, "monitor")))

    def test_no_image_comes_from_where_users_may_not_read(self) -> None:
        """As OpenNebula's own drivers: what is restricted, but for what is safe; by where links lead."""
        self.enterContext(mock.patch.dict(os.environ, HOME=str(self.folder / "home")))
        open_, shut = self.folder / "open", self.folder / "shut"
        for file in (shut / "disk", shut / "safe/disk", self.folder / "home/key", self.folder / "var/key"):
            write(file, "x")
        open_.mkdir()
        (open_ / "link").symlink_to(shut / "disk")
        template = f"<RESTRICTED_DIRS>/nowhere {shut}</RESTRICTED_DIRS><SAFE_DIRS>{shut}/safe</SAFE_DIRS>"
        write(self.remotes / "datastore/downloader.sh", "#!/bin/sh\necho came here >&2; exit 1\n", 0o755)
        for path in (shut / "disk", open_ / "link", f"{open_}/../shut/disk", "home/key", "var/key"):
            image = f"<PATH>{self.folder / path}</PATH>"
            error = self.assertRaises(Refused, self.run_action, "cp", template, image)
            self.assertIn("RESTRICTED_DIRS", str(error))
            self.assertRaises(Refused, self.run_action, "stat", template, image)
        for path in (shut / "safe/disk", self.folder / "shutter"):
            tried = self.assertRaises(FrontendFailed, self.run_action, "cp", template, f"<PATH>{path}</PATH>")
            self.assertIn("came here", str(tried))
        self.assertEqual([], list((self.datastores / "100").iterdir()))

    def test_what_is_no_disk_is_refused(self) -> None:
        for kind in ("3", "4", "5", "KERNEL", "context"):
            for action in ("cp", "mkfs", "stat"):
                error = self.assertRaises(Refused, self.run_action, action, "", f"<TYPE>{kind}</TYPE>")
                self.assertIn("of type FILE", str(error))

    def test_an_unknown_method_is_refused_and_the_images_own_comes_before_the_datastores(self) -> None:
        good, bad = (f"<VIRTMAN_METHOD>{value}</VIRTMAN_METHOD>" for value in ("uftp", "pigeon"))
        image = "<ID>7</ID><FORMAT>save_as</FORMAT><PATH>/tmp/x</PATH><TEMPLATE>{}</TEMPLATE>"
        for action in ("stat", "mkfs"):
            for template, own in ((bad, ""), (good, bad)):
                error = self.assertRaises(Refused, self.run_action, action, template, image.format(own))
                self.assertIn("'pigeon': it may be one of auto, lazy", str(error))
        self.assertFalse(Path(self.base).exists())
        self.run_action("mkfs", bad, image.format(good))

    def test_what_is_saved_has_a_card_that_holds_nothing_yet(self) -> None:
        path, card_format = self.run_action("mkfs", "", "<ID>7</ID><FORMAT>save_as</FORMAT>").split()
        self.assertRegex(path, rf"^{self.base}/one-7-[0-9a-f]{{8}}$")
        self.assertEqual(("raw", []), (card_format, self.steps()))

    def keep(self) -> str:
        """A persistent image that waits at both origins."""
        card = Card(NAME, "raw", ("o1", "o2"), NAME, kept=Kept(f"{NAME}-k1", ("o1", "o2"), NAME))
        write(self.datastores / "100" / NAME, json.dumps(asdict(card)))
        return f"<SOURCE>{self.base}/{NAME}</SOURCE><TARGET_SNAPSHOT>3</TARGET_SNAPSHOT>"

    def test_a_snapshot_of_an_image_goes_at_all_hosts_that_keep_it(self) -> None:
        self.has("o1", snapshot="snap-3")
        write(self.folder / "says" / "o1.forget", "exit 3")  # it has lost the disk
        for action, step in (("snap_delete", "forget"), ("snap_revert", "revert")):
            self.assertEqual("", self.run_action(action, "", self.keep()))
            done = [[*s[:2], s[-1]] for s in self.steps() if s[1] != "describe"]
            self.assertEqual([["o1", step, "snap-3"], ["o2", step, "snap-3"]], done)

    def test_a_deleted_image_stays_until_opennebula_says_that_its_vms_are_gone(self) -> None:
        def show_vm(number: int) -> Vm:
            if number == 44:
                raise FrontendFailed("onevm does not answer")
            return Vm(number, 0, "", (), (disk,), done=number in done)

        disk, done = VmDisk(0, 1, 1, "raw", "virtman", f"{self.base}/{NAME}"), {42}
        self.store = Datastore(Settings(), self.remotes, show_vm)
        for host in ("o1", "o2"):
            self.says(host, "status", '{"disks": {"total": 1, "free": 1}}')
        users = "<VMS><ID>42</ID><ID>43</ID><ID>44</ID></VMS>"
        self.run_action("rm", "", self.keep() + users)
        self.run_action("monitor")
        self.assertEqual([43, 44], json.loads((self.datastores / "100" / NAME).read_text())["left_to"])
        self.run_action("rm", "", self.keep() + users.replace("<ID>44</ID>", ""))
        self.assertNotIn("o1 sweep", self.done())
        done.add(43)
        self.run_action("monitor")
        self.assertEqual(["o1 sweep", "o2 sweep"], self.done()[:2])

    def test_an_image_that_no_origin_can_export_leaves_no_file(self) -> None:
        source = self.keep()
        for host in ("o1", "o2"):
            self.says(host, "publish", '{"digest": "x"}')
            self.says(host, "export", "half", fails=True)
        self.assertRaises(HostFailed, self.run_action, "export", "", source)
        self.assertEqual([], list((self.datastores / "100").glob(".*.export")))
        self.says("o2", "export", "content")
        self.assertIn("<FORMAT><![CDATA[qcow2]]>", self.run_action("export", "", source))
        (file,) = (self.datastores / "100").glob(".*.export")
        self.assertEqual("content", file.read_text())

    def adding(self, name: str, *, with_card: bool = False) -> Path:
        """The folder of a call that adds an image."""
        folder = self.datastores / "100" / f".adding-{name}"
        write(folder / "disk", "x")
        if with_card:
            write(folder / NAME, json.dumps(asdict(Card(NAME, "raw", ("o1", "o2")))))
        return folder

    def add(self) -> str:
        """An image that both origins take. Returns its path."""
        for host in ("o1", "o2"):
            self.says(host, "upload", '{"digest": "x"}')
        return self.run_action("mkfs", "", "<ID>8</ID><SIZE>1</SIZE>").split()[0]

    def test_what_killed_calls_left_goes_and_what_others_add_stays(self) -> None:
        self.adding("killed")
        other = self.adding("other")
        handle = os.open(other, os.O_RDONLY)
        self.addCleanup(os.close, handle)
        fcntl.flock(handle, fcntl.LOCK_EX)
        path = self.add()
        self.assertEqual({path, str(other)}, {str(left) for left in (self.datastores / "100").iterdir()})

    def test_what_a_killed_call_published_goes_when_all_origins_are_there(self) -> None:
        killed = self.adding("killed", with_card=True)
        self.says("o2", "sweep", "away", fails=True)
        self.add()
        self.assertEqual([NAME], [file.name for file in killed.iterdir()])
        self.says("o2", "sweep")
        self.steps()
        self.add()
        self.assertFalse(killed.exists())
        self.assertEqual([["o1", NAME], ["o2", NAME]], [[s[0], s[3]] for s in self.steps() if s[1] == "sweep"])

    def test_what_was_added_before_the_call_was_killed_stays(self) -> None:
        self.keep()
        killed = self.adding("killed", with_card=True)
        self.add()
        self.assertEqual(["o1 upload", "o2 upload"], self.done())
        self.assertFalse(killed.exists())

    def test_an_image_that_is_gone_can_be_deleted_again(self) -> None:
        self.assertEqual("", self.run_action("rm", "", f"<SOURCE>{self.base}/{NAME}</SOURCE>"))
        self.assertEqual([], [*self.steps(), *(self.datastores / "100").iterdir()])
