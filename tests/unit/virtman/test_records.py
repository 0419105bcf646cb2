"""Records on disk."""

from __future__ import annotations

import math
import os
import stat
import traceback

from testtools import TestCase

from drivers.base import Child, Parent
from tests.doubles.volt import digest_of
from tests.limits import no_more_files
from tests.unit.virtman.scene import damage, folder_for
from virtman.errors import HostTrouble, StateDamaged
from virtman.records import Boot, ImageRecord, RecordStore, Role, Snapshot, State, VmRecord


def vm(name: str = "web", **more: object) -> VmRecord:
    return VmRecord(name=name, image="debian", size=512, state=State.PRESENT, uuid="1f").model_copy(update=more)


class ShelfTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = folder_for(self) / "records"
        self.records = RecordStore(self.folder, VmRecord)

    def test_a_record_survives_the_shelf(self) -> None:
        record = vm(boot=Boot(memory=512, cpus=2, network="user"))
        self.records.put("web", record)
        self.assertEqual(record, RecordStore(self.folder, VmRecord).get("web"))

    def test_what_could_not_be_read_again_is_not_written(self) -> None:
        self.records.put("web", vm())
        endless = Snapshot(name="a", parent=None, size=512, taken=math.inf, state="off", id="1f" * 16)
        for name in ("web", "new"):
            error = self.assertRaises(StateDamaged, self.records.put, name, vm(name, snapshots=(endless,)))
            self.assertIn(f"{name}.json is not written: its snapshots.0.taken could not be read again", str(error))
        self.assertEqual([vm()], RecordStore(self.folder, VmRecord).all())

    def test_records_are_listed_by_name(self) -> None:
        names = [f"vm-{number}" for number in range(40, 10, -1)]  # no file system lists them by name
        for name in names:
            self.records.put(name, vm(name))
        self.assertEqual(sorted(names), self.records.names())
        self.assertEqual(sorted(names), [record.name for record in self.records.all()])

    def test_what_cannot_be_written_is_remembered_until_something_is_or_the_process_ends(self) -> None:
        self.records.put("web", vm())
        self.records.remember("web", vm(size=1024))
        self.assertEqual(([vm(size=1024)], [vm()]), (self.records.all(), RecordStore(self.folder, VmRecord).all()))
        self.records.put("web", vm(size=2048))
        self.assertEqual([vm(size=2048)], self.records.all())

    def test_remove_is_idempotent(self) -> None:
        self.records.put("web", vm())
        self.records.remove("web")
        self.records.remove("web")
        self.assertEqual([], self.records.names())

    def test_torn_files_are_cleaned_away_and_never_read(self) -> None:
        self.records.put("web", vm())
        torn = self.folder / ".web.json.abc"
        torn.write_text('{"name": "we')
        self.assertEqual([vm()], RecordStore(self.folder, VmRecord).all())
        self.assertFalse(torn.exists())

    def test_a_damaged_record_is_named_until_it_is_restored(self) -> None:
        self.records.put("good", vm("good"))
        good = vm().begin("destroy").model_dump_json().encode()
        later = (good.replace(b"destroy", b"teleport"), good[:-1] + b', "more": 1}')
        for content in (b"", b"{", b"\0" * 512, b"[]", b'{"name": "web"}', good + b"x", *later):
            damage(self.records, "web", content)
            error = self.assertRaises(StateDamaged, self.records.get, "web")
            self.assertIn(str(self.folder / "web.json"), str(error))
            self.assertEqual(([vm("good")], {"web": str(error)}), self.records.sorted_out())
            self.assertEqual(["good", "web"], self.records.names())
        (self.folder / "web.json").write_bytes(good)
        self.assertEqual((vm().begin("destroy"), {}), (self.records.get("web"), self.records.unreadable()))

    def test_a_record_that_cannot_be_written_is_an_error_of_the_agent(self) -> None:
        self.folder.rmdir()
        self.assertRaises(HostTrouble, self.records.put, "web", vm())
        self.assertRaises(HostTrouble, self.records.remove, "web")

    def test_a_record_that_is_no_file_cannot_be_read(self) -> None:
        (self.folder / "web.json").mkdir()
        self.assertRaises(StateDamaged, RecordStore(self.folder, VmRecord).get, "web")

    def test_an_agent_that_cannot_look_does_not_take_that_for_no_records(self) -> None:
        self.records.put("web", vm())
        with no_more_files():
            self.assertRaises(HostTrouble, RecordStore, self.folder, VmRecord)

    def test_records_are_private_whatever_the_umask(self) -> None:
        self.addCleanup(os.umask, os.umask(0))
        self.records.put("web", vm())
        self.assertEqual(0o700, stat.S_IMODE(self.folder.stat().st_mode))
        self.assertEqual(0o600, stat.S_IMODE((self.folder / "web.json").stat().st_mode))


class ImageRecordTest(TestCase):
    def record(self, **fields: object) -> ImageRecord:
        return ImageRecord(name="debian", role=Role.HOST, state=State.ABSENT).model_copy(update=fields)

    def test_an_image_needs_size_and_digest(self) -> None:
        for fields in ({}, {"size": 512}, {"digest": digest_of("debian")}):
            record = self.record(**fields)
            self.assertRaises(StateDamaged, lambda record=record: record.image)

    def test_secrets_are_on_disk_and_not_in_what_a_record_looks_like(self) -> None:
        parents = (Parent("a", "unix:///a", "whispered"),)
        record = self.record(parents=parents, children=(Child("b", "whispered"),))
        self.assertEqual(2, record.model_dump_json().count("whispered"))
        for shown in (record, *record.parents, *record.children):
            self.assertNotIn("whispered", f"{shown!r} {shown}")

    def test_a_damaged_record_is_not_repeated_in_the_error(self) -> None:
        folder = folder_for(self)
        record = self.record(parents=(Parent("a", "unix:///a", "whispered"),))
        (folder / "debian.json").write_text(record.model_dump_json().replace('"address"', '"addres"'))
        error = self.assertRaises(StateDamaged, RecordStore(folder, ImageRecord).get, "debian")
        self.assertNotIn("whispered", "".join(traceback.format_exception(error)))
