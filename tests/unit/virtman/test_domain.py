"""The domain's XML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st
from testtools import TestCase
from testtools.matchers import HasLength, MatchesRegex

from drivers.base import Device
from drivers.qemu import hotplug
from virtman.domain import QEMU_NAMESPACE, Machine, disks_of, domain_xml, owner_of, scsi_target, uuid_of
from virtman.errors import BadRequest
from virtman.names import NAME_PATTERN

NODE = {
    "driver": "qcow2",
    "file": {"driver": "file", "filename": "/disks/vm.qcow2"},
    "backing": {"driver": "nbd", "export": "debian", "reconnect-delay": 86400},
}
QCOW2 = Device(1 << 20, Path("/disks/vm.qcow2"), NODE)
BLOCK = Device(1 << 20, Path("/dev/mapper/vm"))
names = st.from_regex(NAME_PATTERN, fullmatch=True).filter(lambda name: not name.endswith("\n"))


def machine(**fields: Any) -> Machine:
    values: dict[str, Any] = {
        "vm": "web-1", "owner": "here", "disk": QCOW2, "seed": Path("/seeds/web-1.iso"),
        "console_log": Path("/logs/web-1.console"), "accel": "tcg", "memory": 512, "cpus": 2, "network": "none",
    }  # fmt: skip
    values |= fields
    return Machine(**{"uuid": uuid_of(values["owner"], values["vm"])} | values)


def parsed(**fields: Any) -> ET.Element:
    return ET.fromstring(domain_xml(machine(**fields)))


def arguments(root: ET.Element) -> list[str]:
    return [argument.attrib["value"] for argument in root.findall(f"{{{QEMU_NAMESPACE}}}commandline/*")]


class DomainTest(TestCase):
    def test_kvm_gives_the_hosts_processor(self) -> None:
        root = parsed(accel="kvm")
        self.assertEqual("kvm", root.attrib["type"])
        self.assertIsNotNone(root.find("cpu[@mode='host-passthrough']"))

    def test_tcg_emulates(self) -> None:
        root = parsed(accel="tcg")
        self.assertEqual("qemu", root.attrib["type"])
        self.assertIsNone(root.find("cpu"))

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
            self.assertEqual(machine().mac, interface.find("mac").attrib["address"])  # type: ignore[union-attr]

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


class IdentityTest(TestCase):
    @given(names, names)
    def test_a_vm_keeps_its_identity(self, vm: str, owner: str) -> None:
        again = machine(vm=vm, owner=owner, memory=1, cpus=1)
        self.assertEqual((machine(vm=vm, owner=owner).uuid, machine(vm=vm, owner=owner).mac), (again.uuid, again.mac))

    @given(names, names)
    def test_a_mac_is_unicast_and_locally_administered(self, vm: str, owner: str) -> None:
        mac = machine(vm=vm, owner=owner).mac
        self.assertThat(mac, MatchesRegex("^[0-9a-f]{2}(:[0-9a-f]{2}){5}$"))
        self.assertEqual(0b10, int(mac[:2], 16) & 0b11)

    def test_siblings_and_namesakes_on_other_hosts_differ(self) -> None:
        machines = [machine(vm=vm, owner=owner) for vm in ("a", "b", "c") for owner in ("x", "y")]
        self.assertThat({m.uuid for m in machines}, HasLength(6))
        self.assertThat({m.mac for m in machines}, HasLength(6))
