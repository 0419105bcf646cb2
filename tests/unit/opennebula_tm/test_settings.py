"""The settings of the drivers."""

from __future__ import annotations

from pathlib import Path

import testtools

from opennebula_tm.driver import settings
from opennebula_tm.driver.errors import FrontendFailed

REMOTES = Path(__file__).parents[3] / "opennebula_tm" / "remotes"


class SettingsTest(testtools.TestCase):
    def test_the_file_that_is_installed_can_be_read(self) -> None:
        found = settings.read(REMOTES)
        self.assertIn("ControlMaster=auto", found.ssh_options)
        self.assertEqual(settings.Settings().step, found.step)

    def test_its_comments_show_what_holds_without_it(self) -> None:
        text = (REMOTES / settings.FILE).read_text().replace("\n#", "\n")
        shown = settings.parse("\n".join(line for line in text.splitlines() if "=" in line and line[0] != " "), "x")
        self.assertEqual(settings.Settings(ssh_options=shown.ssh_options), shown)

    def test_without_the_file_all_is_as_it_comes(self) -> None:
        self.assertEqual(settings.Settings(), settings.read(Path("/nonexistent")))

    def test_what_it_does_not_know_is_refused_with_its_line(self) -> None:
        for text, line in (
            ("STEPS=3", 1), ("\nSTEP=x", 2), ("STEP=0", 1), ("STEP=-1", 1), ("STEP=nan", 1), ("STEP=inf", 1),
            ("STEP=9 LOCK=9", 1), ("STEP", 1), ('VIRTMAN="x', 1), ("SSH_OPTIONS=\"-o 'x\"", 1),
        ):  # fmt: skip
            with self.subTest(text=text):
                error = self.assertRaises(FrontendFailed, settings.parse, text, "virtman.conf")
                self.assertIn(f"virtman.conf, line {line}:", str(error))

    def test_quotes_are_those_of_a_shell(self) -> None:
        found = settings.parse("""SSH_OPTIONS="-o 'A=b c' -v"  # comment\nSTEP=1.5""", "x")
        self.assertEqual((("-o", "A=b c", "-v"), 1.5), (found.ssh_options, found.step))
