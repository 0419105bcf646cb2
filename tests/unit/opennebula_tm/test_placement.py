"""What a host tells OpenNebula's scheduler, as the installed probe prints it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from testtools import TestCase

from opennebula_tm.driver import placement
from opennebula_tm.installer.template import attributes
from tests.unit.opennebula_tm.scene import PROBE, write
from tests.unit.virtman.scene import folder_for

PACKAGE = Path(__file__).parents[3] / "opennebula_tm"
MIB = 1 << 20


def stack(name: str, role: str, size: int | None, fetched: int) -> dict[str, Any]:
    """One image of a status."""
    return {"name": name, "role": role, "size": size, "fetched_bytes": fetched}


def status(**changes: Any) -> dict[str, Any]:
    """A host without trouble."""
    images = [
        stack("one-17-0a1b2c3d", "host", 2048 * MIB, 812 * MIB + 5),
        stack("one-4-ffffffff", "origin", 2048 * MIB, 0),
        stack("debian-12", "host", None, 0),
    ]
    calm = {"volt": {"connected": True}, "disks": {"trouble": None}, "damaged": {}, "deaths": [], "repairing": False}
    return {**calm, "images": images, **changes}


class ReportTest(TestCase):
    def lines(self, **changes: Any) -> list[str]:
        return list(placement.report(status(**changes), folder_for(self)))

    def test_images_by_what_is_held(self) -> None:
        self.assertEqual(
            [
                'VIRTMAN = "YES"',
                'VIRTMAN_STATE = "ready"',
                'VIRTMAN_IMAGES = "one-4-ffffffff,one-17-0a1b2c3d,debian-12"',
                "VIRTMAN_IMAGE_4 = 2048",
                "VIRTMAN_IMAGE_17 = 812",
            ],
            self.lines(),
        )

    def test_of_an_image_whose_content_was_replaced_the_newest_counts(self) -> None:
        held = {"one-7-0a1b2c3d-g2": 2, "one-7-0a1b2c3d-g10": 1, "one-7-0a1b2c3d": 3, "one-7-0a1b2c3d-t1": 9}
        images = [{"name": name, "role": "node", "fetched_bytes": mib << 20} for name, mib in held.items()]
        lines = [line for line in self.lines(images=images) if line.startswith("VIRTMAN_IMAGE_")]
        self.assertEqual(["VIRTMAN_IMAGE_7 = 1"], lines)

    def test_trouble_in_one_word(self) -> None:
        for changes, word in (
            ({"volt": {"connected": False}}, "unconnected"),
            ({"disks": {"trouble": "full"}}, "disks"),
            ({"damaged": {"vm a": "torn"}}, "damaged"),
            ({"deaths": [{"running": True}, {"running": False}]}, "broken"),
            ({"deaths": [{"running": True}]}, "ready"),
            ({"repairing": True}, "repairing"),
        ):
            self.assertIn(f'VIRTMAN_STATE = "{word}"', self.lines(**changes))

    def test_names_cannot_end_their_quotes(self) -> None:
        lines = self.lines(images=[stack('a"\n\\b]]>', "host", 1, 1)])
        self.assertIn('VIRTMAN_IMAGES = "a___b__>"', lines)
        self.assertEqual(3, len(list(attributes("\n".join(lines)))))

    def test_room_of_our_system_datastores_alone(self) -> None:
        folder = folder_for(self)
        for name in ("104/.virtman", "105/.virtman", "106", "x/.virtman"):
            (folder / name).mkdir(parents=True)
        write(folder / "105/.monitor", "ssh\n")
        lines = list(placement.report(status(disks={"total": 10 * MIB, "free": 4 * MIB}), folder))
        self.assertEqual("DS = [ ID = 104, USED_MB = 6, TOTAL_MB = 10, FREE_MB = 4 ]", lines[-1])
        self.assertEqual(1, sum(line.startswith("DS") for line in lines))
        (block,) = [a for a in attributes("\n".join(lines)) if a.name == "DS"]
        self.assertEqual({"ID", "USED_MB", "TOTAL_MB", "FREE_MB"}, set(block.pairs))


class ProbeTest(TestCase):
    """The program, where the installer puts it."""

    def setUp(self) -> None:
        super().setUp()
        self.folder = folder_for(self)
        write(self.folder / PROBE, (PACKAGE / "remotes" / PROBE).read_bytes(), 0o755)
        library = self.folder / "tm/virtman/opennebula_tm"
        for name in ("__init__.py", "driver/__init__.py", "driver/placement.py"):
            write(library / name, (PACKAGE / name).read_bytes())
        (self.folder / "datastores/104/.virtman").mkdir(parents=True)

    def run_probe(self, virtman: str | None) -> list[str]:
        if virtman is not None:
            write(self.folder / "bin/virtman", f"#!/bin/sh\n{virtman}\n", 0o755)
        configuration = f"<CONF><DATASTORE_LOCATION>{self.folder}/datastores</DATASTORE_LOCATION></CONF>"
        path = f"{self.folder}/bin:{os.environ['PATH']}" if virtman is not None else "/usr/bin:/bin"
        done = subprocess.run(
            [self.folder / PROBE, "kvm", "-k"], input=configuration, env={"PATH": path, "VIRTMAN_SOCKET": "/s"},
            capture_output=True, text=True, check=False, cwd="/",
        )  # fmt: skip
        self.assertEqual((0, ""), (done.returncode, done.stderr))
        self.assertTrue(list(attributes(done.stdout)))
        return done.stdout.splitlines()

    def test_asks_the_hosts_agent(self) -> None:
        write(self.folder / "answer", json.dumps(status(host="a b")))
        test = f'[ "$*" = "--socket /s status --json" ] && cat {self.folder}/answer'
        lines = self.run_probe(test)
        self.assertIn("VIRTMAN_IMAGE_17 = 812", lines)
        self.assertTrue(lines[-1].startswith("DS = [ ID = 104,"))

    def test_hosts_without_an_agent_are_no_failure(self) -> None:
        for virtman in ("echo virtman: no agent >&2; exit 1", "echo no JSON", "echo []", "echo {}; exit 1"):
            lines = self.run_probe(virtman)
            self.assertEqual(['VIRTMAN = "NO"', 'VIRTMAN_STATE = "silent"'], lines[:2])
            self.assertTrue(lines[-1].startswith("DS = [ ID = 104,"))
