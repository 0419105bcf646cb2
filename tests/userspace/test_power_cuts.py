"""Power cuts at every flush of the disk that has the agent's state: what was told to be written is there.

A killed process loses nothing that it wrote, so only such a disk shows that a file is synced too late or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from testtools import TestCase

from drivers.host.durable import write_atomically
from drivers.host.space import Room
from tests.programs import require_root
from tests.unit.virtman.scene import folder_for
from tests.userspace.loggeddisk import LoggedDisk, content_of, files_in
from virtman.imagefile import inspect
from virtman.imagestore import ImageStore
from virtman.records import RecordStore, State, VmRecord

Files = dict[str, bytes]
"""Contents by path."""

ROUNDS = 4
SMALL, LARGE = 100, 300_000
"""Bytes: within a block of the file system, and many of them."""


class PowerCutsTest(TestCase):
    """A folder ``state`` on a disk whose power is cut at every flush and whenever somebody was told that it is done."""

    def setUp(self) -> None:
        super().setUp()
        require_root(self, "a disk that keeps a log is mounted")
        if not Path("/dev/fuse").exists():
            self.skipTest("needs /dev/fuse for a disk that keeps a log")
        self.folder = folder_for(self)
        self.disk = LoggedDisk(self, self.folder)
        self.state = self.disk.root / "state"
        self.history: list[Files] = []

    def done(self) -> None:
        """Somebody is told that all until now is done: it must outlive a power cut from now on."""
        self.history.append(files_in(self.state))
        self.disk.mark()

    def make(self) -> None:
        """The folder is there, for good."""
        self.state.mkdir()
        os.sync()
        self.done()

    def assert_every_cut_is_between_two_states(self, seen: Callable[[Files], Files] = lambda files: files) -> None:
        """After a cut there is what was done last, or all of what was being done then; never a part of it.

        ``seen``: those of the files that count.
        """
        self.disk.unplug()
        met = []
        for number, cut in enumerate(self.disk.cuts()):
            if cut.marks == 0:
                continue
            found = seen(content_of(cut.disk, Path("state")))
            allowed = self.history[cut.marks - 1 : cut.marks + (not cut.at_mark)]
            if found not in allowed:
                self.fail(f"cut {number}, after mark {cut.marks}: {sizes(found)}, not one of {[*map(sizes, allowed)]}")
            met.append(cut.marks)
        self.assertEqual(list(range(1, len(self.history) + 1)), sorted(set(met)))
        self.assertGreater(len(met), 2 * len(self.history))

    def check(self, act: Callable[[int], None]) -> None:
        for number in range(ROUNDS):
            act(number)
            self.done()
        self.assert_every_cut_is_between_two_states()

    def test_a_file_that_was_written_is_there_whole(self) -> None:
        self.make()
        self.check(lambda number: write_atomically(self.state / f"file-{number}", os.urandom(LARGE)))

    def test_a_file_that_is_written_anew_is_the_old_or_the_new_one(self) -> None:
        self.make()
        self.check(lambda number: write_atomically(self.state / "file", os.urandom(SMALL + number % 2 * LARGE)))

    def test_a_record_that_was_removed_does_not_come_back(self) -> None:
        self.make()
        records = RecordStore(self.state, VmRecord)

        def act(number: int) -> None:
            name = f"vm-{number // 2}"
            if number % 2:
                records.remove(name)
            else:
                records.put(name, VmRecord(name=name, image="img", size=None, state=State.PRESENT))

        self.check(act)

    def test_an_image_that_was_published_is_there_whole_and_one_that_was_removed_is_gone(self) -> None:
        self.make()
        store = ImageStore(self.state, Room(self.state))
        for number in range(ROUNDS // 2):
            file = self.folder / "image"
            file.write_bytes(os.urandom(LARGE // 512 * 512))
            image = store.add(f"img-{number}", inspect(file), lambda *_: None)
            self.done()
            store.remove(image.key)
            self.done()
        self.assert_every_cut_is_between_two_states(with_content)


def with_content(files: Files) -> Files:
    """Without the manifests of images that have no content, which gc removes."""
    return {name: content for name, content in files.items() if f"images/{Path(name).stem}.raw" in files}


def sizes(files: Files) -> dict[str, int]:
    """For messages: the contents are random."""
    return {name: len(content) for name, content in files.items()}
