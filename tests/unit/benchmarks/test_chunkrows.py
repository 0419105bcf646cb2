"""The chunk store's benchmark: what it computes of what it measured."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from testtools import ExpectedException, TestCase

from benchmarks.chunkrows import warm, waves
from benchmarks.chunkrows.table import BEGIN, END, Line, at_least, at_most, markdown, not_measured, put_between_marks
from benchmarks.chunkrows.versions import BEFORE, NOW


class TableTest(TestCase):
    def test_a_bar_is_met_at_the_bar(self) -> None:
        self.assertTrue(at_least("reads", 3, 3.0).met)
        self.assertFalse(at_least("reads", 3, 2.99).met)
        self.assertTrue(at_most("bytes", 1.02, 1.02).met)
        self.assertFalse(at_most("bytes", 1.02, 1.03).met)

    def test_what_is_not_measured_meets_and_misses_nothing(self) -> None:
        self.assertEqual(
            ["a boot", "1.02", "not measured here: no netem", ""], not_measured("a boot", "1.02", "no\n netem").cells()
        )

    def test_a_line_stays_one_line_of_the_table(self) -> None:
        self.assertEqual(
            "| a/b | at most 1 | 0.500 (x) | met |", markdown([at_most("a|b", 1, 0.5, "x")]).splitlines()[2]
        )

    def test_only_what_is_between_the_marks_is_replaced(self) -> None:
        with TemporaryDirectory() as folder:
            page = Path(folder) / "page.md"
            page.write_text(f"one\n{BEGIN}\nold\n{END}\ntwo\n")
            put_between_marks(page, "new")
            self.assertEqual(f"one\n{BEGIN}\nnew\n{END}\ntwo\n", page.read_text())

    def test_a_page_without_marks_stays(self) -> None:
        with TemporaryDirectory() as folder:
            page = Path(folder) / "page.md"
            page.write_text("one\n")
            with ExpectedException(ValueError, ".*no place.*"):
                put_between_marks(page, "new")
            self.assertEqual("one\n", page.read_text())


class LinesTest(TestCase):
    def test_warm_reads_are_compared_by_the_median_round(self) -> None:
        found = {}
        for reads in warm.ALL:
            found[NOW, reads] = [warm.Measured(rate, 0.1) for rate in (100, 900, 300)]
            found[BEFORE, reads] = [warm.Measured(100, 0.4)]
        lines = warm.lines(found, [NOW, BEFORE])
        self.assertEqual([True, False, True, True], [line.met for line in lines])
        self.assertIn("3.00", lines[0].measured)

    def test_a_wave_is_compared_with_local_files_and_with_the_boot(self) -> None:
        figures = {"cpu_s": {"all": 13.0}, "fetched_bytes_per_host": [5, 10], "boot_set": {"rounded_bytes": 10}}
        cpu, fetched = waves.lines_of("hosts", 10.0, {NOW: figures})
        self.assertEqual(Line(cpu.what, "at most 1.3", "1.300 (local files 10.0 s, chunk store 13.0 s)", met=True), cpu)
        self.assertTrue(fetched.met)
