"""The chunk store's benchmark: what it computes of what it measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st
from testtools import ExpectedException, TestCase

from benchmarks import chunkstore
from benchmarks.chunkrows import warm, waves
from benchmarks.chunkrows.boots import Boot
from benchmarks.chunkrows.scale import QUICK, Job
from benchmarks.chunkrows.stores import received_bytes
from benchmarks.chunkrows.table import BEGIN, END, Line, at_least, at_most, markdown, not_measured, put_between_marks
from benchmarks.chunkrows.turns import image_lru_rate
from benchmarks.chunkrows.versions import BEFORE, NOW
from benchmarks.errors import Failed
from benchmarks.trace import Read, Trace

SS = """\
0 0 127.0.0.1:4000 127.0.0.1:5000 users:(("virtman-chunkd",pid=12,fd=9))
\t ts sack bytes_sent:7 bytes_acked:8 bytes_received:100 segs_out:4
0 0 127.0.0.1:5000 127.0.0.1:4000 users:(("virtman-chunkd",pid=123,fd=9))
\t ts sack bytes_received:1000
0 0 127.0.0.1:4001 127.0.0.1:5000 users:(("virtman-chunkd",pid=12,fd=10))
\t ts sack bytes_received:20
0 0 127.0.0.1:4002 127.0.0.1:5000 users:(("virtman-chunkd",pid=12,fd=11))
\t ts sack
"""


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
        figures = {"cpu_s": {"all": 13.0}, "fetched_bytes_per_host": [5, 10]}
        cpu, fetched = waves.lines_of("hosts", 10.0, {NOW: figures}, 10)
        self.assertEqual(Line(cpu.what, "at most 1.3", "1.300 (local files 10.0 s, chunk store 13.0 s)", met=True), cpu)
        self.assertTrue(fetched.met)

    def test_a_boot_needs_no_zeros(self) -> None:
        with TemporaryDirectory() as folder:
            image = Path(folder) / "image"
            image.write_bytes(b"x" * 10 + bytes(10) + b"x" * 10)
            reads = (Read(0.0, 2, 3), Read(0.0, 12, 3), Read(0.0, 3, 1))
            boot = Boot(image, Trace("", 30, 0.0, reads), image)
            self.assertEqual(10, waves.data_bytes(boot, 10))


class ReceivedTest(TestCase):
    def test_all_connections_of_one_process_count(self) -> None:
        self.assertEqual(120, received_bytes(SS, 12))
        self.assertEqual(0, received_bytes(SS, 1))


class ImageLruTest(TestCase):
    def test_images_in_turn_are_never_there_if_one_too_many(self) -> None:
        self.assertEqual(0, image_lru_rate([0, 1, 2] * 5, size=10, limit=29))

    def test_images_that_fit_are_read_once(self) -> None:
        self.assertEqual(0.5, image_lru_rate([0, 1, 2] * 2, size=10, limit=30))

    def test_the_image_that_was_used_longest_ago_goes(self) -> None:
        self.assertEqual(0.4, image_lru_rate([0, 1, 0, 2, 0], size=10, limit=20))

    @given(st.lists(st.integers(0, 5), min_size=1), st.integers(1, 6))
    def test_a_larger_cache_is_never_worse(self, order: list[int], images: int) -> None:
        self.assertLessEqual(image_lru_rate(order, 1, images), image_lru_rate(order, 1, images + 1))


class RowsTest(TestCase):
    def test_a_row_that_fails_loses_no_other(self) -> None:
        saved: list[Mapping[str, Any]] = []
        rows = {"bad": _fail, "good": lambda _job: [at_most("bytes", 1, 1)], "old": _fail}
        old = {"old": {"day": "2026-01-01", "machine": {"cpus": 1}, "lines": []}}
        with patch.object(chunkstore, "ROWS", rows):
            job = Job(QUICK, Path(), None)
            figures, failures = chunkstore.measured(["bad", "good"], job, old, saved.append)
        self.assertEqual(["bad: it is broken"], failures)
        self.assertEqual(["good", "old"], list(figures))
        self.assertEqual([figures], saved)
        self.assertIn("| bytes | at most 1 | 1.000 | met |", chunkstore.text(figures))


def _fail(_job: Job) -> list[Line]:
    raise Failed("it is broken")
