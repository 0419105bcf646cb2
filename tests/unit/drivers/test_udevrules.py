"""What udev is told of an agent's folder."""

from __future__ import annotations

from testtools import TestCase

from drivers.kernel import udevrules
from drivers.names import STATE
from tests.unit.logs import Logged
from tests.unit.virtman.scene import folder_for


class LeaveAloneTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = folder_for(self)
        known = list(udevrules._folders)
        self.addCleanup(udevrules._folders.__setitem__, slice(None), known)

    def told(self) -> list[str]:
        """The files whose loop devices are left alone: of the folders that udev is told of, and of our maps."""
        (line,) = [line for line in udevrules.rules().splitlines() if "ATTR{loop/backing_file}" in line]
        return line.split('"')[3].split("|")

    def test_an_agent_in_the_usual_folder_has_no_other(self) -> None:
        udevrules.leave_alone(STATE)
        self.assertEqual(["/dev/*/virtman-*", f"{STATE}/*"], self.told())

    def test_a_folder_behind_a_symlink_is_named_as_the_kernel_names_it_once(self) -> None:
        real, link = self.folder / "disk+1", self.folder / "state"
        real.mkdir()
        link.symlink_to(real)
        for folder in (link, real, link):
            udevrules.leave_alone(folder)
        self.assertEqual([f"{STATE}/*", f"{real}/*"], self.told()[1:])

    def test_a_folder_that_means_something_in_a_rule_is_said_and_not_named(self) -> None:
        before, logged = udevrules.rules(), Logged(self, "drivers.kernel.udevrules")
        for name in ("a|b", "a*", "a?", "a[b", 'a"', "a\nb", "a\\b", "a$b", "a%b", "a b"):
            udevrules.leave_alone(self.folder / name)
            self.assertIn(name, "\n".join(logged.lines))
        self.assertEqual(before, udevrules.rules())
