"""What is served in place, and whether it still is what it was."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from unittest import mock

from testtools import TestCase

from drivers.digests import BLAKE3, SHA256
from tests.unit.virtman.scene import folder_for
from virtman import inplace
from virtman.errors import BadImageFile, OriginChanged, OriginMissing
from virtman.fdpassing import Passed
from virtman.records import DEVICE, FILE, ImageRecord, InPlace, Role, State

SIZE = 1 << 20
SUM, OTHER, DRAWN = (f"{kind}:{digit * 64}" for kind, digit in (("sha256", "1"), ("sha256", "2"), ("id", "3")))


class InPlaceTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = folder_for(self)
        self.file = self.folder / "disk.raw"
        self.file.write_bytes(os.urandom(SIZE))

    def found(self, path: Path | None = None) -> InPlace:
        with inplace.to_publish(path or self.file, [self.folder / "state"]) as (found, _fd):
            return found

    def record(self, digest: str = DRAWN, **fields: object) -> ImageRecord:
        known = self.found().model_copy(update=fields)
        return ImageRecord(name="img", role=Role.ORIGIN, state=State.PRESENT, size=SIZE, digest=digest, in_place=known)

    def why_not(self, record: ImageRecord, kind: type[Exception] = OriginChanged) -> str:
        return str(self.assertRaises(kind, self.open, record))

    def open(self, record: ImageRecord) -> tuple[bytes, str]:
        with inplace.opened(record) as (_now, opened):
            return opened.path.read_bytes(), opened.mark


class PublishedTest(InPlaceTest):
    def test_a_file_is_known_by_what_nobody_can_set(self) -> None:
        found, told = self.found(), self.file.stat()
        self.assertEqual((FILE, SIZE), (found.kind, found.size))
        self.assertEqual(
            (told.st_ino, told.st_mtime_ns, told.st_ctime_ns), (found.inode, found.mtime_ns, found.ctime_ns)
        )

    def test_its_last_change_is_past_when_it_is_looked_at(self) -> None:
        """Else what is written in the same tick of the kernel's clock would not show."""
        for _ in range(20):
            self.file.write_bytes(b"1" * SIZE)
            record = self.record()
            self.file.write_bytes(b"2" * SIZE)
            self.assertIn("has changed", self.why_not(record))

    def test_what_waits_in_memory_is_on_the_disk_before_it_is_looked_at(self) -> None:
        with mock.patch.object(os, "fsync", side_effect=lambda _fd: self.file.write_bytes(bytes(2 * SIZE))):
            self.assertEqual(2 * SIZE, self.found().size)

    def test_one_that_is_written_to_all_the_time_is_refused(self) -> None:
        def just_written() -> float:
            return self.file.stat().st_ctime_ns / 1e9 + inplace.SETTLED / 2

        with ExitStack() as stack:
            publish = partial(stack.enter_context, inplace.to_publish(self.file, [], just_written))
            self.assertIn("being written to", str(self.assertRaises(BadImageFile, publish)))

    def test_what_is_no_raw_disk_is_refused_with_what_makes_one_of_it(self) -> None:
        for begin, said in (
            (b"QFI\xfb", f"qemu-img convert -O raw {self.file} {self.file}.raw"),
            (b"KDMV", f"qemu-img convert -O raw {self.file} {self.file}.raw"),
            (b"\x1f\x8b\x08", f"gzip --decompress --stdout {self.file} > "),
        ):
            self.file.write_bytes(begin.ljust(SIZE, b"\0"))
            self.assertIn(said, str(self.assertRaises(BadImageFile, self.found)))

    def test_what_is_no_disk_is_refused(self) -> None:
        for name, size in (("empty", 0), ("odd", 513)):
            (self.folder / name).write_bytes(bytes(size))
        os.mkfifo(fifo := self.folder / "fifo")
        for path, said in (
            (self.folder / "empty", "is empty"),
            (self.folder / "odd", "513 bytes"),
            *((path, "neither a file nor a block device") for path in (fifo, Path("/dev/null"), self.folder)),
            (self.folder / "none", "cannot read"),
        ):
            self.assertIn(said, str(self.assertRaises(BadImageFile, self.found, path)))

    def test_paths_that_are_none_or_the_agents_own(self) -> None:
        own = self.folder / "state" / "records"
        own.mkdir(parents=True)
        (own / "file").write_bytes(bytes(512))
        link = self.folder / "link"
        link.symlink_to(own / "file")
        for path, said in ((Path("disk.raw"), "absolute"), (own / "file", "agent's own"), (link, "agent's own")):
            self.assertIn(said, str(self.assertRaises(BadImageFile, self.found, path)))

    def test_the_agents_own_also_where_its_folder_is_called_by_a_link(self) -> None:
        link = self.folder / "link"
        link.symlink_to(self.folder)
        publish = partial(ExitStack().enter_context, inplace.to_publish(self.file, [link]))
        self.assertIn("agent's own", str(self.assertRaises(BadImageFile, publish)))


