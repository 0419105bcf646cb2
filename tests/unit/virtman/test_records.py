"""Records on disk."""

from __future__ import annotations

import json
import os
import stat
import traceback

from testtools import TestCase

from drivers.base import Child, Image, Parent
from tests.doubles.volt import digest_of
from tests.unit.virtman.scene import folder_for
from virtman.errors import StateDamaged
from virtman.records import (
    Boot,
    ChildRecord,
    ImagePhase,
    ImageRecord,
    ParentRecord,
    Role,
    Shelf,
    VmPhase,
    VmRecord,
)


def vm(name: str = "web", **more: object) -> VmRecord:
    return VmRecord(name=name, image="debian", size=512, phase=VmPhase.READY).model_copy(update=more)


class ShelfTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = folder_for(self) / "records"
        self.shelf = Shelf(self.folder, VmRecord)

    def test_a_record_survives_the_shelf(self) -> None:
        record = vm(boot=Boot(memory=512, cpus=2, network="user"))
        self.shelf.put("web", record)
        self.assertEqual(record, Shelf(self.folder, VmRecord).get("web"))

    def test_a_missing_record_is_none(self) -> None:
        self.assertIsNone(self.shelf.get("web"))

    def test_put_replaces(self) -> None:
        self.shelf.put("web", vm())
        self.shelf.put("web", vm(size=1024))
        self.assertEqual([vm(size=1024)], self.shelf.all())

    def test_records_are_listed_by_name(self) -> None:
        for name in ("b", "a", "c"):
            self.shelf.put(name, vm(name))
        self.assertEqual(["a", "b", "c"], self.shelf.names())
        self.assertEqual(["a", "b", "c"], [record.name for record in self.shelf.all()])

    def test_remove_is_idempotent(self) -> None:
        self.shelf.put("web", vm())
        self.shelf.remove("web")
        self.shelf.remove("web")
        self.assertEqual([], self.shelf.names())

    def test_torn_files_are_cleaned_away_and_never_read(self) -> None:
        self.shelf.put("web", vm())
        torn = self.folder / ".web.json.abc"
        torn.write_text('{"name": "we')
        self.assertEqual(["web"], self.shelf.names())
        Shelf(self.folder, VmRecord)
        self.assertFalse(torn.exists())
        self.assertEqual([vm()], self.shelf.all())

    def test_a_damaged_record_is_named(self) -> None:
        for damage in (b"", b"{", b"\0" * 512, b"[]", b'{"name": "web"}', vm().model_dump_json().encode() + b"x"):
            (self.folder / "web.json").write_bytes(damage)
            error = self.assertRaises(StateDamaged, self.shelf.get, "web")
            self.assertIn(str(self.folder / "web.json"), str(error))
            self.assertEqual(["web"], self.shelf.damaged())
            self.assertEqual([], self.shelf.all())

    def test_a_damaged_record_does_not_hide_the_others(self) -> None:
        self.shelf.put("good", vm())
        (self.folder / "web.json").write_bytes(b"{")
        self.assertEqual([vm()], self.shelf.all())
        self.assertEqual(["web"], self.shelf.damaged())

    def test_a_record_with_unknown_fields_is_damaged(self) -> None:
        (self.folder / "web.json").write_text(vm().model_dump_json()[:-1] + ', "later": 1}')
        self.assertRaises(StateDamaged, self.shelf.get, "web")

    def test_records_are_private_whatever_the_umask(self) -> None:
        self.addCleanup(os.umask, os.umask(0))
        self.shelf.put("web", vm())
        self.assertEqual(0o700, stat.S_IMODE(self.folder.stat().st_mode))
        self.assertEqual(0o600, stat.S_IMODE((self.folder / "web.json").stat().st_mode))


class ImageRecordTest(TestCase):
    def record(self, **fields: object) -> ImageRecord:
        return ImageRecord(name="debian", role=Role.HOST, phase=ImagePhase.ATTACHING).model_copy(update=fields)

    def test_an_image_needs_size_and_digest(self) -> None:
        for fields in ({}, {"size": 512}, {"digest": digest_of("debian")}):
            record = self.record(**fields)
            self.assertRaises(StateDamaged, lambda record=record: record.image)

    def test_image_and_parents_are_what_drivers_know(self) -> None:
        parents = (ParentRecord(host="a", address="unix:///a", secret="x"), ParentRecord(host="b", address="unix:///b"))
        children = (ChildRecord(host="c", secret="y"), ChildRecord(host="d", secret="z"))
        record = self.record(size=512, digest=digest_of("debian"), parents=parents, children=children)
        self.assertEqual(Image("debian", 512, digest_of("debian")), record.image)
        self.assertEqual([Parent("a", "unix:///a", "x"), Parent("b", "unix:///b")], record.parent_list())
        self.assertEqual([Child("c", "y"), Child("d", "z")], record.child_list())

    def test_secrets_are_on_disk_and_not_in_what_a_record_looks_like(self) -> None:
        parents = (ParentRecord(host="a", address="unix:///a", secret="whispered"),)
        record = self.record(parents=parents, children=(ChildRecord(host="b", secret="whispered"),))
        self.assertEqual(2, record.model_dump_json().count("whispered"))
        for shown in (record, *record.parents, *record.children, *record.parent_list(), *record.child_list()):
            self.assertNotIn("whispered", f"{shown!r} {shown}")

    def test_a_record_of_before_there_were_secrets_can_be_read(self) -> None:
        old = self.record(parents=(ParentRecord(host="a", address="unix:///a"),)).model_dump(mode="json")
        del old["parents"][0]["secret"]
        record = ImageRecord.model_validate_json(json.dumps(old | {"children": ["b"]}))
        self.assertEqual([Parent("a", "unix:///a")], record.parent_list())
        self.assertEqual([Child("b")], record.child_list())

    def test_a_damaged_record_is_not_repeated_in_the_error(self) -> None:
        folder = folder_for(self)
        record = self.record(parents=(ParentRecord(host="a", address="unix:///a", secret="whispered"),))
        (folder / "debian.json").write_text(record.model_dump_json().replace('"address"', '"addres"'))
        error = self.assertRaises(StateDamaged, Shelf(folder, ImageRecord).get, "debian")
        self.assertNotIn("whispered", "".join(traceback.format_exception(error)))

    def test_it_is_unconfirmed_until_the_revision_is_the_assigned_one(self) -> None:
        self.assertTrue(self.record(assigned=3, revision=2).unconfirmed)
        self.assertFalse(self.record(assigned=3, revision=3).unconfirmed)
