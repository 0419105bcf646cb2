"""The definition that a local boot is compared with."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import testtools

from lab.errors import LabError
from lab.localboot import block_nodes, local_definition

DISK = {"driver": "qcow2", "node-name": "x-disk-node", "file": {"filename": "/vm.qcow2"}, "backing": {"driver": "nbd"}}
SEED = {"driver": "raw", "node-name": "x-seed-node", "file": {"filename": "/vm.iso"}}


def definition(*nodes: object) -> ET.Element:
    """A domain with these block nodes."""
    root = ET.fromstring("<domain><devices><serial><log file='/old'/></serial></devices></domain>")
    line = ET.SubElement(root, "{http://libvirt.org/schemas/domain/qemu/1.0}commandline")
    for word in (word for node in nodes for word in ("-blockdev", json.dumps(node), "-device", "{}")):
        ET.SubElement(line, "{http://libvirt.org/schemas/domain/qemu/1.0}arg", value=word)
    return root


class LocalDefinitionTest(testtools.TestCase):
    def change(self, root: ET.Element) -> ET.Element:
        """The definition for a local boot."""
        paths = (Path(name) for name in ("/base.raw", "/local.qcow2", "/local.iso", "/local.console"))
        return ET.fromstring(local_definition(root, *paths))

    def test_the_disk_is_the_overlay_over_the_file(self) -> None:
        disk, seed = block_nodes(self.change(definition(DISK, SEED)))
        backing = {"driver": "raw", "file": {"driver": "file", "filename": "/base.raw"}}
        self.assertEqual({**DISK, "file": {"filename": "/local.qcow2"}, "backing": backing}, disk)
        self.assertEqual({**SEED, "file": {"filename": "/local.iso"}}, seed)

    def test_the_console_is_logged_to_its_own_file(self) -> None:
        log = self.change(definition(DISK, SEED)).find("devices/serial/log")
        assert log is not None
        self.assertEqual("/local.console", log.get("file"))

    def test_the_original_stays_as_it_is(self) -> None:
        root = definition(DISK, SEED)
        self.change(root)
        self.assertEqual([DISK, SEED], block_nodes(root))

    def test_a_definition_with_disks_of_another_kind_is_refused(self) -> None:
        self.assertRaises(LabError, self.change, definition(SEED))
