"""Published images, with the real qemu-img."""

from __future__ import annotations

import hashlib
import itertools
import os
import stat
from pathlib import Path

from testtools.matchers import Contains, HasLength, LessThan

from drivers.digests import PIECE, PIECES, SHA256, key_of
from drivers.host.space import Room
from drivers.manifest import FOLDER, path_of
from tests.limits import no_more_files
from tests.unit.virtman.imagefiles import CONTENT, MIB, ImagesTest, digest_of, qemu_img
from virtman.client import silently
from virtman.convert import QCOW2, RAW, Content
from virtman.errors import BadImageFile, HostTrouble, NoRoom
from virtman.imagefile import inspect
from virtman.imagestore import ImageStore


class StoreTest(ImagesTest):
    def setUp(self) -> None:
        super().setUp()
        self.store = ImageStore(self.folder, self.room)

    def manifests(self) -> list[str]:
        return sorted(path.name for path in (self.folder / FOLDER).iterdir())

    def stored(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "images").iterdir())

    def test_while_an_image_comes_in_nothing_is_there_under_its_key(self) -> None:
        seen: list[str] = []
        image = self.store.add("debian", inspect(self.raw), lambda *_: seen.extend(self.store.keys()))
        self.assertEqual(([], [image.key]), (seen, [*self.store.keys()]))

    def test_the_content_is_kept_under_its_digest(self) -> None:
        image = self.store.add("debian", inspect(self.raw), silently)
        self.assertEqual(("debian", len(CONTENT), digest_of(CONTENT)), (image.name, image.size, image.digest))
        self.assertEqual([f"{image.key}.raw"], self.stored())
        self.assertEqual(CONTENT, self.store.path(image).read_bytes())
        self.assertEqual(0o700, stat.S_IMODE((self.folder / "images").stat().st_mode))
        self.assertEqual({image.key}, self.store.keys())
        with no_more_files():
            self.assertRaises(HostTrouble, self.store.keys)

    def test_content_goes_with_its_manifest(self) -> None:
        image = self.store.add("debian", inspect(self.raw), silently)
        self.assertEqual([image.key], self.manifests())
        files = (self.store.path(image), path_of(self.folder, image.key))
        taken = sum(file.stat().st_blocks * 512 for file in files)
        self.assertEqual(taken, self.store.size(image.key))
        self.assertEqual([taken, 0], [self.store.remove(image.key) for _ in range(2)])
        self.assertEqual(([], []), (self.stored(), self.manifests()))

    def test_the_manifest_is_there_before_the_content_has_its_name(self) -> None:
        seen: dict[str, list[str]] = {}
        rename = Path.rename

        def noted(path: Path, target: Path) -> Path:
            seen[target.name] = self.manifests()
            return rename(path, target)

        self.patch(Path, "rename", noted)
        image = self.store.add("debian", inspect(self.raw), silently)
        self.assertEqual([image.key], seen[f"{image.key}.raw"])

    def test_a_manifest_without_content_is_there_under_its_key_and_can_be_removed(self) -> None:
        key = key_of(digest_of(CONTENT))
        for name in (key, f"{key}.json", f".{key}", "lost+found"):
            (self.folder / FOLDER / name).write_text("of the chunk store")
        self.assertEqual({key}, self.store.keys())
        self.assertGreater(self.store.remove(key), 0)
        self.assertEqual(set(), self.store.keys())

    def test_an_image_that_has_a_digest_of_an_earlier_kind_keeps_it(self) -> None:
        for kind, digest in (
            (SHA256, hashlib.sha256(CONTENT).hexdigest()),
            (PIECES, hashlib.sha256(hashlib.sha256(CONTENT).digest()).hexdigest()),
        ):
            image = self.store.add("old", inspect(self.raw), silently, kind)
            self.assertEqual(f"{kind}{digest}", image.digest)
        self.assertEqual([], self.manifests())

    def test_raw_and_every_kind_of_qcow2_of_one_disk_are_one_file(self) -> None:
        added = {self.store.add("raw", inspect(self.raw), silently).key}
        for options in ([], ["-c"], ["-o", "compat=0.10"], ["-o", "cluster_size=4k"]):
            added.add(self.store.add("qcow2", inspect(self.qcow2(*options)), silently).key)
        self.assertThat(added, HasLength(1))
        self.assertThat(self.stored(), HasLength(1))

    def test_a_raw_file_that_ends_within_a_sector_is_filled_up(self) -> None:
        image = self.store.add("odd", inspect(self.file("odd", b"odd")), silently)
        self.assertEqual(512, image.size)
        self.assertEqual(b"odd".ljust(512, b"\0"), self.store.path(image).read_bytes())

    def test_the_digest_is_of_the_content_and_takes_no_time_for_holes(self) -> None:
        size = 69 * MIB
        read: list[int] = []
        pread = os.pread

        def counted(fd: int, length: int, offset: int) -> bytes:
            read.append(length)
            return pread(fd, length, offset)

        self.patch(os, "pread", counted)
        late = bytes(MIB - 4096) + b"late" * 1024  # data behind a hole of the same piece
        with self.raw.open("r+b") as file:
            file.truncate(size)
            for begin in (2 * PIECE, size - MIB):
                file.seek(begin + MIB - 4096)
                file.write(late[-4096:])
        holed = self.store.add("holed", inspect(self.raw), silently)
        self.assertThat(sum(read), LessThan(4 * PIECE))
        self.assertEqual((size, digest_of(self.raw.read_bytes())), (holed.size, holed.digest))
        with self.raw.open("r+b") as file:
            file.seek(size // 2)
            file.write(bytes(2 * PIECE))
        self.assertEqual(holed.key, self.store.add("zeros", inspect(self.raw), silently).key)
        self.assertEqual(holed.key, self.store.add("qcow2", inspect(self.qcow2()), silently).key)

    def test_progress_is_told_by_step_and_never_goes_back(self) -> None:
        seen: list[tuple[str, int, int]] = []
        self.store.add("debian", inspect(self.qcow2()), lambda *what: seen.append(what))
        self.assertEqual(["copy", "digest"], list(dict.fromkeys(step for step, _, _ in seen)))
        for wanted in ("copy", "digest"):
            done = [done for step, done, _ in seen if step == wanted]
            self.assertEqual(sorted(done), done)
            self.assertEqual(len(CONTENT), done[-1])
        self.assertEqual({len(CONTENT)}, {total for _, _, total in seen})

    def test_a_copy_that_fails_leaves_nothing(self) -> None:
        torn = Content("gone", ("-f", "raw", str(self.folder / "gone")), 512, 0)
        error = self.assertRaises(BadImageFile, self.store.add, "debian", torn, silently)
        self.assertThat(str(error), Contains("gone"))
        self.assertEqual([], self.stored())

    def test_files_with_more_space_than_there_is_room_are_copied_without_their_zeros(self) -> None:
        store = ImageStore(tiny := self.tiny(16 * MIB), Room(tiny))
        for name, how in itertools.product((RAW, QCOW2), ("falloc", "full")):
            qemu_img("create", "-f", name, "-o", f"preallocation={how}", path := self.folder / "zeros", 32 * MIB)
            self.assertGreaterEqual(path.stat().st_blocks * 512, 32 * MIB)
            self.assertLess(store.path(store.add("x", inspect(path), silently)).stat().st_blocks * 512, MIB)

    def test_a_compressed_file_is_refused_before_its_copy_for_what_it_holds(self) -> None:
        store = ImageStore(tiny := self.tiny(8 * MIB), Room(tiny))
        self.raw.write_bytes(b"x" * 8 * MIB + bytes(MIB))
        qemu_img("convert", "-c", "-O", "qcow2", self.raw, packed := self.folder / "packed")
        seen: list[str] = []
        error = self.assertRaises(NoRoom, store.add, "x", inspect(packed), lambda done, *_: seen.append(done))
        self.assertThat(str(error), Contains("which takes 8 MiB"))
        self.assertEqual(([], []), (seen, self.stored()))

    def test_a_copy_ends_at_what_is_kept_for_vms_and_is_cleaned(self) -> None:
        tiny = self.tiny(32 * MIB)
        self.assertEqual([32 * MIB // 10, 0], [Room(tiny).reserve(folder) for folder in (tiny, self.folder)])
        store = ImageStore(tiny, Room(tiny, 28 * MIB))
        self.raw.write_bytes(b"x" * 16 * MIB)
        unknown = Content("x", ("-f", "raw", str(self.raw)), 16 * MIB, 0)
        error = self.assertRaises(NoRoom, store.add, "x", unknown, silently)
        self.assertThat(str(error), Contains("28 MiB are kept for what VMs write"))
        self.assertEqual([], list((tiny / "images").iterdir()))

    def test_clean_removes_what_an_interrupted_import_left_and_nothing_else(self) -> None:
        image = self.store.add("debian", inspect(self.raw), silently)
        (self.folder / "images" / ".import-debian.raw").write_bytes(b"half")
        (self.folder / FOLDER / ".manifest-x").write_bytes(b"half")
        self.store.clean()
        self.assertEqual(([f"{image.key}.raw"], [image.key]), (self.stored(), self.manifests()))
