"""Names of what belongs to a server on a base. ``nova.virtman.names`` needs no Nova, and is loaded by its path."""

from __future__ import annotations

import importlib.util
import uuid
from pathlib import Path

import testtools

from virtman.names import check_name

PATH = Path(__file__).parents[3] / "openstack_nova_patch/modules/names.py"
SPEC = importlib.util.spec_from_file_location("nova_virtman_names", PATH)
assert SPEC is not None and SPEC.loader is not None
names = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(names)

SERVER, OTHER = "1c2f9ab4-2b5e-4d2a-8a6e-8a5c0d1f7e11", "7b0e44aa-93cd-4a35-9e43-9dbb3a1f4a22"
VOLUME, ANOTHER = "c1b6f0de-7a5f-4b9a-9f54-0d3e6a2b8c33", "d4a7e1cf-6b4e-4c8b-8e65-1c2d5b3a9d44"


class NamesTest(testtools.TestCase):
    def test_only_the_mark_with_its_value_makes_a_base(self) -> None:
        self.assertTrue(names.is_base({"volume_metadata": {"virtman_base": "true"}}))
        for metadata in ({}, {"virtman_base": "false"}, {"virtman_base": "True"}, {"base": "true"}):
            self.assertFalse(names.is_base({"volume_metadata": metadata}))
        self.assertFalse(names.is_base({}))

    def test_a_disk_has_a_name_that_the_agent_takes_and_that_stays_the_same_over_releases(self) -> None:
        mine = names.disk_of(SERVER, VOLUME)
        check_name("vm", mine)
        check_name("image", names.image_of(VOLUME))
        self.assertEqual(f"nova-{SERVER}-edcf39e928d3351511", mine)
        self.assertEqual(SERVER, names.server_of(mine))
        for name in ("web-1", f"nova-{SERVER}", mine.upper(), f"{mine}0", f"x{mine}", mine[:-1], f"{mine}\n"):
            self.assertIsNone(names.server_of(name), name)

    def test_an_attachment_is_a_uuid_that_cinder_does_not_draw(self) -> None:
        found = uuid.UUID(names.attachment_of(SERVER, VOLUME))
        self.assertEqual((uuid.RFC_4122, 8), (found.variant, found.version))
        self.assertEqual("76697274-6d61-8edc-8f39-e928d3351511", str(found))
        self.assertTrue(names.is_ours(str(found)))
        for attachment in (None, "", str(uuid.uuid4()), f"{found}0"):
            self.assertFalse(names.is_ours(attachment), attachment)

    def test_each_server_has_a_disk_and_an_attachment_of_each_base(self) -> None:
        for name_of in (names.disk_of, names.attachment_of):
            self.assertEqual(
                4, len({name_of(server, volume) for server in (SERVER, OTHER) for volume in (VOLUME, ANOTHER)})
            )
