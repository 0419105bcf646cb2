"""A host's way to its parents, with a parent in the same guest."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import rtslib_fb
from testtools import TestCase

from drivers.attach import iscsi
from drivers.attach.iscsi import IscsiAttach
from drivers.base import PATH_POLICIES, Child, Device, Image, Parent, PathState, Place
from drivers.errors import BadDisk, CommandFailed, DriverError, HostFailed
from drivers.export.lio import LioExport
from drivers.host.command import run
from drivers.iscsi import records
from drivers.iscsi.names import DISK, PORTAL_GROUP, serial_of, target_name
from drivers.iscsi.sessions import sessions
from drivers.kernel import devmapper, multipath
from drivers.kernel.multipath import Groups
from drivers.kernel.scsi import MODEL
from tests.contracts import drivers as contracts
from tests.kernel.inside import iscsi_tools
from tests.kernel.inside.folders import state_folder
from tests.kernel.inside.iscsi_tools import SECRET
from tests.limits import no_more_files
from tests.patience import PATIENCE, wait_until

pytestmark = iscsi_tools.RTSLIB_WARNS

HOST = socket.gethostname()
IP = "127.0.0.1"
SIZE = 4 << 20
NEVER = 10 * PATIENCE
FOR_A_WHILE = 5.0
"""Seconds without an answer, after which a read counts as one that waits."""
SOON = 5.0
"""Seconds for which a parent may be away."""
GONE = Parent("gone", f"iscsi://{IP}:1")
"""Nobody listens there."""
HOLDS = "3 queue_if_no_path queue_mode bio 0 0 0"
"""Of a table of a multipath map: it has no path, and what is read waits."""
FOR_ADMINISTRATORS = Path("/etc/multipath/conf.d/virtman.conf")
"""deploy/multipath/virtman.conf, installed as in every guest."""


def multipathd_wants(disk: Path) -> bool:
    """Whether it is a path of a map that multipathd would make (multipath(8))."""
    try:
        run(["multipath", "-c", str(disk)])
    except CommandFailed:
        return False
    return True


def let_everybody_log_in(listener: socket.socket) -> None:
    """Answer every login that it is done, without a proof of anybody (RFC 7143, 11.12 and 11.13)."""
    text = b"AuthMethod=None\0"
    while True:
        try:
            connection, _address = listener.accept()
        except OSError:
            return
        with connection:
            asked = connection.recv(48, socket.MSG_WAITALL)
            connection.recv(-(-int.from_bytes(asked[5:8]) // 4) * 4, socket.MSG_WAITALL)
            to_the_next_stage, session, task = bytes([0x23, 0x81, 0, 0, 0]), asked[8:14] + b"\0\1", asked[16:20]
            head = to_the_next_stage + len(text).to_bytes(3) + session + task + bytes(8) + asked[24:28] * 2
            connection.sendall(head.ljust(48, b"\0") + text)
            connection.recv(1)


class IscsiCase(TestCase):
    """A host that is its own parent."""

    def setUp(self) -> None:
        super().setUp()
        self.folder = state_folder(self)
        self.place = Place(self.folder, self.folder, host=HOST, address=IP)
        self.export = LioExport(self.place, died=self.fail)
        iscsi_tools.expect_nothing_left(self, self.export)
        self.content = os.urandom(SIZE)
        (self.folder / "image").write_bytes(self.content)
        self.image = Image("Debian_12", SIZE, f"sha256:{hashlib.sha256(self.content).hexdigest()}")
        self.parent = Parent(HOST, self.export.address, SECRET)
        self.addCleanup(self.export.withdraw, self.image.name)
        self.lost: list[str] = []
        self.was_lost = threading.Event()
        self.attach = self.new_driver()
        self.addCleanup(self.attach.disconnect, self.image.name)

    def new_driver(self, patience: float = iscsi.PATIENCE) -> IscsiAttach:
        driver = IscsiAttach(self.place, lost=self._note_lost, patience=patience)
        self.addCleanup(driver.close)
        return driver

    def replace_driver(self, patience: float) -> None:
        """Have another driver object."""
        self.attach = self.new_driver(patience)
        self.addCleanup(self.attach.disconnect, self.image.name)

    def _note_lost(self, _image: str, parent: str) -> None:
        self.lost.append(parent)
        self.was_lost.set()

    def publish(self) -> None:
        self.export.publish(self.image, Device(SIZE, self.folder / "image"))
        self.export.allow(self.image.name, [Child(HOST, SECRET)])

    def alien(self) -> Parent:
        """A parent whose target shows another disk, as large as the image."""
        disk = rtslib_fb.FileIOStorageObject(f"{MODEL}alien", dev=str(self.folder / "alien"), size=SIZE)
        return self.parent_with(self.made(disk))

    def made(self, disk: Any) -> Any:
        """A disk that goes with the test. By its name udev leaves it alone."""
        self.addCleanup(disk.delete)
        disk.set_attribute("emulate_model_alias", 1)
        return disk

    def parent_with(self, disk: Any) -> Parent:
        """A parent whose target shows this disk."""
        other = LioExport(replace(self.place, host="alien"), died=self.fail)
        other.reserve(self.image.name)
        self.addCleanup(other.withdraw, self.image.name)
        target = rtslib_fb.Target(rtslib_fb.FabricModule("iscsi"), target_name("alien", self.image.name))
        rtslib_fb.LUN(rtslib_fb.TPG(target, PORTAL_GROUP), DISK, disk)
        other.allow(self.image.name, [Child(HOST, SECRET)])
        return Parent("alien", other.address, SECRET)

    def without_parents(self) -> Path:
        """A device that holds all reads."""
        path = devmapper.create("virtman-test", [f"0 {SIZE // 512} multipath {HOLDS}"], read_only=True)
        self.addCleanup(devmapper.remove, "virtman-test")
        self.addCleanup(self.export.withdraw, self.image.name)
        self.addCleanup(self.let_go)
        return path

    def reads_wait(self) -> bool:
        """Whether such a device holds one."""
        number = devmapper.number(devmapper.map_path("virtman-test"))
        return Path(f"/sys/dev/block/{number}/inflight").read_text().split()[0] != "0"

    def let_go(self) -> None:
        """Fail what is read of such a device, as ``abandon`` does on a host whose parents are gone."""
        devmapper.message("virtman-test", "fail_if_no_path")

    def let_all_go(self) -> None:
        """Have no map hold a read: who waits for it could not be killed."""
        for name in devmapper.names("virtman-"):
            devmapper.message(name, "fail_if_no_path")

    def connect(self) -> Path:
        return contracts.path_of(self.attach.connect(self.image, [self.parent]))

    def read(self, path: Path) -> bytes:
        """The content, past the page cache."""
        copy = self.folder / "copy"
        run(["dd", f"if={path}", f"of={copy}", "bs=64k", "iflag=direct", "status=none"], timeout=PATIENCE)
        return copy.read_bytes()

    def states(self) -> list[PathState]:
        return [status.state for status in self.attach.paths(self.image.name)]


class ContractTest(IscsiCase, contracts.AttachContract):
    """The contract of all attach drivers."""

    def setUp(self) -> None:
        super().setUp()
        self.publish()
        self.file = self.folder / "image"
        [published] = [disk for disk in rtslib_fb.RTSRoot().storage_objects if disk.name.startswith(MODEL)]
        self.parents = [self.parent, self.parent_with(published)]

    def make(self) -> IscsiAttach:
        """One at a time, as agents are."""
        self.attach.close()
        self.attach = self.new_driver()
        return self.attach

    def test_each_policy_but_failover_reads_from_all_parents(self) -> None:
        for policy in PATH_POLICIES[1:]:
            self.place = replace(self.place, path_policy=policy)
            path = contracts.path_of(self.make().connect(self.image, self.parents))
            wait_until(lambda: self.states() == [PathState.ACTIVE, PathState.ACTIVE])
            self.assertIn(f" {policy} ", devmapper.table(path.name))
            before = self.sectors_read()
            self.assertEqual(self.content, self.read(path))
            counts = [after - count for after, count in zip(self.sectors_read(), before, strict=True)]
            self.assertGreaterEqual(min(counts), SIZE // 512 // 4, (policy, counts))
            self.attach.disconnect(self.image.name)

    def sectors_read(self) -> list[int]:
        """By each session's disk (Linux: Documentation/block/stat.rst)."""
        disks = [disk for session in sessions().values() if (disk := session.disk())]
        return [int((disk / "stat").read_text().split()[2]) for disk in disks]


