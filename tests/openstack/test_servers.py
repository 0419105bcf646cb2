"""The life of servers that boot from a base, through Nova's API."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lxml import etree

from tests.openstack.computes import GLANCE_IMAGE, ServerCase, sha256

DISK = (
    '<disk type="file" device="disk"><driver name="qemu" type="qcow2" cache="none" discard="unmap"'
    ' error_policy="stop" rerror_policy="stop"/><alias name="ua-{volume}"/>'
    '<source file="{path}"/><target dev="vda" bus="virtio"/><serial>{volume}</serial></disk>'
)


class LifeTest(ServerCase):
    """One or a few servers."""

    def test_libvirt_gets_the_private_disk_of_the_host(self) -> None:
        (disk,) = self.xml[self.server["id"]].findall("devices/disk")
        self.assertEqual(DISK.format(path=self.disks(self.node)[self.server["id"]], volume=self.volume), plain(disk))
        self.assertEqual(sha256(self.content), sha256(self.read(self.server)))

    def test_a_server_keeps_what_it_wrote_when_it_is_stopped_started_and_rebooted(self) -> None:
        self.write(self.server, b"kept")
        for action, state in (({"os-stop": None}, "SHUTOFF"), ({"os-start": None}, "ACTIVE")):
            self.act(self.server, action, state)
        for kind in ("SOFT", "HARD"):
            self.act(self.server, {"reboot": {"type": kind}}, "ACTIVE")
        self.assertEqual(b"kept", self.read(self.server)[:4])

    def test_a_deleted_server_leaves_nothing_and_takes_no_base_with_it(self) -> None:
        request = self.request()
        request["block_device_mapping_v2"][0]["delete_on_termination"] = True
        second = self.until(self.api.post_server({"server": request}), "ACTIVE")
        for server in (second, self.server):
            self._delete_server(server)
        self.assertEqual([], self.all_disks())
        self.assertIn(self.volume, self.cinder.volumes)

    def test_a_server_that_is_rebuilt_begins_anew(self) -> None:
        self.write(self.server, b"gone")
        self.act(self.server, {"rebuild": {"imageRef": GLANCE_IMAGE}}, "ACTIVE")
        self.assertEqual(sha256(self.content), sha256(self.read(self.server)))
        self.assertEqual([self.server["id"]], self.all_disks())

    def test_a_snapshot_of_a_server_is_an_image_with_what_it_wrote(self) -> None:
        self.write(self.server, b"snapshot")
        self.act(self.server, {"os-stop": None}, "SHUTOFF")
        self.api.post_server_action(self.server["id"], {"createImage": {"name": "copy"}})
        self.until(self.server, "SHUTOFF")
        image = next(image for image in self.glance.detail(self.admin) if image["name"] == "copy")
        self.assertEqual("active", image["status"])
        self.assertEqual(b"snapshot", self.read_qcow2(self.image_file(image["id"]))[:8])

    def image_file(self, image: str) -> Path:
        """What Glance holds of an image."""
        file = self.folder / "image"
        self.glance.download(self.admin, image, dst_path=file)
        return file


def plain(element: Any) -> str:
    """An element of XML without the blanks between its parts."""
    text = etree.tostring(element, encoding="unicode")
    return re.sub(r">\s+<", "><", text).strip()
