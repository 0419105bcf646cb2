"""What the benchmark of volumes makes of its measurements."""

from __future__ import annotations

from testtools import TestCase

from benchmarks.kernel_volume import KINDS, missed, summary


def rounds(read: float, write: float) -> list[dict[str, dict[str, float]]]:
    """Two rounds with these ratios."""
    ratios = {"read": read, "write": write, "write, each flushed": 2.0}
    figures = {"bare_us": dict.fromkeys(KINDS, 100.0), "cached_us": {kind: 100 * ratios[kind] for kind in KINDS}}
    return [{**figures, "ratios": ratios}] * 2


class BarsTest(TestCase):
    def missed(self, read: float, write: float) -> list[str]:
        return missed({kind: summary(rounds(read, write), kind) for kind in KINDS})

    def test_what_is_as_the_bars_say_is_fine(self) -> None:
        self.assertEqual([], self.missed(0.2, 1.1))

    def test_what_is_not_is_told(self) -> None:
        self.assertEqual(["warm reads are 4.00 times as fast; bar: 5.0"], self.missed(0.25, 1.0))
        self.assertEqual(["writes take 1.20 times as long; bar: 1.1"], self.missed(0.1, 1.2))
