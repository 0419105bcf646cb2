"""State that releases wrote (tests/golden, one folder each) opens in this version: operations go on, nothing is lost.

``python -m tests.unit.virtman.test_golden`` writes the folder of the version in setup.py, which each release needs.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import secrets
import shutil
import sqlite3
import uuid
from pathlib import Path
from typing import Any
from unittest import mock

import sqlalchemy as sa
from testtools import TestCase

from drivers.cache.cachegroup import Entry, Group
from drivers.snapshot.disks import Records
from drivers.snapshot.dmsnapshot import _Disk
from drivers.snapshot.thinvolumes import Snapshot, ThinDisk
from tests.unit.virtman import test_attaching, test_cut_off, test_migration, test_renaming, test_streams
from tests.unit.virtman.scene import BOOT, Scene, folder_for
from tests.unit.virtman.test_cut_off import Act
from virtman import attaching, booting, creating, disks, hosting, migration, origins, renaming
from virtman.records import RENAME_BACK, DeviceRecord, ImageRecord, RecordStore, VmRecord
from virtman.stackchoice import KERNEL, made_with, settle
from virtman.stateversion import mark, refusal
from volt.models import HostState
from volt.store import HostRow, ImageRow, Store, changing_tree, edge_key_table, load_tree

GOLDEN = Path(__file__).parents[2] / "golden"
DISK = "/dev/mapper/virtman-image-debian"
THIN = ThinDisk(7, 5 << 20, DISK, made=True, snapshots={"one": Snapshot(8, 4 << 20)}, unused=(9,))
STORE = _Disk(5 << 20, DISK, 4 << 20, 8)
VOLUMES = {Path("/dev/vdb"): Entry("0123456789abcdef", 1 << 30, "broken", "it has no room")}
KEY = bytes(range(32))


def read_by_none(scene: Scene) -> None:
    test_cut_off.offered(scene)
    hosting.ensure(scene.stacks, "debian")


def a_device(scene: Scene) -> Path:
    path = Path("/tmp/vm-golden-device")
    scene.test.addCleanup(path.unlink, missing_ok=True)
    path.write_text("8:16")
    return path


def device_attached(scene: Scene) -> None:
    scene.devices.attach(a_device(scene))


def receive(scene: Scene, stream: str = "changes", release: str = "") -> None:
    test_streams.receive(scene, (GOLDEN / (release or version()) / f"{stream}.stream").read_bytes())


def received(scene: Scene, release: str = "") -> None:
    test_streams.receiver(scene)
    receive(scene, "first", release)


def withdrawn(scene: Scene) -> None:
    test_cut_off.publish_copy(scene)
    scene.volt.images.clear()
    scene.volt.places.clear()


CUTS: dict[str, tuple[Act, Act]] = {
    "arrive": (test_migration.arriving, lambda s: migration.arrive(s.vms, "vm")),
    "attach": (test_cut_off.offered, lambda s: hosting.ensure(s.stacks, "debian")),
    "attach-device": (a_device, device_attached),
    "attach-disk": (test_attaching.a_vm_and_a_disk, lambda s: attaching.attach(s.vms, "vm", "data")),
    "boot": (test_cut_off.attached, lambda s: booting.boot(s.vms, "vm", "debian", None, BOOT, [], None)),
    "create": (test_cut_off.attached, test_cut_off.create),
    "delete-snapshot": (test_cut_off.with_snapshots, lambda s: disks.drop(s.vms, "vm", "one")),
    "destroy": (test_cut_off.two_vms, lambda s: creating.destroy(s.vms, "vm")),
    "detach": (withdrawn, lambda s: origins.drop_origin(s.stacks, "mine")),
    "detach-device": (device_attached, lambda s: s.devices.detach(a_device(s))),
    "detach-disk": (test_attaching.attached, lambda s: attaching.detach(s.vms, "vm", "data")),
    "migrate": (test_migration.a_vm, test_migration.leave),
    "publish": (lambda _scene: None, test_cut_off.publish_copy),
    "receive": (received, receive),
    "rename": (test_renaming.a_vm, lambda s: renaming.rename(s.vms, "vm", "new")),
    "resize": (test_cut_off.with_snapshots, lambda s: disks.resize(s.vms, "vm", 2 << 30)),
    "revert": (test_cut_off.switched_off, lambda s: disks.revert(s.vms, "old", "one")),
    "take-snapshot": (test_cut_off.with_snapshots, lambda s: disks.take(s.vms, "vm", "tri")),
}
"""Of each kind of operation: what is there before, and the operation, which is cut off in its middle."""


def version() -> str:
    found = re.search(r'\bversion="(\d.+)"', (GOLDEN.parents[1] / "setup.py").read_text())
    assert found is not None
    return found[1]


def cut_at(test: TestCase, kind: str, number: int) -> Scene:
    given, act = CUTS[kind]
    numbers = itertools.count(1)
    with (
        mock.patch("virtman.records.uuid4", lambda: uuid.UUID(int=next(numbers))),
        mock.patch.object(secrets, "token_hex", lambda size: f"{next(numbers):0{2 * size}x}"),
    ):
        scene = Scene(test)
        given(scene)
        scene.cut(act, number)
    return scene


def cut_off(test: TestCase, kind: str) -> Scene:
    """A host whose agent died in the middle of an operation. What is random otherwise is the same each time."""
    moments = cut_at(test, kind, 0).moments
    steps = [at for at, what in enumerate(moments, 1) if what.startswith(f"{kind}:")]
    return cut_at(test, kind, steps[len(steps) // 2])


class GoldenTest(TestCase):
    def test_operations_that_a_release_began_are_finished_or_undone(self) -> None:
        for records in sorted(GOLDEN.glob("*/records/*")):
            kind = records.name
            scene = cut_off(self, kind)
            shutil.rmtree(scene.folder / "records")
            shutil.copytree(records, scene.folder / "records", copy_function=shutil.copy)
            scene.start()
            self.assertEqual([kind], self.operations(scene))
            scene.repair()
            if kind not in ("migrate", "arrive", "rename"):  # which do not leave a VM that runs
                scene.check(self)
            self.assertEqual([], self.operations(scene))

    def operations(self, scene: Scene) -> list[str]:
        """Kinds of operations that are under way. All records can be read."""
        records: list[RecordStore[Any]] = [scene.image_shelf, scene.vm_shelf, scene.device_shelf]
        self.assertEqual([{}] * 3, [store.unreadable() for store in records])
        return [record.kind.replace(" ", "-") for store in records for record in store.all() if record.operation]

    def test_this_release_has_a_folder_with_an_operation_of_each_kind(self) -> None:
        kinds = {*DeviceRecord.phases, *ImageRecord.phases, *VmRecord.phases} - {RENAME_BACK}
        there = {records.name for records in (GOLDEN / version() / "records").iterdir()}
        self.assertEqual({kind.replace(" ", "-") for kind in kinds}, there)

    def test_streams_are_received(self) -> None:
        for release in GOLDEN.iterdir():
            scene = Scene(self)
            received(scene, release.name)
            receive(scene, release=release.name)
            disk = scene.host.disks["vm"]
            self.assertEqual(({"a", "c"}, "now"), (set(disk.snapshots), disk.writes))

    @mock.patch("drivers.door.provide", mock.Mock())
    def test_an_agent_starts_with_the_state_and_the_drivers_read_theirs(self) -> None:
        for release in GOLDEN.iterdir():
            self.assertIsNone(refusal(release / "state"))
            self.assertEqual(KERNEL, made_with(release / "state"))
            self.assertEqual({"vm": THIN}, Records(release / "state/dmthin", ThinDisk).all())
            self.assertEqual({"vm": STORE}, Records(release / "state/dmsnapshot", _Disk).all())
            self.assertEqual(VOLUMES, Group(release / "state/cache", mock.Mock()).recorded())

    def test_volt_goes_on_with_its_tables_and_key(self) -> None:
        for release in GOLDEN.iterdir():
            database = folder_for(self) / "volt.db"
            with contextlib.closing(sqlite3.connect(database)) as connection:
                connection.executescript((release / "volt.sql").read_text())
            store = Store(f"sqlite:///{database}")
            self.addCleanup(store.close)
            self.assertEqual(KEY, store.edge_key)
            with store.read() as session:
                tree = load_tree(session, session.query(ImageRow).one())
            self.assertEqual(["origin", "host-1", "host-2"], sorted(tree.hosts, key=lambda host: tree.hosts[host].slot))


class Writing(TestCase):
    """Writes what the tests read."""

    __test__ = False

    def runTest(self) -> None:
        release = GOLDEN / version()
        release.mkdir()
        source = test_streams.sender(self)
        (release / "first.stream").write_bytes(test_streams.sent(source, "a"))
        (release / "changes.stream").write_bytes(test_streams.sent(source, None, "a", all_of_them=True))
        for kind in CUTS:
            shutil.copytree(cut_off(self, kind).folder / "records", release / "records" / kind)
        self.write_drivers_state(release / "state")
        self.write_database(release / "volt.sql")

    def write_drivers_state(self, state: Path) -> None:
        for name in ("dmthin", "dmsnapshot", "cache"):
            (state / name).mkdir(parents=True)
        mark(state)
        settle(state, KERNEL)
        Records(state / "dmthin", ThinDisk).write("vm", THIN)
        Records(state / "dmsnapshot", _Disk).write("vm", STORE)
        Group(state / "cache", mock.Mock())._write(VOLUMES)

    def write_database(self, target: Path) -> None:
        database = folder_for(self) / "volt.db"
        store = Store(f"sqlite:///{database}")
        image = ImageRow(name="debian", published=True, size=1 << 30, digest="sha256:" + 64 * "0", fanout=2, revision=0)
        with store.write() as session:
            session.add(image)
            session.execute(sa.update(edge_key_table).values(key=KEY))
            for name in ("origin", "host-1", "host-2", "gone"):
                address = f"unix:///run/{name}/serve"
                session.add(HostRow(name=name, address=address, state=HostState.ALIVE, last_seen=0.0))
            with changing_tree(session, image, 0) as tree:
                tree.publish("origin")
                for name in ("host-1", "host-2", "gone"):
                    tree.join(name)
                tree.leave("gone", dropped=-1)
        store.close()
        with contextlib.closing(sqlite3.connect(database)) as connection:
            target.write_text("\n".join(connection.iterdump()))


if __name__ == "__main__":
    with mock.patch("drivers.door.provide"):
        Writing().debug()
