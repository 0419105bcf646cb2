"""A disk on its way: what is asked of hosts, and what is left on the front end."""

from __future__ import annotations

from pathlib import Path

from opennebula_tm.driver import names
from opennebula_tm.driver.disks import Disks, Ref
from opennebula_tm.driver.errors import HostFailed, NotThere
from opennebula_tm.driver.moving import Mover, Stored, Streams
from tests.unit.opennebula_tm.scene import write
from tests.unit.opennebula_tm.steps import StepsTestCase


class MoverTest(StepsTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.disks = Disks(self.hosts)
        self.mover = Mover(self.disks, Streams(self.hosts))
        self.here, self.there = self.ref("host-1"), self.ref("host-2")
        self.stored = Stored(self.ref("fe"))

    def ref(self, host: str) -> Ref:
        return Ref(names.place(self.at(host)), 42, 0)

    def store(self, content: str = "stream") -> None:
        """An earlier stop."""
        write(self.stored.file, content)
        self.stored.note("img")

    def test_a_stop_fetches_the_disk_and_then_removes_it_where_it_was(self) -> None:
        self.has("host-1", image="img")
        self.says("host-1", "send", "stream")
        self.mover.stop(self.here, self.stored)
        lock, link, name = self.lock(self.here), self.here.link, "one-42-0-host-1"
        self.assertEqual(
            [
                ["host-1", "describe", name],
                ["host-1", "send", *lock, name, "--with-snapshots"],
                ["host-1", "moved", *lock, link, str(self.stored.file), name],
            ],
            self.steps(),
        )
        self.assertEqual(("stream", "img"), (self.stored.file.read_text(), self.stored.image))

    def test_a_stream_that_breaks_off_leaves_the_disk_and_no_half_of_it(self) -> None:
        self.has("host-1")
        self.says("host-1", "send", "the disk is torn", fails=True)
        self.assertRaises(HostFailed, self.mover.stop, self.here, self.stored)
        self.assertEqual(["host-1 describe", "host-1 send"], self.done())
        self.assertFalse(self.stored.there)
        self.assertEqual([f"{self.stored.file.stem}.json"], [path.name for path in self.stored.file.parent.iterdir()])

    def test_a_stop_that_was_cut_off_goes_on(self) -> None:
        self.store()
        self.mover.stop(self.here, self.stored)
        self.assertEqual(["host-1 describe", "host-1 moved"], self.done())
        self.assertTrue(self.stored.there)

    def test_a_disk_that_is_nowhere_is_told_and_half_of_what_a_stop_writes_is_none(self) -> None:
        self.assertRaises(NotThere, self.mover.resume, self.stored, self.here, "raw", Path(self.here.link))
        for noted, fetched in ((False, False), (True, False), (False, True)):
            self.stored.remove()
            if noted:
                self.stored.note("img")
            if fetched:
                write(self.stored.file, "stream")
            self.assertRaises(NotThere, self.mover.stop, self.here, self.stored)
        self.assertEqual({"host-1 describe"}, set(self.done()))

    def test_a_migration_sends_the_disk_and_then_removes_it_where_it_was(self) -> None:
        self.has("host-1", image="img")
        self.says("host-1", "forward", "/dev/new\n")
        self.store("of an earlier stop")
        self.mover.migrate(self.here, self.disks.there(self.here), self.there, "raw", self.stored)
        lock, name = self.lock(self.here), "one-42-0-host-1"
        receive = f"receive {' '.join(lock)} {self.there.link} one-42-0-host-2 img raw"
        self.assertEqual(
            [
                ["host-1", "forward", *lock, "host-2", receive, name, "--with-snapshots"],
                ["host-1", "moved", *lock, self.here.link, "/dev/new", name],
            ],
            self.steps()[1:],
        )
        self.assertFalse(self.stored.there)

    def test_a_migration_or_a_resume_that_fails_removes_nothing(self) -> None:
        self.has("host-1")
        for host, action in (("host-1", "forward"), ("host-2", "receive")):
            self.says(host, action, "host-2 is full", fails=True)
        self.store()
        found = self.disks.there(self.here)
        self.assertRaises(HostFailed, self.mover.migrate, self.here, found, self.there, "raw", self.stored)
        self.assertRaises(HostFailed, self.mover.resume, self.stored, self.there, "raw", Path(self.there.link))
        self.assertEqual(["host-1 describe", "host-1 forward", "host-2 receive"], self.done())
        self.assertTrue(self.stored.there)

    def test_a_resume_hands_the_stream_over_and_then_removes_it(self) -> None:
        self.store()
        self.says("host-2", "receive", "/dev/new\n")
        link = Path(self.there.link)
        write(link, "what led to the stream")
        self.mover.resume(self.stored, self.there, "qcow2", link)
        receive = [*self.lock(self.there), self.there.link, "one-42-0-host-2", "img", "qcow2"]
        self.assertEqual([["host-2", "receive", *receive]], self.steps())
        self.assertEqual("stream", (self.folder / "input").read_text())
        self.assertEqual((Path("/dev/new"), False), (link.readlink(), self.stored.there))

    def test_a_resume_that_was_cut_off_finds_the_disk_at_its_host(self) -> None:
        self.has("host-2", path="/dev/arrived")
        link = Path(self.there.link)
        write(link, "what led to the stream")
        self.mover.resume(self.stored, self.there, "raw", link)
        self.assertEqual((["host-2 describe"], Path("/dev/arrived")), (self.done(), link.readlink()))
