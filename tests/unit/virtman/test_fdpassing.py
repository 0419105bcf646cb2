"""Open files that callers pass: exactly one, of the right kind, and nothing of it stays open after an error."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path

from drivers.base import Device
from drivers.host.space import Room
from tests.others import as_nobody
from tests.unit.virtman.imagefiles import CONTENT, ImagesTest
from virtman.convert import QCOW2, RAW, of_device
from virtman.copies import fill
from virtman.errors import BadImageFile, BadRequest, CallerGone, NoRoom
from virtman.fdpassing import MOST, Passed, check_readable, check_writable, mine, opened, pass_to, receive, theirs
from virtman.imagefile import source
from virtman.imagestore import ImageStore
from virtman.newfile import new_file
from virtman.pipe import Pipe

NAME = Path("/callers/name")


def open_files() -> set[str]:
    """What this process has open, but for what looks."""
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it is what looks
            found.add(f"{fd.name} {fd.readlink()}")
    return found


class ReceiveTest(ImagesTest):
    def setUp(self) -> None:
        super().setUp()
        self.ours, self.theirs = map(self.enterContext, socket.socketpair())
        self.fd = os.open(self.raw, os.O_RDONLY)
        self.addCleanup(os.close, self.fd)

    def test_the_one_that_is_passed(self) -> None:
        socket.send_fds(self.theirs, [b"\0"], [self.fd])
        fd = receive(self.ours, 10)
        self.addCleanup(os.close, fd)
        self.assertTrue(os.path.sameopenfile(self.fd, fd))
        self.assertFalse(os.get_inheritable(fd))

    def test_none_and_several_are_refused_and_closed(self) -> None:
        for count in (0, 2, MOST):
            before = open_files()
            socket.send_fds(self.theirs, [b"\0"], [self.fd] * count)
            error = self.assertRaises(BadRequest, receive, self.ours, 10)
            self.assertIn(f"and {count} were", str(error))
            self.assertEqual(before, open_files())

    def test_who_hangs_up_passes_none(self) -> None:
        self.theirs.close()
        self.assertRaises(BadRequest, receive, self.ours, 10)

    def test_who_is_silent_is_not_waited_for(self) -> None:
        self.assertRaises(CallerGone, receive, self.ours, 0.01)

    def test_it_goes_through_a_pipe_and_is_closed(self) -> None:
        before = open_files()
        pipe = Pipe(self.folder)
        passing = threading.Thread(target=pass_to, args=(str(pipe.path), self.fd))
        passing.start()
        with pipe.caller() as caller, caller.passed() as fd:
            self.assertTrue(os.path.sameopenfile(self.fd, fd))
        passing.join()
        self.assertEqual(before, open_files())

    def test_a_pipe_that_is_gone(self) -> None:
        self.assertRaises(CallerGone, pass_to, str(self.folder / "gone"), self.fd)


class CheckTest(ImagesTest):
    def why_not(self, path: Path, flags: int) -> tuple[str, str]:
        """Why a file that is opened so is neither read nor written."""
        fd = os.open(path, flags)
        try:
            reading = self.assertRaises(BadImageFile, check_readable, fd, NAME)
            writing = self.assertRaises(BadRequest, check_writable, fd, NAME)
            return str(reading), str(writing)
        finally:
            os.close(fd)

    def test_only_files(self) -> None:
        said = f"{NAME} is not a file"
        for path, flags in ((self.folder, os.O_RDONLY), (Path("/dev/null"), os.O_RDWR), (Path("/dev"), os.O_PATH)):
            self.assertEqual((said, said), self.why_not(path, flags))
        reading, writing = os.pipe()
        self.addCleanup(os.close, reading)
        self.addCleanup(os.close, writing)
        self.assertRaises(BadImageFile, check_readable, reading, NAME)

    def test_a_path_is_not_open(self) -> None:
        said = (f"{NAME} was not opened for reading", f"{NAME} was not opened for writing")
        self.assertEqual(said, self.why_not(self.raw, os.O_PATH))

    def test_what_was_opened_for_one_is_not_used_for_the_other(self) -> None:
        empty = self.folder / "empty"
        empty.touch()
        with empty.open("wb") as file:
            self.assertRaises(BadImageFile, check_readable, file.fileno(), NAME)
            check_writable(file.fileno(), NAME)
        with empty.open("rb") as file:
            self.assertRaises(BadRequest, check_writable, file.fileno(), NAME)
            check_readable(file.fileno(), NAME)

    def test_only_what_is_new_is_written(self) -> None:
        empty = self.folder / "empty"
        empty.touch()
        os.link(empty, self.folder / "another name")
        for path in (self.raw, empty):
            with path.open("r+b") as file:
                error = self.assertRaises(BadRequest, check_writable, file.fileno(), NAME)
                self.assertIn("not a new and empty file", str(error))

    def test_what_cannot_be_opened_is_told(self) -> None:
        os.mkfifo(self.folder / "fifo")
        for name in ("gone", "fifo", "."):
            error = self.assertRaises(BadImageFile, opened(self.folder / name).__enter__)
            self.assertEqual(f"{self.folder / name} is not a file", str(error))
        said = as_nobody(self, lambda: opened(self.raw).__enter__())
        self.assertEqual(f"BadImageFile: cannot read {self.raw}: Permission denied", said)


class PublishTest(ImagesTest):
    """What a caller does to his file later changes nothing of what QEMU's programs obey."""

    def passed(self, path: Path, *, trusted: bool) -> Passed:
        fd = os.open(path, os.O_RDONLY)
        self.addCleanup(os.close, fd)
        return Passed(fd, NAME, trusted)

    def test_a_qcow2_is_copied_before_it_is_obeyed(self) -> None:
        path = self.qcow2()
        passed = self.passed(path, trusted=False)
        with source(passed, self.folder, self.room) as content:
            path.write_bytes(b"changed")
            self.assertNotEqual(str(passed.path), content.location[-1])
            self.assertEqual(b"QFI\xfb", Path(content.location[-1]).read_bytes()[:4])
            self.assertEqual((str(NAME), len(CONTENT)), (content.name, content.size))
        self.assertEqual({self.raw.name, path.name}, {one.name for one in self.folder.iterdir()})

    def test_holes_take_no_room_in_the_copy(self) -> None:
        path = self.qcow2()
        with path.open("r+b") as file:
            file.seek(1 << 28)
            file.write(b"end")
            file.truncate((1 << 28) + (1 << 20))
            os.posix_fallocate(file.fileno(), 1 << 26, 1 << 26)
        with mine(self.passed(path, trusted=False), tiny := self.tiny(1 << 25), Room(tiny)) as copy:
            self.assertEqual(path.stat().st_size, copy.stat().st_size)
            self.assertTrue(copy.stat().st_blocks * 512 < len(CONTENT) + (2 << 20))
            with copy.open("rb") as file:
                self.assertEqual(b"QFI\xfb", file.read(4))
                file.seek(1 << 28)
                self.assertEqual(b"end\0", file.read(4))

    def test_a_raw_file_stays_raw_and_an_administrators_is_read_where_it_is(self) -> None:
        with source(self.passed(self.raw, trusted=False), self.folder, self.room) as content:
            self.assertEqual(("-f", RAW), content.location[:2])
        passed = self.passed(self.qcow2(), trusted=True)
        with source(passed, self.folder, self.room) as content:
            self.assertEqual(("-f", QCOW2, str(passed.path)), content.location)

    def test_the_callers_name_is_told(self) -> None:
        damaged = self.qcow2()
        os.truncate(damaged, 70000)
        for trusted in (True, False):
            error = self.assertRaises(
                BadImageFile, source(self.passed(damaged, trusted=trusted), self.folder, self.room).__enter__
            )
            self.assertIn(str(NAME), str(error))
            self.assertNotIn("/proc", str(error))


