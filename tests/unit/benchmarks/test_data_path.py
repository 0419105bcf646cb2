"""What the benchmark of the data path makes of its measurements."""

from __future__ import annotations

import json

from testtools import TestCase

from benchmarks import fio
from benchmarks.errors import Failed
from benchmarks.kernelpath import busy


class FiguresTest(TestCase):
    def test_the_processor_works_for_programs_kernel_and_interrupts_and_not_while_it_waits(self) -> None:
        self.assertEqual(1.25, busy("cpu  100 1 10 5000 700 4 10 0 0 0"))


class FioTest(TestCase):
    def test_reads_share_the_time_of_those_beside_them(self) -> None:
        said = json.dumps({"jobs": [{"error": 0, "job_runtime": 1500, "read": {"lat_ns": {"mean": 16e6}}}]})
        self.assertEqual((0.001, 1.5), (fio.read_seconds(said, 16), fio.seconds(said)))

    def test_an_error_is_told(self) -> None:
        self.assertRaises(Failed, fio.seconds, json.dumps({"jobs": [{"error": 5}]}))
