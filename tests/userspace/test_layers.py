"""An image that was made of another one: hosts fetch only what they do not have."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from drivers.chunkstore.control import Control
from tests.unit.virtman.imagefiles import qemu_img
from tests.userspace.hosts import HostProcess, HostsTestCase

MIB = 1 << 20
CHUNK = 64 << 10


class LayersTest(HostsTestCase):
    def test_an_update_of_a_base_that_a_host_has_travels_alone(self) -> None:
        base, origin, reader = self.image_file("base", 8 * MIB), self.host("origin"), self.host("reader")
        first, second = origin.start(), reader.start()
        first.publish("base", base)
        self.assert_same(second.create("old", "base").disk.path, base)
        self.assertEqual(8 * MIB, fetched(reader))
        overlay, whole = self.update(base)
        first.publish("update", overlay, parent="base")
        shown = first.image("update")
        self.assertEqual(("base", [], True), (shown.parent, shown.hosts, shown.verified))
        changed = 2 * MIB + CHUNK
        self.assertEqual((changed, 8 * MIB - CHUNK), (shown.own_bytes, shown.shared_bytes))
        held, before = status(reader)["held"], fetched(reader)
        self.assert_same(second.create("new", "update").disk.path, whole)
        self.assertEqual((changed, changed), (fetched(reader) - before, status(reader)["held"] - held))
        seen = second.image("update")
        self.assertEqual(["reader"], seen.hosts)
        self.assertEqual((shown.own_bytes, shown.shared_bytes), (seen.own_bytes, seen.shared_bytes))

    def test_an_overlay_is_published_by_a_host_that_did_not_have_the_base(self) -> None:
        base, origin, other = self.image_file("base", 4 * MIB), self.host("origin"), self.host("other")
        origin.start().publish("base", base)
        overlay, whole = self.update(base)
        client = other.start()
        client.publish("update", overlay, parent="base")
        self.assertEqual(4 * MIB - CHUNK, fetched(other))  # all but what the overlay has itself
        self.assert_same(client.create("vm", "update").disk.path, whole)

    def update(self, base: Path) -> tuple[Path, Path]:
        """An overlay that changes one chunk of the base, and adds 2 MiB behind it; and what it holds as a whole.

        Its header names a file that is not there.
        """
        overlay, content = self.folder / "update.qcow2", bytearray(base.read_bytes())
        changed, added = self.image_file("changed", CHUNK), self.image_file("added", 2 * MIB)
        qemu_img("create", "-u", "-f", "qcow2", "-F", "raw", "-b", "/nowhere/base", overlay, len(content) + 2 * MIB)
        node = {"driver": "qcow2", "backing": None, "file": {"driver": "file", "filename": str(overlay)}}
        writes = [f"write -s {changed} {MIB} {CHUNK}", f"write -s {added} {len(content)} {2 * MIB}"]
        argv = ["qemu-io", *(word for write in writes for word in ("-c", write)), f"json:{json.dumps(node)}"]
        subprocess.run(argv, check=True, capture_output=True)
        content[MIB : MIB + CHUNK] = changed.read_bytes()
        whole = self.folder / "whole.raw"
        whole.write_bytes(content + added.read_bytes())
        return overlay, whole

    def assert_same(self, disk: str, file: Path) -> None:
        self.assert_same_content(Path(disk), file)


def status(host: HostProcess) -> dict[str, Any]:
    """What the host's chunk store has."""
    answer: dict[str, Any] = Control(host.run / "chunkd.sock").call("status")
    return answer


def fetched(host: HostProcess) -> int:
    """Bytes that the host has read from parents, of all images."""
    return sum(image["fetched"] for image in status(host)["images"])
