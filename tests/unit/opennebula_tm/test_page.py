"""docs/opennebula.md keeps up with the installer and the probe."""

from __future__ import annotations

import argparse
from pathlib import Path

from testtools import TestCase

from opennebula_tm.installer import tuning
from opennebula_tm.installer.cli import parser

PAGE = (Path(__file__).parents[3] / "docs" / "opennebula.md").read_text()


class PageTest(TestCase):
    def test_has_every_option(self) -> None:
        (commands,) = [a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)]
        for command in commands.choices.values():
            for option in (option for action in command._actions for option in action.option_strings):
                if option not in ("-h", "--help"):
                    self.assertIn(option, PAGE)

    def test_has_every_cap_with_its_values(self) -> None:
        for name, default, wanted, _why in (*tuning.SINGLE, *tuning.SSHD):
            self.assertRegex(PAGE, rf"(?m)^\| {name}[^|]*\| {default} \| {wanted} \|")
        for block, _executable, _why in tuning.THREADS:
            self.assertRegex(PAGE, rf"(?m)^\| `-t` of {block} \| 15 \| {tuning.WANTED_THREADS} \|")
