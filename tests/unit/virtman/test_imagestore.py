"""Published images, with the real qemu-img."""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
import shutil
import subprocess
from pathlib import Path

from testtools import TestCase
from testtools.matchers import Contains, HasLength

from tests.unit.virtman.scene import folder_for
from virtman.errors import BadImageFile, NoRoom
from virtman.imagestore import RESERVE, ImageStore, Source, inspect

MIB = 1 << 20
CONTENT = random.Random(1).randbytes(MIB) + bytes(2 * MIB) + b"end".ljust(512, b".")


def nothing(_step: str, _done: int, _total: int) -> None:
    """Nobody looks at the progress."""


def qemu_img(*arguments: object) -> None:
    subprocess.run(["qemu-img", *map(str, arguments)], check=True, capture_output=True)


class ImagesTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        if shutil.which("qemu-img") is None:
            self.skipTest("qemu-img is missing: it is in Debian's package qemu-utils")
        self.folder = folder_for(self)
        self.raw = self.file("disk.raw", CONTENT)

    def file(self, name: str, content: bytes) -> Path:
        path = self.folder / name
        path.write_bytes(content)
        return path

    def qcow2(self, *options: str) -> Path:
        path = self.folder / "disk.qcow2"
        qemu_img("convert", "-O", "qcow2", *options, self.raw, path)
        return path

    def refused(self, path: Path, *reasons: str) -> None:
        """The file is refused in one line that names it."""
        error = self.assertRaises(BadImageFile, inspect, path)
        for text in (str(path), *reasons):
            self.assertThat(str(error), Contains(text))


