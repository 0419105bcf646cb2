"""The version of a state folder."""

from __future__ import annotations

from pathlib import Path

from testtools import TestCase

from tests.limits import no_more_files
from tests.unit.virtman.scene import folder_for
from virtman.errors import ConfigError, HostTrouble
from virtman.stateversion import has_records, mark, refusal


class StateVersionTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.state = folder_for(self) / "state"

    def write(self, name: str, content: str = "{}") -> Path:
        path = self.state / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        return path

    def test_a_new_folder_gets_the_version_and_opens_again(self) -> None:
        mark(self.state)
        self.write("records/vms/web.json")
        self.assertEqual("2\n", (self.state / "version").read_text())
        mark(self.state)
        self.assertIsNone(refusal(self.state))

    def test_a_folder_of_another_version_is_refused_and_stays_as_it_is(self) -> None:
        for name, content in (
            ("version", "1\n"),
            ("version", ""),
            ("drivers.json", "{}"),
            ("records/vms/a.json", "{}"),
        ):
            file = self.write(name, content)
            error = self.assertRaises(ConfigError, mark, self.state)
            self.assertEqual(refusal(self.state), str(error))
            self.assertIn(f"{self.state}: destroy its VMs and unpublish its images with that version", str(error))
            self.assertEqual([file], [path for path in self.state.rglob("*") if path.is_file()])
            file.unlink()

    def test_half_written_records_are_none(self) -> None:
        self.write("records/vms/.web.json.x1")
        self.assertFalse(has_records(self.state))
        with no_more_files():  # not "there are none": other drivers would be taken
            self.assertRaises(HostTrouble, has_records, self.state)
