"""What is read in tables of device-mapper."""

from __future__ import annotations

from testtools import TestCase

from drivers.attach.iscsimap import groups_of, table_of
from drivers.base import Image
from drivers.kernel.devmapper import numbers_in
from drivers.kernel.multipath import State, state_in


class PathsTest(TestCase):
    """The table by which an image's map reads from its parents."""

    def table(self, policy: str, numbers: list[str], resting: int) -> str:
        image = Image("debian", 4 << 20, "sha256:" + "0" * 64)
        table = table_of(image, policy, groups_of(policy, numbers, resting))
        return table.removeprefix("0 8192 multipath 1 queue_if_no_path 0 ")

    def test_those_that_rest_are_read_from_when_no_other_can_be(self) -> None:
        all_of_them = ["8:0", "8:16", "8:32"]
        for resting, table in (
            (0, "1 1 round-robin 0 3 0 8:0 8:16 8:32"),
            (1, "2 1 round-robin 0 2 0 8:0 8:16 round-robin 0 1 0 8:32"),
            (3, "1 1 round-robin 0 3 0 8:0 8:16 8:32"),
        ):
            self.assertEqual(table, self.table("round-robin", all_of_them, resting))

    def test_with_failover_each_is_the_next_ones_last_resort(self) -> None:
        self.assertEqual(
            "2 1 service-time 0 1 0 8:0 service-time 0 1 0 8:16", self.table("failover", ["8:0", "8:16"], 1)
        )
        self.assertEqual("0 0", self.table("failover", [], 0))


class StateTest(TestCase):
    """As kernels tell of maps: Linux 6.1 and 6.12."""

    def test_paths_by_their_groups_and_which_have_failed(self) -> None:
        for told, groups, failed, group in (
            ("2 0 0 0 0 0", [], [], 0),
            ("2 0 0 0 1 1 A 0 1 2 8:0 A 3 0 1", [["8:0"]], [], 1),
            ("2 0 0 0 2 2 E 0 1 2 8:0 F 1 0 1 A 0 1 2 8:16 A 0 3 1", [["8:0"], ["8:16"]], ["8:0"], 2),
            ("2 1 0 0 1 1 A 0 2 2 8:0 A 0 0 1 8:16 A 0 0 1", [["8:0", "8:16"]], [], 1),
            ("2 0 0 0 1 1 A 0 2 1 8:0 A 0 5 65:16 F 2 0", [["8:0", "65:16"]], ["65:16"], 1),
            ("2 0 0 1 alua 2 1 A 0 2 0 8:0 A 0 8:16 F 1 E 0 1 0 8:32 A 0", [["8:0", "8:16"], ["8:32"]], ["8:16"], 1),
        ):
            self.assertEqual(State(groups, frozenset(failed), group), state_in(f"0 8192 multipath {told}"))

    def test_one_of_another_kind_has_no_paths(self) -> None:
        for told in ("", "0 8192 linear", "0 8192 mirror 2 252:0 252:1 1/1 1 AA 1 core"):
            self.assertEqual(State([], frozenset(), 0), state_in(told))

    def test_groups_without_some(self) -> None:
        groups = [["8:0"], ["8:16", "8:32"]]
        state = State(groups, frozenset(), 1)
        for numbers, left in (
            ([], groups),
            (["8:0"], [["8:16", "8:32"]]),
            (["8:16"], [["8:0"], ["8:32"]]),
            (["8:0", "8:16", "8:32", "8:48"], []),
        ):
            self.assertEqual(left, state.without(numbers))

    def test_numbers_in_a_table(self) -> None:
        head = "0 8192 multipath 3 queue_if_no_path queue_mode bio 0"
        self.assertEqual([], numbers_in(f"{head} 0 0"))
        self.assertEqual(["8:0", "65:16"], numbers_in(f"{head} 1 1 round-robin 0 2 1 8:0 1 65:16 1"))
