"""The domain's XML."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4
from xml.etree import ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st
from testtools import TestCase
from testtools.matchers import HasLength, MatchesRegex

from drivers.base import Device
from drivers.qemu import hotplug
from virtman.domain import (
    QEMU_NAMESPACE,
    Machine,
    arriving,
    disks_of,
    domain_xml,
    mac_of,
    owner_of,
    redefined,
    scsi_disk,
    scsi_target,
)
from virtman.errors import BadRequest

NODE = {
    "driver": "qcow2",
    "file": {"driver": "file", "filename": "/disks/vm.qcow2"},
    "backing": {"driver": "nbd", "export": "debian", "reconnect-delay": 86400},
}
QCOW2 = Device(1 << 20, Path("/disks/vm.qcow2"), NODE)
BLOCK = Device(1 << 20, Path("/dev/mapper/vm"))


def machine(**fields: Any) -> Machine:
    values: dict[str, Any] = {
        "vm": "web-1", "uuid": str(UUID(int=7)), "owner": "here", "disk": QCOW2, "seed": Path("/seeds/web-1.iso"),
        "console_log": Path("/logs/web-1.console"), "accel": "tcg", "memory": 512, "cpus": 2, "network": "none",
    }  # fmt: skip
    values |= fields
    return Machine(**values)


def parsed(**fields: Any) -> ET.Element:
    return ET.fromstring(domain_xml(machine(**fields)))


def arguments(root: ET.Element) -> list[str]:
    return [argument.attrib["value"] for argument in root.findall(f"{{{QEMU_NAMESPACE}}}commandline/*")]


class DomainTest(TestCase):
    def test_kvm_gives_the_hosts_processor_and_tcg_emulates_one(self) -> None:
        for accel, kind, processor in (("kvm", "kvm", "host-passthrough"), ("tcg", "qemu", None)):
            cpu = parsed(accel=accel).find("cpu")
            self.assertEqual(
                (kind, processor), (parsed(accel=accel).get("type"), None if cpu is None else cpu.get("mode"))
            )

    def test_a_disk_that_is_a_block_node_is_handed_over_as_it_is(self) -> None:
        root = parsed()
        self.assertEqual([], root.findall("devices/disk"))
        found = arguments(root)
        self.assertEqual(["-blockdev", "-device"] * 2, found[::2])
        blockdev, device = json.loads(found[1]), json.loads(found[3])
        self.assertEqual(NODE | {"node-name": device["drive"]}, blockdev)
        self.assertEqual(("virtio-blk-pci", 1), (device["driver"], device["bootindex"]))

    def test_a_block_device_is_a_disk_of_libvirt(self) -> None:
        root = parsed(disk=BLOCK)
        self.assertEqual("/dev/mapper/vm", root.find("devices/disk/source").attrib["dev"])  # type: ignore[union-attr]
        self.assertThat(arguments(root), HasLength(4))

    def test_what_a_guest_discards_reaches_a_block_device(self) -> None:
        drivers = parsed(disk=BLOCK, disks={"data": BLOCK}).findall("devices/disk/driver")
        self.assertEqual(["unmap"] * 2, [driver.attrib["discard"] for driver in drivers])

    def test_a_vm_is_never_told_of_an_error_of_its_disks(self) -> None:
        for disk in (QCOW2, BLOCK):
            root = parsed(disk=disk, disks={"data": disk})
            policies = [element.attrib for element in root.findall("devices/disk/driver")]
            self.assertEqual(
                [("stop", "stop")] * len(policies), [(p["error_policy"], p["rerror_policy"]) for p in policies]
            )
            devices = [json.loads(argument) for argument in arguments(root)[3::4]]
            self.assertEqual([("stop", "stop")] * len(devices), [(d["werror"], d["rerror"]) for d in devices])

    def test_the_seed_is_read_only_and_comes_after_the_disk(self) -> None:
        found = arguments(parsed())
        seed, seed_device, disk_device = json.loads(found[5]), json.loads(found[7]), json.loads(found[3])
        self.assertTrue(seed["read-only"])
        self.assertEqual("/seeds/web-1.iso", seed["file"]["filename"])
        self.assertLess(int(disk_device["addr"], 16), int(seed_device["addr"], 16))
        self.assertNotIn("bootindex", seed_device)

    def test_further_disks_are_block_nodes_or_disks_of_libvirt_and_on_the_scsi_controller(self) -> None:
        root = parsed(disks={"data": QCOW2, "more": BLOCK, "a-name-of-more-than-20-letters": BLOCK})
        node, device = [json.loads(argument) for argument in arguments(root)[9::2]]
        self.assertEqual(NODE | {"node-name": device["drive"]}, node)
        self.assertEqual(("scsi-hd", "scsi0.0", "data"), (device["driver"], device["bus"], device["serial"]))
        self.assertIsNotNone(root.find("devices/controller[@type='scsi'][@model='virtio-scsi']"))
        disks = root.findall("devices/disk")
        self.assertEqual(["sdb", "sdc"], [disk.find("target").attrib["dev"] for disk in disks])  # type: ignore[union-attr]
        serials = [disk.findtext("serial") or "" for disk in disks]
        self.assertEqual(("more", 20), (serials[0], len(serials[1])))
        self.assertNotEqual(hotplug.serial("a-name-of-more-than-20-letterz"), serials[1])
        self.assertEqual({"/dev/mapper/vm": "sdb"}, disks_of(domain_xml(machine(disks={"1": BLOCK, "2": BLOCK}))))

    def test_there_are_as_many_targets_as_one_likes(self) -> None:
        self.assertEqual(["sda", "sdz", "sdaa", "sdzz", "sdaaa"], [scsi_target(n) for n in (0, 25, 26, 701, 702)])

    def test_networks(self) -> None:
        expected = {
            "user": ("user", None),
            "network:default": ("network", {"network": "default"}),
            "bridge:br0": ("bridge", {"bridge": "br0"}),
        }
        for network, (kind, source) in expected.items():
            interface = parsed(network=network).find("devices/interface")
            assert interface is not None
            self.assertEqual(kind, interface.attrib["type"])
            found = interface.find("source")
            self.assertEqual(source, None if found is None else found.attrib)
            self.assertEqual(mac_of(machine().uuid), interface.find("mac").attrib["address"])  # type: ignore[union-attr]

    def test_other_networks_are_refused(self) -> None:
        for network in ("", "wifi", "network:", "bridge:", "user:x", "none:x", "network", "direct:eth0"):
            self.assertRaises(BadRequest, domain_xml, machine(network=network))

    def test_text_is_escaped(self) -> None:
        evil = "a'\"<>&]]>"
        root = parsed(network=f"network:{evil}", owner=evil, seed=Path(f"/{evil}"), console_log=Path(f"/{evil}"))
        self.assertEqual(evil, root.find("devices/interface/source").attrib["network"])  # type: ignore[union-attr]
        self.assertEqual(f"/{evil}", json.loads(arguments(root)[5])["file"]["filename"])

    def test_the_owner_is_found_again(self) -> None:
        for owner in ("here", "a'\"<&>"):
            self.assertEqual(owner, owner_of(domain_xml(machine(owner=owner))))

    def test_domains_of_others_have_no_owner(self) -> None:
        for xml in (
            "<domain/>",
            "<domain><metadata/></domain>",
            '<domain><metadata><virtman owner="x"/></metadata></domain>',
        ):
            self.assertIsNone(owner_of(xml))


class RedefinedTest(TestCase):
    def edited(self, disk: Device) -> str:
        """What libvirt has of a VM to which an administrator has given more."""
        root = parsed(disk=disk, disks={"data": BLOCK, "more": QCOW2}, network="user")
        ET.SubElement(root, "description").text = "changed by hand"
        devices, command_line = root.find("devices"), root.find(f"{{{QEMU_NAMESPACE}}}commandline")
        assert devices is not None
        assert command_line is not None
        devices.append(ET.fromstring(scsi_disk("theirs", Device(1 << 20, Path("/dev/theirs")), "sda")))
        devices.findall("disk")[-1].remove(devices.findall("disk")[-1].find("alias"))  # type: ignore[arg-type]
        for disk_of_ours in devices.findall("disk")[:-1]:
            ET.SubElement(disk_of_ours, "iotune")
        devices.remove(devices.find("rng"))  # type: ignore[arg-type]
        for argument in ("-device", '{"driver": "edu", "id": "theirs"}', "-device", "pvpanic"):
            ET.SubElement(command_line, f"{{{QEMU_NAMESPACE}}}arg", value=argument)
        return ET.tostring(root, encoding="unicode")

    def test_what_others_have_added_or_removed_stays_so(self) -> None:
        for disk in (QCOW2, BLOCK):
            xml = self.edited(disk)
            again = redefined(xml, machine(disk=disk, disks={"data": BLOCK, "more": QCOW2}, network="user"))
            self.assertEqual(ET.canonicalize(xml), ET.canonicalize(again))

    def test_the_disks_are_those_of_now_and_others_keep_their_places(self) -> None:
        other, more = (Device(1 << 20, Path(f"/dev/mapper/{name}")) for name in ("other", "more"))
        xml = self.edited(BLOCK).replace("<iothreads>1</iothreads>", "").replace('"stop"', '"report"')
        root = ET.fromstring(redefined(xml, machine(disk=other, disks={"more": more}, network="user")))
        disks = {disk.find("source").attrib["dev"]: disk for disk in root.iterfind("devices/disk")}  # type: ignore[union-attr]
        targets = {path: disk.find("target").attrib["dev"] for path, disk in disks.items()}  # type: ignore[union-attr]
        self.assertEqual({"/dev/mapper/other": "vda", "/dev/mapper/more": "sdb", "/dev/theirs": "sda"}, targets)
        self.assertIsNotNone(disks["/dev/mapper/other"].find("iotune"))
        self.assertIsNotNone(disks["/dev/mapper/other"].find("driver[@error_policy='stop']"))
        self.assertEqual("1", root.findtext("iothreads"))
        self.assertEqual(["edu"], [json.loads(a)["driver"] for a in arguments(root) if "edu" in a])
        self.assertEqual(2 * 2 + 4, len(arguments(root)), "the seed, theirs, and no disk of ours")

    def test_another_host_gets_what_others_have_added(self) -> None:
        there = machine(owner="there", seed=Path("/there.iso"), console_log=Path("/there.console"))
        xml = arriving(self.edited(QCOW2), domain_xml(there))
        root = ET.fromstring(xml)
        self.assertEqual(("changed by hand", "there"), (root.findtext("description"), owner_of(xml)))
        self.assertEqual(arguments(ET.fromstring(domain_xml(there))), arguments(root)[:-4])
        self.assertEqual("/there.console", root.find("devices/serial/log").attrib["file"])  # type: ignore[union-attr]

    def test_the_machine_that_is_asked_for_takes_the_place_of_another_one(self) -> None:
        asked = machine(disk=BLOCK, memory=1024, cpus=4, network="bridge:br0", accel="kvm", console_log=Path("/new"))
        xml = redefined(self.edited(BLOCK).replace("</vcpu>", "</vcpu><currentMemory>1</currentMemory>"), asked)
        root = ET.fromstring(xml)
        self.assertEqual(("1024", None, "4"), tuple(map(root.findtext, ("memory", "currentMemory", "vcpu"))))
        self.assertEqual(["bridge"], [interface.attrib["type"] for interface in root.iterfind("devices/interface")])
        self.assertEqual(("kvm", "/new"), (root.attrib["type"], root.find("devices/serial/log").attrib["file"]))  # type: ignore[union-attr]
        self.assertIsNotNone(root.find("cpu"))
        without = redefined(xml, replace(asked, network="none", accel="tcg"))
        self.assertEqual((None, None), tuple(map(ET.fromstring(without).find, ("devices/interface", "cpu"))))


class IdentityTest(TestCase):
    @given(st.uuids())
    def test_a_mac_is_unicast_and_locally_administered_and_always_the_same(self, uuid: UUID) -> None:
        mac = mac_of(str(uuid))
        self.assertEqual(mac, mac_of(str(uuid)))
        self.assertNotEqual(mac, mac_of(str(uuid4())))
        self.assertThat(mac, MatchesRegex("^[0-9a-f]{2}(:[0-9a-f]{2}){5}$"))
        self.assertEqual(0b10, int(mac[:2], 16) & 0b11)
