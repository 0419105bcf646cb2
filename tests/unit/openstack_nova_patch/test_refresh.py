"""Recording a series from a changed Nova, and what holds for those that are recorded."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stderr, redirect_stdout

from testtools import TestCase

from openstack_nova_patch.tool import series
from openstack_nova_patch.tool.errors import Refused
from openstack_nova_patch.tool.refresh import main, refresh
from tests.unit.opennebula_tm.scene import tree, write
from tests.unit.openstack_nova_patch.scene import CHANGED, FILES, change, nova
from tests.unit.virtman.scene import folder_for


class RefreshTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = folder_for(self)
        self.original, self.changed = nova(self.folder / "original"), nova(self.folder / "changed")
        change(self.changed)
        self.known = self.folder / "series"

    def refresh(self) -> series.Series:
        return refresh(self.original, self.changed, self.known / "34.0.0")

    def test_each_changed_file_has_a_patch_that_is_named_by_it_and_comes_after_what_it_may_use(self) -> None:
        made = self.refresh()
        names = ["0001-conf-compute.patch", "0002-compute-api.patch", "0003-compute-manager.patch"]
        self.assertEqual(names, [one.patch for one in made.changes])
        self.assertEqual([f"nova/{name}" for name in CHANGED], [one.file for one in made.changes])
        self.assertEqual({*names, "checksums.json"}, {path.name for path in made.folder.iterdir()})
        self.assertEqual([made.folder], list(self.known.iterdir()))
        self.assertEqual(made, series.read(made.folder))

    def test_the_order_and_what_was_written_above_a_patch_stay(self) -> None:
        first = self.refresh()
        lines = first.changed_lines()
        patch = first.folder / "0003-compute-manager.patch"
        patch.write_bytes(b"Why it is needed.\n\n" + patch.read_bytes())
        turned = series.Series(first.folder, first.changes[::-1])
        series.write(turned)
        write(self.changed / "virt/driver.py", FILES["virt/driver.py"] + b"more\n")
        second = self.refresh()
        names = ("compute-manager", "compute-api", "conf-compute", "virt-driver")
        expected = [f"{number:04}-{name}.patch" for number, name in enumerate(names, 1)]
        self.assertEqual(expected, [one.patch for one in second.changes])
        self.assertTrue((second.folder / expected[0]).read_bytes().startswith(b"Why it is needed.\n\n--- a/nova/"))
        self.assertEqual(lines + 1, second.changed_lines())

    def test_what_no_patch_can_hold_is_refused_and_the_series_stays(self) -> None:
        self.refresh()
        before = tree(self.known)
        write(self.changed / "compute/new.py", "x = 1\n")
        self.assertRaisesRegex(Refused, "changed/nova has compute/new.py: new files are our modules", self.refresh)
        (self.changed / "compute/new.py").unlink()
        (self.changed / "virt/driver.py").unlink()
        self.assertRaisesRegex(Refused, "original/nova has virt/driver.py", self.refresh)
        write(self.changed / "virt/driver.py", b"\0")
        self.assertRaisesRegex(Refused, "driver.py: no patch can be made of it: Binary files", self.refresh)
        self.assertEqual(before, tree(self.known))

    def test_the_command_counts_and_warns_above_the_limit(self) -> None:
        argv = [str(self.original), str(self.changed), "34.0.0"]
        self.assertEqual((0, "5 lines of Nova changed, of 60 that may be"), self.run_it(argv))
        write(self.changed / "virt/driver.py", FILES["virt/driver.py"] + b"more\n" * 56)
        self.assertEqual((1, "61 lines of Nova changed, of 60 that may be"), self.run_it(argv))
        code, said = self.run_it([str(self.folder), str(self.changed), "34.0.0"])
        self.assertEqual(1, code)
        self.assertIn("is not the folder of the package nova", said)

    def run_it(self, argv: list[str]) -> tuple[int, str]:
        """Exit code and last line."""
        out = io.StringIO()
        with redirect_stdout(out), redirect_stderr(out):
            code = main(argv, self.known)
        return code, out.getvalue().splitlines()[-1]


class RecordedTest(TestCase):
    """Of the series of this repository."""

    def test_each_patch_changes_the_file_that_is_listed_for_it_and_nothing_else(self) -> None:
        known = series.read_all()
        self.assertTrue(known)
        for one in known:
            listed = {change.patch for change in one.changes} | {series.CHECKSUMS}
            self.assertEqual(listed, {path.name for path in one.folder.iterdir()})
            self.assertEqual(sorted(listed - {series.CHECKSUMS}), [change.patch for change in one.changes])
            self.assertTrue(one.changes)
            self.assertLessEqual(one.changed_lines(), series.LIMIT, one.version)
            for change_ in one.changes:
                text = (one.folder / change_.patch).read_bytes().decode(errors="replace")
                self.assertEqual([f"a/{change_.file}"], re.findall(r"(?m)^--- (\S+)$", text))
                self.assertEqual([f"b/{change_.file}"], re.findall(r"(?m)^\+\+\+ (\S+)$", text))
                self.assertNotEqual(change_.before, change_.after)
