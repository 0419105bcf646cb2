"""Staged timings: statistics, the sentence, results put together, the plot."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal
from xml.etree import ElementTree as ET

from testtools import TestCase

from virtman.errors import BadRequest
from virtman.stageplot import LONGEST_NAME, MANY, plot
from virtman.staging import STAGES, Result, Round, Run, cost_most, fastest, figures, merged

SVG = "{http://www.w3.org/2000/svg}"
BEGUN = datetime(2026, 1, 1, tzinfo=UTC)


def result(*rounds: Round, kind: Literal["boot", "deploy"] = "boot", **more: Any) -> Result:
    return Result(**{"kind": kind, "image": "debian", "host": "here", "begun": BEGUN, "rounds": [*rounds], **more})


def boots(label: str, *seconds: dict[str, float]) -> Round:
    return Round(label=label, runs=[Run(name=f"vm-{number}", seconds=each) for number, each in enumerate(seconds)])


class FiguresTest(TestCase):
    def test_median_90_percent_longest_and_share(self) -> None:
        runs = [Run(name=str(number), seconds={"disk": number, "guest": 1}) for number in range(1, 11)]
        found = {one.stage.name: one[1:] for one in figures("boot", runs)}
        self.assertEqual((5, 9, 10, 55 / 65), found["disk"])
        self.assertEqual((1, 1, 1, 10 / 65), found["guest"])
        self.assertEqual((0, 0, 0, 0), found["start"])
        self.assertEqual([stage.name for stage in STAGES["boot"]], list(found))

    def test_of_one_run_of_no_time_and_of_nothing(self) -> None:
        self.assertEqual(
            [(2, 2, 2, 1)], [one[1:] for one in figures("boot", [Run(name="a", seconds={"guest": 2})])[5:]]
        )
        self.assertEqual({0}, {one.share for one in figures("deploy", [Run(name="a")])})
        self.assertEqual([], figures("boot", []))


class CostMostTest(TestCase):
    def test_names_the_stage_and_its_setting(self) -> None:
        said = cost_most(result(boots("1 at a time", {"disk": 3, "guest": 1})))
        self.assertIn("what cost most: disk, 75% of the time (its setting: virtman hydrate IMAGE", said)
        self.assertNotIn(";", said)

    def test_behind_a_wait_it_names_the_work_as_well(self) -> None:
        said = cost_most(result(boots("1 at a time", {"guest": 2}, {"pending": 2, "guest": 1, "start": 0.5})))
        self.assertIn("what cost most: guest, 55%", said)
        said = cost_most(result(boots("1 at a time", {"guest": 1}, {"pending": 7, "start": 2})))
        self.assertIn("what cost most: pending, 70% of the time (its setting: --parallel", said)
        self.assertIn("; of the work: start, 20% of the time", said)

    def test_is_about_the_fastest_round_and_says_nothing_of_nothing(self) -> None:
        slow, fast = boots("1 at a time", {"guest": 9}), boots("2 at a time", {"disk": 2, "guest": 1})
        self.assertIn("disk", cost_most(result(slow, fast)))
        self.assertEqual("", cost_most(result(Round(label="1", runs=[Run(name="a", error="no")]))))

    def test_a_round_in_which_something_failed_is_fastest_only_if_there_is_no_other(self) -> None:
        failed = Round(label="4", runs=[Run(name="a", seconds={"guest": 1}), Run(name="b", error="no")])
        whole = boots("1", {"guest": 9})
        self.assertIs(whole, fastest([failed, whole]))
        self.assertIs(failed, fastest([failed]))
        self.assertIsNone(fastest([]))


class MergedTest(TestCase):
    def test_rounds_of_one_label_become_one(self) -> None:
        one = result(boots("1", {"guest": 1}), boots("2", {"guest": 2}), notes=["cold"])
        two = result(boots("1", {"guest": 3}), host="there")
        both = merged([one, two])
        self.assertEqual(["1", "2"], [each.label for each in both.rounds])
        self.assertEqual(["here: vm-0", "there: vm-0"], [run.name for run in both.rounds[0].runs])
        self.assertEqual(("debian", "here, there", 3), (both.image, both.host, both.rounds[0].seconds))
        self.assertEqual(["here: cold"], both.notes)
        self.assertIn("guest, 100%", both.cost_most)

    def test_boots_and_deployments_are_not_put_together(self) -> None:
        self.assertRaises(BadRequest, merged, [result(), result(kind="deploy")])


class PlotTest(TestCase):
    def bars(self, root: ET.Element) -> list[list[str]]:
        """What each part of each bar says."""
        groups = root.iterfind(f"{SVG}g")
        return [[str(title.text) for title in group.iterfind(f"{SVG}rect/{SVG}title")] for group in groups]

    def test_each_run_has_a_bar_with_each_stage(self) -> None:
        made = result(boots("1", {"disk": 1.5, "guest": 40}, {"guest": 2}), boots("2", {"guest": 1}))
        root = ET.fromstring(plot(made))
        self.assertEqual([len(STAGES["boot"])] * 3, [len(bar) for bar in self.bars(root)])
        self.assertEqual("vm-0: disk 1.50 s", self.bars(root)[0][1])
        said = [text.text for text in root.iterfind(f"{SVG}text")]
        for text in ("boot of debian: seconds by stage", *(stage.name for stage in STAGES["boot"]), "0 s", "40 s"):
            self.assertIn(text, said)
        self.assertIn("prefers-color-scheme: dark", str(root.findtext(f"{SVG}style")))

    def test_nothing_leaves_the_picture(self) -> None:
        for longest in (0.0, 0.004, 1.0, 7.9, 8.0, 8.1, 12345.0):
            root = ET.fromstring(plot(result(boots("1", {"pending": longest / 2, "guest": longest / 2}))))
            width = float(root.attrib["viewBox"].split()[2])
            edges = [float(bar.attrib["x"]) + float(bar.attrib["width"]) for bar in root.iterfind(f"{SVG}g/{SVG}rect")]
            ticks = [float(line.attrib["x1"]) for line in root.iterfind(f"{SVG}line")]
            self.assertLess(max(edges + ticks), width)
            self.assertLessEqual(len(ticks), 9)

    def test_many_bars_are_thin_and_have_no_names(self) -> None:
        root = ET.fromstring(plot(result(boots("1", *[{"guest": 1.0}] * (MANY + 1)))))
        self.assertEqual([], root.findall(f"{SVG}g/{SVG}text"))
        self.assertEqual(MANY + 1, len(self.bars(root)))

    def test_any_name_makes_xml_and_what_failed_is_named(self) -> None:
        bad = Run(name="<&>\x00" + "x" * 99, seconds={"disk": 1}, error="no")
        root = ET.fromstring(plot(result(Round(label="<1>\x01", runs=[bad]), kind="boot")))
        self.assertEqual(
            ["<&>" + "x" * (LONGEST_NAME - 4) + "…", "failed"], [t.text for t in root.iterfind(f"{SVG}g/{SVG}text")]
        )
