"""What images hold: the disk of a persistent image at its origins, and on its way to a VM and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePosixPath

from opennebula_tm.driver import names
from opennebula_tm.driver.card import Card, Cards, Kept
from opennebula_tm.driver.content import Contents, Origins
from opennebula_tm.driver.disks import Disks, Ref
from opennebula_tm.driver.errors import HostFailed, Refused
from opennebula_tm.driver.moving import Streams
from tests.unit.opennebula_tm.steps import StepsTestCase

NAME = "one-7-0a1b2c3d"
FRESH = Card(NAME, "raw", ("o1", "o2"), NAME, "sha256:1")
WAITING = replace(FRESH, generation=1, kept=Kept(f"{NAME}-k1", ("o1", "o2"), NAME, "one-41-0-host-1"))


class ContentsTest(StepsTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.disks = Disks(self.hosts)
        path = PurePosixPath(self.datastores) / "100" / NAME
        self.datastores.joinpath("100").mkdir(parents=True)
        self.cards = Cards()
        self.contents = Contents(self.cards, path, Origins(self.hosts, Streams(self.hosts), path.parent))
        self.path = path
        self.ref = Ref(names.place(self.at("host-1")), 42, 0)

    def write(self, card: Card) -> None:
        self.cards.write(self.path, card)

    def give(self, size: int = 0) -> None:
        self.contents.give(self.ref, self.disks, size, "")

    def keep(self) -> Card:
        return self.contents.keep("img", self.ref.source, self.ref.name)

    def swept(self) -> list[list[str]]:
        """The hosts that were to forget, and what not."""
        return [[step[0], *step[4:]] for step in self.steps() if step[1] == "sweep"]

    def test_what_a_vm_leaves_waits_at_all_origins_and_what_was_before_goes(self) -> None:
        self.write(replace(FRESH, used_by=self.ref.name))
        kept = Kept(f"{NAME}-k1", ("o1", "o2"), "img", self.ref.name)
        self.assertEqual(replace(FRESH, generation=1, kept=kept), self.keep())
        self.assertEqual(self.contents.card.kept, kept)
        named = [NAME, f"{NAME}-k1", "img"]
        self.assertEqual([["o1", *named], ["o2", *named]], self.swept())

    def test_an_origin_that_cannot_take_it_is_left_out_but_for_the_last(self) -> None:
        self.write(FRESH)
        self.says("host-1", "forward", "one of them is full", fails=True)
        error = self.assertRaises(HostFailed, self.keep)
        self.assertEqual("; ".join(["host-1: one of them is full"] * 2), str(error))
        self.assertEqual((None, []), (self.contents.card.kept, self.swept()))
        # The disk's host, which sends it, is an origin itself: there it goes through no ssh.
        self.write(replace(FRESH, origins=("o1", "host-1")))
        (self.folder / "says" / "host-1.forward").write_text('[ -z "$4" ] || exit 1')
        kept = self.keep().kept
        assert kept is not None
        self.assertEqual(("host-1",), kept.at)

    def test_the_first_vm_gets_a_disk_of_the_image(self) -> None:
        self.write(FRESH)
        self.give(5)
        (step,) = self.steps()
        self.assertEqual(["host-1", "create"], step[:2])
        self.assertEqual([NAME, "5", "raw", "", "fresh"], step[6:])
        self.assertEqual(self.ref.name, self.contents.card.used_by)

    def test_the_next_one_gets_the_disk_that_waits_which_stays_until_it_is_replaced(self) -> None:
        self.write(WAITING)
        self.has("host-1", size=10)
        self.give(5)
        self.assertEqual(["o1 forward", "host-1 describe", "host-1 link"], self.done())
        card = self.contents.card
        assert card.kept is not None
        self.assertEqual((self.ref.name, f"{NAME}-k1", ""), (card.used_by, card.kept.disk, card.kept.of))

    def test_it_comes_from_the_next_origin_if_one_cannot_send_it(self) -> None:
        self.write(WAITING)
        self.has("host-1")
        self.says("o1", "forward", "gone", fails=True)
        self.give()
        self.assertEqual(["o1 forward", "o2 forward"], self.done()[:2])
        self.says("o2", "forward", "gone, too", fails=True)
        self.write(WAITING)
        self.assertEqual("o1: gone; o2: gone, too", str(self.assertRaises(HostFailed, self.give)))
        self.assertEqual("", self.contents.card.used_by)

    def test_a_repeated_call_takes_what_the_vm_has_and_no_other_vm_does(self) -> None:
        for used_by, image, steps in (
            (self.ref.name, NAME, ["host-1 describe", "host-1 link"]),
            ("one-41-0-host-1", NAME, ["o1 forward", "host-1 describe"]),
            (self.ref.name, "one-9-0a1b2c3d", ["host-1 describe", "o1 forward"]),  # a disk of another image
        ):
            self.has("host-1", image=image, path="/dev/mine")
            self.write(replace(WAITING, used_by=used_by))
            self.give()
            self.assertEqual(steps, self.done()[:2])

    def reverted(self, *failing: str) -> tuple[str, ...]:
        """Where the disk waits after a revert that fails at some hosts."""
        self.write(WAITING)
        for host in failing:
            self.says(host, "revert", "away", fails=True)
        self.contents.revert(3)
        kept = self.contents.card.kept
        assert kept is not None
        return kept.at

    def test_a_revert_leaves_out_who_cannot_do_it(self) -> None:
        self.write(WAITING)
        self.has("o1", snapshot="snap-2")
        self.assertIn("has no snapshot 3", str(self.assertRaises(Refused, self.contents.revert, 3)))
        for host in ("o1", "o2"):
            self.has(host, snapshot="snap-3")
        self.assertEqual(("o1", "o2"), self.reverted())
        self.assertEqual(("o1",), self.reverted("o2"))
        self.says("o1", "describe", "away", fails=True)
        self.says("o2", "revert")
        self.assertEqual(("o2",), self.reverted("o1"))

    def test_what_waits_becomes_the_image_at_all_origins(self) -> None:
        self.write(replace(WAITING, kept=Kept(f"{NAME}-k1", ("o2",), NAME)))
        for host in ("o1", "o2"):
            self.says(host, "publish", '{"digest": "sha256:2"}')
        card = self.contents.settled()
        self.assertEqual(replace(FRESH, generation=2, image=f"{NAME}-g2", digest="sha256:2"), card)
        self.assertEqual(["o2 forward", "o1 publish", "o2 publish", "o1 sweep", "o2 sweep"], self.done())
        self.assertEqual((card, []), (self.contents.settled(), self.steps()))

    def test_an_image_that_cannot_be_published_everywhere_is_nowhere(self) -> None:
        self.write(WAITING)
        self.says("o1", "publish", '{"digest": "sha256:2"}')
        self.says("o2", "publish", "full", fails=True)
        self.assertRaises(HostFailed, self.contents.settled)
        named = [NAME, f"{NAME}-k1", NAME]
        self.assertEqual([["o1", *named], ["o2", *named]], self.swept())
        self.assertEqual((NAME, WAITING.kept), (self.contents.card.image, self.contents.card.kept))

    def test_a_removed_image_leaves_nothing_and_stays_known_until_then(self) -> None:
        self.write(WAITING)
        self.says("o2", "sweep", "away", fails=True)
        self.assertRaises(HostFailed, self.contents.remove)
        self.assertTrue(self.cards.exists(self.path))
        self.says("o2", "sweep")
        self.contents.remove()
        self.assertEqual([["o1"], ["o2"]] * 2, self.swept())
        self.assertFalse(self.cards.exists(self.path))