class PassedTest(InPlaceTest):
    def passed(self, path: Path, flags: int = os.O_RDONLY) -> InPlace:
        """What is published if this is open, and the file's path is said."""
        fd = os.open(path, flags)
        try:
            with inplace.to_publish(Passed(fd, self.file, trusted=False), []) as (found, _fd):
                return found
        finally:
            os.close(fd)

    def test_it_is_what_its_path_leads_to(self) -> None:
        self.assertEqual(self.found(), self.passed(self.file))
        link = self.folder / "link"
        link.symlink_to(self.file)
        self.assertEqual(self.found(), self.passed(link))

    def test_another_file_is_refused(self) -> None:
        other = self.folder / "other"
        other.write_bytes(self.file.read_bytes())
        error = self.assertRaises(BadImageFile, self.passed, other)
        self.assertIn("does not lead to the file that was passed", str(error))

    def test_what_he_may_not_read_is_refused(self) -> None:
        for flags in (os.O_WRONLY, os.O_PATH):
            self.assertIn("not opened for reading", str(self.assertRaises(BadImageFile, self.passed, self.file, flags)))


class OpenedTest(InPlaceTest):
    def test_what_is_the_same_is_handed_on_open(self) -> None:
        record = self.record()
        content, mark = self.open(record)
        self.assertEqual((self.file.read_bytes(), mark), (content, self.open(record)[1]))
        self.assertTrue(mark.isalnum())
        self.assertLessEqual(len(mark), 20)

    def test_what_took_its_place_has_another_mark(self) -> None:
        first = self.open(self.record())[1]
        self.file.write_bytes(self.file.read_bytes())
        self.assertNotEqual(first, self.open(self.record())[1])

    def test_a_path_that_leads_elsewhere_meanwhile_leads_nobody_astray(self) -> None:
        content, other = self.file.read_bytes(), self.folder / "other"
        other.write_bytes(bytes(SIZE))
        with inplace.opened(self.record()) as (_now, opened):
            other.rename(self.file)
            self.assertEqual(content, opened.path.read_bytes())

    def test_every_change_is_one(self) -> None:
        def write() -> None:
            with self.file.open("r+b") as file:
                file.write(b"x")

        def write_and_hide_it() -> None:
            before = self.file.stat()
            write()
            os.utime(self.file, ns=(before.st_atime_ns, before.st_mtime_ns))

        def replace() -> None:
            self.file.rename(self.folder / "aside")
            self.file.write_bytes((self.folder / "aside").read_bytes())

        for act, said in (
            (write, "has changed since"),
            (write_and_hide_it, "has changed since"),
            (replace, "is another file now"),
            (lambda: os.truncate(self.file, SIZE + 512), f"has {SIZE + 512} bytes now, and had {SIZE}"),
        ):
            record = self.record()
            act()
            self.assertIn(said, self.why_not(record))
            self.file.unlink()
            self.file.write_bytes(os.urandom(SIZE))

    def test_what_is_missing_is_not_changed(self) -> None:
        record = self.record()
        aside = self.file.rename(self.folder / "aside")
        self.assertIn("No such file", self.why_not(record, OriginMissing))
        os.link(aside, self.file)
        self.assertIn("has changed", self.why_not(record), "a further name is a change, too")

    def test_no_fifo_is_opened(self) -> None:
        record = self.record()
        self.file.unlink()
        os.mkfifo(self.file)
        self.assertIn("neither a file nor a block device", self.why_not(record))

    def test_what_proves_to_be_something_else_is_not_served(self) -> None:
        self.assertIn(f"holds {OTHER}, and not {SUM}", self.why_not(self.record(SUM, content=OTHER)))
        self.open(self.record(SUM, content=SUM))
        self.open(self.record(DRAWN, content=SUM))
        kinds = [inplace.kind_of_sum(self.record(digest)) for digest in (SUM, DRAWN)]
        self.assertEqual([SHA256, BLAKE3], kinds)

    def test_it_is_one_sentence_that_names_the_ways_out(self) -> None:
        record = self.record()
        os.truncate(self.file, 512)
        said = self.why_not(record)
        self.assertNotIn("\n", said)
        self.assertIn(f"--in-place --trust {DRAWN}, or give it up: virtman unpublish img", said)


class DevicesTest(TestCase):
    def device(self, identity: str, size: int = SIZE) -> InPlace:
        return InPlace(path="/dev/a", kind=DEVICE, size=size, identity=identity)

    def test_they_differ(self) -> None:
        lasting, booted = self.device("wwid 1"), self.device("boot b1 7:0 26")
        self.assertEqual("", inplace.differs(lasting, self.device("wwid 1")))
        self.assertEqual("is another device now", inplace.differs(lasting, self.device("wwid 2")))
        self.assertEqual("is another device now", inplace.differs(booted, self.device("boot b1 7:0 27")))
        self.assertIn("over a boot of this host", inplace.differs(booted, self.device("boot b2 7:0 26")))
        self.assertIn("bytes now", inplace.differs(lasting, self.device("wwid 1", 512)))
        self.assertIn("is a file now", inplace.differs(lasting, InPlace(path="/a", kind=FILE, size=SIZE)))