class ExportTest(ImagesTest):
    def fill(self, image_format: str, *, trusted: bool) -> list[int]:
        """Fill a caller's file. Returns the sizes that it had meanwhile."""
        self.target = self.folder / "target"
        sizes: list[int] = []
        with new_file(self.target) as file:
            content = of_device("x", Device(len(CONTENT), self.raw))
            passed, store = Passed(file.fd, NAME, trusted), ImageStore(self.folder, self.room)
            fill(passed, content, image_format, store, lambda *_: sizes.append(os.fstat(file.fd).st_size))
        return sizes

    def test_the_header_of_a_qcow2_is_not_obeyed_where_the_caller_writes(self) -> None:
        sizes = self.fill(QCOW2, trusted=False)
        self.assertEqual({0}, set(sizes))
        self.assertEqual(b"QFI\xfb", self.target.read_bytes()[:4])
        with source(self.target, self.folder, self.room) as content:
            self.assertEqual(len(CONTENT), content.size)

    def test_what_was_written_ends_at_the_reserve_where_the_caller_has_his_file(self) -> None:
        passed = Passed(os.open(self.folder / "target", os.O_RDWR | os.O_CREAT), NAME, trusted=False)
        self.addCleanup(os.close, passed.fd)

        def fill() -> None:
            with theirs(passed, self.folder, Room(self.folder, 1 << 60)) as path:
                path.write_bytes(CONTENT)

        self.assertIn(f"for {NAME}", str(self.assertRaises(NoRoom, fill)))


class StrangerTest(ImagesTest):
    def test_another_user_is_hung_up_on_and_the_caller_is_waited_for(self) -> None:
        self.folder.chmod(0o711)
        pipe = Pipe(self.folder, 12345)
        self.addCleanup(pipe.close)
        said = as_nobody(self, lambda: pass_to(str(pipe.path), 0))
        self.assertIn("Permission denied", said)
        pipe.path.chmod(0o666)  # as of an agent that is not root's
        with socket.socket(socket.AF_UNIX) as sock:
            got: list[bytes] = []

            def accept() -> None:
                with pipe.caller() as caller:
                    got.extend(caller.chunks())

            thread = threading.Thread(target=accept)
            thread.start()

            def stranger() -> str:
                with socket.socket(socket.AF_UNIX) as other:
                    other.settimeout(20)
                    other.connect(str(pipe.path))
                    return f"heard {other.recv(1)!r}"

            self.assertEqual("heard b''", as_nobody(self, stranger))
            sock.connect(str(pipe.path))
            sock.sendall(b"data")
            sock.shutdown(socket.SHUT_WR)
            thread.join(60)
        self.assertEqual([b"data"], got)
