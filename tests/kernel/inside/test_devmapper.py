"""Device-mapper maps by name."""

from __future__ import annotations

import errno

from testtools import TestCase

from drivers.errors import NotOurs
from drivers.host.command import run
from drivers.kernel import devmapper, dmioctl

ZEROS = "0 2048 zero"


class MapsTest(TestCase):
    """Maps of zeros."""

    def half(self, name: str) -> str:
        """A map without a table, as a dmsetup that was killed leaves it."""
        run(["dmsetup", "create", "--notable", name])
        self.addCleanup(devmapper.remove, name)
        return name

    def test_a_half_made_map_is_there_and_can_be_removed(self) -> None:
        name = self.half("virtman-test-half")
        self.assertTrue(devmapper.exists(name))
        devmapper.remove(name)
        self.assertFalse(devmapper.exists(name))

    def test_a_half_made_map_is_made_anew(self) -> None:
        name = self.half("virtman-test-half")
        path = devmapper.create(name, [ZEROS], read_only=True)
        self.assertEqual(bytes(1 << 20), path.read_bytes())

    def test_a_map_that_is_there_stays(self) -> None:
        name = "virtman-test-whole"
        self.addCleanup(devmapper.remove, name)
        first = devmapper.number(devmapper.create(name, [ZEROS]))
        self.assertEqual(first, devmapper.number(devmapper.create(name, [ZEROS])))

    def test_a_map_of_another_agent_is_told_nothing(self) -> None:
        name = "virtman-test-whole"
        self.addCleanup(devmapper.act_for, "")
        devmapper.act_for("one")
        self.addCleanup(devmapper.remove, name)
        self.addCleanup(devmapper.act_for, "one")
        devmapper.create(name, [ZEROS])
        devmapper.act_for("two")
        self.assertRaises(NotOurs, devmapper.tell, name, "fail_if_no_path")

    def test_an_error_says_of_which_map_it_is_and_what_that_was_told(self) -> None:
        name = "virtman-test-whole"
        self.addCleanup(devmapper.remove, name)
        devmapper.create(name, [ZEROS])
        for act, about, number in (
            (lambda: dmioctl.status("virtman-test-none"), "virtman-test-none", errno.ENXIO),
            (lambda: devmapper.tell(name, "fail_if_no_path"), f"{name}: fail_if_no_path", errno.EINVAL),
        ):
            error = self.assertRaises(OSError, act)
            self.assertEqual((number, True), (error.errno, about in str(error)))

    def test_maps_are_listed_by_the_beginning_of_their_names_however_many_there_are(self) -> None:
        names = {self.half(f"virtman-test-{number:02}-{'long' * 25}") for number in range(40)}
        self.assertEqual(names, devmapper.names("virtman-test-"))
        self.assertEqual(frozenset(), devmapper.names("virtman-test-x"))
