"""What the lab reads from a VM's console."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import testtools

from lab.errors import LoginFailed
from lab.login import io_errors, wait_login


class ConsoleTestCase(testtools.TestCase):
    def console(self, text: str) -> Path:
        """A console's log with this text."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        path = Path(folder.name) / "console"
        path.write_text(text)
        return path


class WaitLoginTest(ConsoleTestCase):
    def test_the_prompt_with_the_own_name_is_found(self) -> None:
        before = time.monotonic()
        self.assertGreaterEqual(wait_login("vm-1", self.console("Debian\r\n\r\nvm-1 login: "), 10), before)

    def test_a_prompt_with_another_name_is_no_login(self) -> None:
        error = self.assertRaises(LoginFailed, wait_login, "vm-1", self.console("guest login: "), 0.3)
        self.assertIn("guest login", str(error))


class IoErrorsTest(ConsoleTestCase):
    def test_a_line_that_tells_of_a_disk_error_counts_once(self) -> None:
        text = "[ 1.0] I/O error, dev vda, sector 8\n[ 1.1] Buffer I/O error on dev vda1\nvm-1 login: \n"
        self.assertEqual(2, io_errors(self.console(text)))

    def test_a_clean_boot_has_none(self) -> None:
        self.assertEqual(0, io_errors(self.console("SeaBIOS\nvm-1 login: ")))