class InspectTest(ImagesTest):
    def test_raw(self) -> None:
        source = inspect(self.raw)
        self.assertEqual((self.raw, "raw", len(CONTENT)), (source.path, source.format, source.size))

    def test_qcow2(self) -> None:
        path = self.qcow2()
        self.assertEqual((path, "qcow2", len(CONTENT)), (path, inspect(path).format, inspect(path).size))

    def test_a_sparse_file_needs_only_the_room_that_it_takes(self) -> None:
        sparse = self.folder / "sparse"
        with sparse.open("wb") as file:
            file.truncate(1 << 40)
        self.assertLess(inspect(sparse).needed, MIB)

    def test_the_magic_number_alone_decides_what_it_is(self) -> None:
        text = self.file("list.vmdk", b'# Disk DescriptorFile\nRW 2048 FLAT "/etc/shadow" 0\n'.ljust(1024, b"\n"))
        self.assertEqual("raw", inspect(text).format)

    def test_a_relative_path_is_refused(self) -> None:
        self.refused(Path("disk.raw"), "absolute")

    def test_what_is_no_file_is_refused(self) -> None:
        self.refused(self.folder / ("x" * 300), "too long")
        for path in (self.folder, self.folder / "missing", Path("/dev/null"), self.raw / "below"):
            self.refused(path, "not a file")

    def test_an_unreadable_file_is_refused(self) -> None:
        self.refused(Path("/proc/self/mem"), "cannot read")  # even root cannot read its beginning

    def test_an_empty_file_is_refused(self) -> None:
        self.refused(self.file("empty", b""), "empty")

    def test_an_empty_qcow2_is_refused(self) -> None:
        path = self.folder / "empty.qcow2"
        qemu_img("create", "-f", "qcow2", path, "0")
        self.refused(path, "empty")

    def test_a_truncated_qcow2_is_refused(self) -> None:
        whole = self.qcow2().read_bytes()
        for length in (4, 64, 512, 65536, len(whole) // 2, len(whole) - 65536):
            self.refused(self.file("torn.qcow2", whole[:length]))

    def test_a_damaged_qcow2_is_refused(self) -> None:
        path = self.qcow2()
        with path.open("r+b") as file:  # the offset of the refcount table (QEMU: docs/interop/qcow2.txt)
            file.seek(48)
            file.write((1 << 40).to_bytes(8, "big"))
        self.refused(path)

    def test_a_qcow2_that_merely_leaks_clusters_is_taken(self) -> None:
        path = self.qcow2()
        with path.open("r+b") as file:  # the unused refcount of some cluster beyond the end
            file.truncate(path.stat().st_size + 10 * 65536)
            file.seek(2 * 65536 + 2 * (path.stat().st_size // 65536 - 1))
            file.write(b"\0\1")
        self.assertEqual(3, subprocess.run(["qemu-img", "check", path], capture_output=True, check=False).returncode)
        self.assertEqual(len(CONTENT), inspect(path).size)

    def test_a_backing_file_is_refused(self) -> None:
        path = self.folder / "overlay.qcow2"
        qemu_img("create", "-f", "qcow2", "-b", self.raw, "-F", "raw", path)
        self.refused(path, "backing-filename", "flatten")

    def test_a_backing_file_that_is_not_there_is_refused_as_well(self) -> None:
        path = self.folder / "overlay.qcow2"
        qemu_img("create", "-u", "-f", "qcow2", "-b", "/nonexistent", "-F", "raw", path, "1M")
        self.refused(path, "backing-filename")

    def test_a_data_file_is_refused(self) -> None:
        path = self.folder / "external.qcow2"
        qemu_img("create", "-f", "qcow2", "-o", f"data_file={self.folder}/data", path, "1M")
        self.refused(path, "data-file")

    def test_an_encrypted_image_is_refused(self) -> None:
        path = self.folder / "secret.qcow2"
        options = "encrypt.format=aes,encrypt.key-secret=key"
        qemu_img("create", "--object", "secret,id=key,data=x", "-f", "qcow2", "-o", options, path, "1M")
        self.refused(path, "encrypted")

    def test_a_file_name_may_look_like_an_option_or_a_protocol(self) -> None:
        for name in ("-f", "nbd:unix:x", "json:{}", "a b", "grüße"):
            path = self.file(name, CONTENT)
            self.assertEqual(len(CONTENT), inspect(path).size)


class StoreTest(ImagesTest):
    def setUp(self) -> None:
        super().setUp()
        self.store = ImageStore(self.folder / "images")

    def stored(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "images").iterdir())

    def test_the_content_is_kept_under_its_digest(self) -> None:
        image = self.store.add("debian", inspect(self.raw), nothing)
        digest = hashlib.sha256(CONTENT).hexdigest()
        self.assertEqual(("debian", len(CONTENT), f"sha256:{digest}"), (image.name, image.size, image.digest))
        self.assertEqual([f"{digest}.raw"], self.stored())
        self.assertEqual(CONTENT, self.store.path(image).read_bytes())
        self.assertEqual([digest], list(self.store.keys()))

    def test_raw_and_every_kind_of_qcow2_of_one_disk_are_one_file(self) -> None:
        added = {self.store.add("raw", inspect(self.raw), nothing).key}
        for options in ([], ["-c"], ["-o", "compat=0.10"], ["-o", "cluster_size=4k"]):
            added.add(self.store.add("qcow2", inspect(self.qcow2(*options)), nothing).key)
        self.assertThat(added, HasLength(1))
        self.assertThat(self.stored(), HasLength(1))

    def test_a_raw_file_that_ends_within_a_sector_is_filled_up(self) -> None:
        image = self.store.add("odd", inspect(self.file("odd", b"odd")), nothing)
        self.assertEqual(512, image.size)
        self.assertEqual(b"odd".ljust(512, b"\0"), self.store.path(image).read_bytes())

    def test_holes_stay_holes(self) -> None:
        image = self.store.add("debian", inspect(self.raw), nothing)
        self.assertLess(self.store.path(image).stat().st_blocks * 512, 2 * MIB)

    def test_progress_is_told_by_step_and_never_goes_back(self) -> None:
        seen: list[tuple[str, int, int]] = []
        self.store.add("debian", inspect(self.qcow2()), lambda *what: seen.append(what))
        self.assertEqual(["copy", "digest"], list(dict.fromkeys(step for step, _, _ in seen)))
        for wanted in ("copy", "digest"):
            done = [done for step, done, _ in seen if step == wanted]
            self.assertEqual(sorted(done), done)
            self.assertEqual(len(CONTENT), done[-1])
        self.assertEqual({len(CONTENT)}, {total for _, _, total in seen})

    def test_a_file_that_changes_afterwards_changes_nothing(self) -> None:
        image = self.store.add("debian", inspect(self.raw), nothing)
        self.raw.write_bytes(b"other")
        self.assertEqual(CONTENT, self.store.path(image).read_bytes())

    def test_a_copy_that_fails_leaves_nothing(self) -> None:
        torn = Source(self.folder / "gone", "raw", 512, 512)
        error = self.assertRaises(BadImageFile, self.store.add, "debian", torn, nothing)
        self.assertThat(str(error), Contains("gone"))
        self.assertEqual([], self.stored())

    def test_a_listener_that_fails_leaves_nothing(self) -> None:
        def fail(step: str, _done: int, _total: int) -> None:
            if step == "digest":
                raise KeyError

        self.assertRaises(KeyError, self.store.add, "debian", inspect(self.raw), fail)
        self.assertEqual([], self.stored())

    def test_a_file_larger_than_the_free_space_is_refused_before_the_copy(self) -> None:
        free = shutil.disk_usage(self.folder).free
        error = self.assertRaises(NoRoom, self.store.add, "x", Source(self.raw, "raw", free, free), nothing)
        self.assertThat(str(error), Contains("MiB free"))
        self.assertEqual([], self.stored())

    def test_the_disk_that_fills_up_during_the_copy_is_told_and_cleaned(self) -> None:
        store = ImageStore(self.tiny(RESERVE + 2 * MIB) / "images")
        compressed = self.folder / "zeros.qcow2"
        self.raw.write_bytes(b"x" * (RESERVE + 8 * MIB))
        qemu_img("convert", "-c", "-O", "qcow2", self.raw, compressed)
        error = self.assertRaises(NoRoom, store.add, "x", inspect(compressed), nothing)
        self.assertThat(str(error), Contains("no space left"))
        self.assertEqual([], list((self.folder / "tiny" / "images").iterdir()))

    def tiny(self, size: int) -> Path:
        """A file system of the given size."""
        if os.geteuid() != 0:
            self.skipTest("only root can mount a small file system")
        folder = self.folder / "tiny"
        folder.mkdir()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"tmpfs", bytes(folder), b"tmpfs", 0, f"size={size}".encode()) != 0:
            self.skipTest(f"cannot mount a tmpfs: {os.strerror(ctypes.get_errno())}")
        self.addCleanup(libc.umount2, bytes(folder), 0)
        return folder

    def test_clean_removes_what_an_interrupted_import_left_and_nothing_else(self) -> None:
        image = self.store.add("debian", inspect(self.raw), nothing)
        (self.folder / "images" / ".import-debian.raw").write_bytes(b"half")
        self.store.clean()
        self.assertEqual([f"{image.key}.raw"], self.stored())

    def test_remove_tells_what_it_freed(self) -> None:
        image = self.store.add("debian", inspect(self.raw), nothing)
        taken = self.store.path(image).stat().st_blocks * 512
        self.assertEqual(taken, self.store.remove(image.key))
        self.assertEqual(0, self.store.remove(image.key))
        self.assertEqual([], self.stored())