class IscsiTest(IscsiCase):
    """What holds for this driver."""

    def test_reads_the_parents_bytes_by_a_read_only_map_with_checked_sums_and_hidden_secrets(self) -> None:
        self.publish()
        path = self.connect()
        self.assertEqual(self.content, self.read(path))
        self.assertEqual([PathState.ACTIVE], self.states())
        self.assertEqual("1", run(["blockdev", "--getro", str(path)]).stdout.strip())
        [connection] = Path("/sys/class/iscsi_connection").iterdir()
        agreed = [(connection / f"{part}_digest").read_text().strip() for part in ("header", "data")]
        self.assertEqual(["1", "1"], agreed)
        found = [path for path in records.folder().rglob("*") if path.is_file()]
        self.assertEqual([0o600], [path.stat().st_mode & 0o777 for path in found])

    def test_read_waits_for_a_parent_that_is_published_later(self) -> None:
        path = self.connect()
        self.assertEqual([PathState.LOST], self.states())
        got: list[bytes] = []
        reader = threading.Thread(target=lambda: got.append(self.read(path)))
        reader.start()
        self.export.reserve(self.image.name)
        self.publish()
        reader.join(PATIENCE)
        self.assertEqual([self.content], got)

    def test_other_parents_follow_the_first_one_which_still_makes_its_stack(self) -> None:
        other = LioExport(replace(self.place, host="other"), died=self.fail)
        self.addCleanup(other.withdraw, self.image.name)
        other.publish(self.image, Device(SIZE, self.folder / "image"))
        other.allow(self.image.name, [Child(HOST, SECRET)])
        self.export.reserve(self.image.name)
        self.export.allow(self.image.name, [Child(HOST, SECRET)])
        parents = [self.parent, Parent("other", other.address, SECRET)]
        path = contracts.path_of(self.attach.connect(self.image, parents))
        reader = threading.Thread(target=self.read, args=[path])
        reader.start()
        reader.join(FOR_A_WHILE)
        self.assertEqual((True, [PathState.LOST, PathState.LOST]), (reader.is_alive(), self.states()))
        self.publish()
        reader.join(PATIENCE)
        wait_until(lambda: self.states() == [PathState.ACTIVE, PathState.STANDBY])

    def test_a_first_parent_that_is_not_reached_or_has_something_else_is_not_waited_for(self) -> None:
        self.publish()
        for first in (GONE, self.alien()):
            self.replace_driver(NEVER)
            self.attach.connect(self.image, [first, self.parent])
            wait_until(lambda: self.states() == [PathState.LOST, PathState.ACTIVE])
            self.attach.disconnect(self.image.name)

    def test_a_parent_that_refuses_is_asked_again_with_the_secret_that_volt_names_later(self) -> None:
        self.publish()
        with self.assertLogs("drivers.attach.iscsiroute", "INFO") as said:
            self.attach.connect(self.image, [replace(self.parent, secret="of an edge that is gone")])
            wait_until(lambda: any("it refuses this host" in line for line in said.output))
        self.assertEqual([PathState.LOST], self.states())
        self.attach.update(self.image, [self.parent])
        wait_until(lambda: self.states() == [PathState.ACTIVE])

    def test_a_session_that_began_with_an_earlier_secret_begins_anew_when_it_breaks(self) -> None:
        self.publish()
        self.replace_driver(SOON)
        self.read(self.connect())
        self.export.allow(self.image.name, [Child(HOST, "of a later edge")])
        self.attach.update(self.image, [replace(self.parent, secret="of a later edge")])
        [session] = sessions().values()
        session.cut()
        self.assertTrue(self.was_lost.wait(PATIENCE))
        wait_until(lambda: self.states() == [PathState.ACTIVE])

    def test_a_multipathd_that_takes_every_disk_leaves_ours_by_the_file_that_administrators_are_given(self) -> None:
        ours, aside = FOR_ADMINISTRATORS, self.folder / "virtman.conf"
        shutil.move(ours, aside)
        self.addCleanup(shutil.move, aside, ours)
        greedy = ours.with_name("greedy.conf")
        self.addCleanup(greedy.unlink)
        greedy.write_text("defaults {\n    find_multipaths greedy\n}\n")
        self.publish()
        self.read(self.connect())
        [disk] = iscsi_tools.disks_of(target_name(HOST, self.image.name))
        self.attach.close()
        devmapper.remove(f"virtman-attach-{self.image.name}")  # Debian 13's wants none that is in use
        self.assertTrue(multipathd_wants(disk))
        shutil.copy(aside, ours)
        self.assertFalse(multipathd_wants(disk))

    def test_new_driver_goes_on_with_the_paths_of_an_old_one(self) -> None:
        self.publish()
        path = self.connect()
        self.read(path)
        self.attach.close()
        table = devmapper.table(path.name)
        self.attach = self.new_driver()
        self.assertEqual({self.image.name}, self.attach.existing())
        self.connect()
        self.assertEqual([PathState.ACTIVE], self.states())
        self.assertEqual(table, devmapper.table(path.name))

    def test_parent_that_goes_is_told_of_and_taken_back(self) -> None:
        self.publish()
        self.replace_driver(SOON)
        path = self.connect()
        self.read(path)
        self.export.withdraw(self.image.name)
        self.assertTrue(self.was_lost.wait(PATIENCE))
        self.assertEqual([HOST], self.lost)
        self.assertEqual([PathState.LOST], self.states())
        self.publish()
        self.assertEqual(self.content, self.read(path))

    def test_a_read_that_a_parent_holds_ends_when_the_image_is_abandoned(self) -> None:
        self.publish()
        path = self.connect()
        wait_until(lambda: self.states() == [PathState.ACTIVE])
        [disk] = iscsi_tools.disks_of(target_name(HOST, self.image.name))
        (Path("/sys/block") / disk.name / "device/timeout").write_text(str(int(NEVER)))
        self.export.publish(self.image, Device(SIZE, self.without_parents()))
        with ThreadPoolExecutor() as pool:
            reading = pool.submit(self.read, path)
            try:
                wait_until(self.reads_wait)
                self.attach.abandon(self.image.name)
                self.assertRaises(CommandFailed, reading.result, PATIENCE)
            finally:
                self.let_all_go()
                self.export.withdraw(self.image.name)

    def groups(self, path: Path) -> Groups:
        """The paths in the map, also those that have failed."""
        return multipath.state(path.name).groups

    @contextlib.contextmanager
    def silence(self) -> Iterator[None]:
        """Nobody in the guest hears of anybody in it."""
        loss = ["tc", "qdisc", "replace", "dev", "lo", "root", "netem", "loss"]
        run([*loss, "100%"])
        self.addCleanup(run, ["tc", "qdisc", "del", "dev", "lo", "root"])
        try:
            yield
        finally:
            run([*loss, "0%"])

    def test_the_disk_of_an_only_parent_stays_in_the_map_while_that_is_not_there(self) -> None:
        self.publish()
        path = self.connect()
        self.read(path)
        [[number]] = before = self.groups(path)
        with self.silence():
            self.lose(HOST)
            wait_until(lambda: number in multipath.state(path.name).failed)
            self.assertEqual(before, self.groups(path))
        self.assertEqual(self.content, self.read(path))
        self.assertEqual(before, self.groups(path))
        self.assertEqual([PathState.ACTIVE], self.states())

    def by_both(self, *parents: Parent) -> Path:
        """Two parents in this order, which are in the map."""
        path = contracts.path_of(self.attach.connect(self.image, parents))
        wait_until(lambda: self.states() == [PathState.ACTIVE, PathState.STANDBY] and len(self.groups(path)) == 2)
        return path

    def test_the_first_parent_is_read_by_again_once_it_is_back(self) -> None:
        self.publish()
        path = self.by_both(self.parent, self.good_parent())
        before = self.groups(path)
        self.lose(HOST)
        self.assertEqual(self.content, self.read(path))
        wait_until(lambda: self.states() == [PathState.ACTIVE, PathState.STANDBY])
        wait_until(lambda: multipath.state(path.name) == multipath.State(before, frozenset(), 1))
        self.assertEqual(before, self.groups(path))

    def test_a_disk_that_is_deleted_is_found_anew(self) -> None:
        self.publish()
        path = self.connect()
        self.read(path)
        [session] = sessions(self.image.name).values()
        disk = session.disk()
        assert disk is not None
        (disk / "device/delete").write_text("1")
        self.assertEqual(self.content, self.read(path))

    def lose(self, parent: str) -> None:
        """Have the driver see that a session has no connection."""
        with self.assertLogs("drivers.attach.iscsiroute", "WARNING") as said:
            self.cut_until_lost(parent, said.output)

    def cut_until_lost(self, parent: str, said: list[str]) -> None:
        """iscsid may be back before the driver looks."""

        def is_lost() -> bool:
            self.cut(parent)
            return any(f"parent {parent} lost" in line for line in said)

        wait_until(is_lost)

    def cut(self, parent: str) -> None:
        """End the connection of a session, if it has one."""
        for session in sessions().values():
            if session.target.name == target_name(parent, self.image.name):
                with contextlib.suppress(DriverError, OSError):
                    session.cut()

    def test_a_parent_that_is_named_while_the_only_one_hangs_is_read_from(self) -> None:
        self.publish()
        path = self.connect()
        wait_until(lambda: self.states() == [PathState.ACTIVE])
        second = self.good_parent()
        self.export.publish(self.image, Device(SIZE, self.without_parents()))
        with ThreadPoolExecutor() as pool:
            reading = pool.submit(self.read, path)
            try:
                wait_until(self.reads_wait)
                began = time.monotonic()
                self.attach.update(self.image, [self.parent, second])
                self.assertEqual(self.content, reading.result(PATIENCE))
                self.assertLess(time.monotonic() - began, devmapper.RELOAD_LIMIT / 2)
            finally:
                self.let_all_go()

    def good_parent(self) -> Parent:
        """Another one, that answers."""
        file = self.folder / "image"
        good = rtslib_fb.FileIOStorageObject(f"{MODEL}good", dev=str(file), size=SIZE, wwn=serial_of(self.image))
        return self.parent_with(self.made(good))

    def test_update_that_failed_is_done_by_the_same_list_again(self) -> None:
        self.publish()
        path = self.connect()
        self.read(path)
        with no_more_files():
            self.assertRaises(HostFailed, self.attach.update, self.image, [GONE])
        self.assertFalse(self.attach.update(self.image, [GONE]))
        self.assertIn("queue_if_no_path 0 0 0", devmapper.table(path.name))

    def impostor(self, **attributes: str) -> Parent:
        """A parent with the image's disk that does not know the secret, with these attributes of the child's ACL."""
        file = self.folder / "image"
        disk = rtslib_fb.FileIOStorageObject(f"{MODEL}false", dev=str(file), size=SIZE, wwn=serial_of(self.image))
        parent = self.parent_with(self.made(disk))
        target = rtslib_fb.Target(rtslib_fb.FabricModule("iscsi"), target_name(parent.host, self.image.name))
        group = rtslib_fb.TPG(target, PORTAL_GROUP)
        for name, value in attributes.items():
            setattr(next(group.node_acls), name, value)
        return parent

    def check_it_is_no_path(self, impostor: Parent) -> None:
        self.publish()
        self.replace_driver(NEVER)
        with self.assertLogs("drivers.attach.iscsiroute", "INFO") as said:
            path = contracts.path_of(self.attach.connect(self.image, [impostor, self.parent]))
            self.assertEqual(self.content, self.read(path))
            wait_until(lambda: any("does not prove itself" in line for line in said.output))
        self.assertEqual([PathState.LOST, PathState.ACTIVE], self.states())
        self.assertEqual([], iscsi_tools.disks_of(target_name(impostor.host, self.image.name)))

    def test_a_parent_that_proves_itself_by_another_secret_is_no_path_and_not_waited_for(self) -> None:
        self.check_it_is_no_path(self.impostor(chap_mutual_password="another secret"))

    def test_a_parent_that_lets_the_host_in_and_does_not_prove_itself_is_no_path(self) -> None:
        self.check_it_is_no_path(self.impostor(chap_mutual_password="", chap_mutual_userid=""))

    def test_a_parent_that_asks_for_no_proof_and_gives_none_is_no_path(self) -> None:
        listener = socket.create_server((IP, 0))
        self.addCleanup(listener.close)
        server = threading.Thread(target=let_everybody_log_in, args=[listener], daemon=True)
        server.start()
        self.addCleanup(listener.shutdown, socket.SHUT_RDWR)
        self.check_it_is_no_path(Parent("false", f"iscsi://{IP}:{listener.getsockname()[1]}", SECRET))

    def test_refuses_an_image_of_an_impossible_size(self) -> None:
        self.assertRaises(BadDisk, self.attach.connect, Image("x", 1000, self.image.digest), [self.parent])
