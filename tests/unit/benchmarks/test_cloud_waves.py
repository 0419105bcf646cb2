"""Waves by OpenNebula's drivers and by Nova: images, pace, and what is refused before a wave starts."""

from __future__ import annotations

from click.testing import CliRunner
from testtools import ExpectedException, TestCase

from benchmarks import nova, opennebula
from benchmarks.errors import NoRoom
from benchmarks.opennebula import PACES
from benchmarks.openstack.plan import Plan
from benchmarks.spreadimage import SpreadImage
from opennebula_tm.installer.tuning import SINGLE, WANTED_THREADS
from tests.unit.virtman.scene import folder_for

IMAGE = SpreadImage(size=256, data=64)


class ImageTest(TestCase):
    def test_data_and_boot_set_are_spread_over_the_image(self) -> None:
        data = IMAGE.data_mibs()
        self.assertEqual(64, len(set(data)))
        self.assertEqual({0, 1, 2, 3}, {mib // 64 for mib in data})
        self.assertEqual(256 - 64, len(IMAGE.holes()))
        self.assertEqual([0, 64, 128, 192], IMAGE.boot_set(4))
        self.assertEqual(IMAGE.data_mibs(), IMAGE.boot_set(1000))

    def test_reads_are_of_data_and_of_holes(self) -> None:
        reads = IMAGE.reads(2)
        self.assertEqual(f"read -P {IMAGE.byte(0)} 0M 1M", reads[0])
        self.assertEqual(5, len(reads))
        self.assertEqual(3, sum(read.startswith("read -P 0 ") for read in reads))


class PacesTest(TestCase):
    def test_the_tuned_settings_are_those_that_install_advises(self) -> None:
        advised = {name: int(wanted) for name, _default, wanted, _why in SINGLE}
        came = {name: int(default) for name, default, _wanted, _why in SINGLE}
        for values, pace in ((advised, PACES["tuned"]), (came, PACES["default"])):
            self.assertEqual(values["MAX_ACTIONS_PER_HOST"], pace.actions_per_host)
            self.assertEqual(values["MAX_ACTIONS_PER_CLUSTER"], pace.actions_per_cluster)
        self.assertEqual(int(WANTED_THREADS), PACES["tuned"].threads)


class RefusalTest(TestCase):
    def test_too_little_room_is_told_in_one_line_before_anything_is_done(self) -> None:
        with ExpectedException(NoRoom, "[^\n]*60 copies of 1000000000 MiB[^\n]*--data"):
            opennebula.check_room(opennebula.Size(60, 4, SpreadImage(2048, 10**9)), folder_for(self))
        with ExpectedException(NoRoom, "[^\n]*60 servers of 1000000000 MiB[^\n]*--data"):
            nova.check_room(Plan(60, 4, 2048, 10**9, 4), folder_for(self))

    def test_data_must_fit_and_the_size_be_whole_gib(self) -> None:
        for wave, option, value in (
            (opennebula, "--data", "17"),
            (opennebula, "--data", "4096"),
            (nova, "--data", "17"),
            (nova, "--data", "4096"),
            (nova, "--size", "1500"),
        ):
            result = CliRunner().invoke(wave.main, [option, value])
            self.assertEqual(2, result.exit_code)
            self.assertIn(f"{option} must be", result.output)
