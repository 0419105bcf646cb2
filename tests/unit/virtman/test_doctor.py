"""What the doctor finds on machines that lack this and that."""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

from testtools import TestCase

from tests.doubles.machine import MachineDouble
from tests.others import as_nobody
from tests.unit.virtman.hypervisor import LIBVIRT
from tests.unit.virtman.scene import folder_for
from virtman.doctor import Examination, advice, examine, rows
from virtman.errors import ConfigError
from virtman.stackchoice import CHUNKSTORE, KERNEL, Drivers
from virtman.stateversion import mark

NOT_KERNEL = ("root",)
NOTHING_OF_QEMU = ("qemu-img", "qemu-storage-daemon")


class DoctorTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.state = folder_for(self)
        mark(self.state)

    def examine(
        self, stack: str = "auto", without: Collection[str] = (), libvirt: str = LIBVIRT, **others: str
    ) -> Examination:
        return examine(stack, others, self.state, "10.0.0.1", libvirt, MachineDouble(without=without))

    def made_with(self, drivers: Drivers) -> Drivers:
        """Have a record of a VM that these drivers made."""
        (self.state / "drivers.json").write_text(json.dumps(vars(drivers)))
        (self.state / "records" / "vms").mkdir(parents=True)
        (self.state / "records" / "vms" / "web.json").touch()
        return drivers

    def test_auto_shows_both_stacks(self) -> None:
        found = self.examine(without=NOT_KERNEL)
        self.assertEqual(["kernel", "chunkstore"], list(found.reports))
        self.assertEqual((CHUNKSTORE, True), (found.drivers, found.runs))
        stacks = [row[0] for row in rows(found)]
        self.assertEqual([4, 2], [stacks.count(stack) for stack in ("kernel", "chunkstore")])

    def test_what_methods_of_deploy_lack_is_named_and_no_stack_needs_it(self) -> None:
        found = self.examine(without=["uftp", "udp-sender", "libtorrent"])
        self.assertTrue(found.runs)
        lacking = {row[2]: row[4] for row in rows(found) if row[0] == "deploy"}
        self.assertEqual(
            {"auto": "-", "bittorrent": "Python library libtorrent", "udpcast": "udp-sender", "uftp": "uftp"}, lacking
        )
        self.assertIn("for virtman deploy --method uftp: apt-get install uftp", list(advice(found)))
        self.assertNotIn("deploy", [row[0] for row in rows(self.examine("kernel"))])

    def test_one_stack_is_shown_alone_with_what_is_there_and_missing(self) -> None:
        found = self.examine("chunkstore")
        self.assertEqual(["chunkstore"], list(found.reports))
        self.assertEqual([None, [], True], [found.install, found.remedies, found.runs])
        lines = {tuple(line[:3]): line[3:] for line in rows(self.examine("chunkstore", without=["qemu-img"]))}
        self.assertEqual(["virtman-chunkd", "-"], lines["chunkstore", "source", "chunkstore"])
        self.assertEqual("qemu-img", lines["chunkstore", "snapshot", "qcow2"][1])

    def test_other_drivers_than_the_stacks_are_looked_at_as_the_agent_would_take_them(self) -> None:
        found = self.examine("kernel", without=["make-bcache"], cache="dmcache")
        self.assertTrue(found.runs)
        self.assertEqual(
            [["iscsi", "dmcache", "lio", "dmthin"]], [[each.driver for each in four] for four in found.reports.values()]
        )
        self.assertFalse(self.examine("chunkstore", snapshot="nonsense").runs)

    def test_one_line_installs_all_that_is_missing_for_the_stack(self) -> None:
        without = (*NOTHING_OF_QEMU, "make-bcache")
        self.assertEqual("apt-get install qemu-system-common qemu-utils", self.examine(without=without).install)
        found = self.examine("kernel", without=without)
        self.assertFalse(found.runs)
        packages = (found.install or "").removeprefix("apt-get install ").split()
        self.assertIn("bcache-tools", packages)
        self.assertNotIn("qemu-system-common", packages)
        self.assertEqual(sorted(set(packages)), packages)

    def test_what_no_package_brings_is_said_once_and_what_the_kernel_loads_is_not_missing(self) -> None:
        found = self.examine("kernel", without=("bcache", "dm_thin_pool", "dm_mod", "/dev/mapper/control"))
        self.assertFalse(found.runs)
        self.assertEqual(1, len([remedy for remedy in found.remedies if "kernel" in remedy and "modules" in remedy]))
        found = self.examine("kernel", without=("/dev/mapper/control", "/dev/loop-control", "/sys/kernel/config"))
        self.assertTrue(found.runs)

    def test_drivers_that_made_the_records_are_looked_at(self) -> None:
        made = self.made_with(Drivers("nbd", "qcow2", "imaginary", "qcow2"))
        found = self.examine()
        self.assertEqual((made, False), (found.drivers, found.runs))
        self.assertTrue(any("imaginary" in remedy for remedy in found.remedies))

    def test_other_drivers_than_made_the_records_are_refused_as_the_agent_does(self) -> None:
        self.made_with(KERNEL)
        found = self.examine()
        self.assertEqual((True, None), (found.runs, found.refusal))
        self.assertEqual("this host had them before", found.reason)
        for stack, others in (("auto", {"cache": "dmcache"}), ("chunkstore", {})):
            found = self.examine(stack, **others)
            self.assertEqual((False, "as was asked for"), (found.runs, found.reason))
            self.assertTrue(any("were made with the kernel stack" in line for line in advice(found)))
            self.assertIn("were made with the kernel stack", found.as_json()["refusal"])

    def test_who_may_not_read_the_state_is_told_all_else_and_no_yes(self) -> None:
        self.assertIsNone(self.examine().unknown)
        self.made_with(KERNEL)
        for shown in (self.state, *self.state.rglob("*")):
            shown.chmod(0o755)
        self.assertIn("the agent does not start", as_nobody(self, partial(self.all_that_is_said, "chunkstore")))
        chunkstore, auto = ("chunkstore", 2), ("auto", 6)
        for hidden, asked in (  # as an agent of root's has them, and a whole folder
            ("records/vms", [chunkstore]), ("drivers.json", [chunkstore, auto]), (".", [chunkstore, auto]),
        ):  # fmt: skip
            mode = (self.state / hidden).stat().st_mode
            (self.state / hidden).chmod(0o600)
            self.addCleanup((self.state / hidden).chmod, mode)
            for stack, drivers in asked:
                said = as_nobody(self, partial(self.all_that_is_said, stack))
                self.assertEqual(drivers, said.count("['chunkstore', ") + said.count("['kernel', "), said)
                self.assertRegex(said, "cannot be told: .*Permission denied")
                self.assertNotIn("the agent does not start", said)
                told = json.loads(as_nobody(self, partial(self.as_text, stack)))
                self.assertEqual((None, None), (told["refusal"], told["runs"]))
                self.assertIn("Permission denied", told["unknown"])
            if auto in asked:
                guess = json.loads(as_nobody(self, partial(self.as_text, "auto", NOTHING_OF_QEMU)))
                self.assertEqual((None, True), (guess["runs"], guess["reason"].startswith("a guess")))
            lacking = json.loads(as_nobody(self, partial(self.as_text, "chunkstore", NOTHING_OF_QEMU)))
            self.assertIs(False, lacking["runs"])
            (self.state / hidden).chmod(mode)

    def all_that_is_said(self, stack: str) -> list[Any]:
        found = self.examine(stack)
        return [*rows(found), *advice(found)]

    def as_text(self, stack: str, without: Collection[str] = ()) -> str:
        return json.dumps(self.examine(stack, without).as_json())

    def test_a_choice_that_is_damaged_is_told_as_the_agent_does(self) -> None:
        (self.state / "drivers.json").write_text("{")
        self.assertRaises(ConfigError, self.examine, "chunkstore")

    def test_libvirt_is_asked(self) -> None:
        found = self.examine()
        self.assertIsNone(found.libvirt_trouble)
        self.assertRegex(found.versions["libvirt"], r"^\d+\.\d+\.\d+$")
        nobody = f"qemu+unix:///system?socket={Path(self.state, 'nobody')}"
        self.assertIn(f"no libvirt at {nobody}", "\n".join(advice(self.examine(libvirt=nobody))))

    def test_an_old_kernel_is_told_of_and_one_that_has_all_is_not(self) -> None:
        told = []
        for kernel in ("6.1.0-44-cloud-amd64", "6.12.118+deb13-cloud-amd64", "6.9.7"):
            found = examine("auto", {}, self.state, "10.0.0.1", LIBVIRT, MachineDouble(kernel=kernel))
            self.assertEqual(kernel, found.as_json()["versions"]["Linux"])
            told.append([line for line in advice(found) if line.startswith(f"Linux {kernel} is older than 6.12: ")])
        self.assertEqual([1, 0, 1], [len(lines) for lines in told])

    def test_an_lvm_that_looks_at_our_devices_is_told_of(self) -> None:
        ours = (Path(__file__).parents[3] / "deploy/lvm/lvmlocal.conf").read_text()
        cases: tuple[tuple[str, str | None, bool], ...]
        cases = (("kernel", None, False), ("kernel", ours, False), ("kernel", "", True), ("auto", "", False))
        cases += (
            ("kernel", ours.replace("/dev/virtman/", "/dev/sdz"), True),
            ("kernel", ours.replace("[", '[ "a|.*|",'), True),
            ("kernel", ours.replace("[", '[ "r|/dev/sdz|",'), False),
            ("kernel", ours.replace("]", ', "a|^/dev/disk/by-id/|", "r|.*|" ]'), False),
            ("kernel", '[ "a|^/dev/sda[0-9]*$|", "r{.*}" ]', False),
            ("kernel", '[ "a|^/dev/mapper/vg|", "r|^/dev/mapper/|" ]', True),
            ("kernel", ours.replace("[", '[ "a|loop|",'), True),
            ("kernel", ours.replace("]", ', "a|.*|" ]'), True),
            ("kernel", ours.replace("]", ', "a|(|" ]'), True),
        )
        for told, accepted in (
            (True, ("sd|", "dm-|", "loop|", "bcache|", "sd[a-z][0-9]*$|", "dm-[0-9]$|", "loop[0-9][0-9]$|", "sdbc|")),
            (True, ("sd[a-z][a-z]$|", "dm-[0-9]{3}$|", "sda|", "dm-1|", "loop12|")),
            (False, ("sd[ab]$|", "(sda|sdb)$|", "dm-1$|")),
        ):
            cases += tuple(("kernel", ours.replace("]", f', "a|^/dev/{end}", "r|.*|" ]'), told) for end in accepted)
        for stack, lvm_filter, told in cases:
            found = examine(stack, {}, self.state, "10.0.0.1", LIBVIRT, MachineDouble(lvm_filter=lvm_filter))
            self.assertEqual(told, any("LVM" in line for line in advice(found)), f"{stack} {lvm_filter}")
            self.assertEqual(told, bool(found.as_json()["lvm"]["trouble"]))

    def test_what_is_wrong_with_the_filter_is_named(self) -> None:
        for lvm_filter, wrong in (
            ('[ "r|^/dev/mapper/virtman-|", "r|^/dev/virtman/|", "a|^/dev/sd|" ]', '"a|^/dev/sd|" accepts /dev/sdz,'),
            ("", "none of its patterns rejects /dev/mapper/virtman-image-x or /dev/dm-9"),
            ('[ "a|(|" ]', "cannot be told: "),
        ):
            found = examine("kernel", {}, self.state, "10.0.0.1", LIBVIRT, MachineDouble(lvm_filter=lvm_filter))
            self.assertIn(wrong, "".join(advice(found)))
