"""Which processes are taken for storage daemons of ours."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from drivers.qemu import daemon
from tests.patience import wait_until
from tests.programs import require_root
from tests.userspace.drivers.hosts import HostCase

NOBODY = 65534


class AdoptionTest(HostCase):
    """A host, and processes that somebody started with the pid file of its image ``img`` on their command line."""

    def setUp(self) -> None:
        super().setUp()
        self.h = self.host("h")
        self.folder = self.h.place.run / "serve"
        self.root.chmod(0o711)
        self.program = Path(shutil.copy(Path("/bin/sh").resolve(), self.root / daemon.PROGRAM))

    def start(self, program: Path, user: int | None = None) -> subprocess.Popen[bytes]:
        """A shell that waits for a line, and looks like a daemon of ours in ps(1)."""
        argv = [daemon.PROGRAM, "-c", "read line", "--pidfile", str(self.folder / "img.pid")]
        process = subprocess.Popen(argv, executable=program, stdin=subprocess.PIPE, user=user)
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        wait_until(lambda: b"--pidfile" in Path(f"/proc/{process.pid}/cmdline").read_bytes())  # a moment after exec(2)
        return process

    def assert_left_alone(self, process: subprocess.Popen[bytes]) -> None:
        """The process is not among our daemons, and an agent that starts and stops the image does not touch it."""
        self.assertEqual({}, daemon.running(self.folder))
        self.h.restart()
        self.assertEqual(frozenset(), self.h.export.existing())
        self.h.export.withdraw("img")
        self.assertIsNone(process.poll())

    def test_process_of_another_user_is_left_alone(self) -> None:
        require_root(self, "a process of another user is started")
        self.assert_left_alone(self.start(self.program, user=NOBODY))

    def test_another_program_of_our_user_is_left_alone(self) -> None:
        self.assert_left_alone(self.start(Path("/bin/sh")))

    def test_process_that_has_ended_is_not_a_daemon(self) -> None:
        process = self.start(self.program)
        (found,) = daemon.running(self.folder).values()
        process.kill()
        self.assertTrue(found.ended(5))
        self.assertEqual({}, daemon.running(self.folder))

    def test_daemon_whose_program_was_upgraded_is_still_ours(self) -> None:
        process = self.start(self.program)
        self.program.unlink()
        self.assertEqual([process.pid], [found.pid for found in daemon.running(self.folder).values()])


class SpawnTest(HostCase):
    def test_what_is_handed_on_may_be_open_under_any_number(self) -> None:
        """Also each under the number that the other one is to have."""
        code = """if True:
            import os, sys
            from pathlib import Path
            from drivers.qemu import daemon
            files = [os.open(path, os.O_RDONLY) for path in sys.argv[1:3]]
            for fd, number in zip(files, (50, 51)):
                os.dup2(fd, number, inheritable=False)
            os.dup2(50, daemon.FILE_FD, inheritable=False)
            os.dup2(51, daemon.LISTEN_FD, inheritable=False)
            said = Path(sys.argv[3])
            daemon.spawn(
                ["sh", "-c", "cat /proc/self/fd/3 /proc/self/fd/4 >&2"], said, daemon.FILE_FD, daemon.LISTEN_FD
            ).ended(60)
        """
        for name in ("one", "two"):
            (self.root / name).write_text(name)
        arguments = [str(self.root / name) for name in ("one", "two", "said")]
        subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)
        self.assertEqual("onetwo", (self.root / "said").read_text())
