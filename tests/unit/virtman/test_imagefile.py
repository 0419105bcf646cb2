"""Files to publish, with the real qemu-img."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from testtools.matchers import MatchesRegex

from drivers.snapshot.layers import _LAYOUT_ABOVE
from tests.unit.virtman.imagefiles import CONTENT, MIB, ImagesTest, qemu_img
from virtman.client import silently
from virtman.convert import RAW, convert
from virtman.errors import BadImageFile
from virtman.fdpassing import Passed, opened
from virtman.imagefile import LARGEST, inspect, source
from virtman.sizes import LARGEST_DISK


class InspectTest(ImagesTest):
    def test_raw(self) -> None:
        source = inspect(self.raw)
        self.assertEqual((("-f", "raw", str(self.raw)), len(CONTENT)), (source.location, source.size))

    def test_qcow2(self) -> None:
        source = inspect(path := self.qcow2())
        self.assertEqual((("-f", "qcow2", str(path)), len(CONTENT)), (source.location, source.size))

    def test_the_magic_number_alone_decides_what_it_is(self) -> None:
        for name in ("disk.vmdk", "disk.qcow2", "disk.gz"):
            self.assertEqual("raw", inspect(self.file(name, CONTENT)).location[1])
        self.assertEqual("qcow2", inspect(self.qcow2().rename(self.folder / "disk.zip")).location[1])

    def test_a_list_of_other_files_is_refused(self) -> None:
        text = self.file("list.vmdk", b'# Disk DescriptorFile\nRW 2048 FLAT "/etc/shadow" 0\n'.ljust(1024, b"\n"))
        self.refused(text, "VMDK")

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

    def test_a_qcow2_with_lazy_refcounts_that_was_not_closed_is_refused_with_the_command_that_repairs_it(self) -> None:
        path = self.qcow2("-o", "lazy_refcounts=on")
        argv = ["qemu-io", "-c", "write -P 1 2M 64k", "-c", "flush", "-c", "sigraise 9", str(path)]
        subprocess.run(argv, capture_output=True, check=False)
        error = self.assertRaises(BadImageFile, inspect, path)
        subprocess.run(str(error).partition(" first: ")[2], shell=True, check=True, capture_output=True)
        self.assertEqual(len(CONTENT), inspect(path).size)

    def test_a_qcow2_that_merely_leaks_clusters_is_taken(self) -> None:
        path = self.qcow2()
        with path.open("r+b") as file:  # the unused refcount of some cluster beyond the end
            file.truncate(path.stat().st_size + 10 * 65536)
            file.seek(2 * 65536 + 2 * (path.stat().st_size // 65536 - 1))
            file.write(b"\0\1")
        self.assertEqual(3, subprocess.run(["qemu-img", "check", path], capture_output=True, check=False).returncode)
        self.assertEqual(len(CONTENT), inspect(path).size)

    def test_a_qcow2_that_refers_to_another_file_or_is_encrypted_or_empty_is_refused(self) -> None:
        secret = ("encrypt.format=aes,encrypt.key-secret=key", "--object", "secret,id=key,data=x")
        for said, size, (options, *more) in (
            ("backing-filename", "1M", (f"backing_file={self.raw},backing_fmt=raw",)),
            ("data-file", "1M", (f"data_file={self.folder}/data",)),
            ("encrypted", "1M", secret),
            ("empty", "0", ("compat=1.1",)),
        ):
            path = self.folder / f"{said}.qcow2"
            qemu_img("create", *more, "-f", "qcow2", "-o", options, path, size)
            self.refused(path, said)

    def test_a_file_name_may_look_like_an_option_or_a_protocol(self) -> None:
        for name in ("-f", "nbd:unix:x", "json:{}", "a b", "grüße"):
            path = self.file(name, CONTENT)
            self.assertEqual(len(CONTENT), inspect(path).size)


class LargestTest(ImagesTest):
    def test_qcow2_has_room_for_the_largest_disk_and_no_more(self) -> None:
        make = ("create", "-f", "qcow2", "-o", _LAYOUT_ABOVE, self.folder / "largest")
        qemu_img(*make, LARGEST_DISK)
        self.assertRaises(subprocess.CalledProcessError, qemu_img, *make, LARGEST_DISK + (1 << 40))

    def test_what_is_larger_is_refused(self) -> None:
        path = self.folder / "large.qcow2"
        qemu_img("create", "-f", "qcow2", path, LARGEST + (1 << 40))
        self.refused(path, "33T", "at most 32T")


class OtherFormatsTest(ImagesTest):
    """As raw they would boot nothing."""

    def converted(self, path: Path, name: str) -> Path:
        """What the command of the refusal makes of a file."""
        error = self.assertRaises(BadImageFile, inspect, path)
        self.assertThat(
            str(error), MatchesRegex(rf"{re.escape(str(path))} is .*{name}.*; (convert|unpack) it first: .+")
        )
        subprocess.run(str(error).partition(" first: ")[2], shell=True, check=True, capture_output=True)
        (made,) = [file for file in self.folder.iterdir() if file not in (path, self.raw)]
        return made

    def assert_the_command_helps(self, path: Path, name: str) -> None:
        made = self.converted(path, name)
        self.assertEqual(len(CONTENT), inspect(made).size)
        compared = subprocess.run(
            ["qemu-img", "compare", "-f", "raw", self.raw, made], capture_output=True, check=False
        )
        self.assertEqual(0, compared.returncode, str(compared.stdout))
        for file in (path, made):
            file.unlink()

    def test_disks_of_other_programs_are_refused_with_the_command_that_converts_them(self) -> None:
        for name, options in (
            ("VMDK", "subformat=monolithicSparse"), ("VDI", ""), ("VHDX", ""), ("QED", ""), ("Parallels", ""),
            ("qcow", ""),
        ):  # fmt: skip
            path = self.folder / f"a disk.{name}"
            qemu_img("convert", "-O", name.lower(), *(["-o", options] if options else []), self.raw, path)
            self.assert_the_command_helps(path, name)

    def test_packed_files_are_refused_with_the_command_that_unpacks_them(self) -> None:
        packers: list[tuple[str, str, Callable[[bytes], bytes]]] = [
            ("gzip", "gz", gzip.compress), ("xz", "xz", lzma.compress), ("bzip2", "bz2", bz2.compress),
            ("Zstandard", "zst", zstd), ("Zstandard", "zst", skipped), ("ZIP", "zip", zipped), ("tar", "ova", tar),
        ]  # fmt: skip
        for name, suffix, pack in packers:
            for file in (f"a disk.img.{suffix}", "disk"):
                self.assert_the_command_helps(self.file(file, pack(CONTENT)), name)

    def test_what_is_packed_by_other_programs_is_refused_too(self) -> None:
        for name, begin in (("LZ4", b"\x04\x22\x4d\x18"), ("7z", b"7z\xbc\xaf\x27\x1c"), ("RAR", b"Rar!\x1a\x07")):
            self.refused(self.file("packed", begin + CONTENT), f"is packed with {name}; unpack it first: ")
        vhd = self.folder / "disk.vhd"
        qemu_img("create", "-f", "vpc", vhd, "4M")  # which grows, and so has its mark at the beginning
        self.refused(vhd, "VHD", "qemu-img convert")


class OverlayTest(ImagesTest):
    """A file over the raw disk. Its header names a file that is not there."""

    def setUp(self) -> None:
        super().setUp()
        self.path = self.folder / "overlay.qcow2"
        named, self.size = self.folder / "not-there.raw", len(CONTENT) + MIB
        qemu_img("create", "-u", "-f", "qcow2", "-F", "raw", "-b", named, self.path, self.size)
        below = json.dumps({"driver": "qcow2", "backing": None, "file": {"driver": "file", "filename": str(self.path)}})
        argv = ["qemu-io", "-c", "write -P 7 64k 64k", "-c", "write -P 8 3200k 64k", f"json:{below}"]
        subprocess.run(argv, check=True, capture_output=True)
        self.content = bytearray(CONTENT + bytes(MIB))
        self.content[64 << 10 : 128 << 10] = b"\7" * (64 << 10)
        self.content[3200 << 10 : 3264 << 10] = b"\x08" * (64 << 10)  # behind the end of what is below
        self.asked = 0

    def base(self) -> dict[str, object]:
        self.asked += 1
        return {"driver": "raw", "file": {"driver": "file", "filename": str(self.raw)}}

    def read(self, file: Path | Passed) -> bytes:
        target = self.folder / "target"
        with source(file, self.folder, self.room, base=self.base) as content:
            convert(content, target, RAW, silently, self.room)
        return target.read_bytes()

    def test_it_is_read_over_what_the_agent_has_and_not_over_what_its_header_names(self) -> None:
        before = self.path.read_bytes()
        self.assertEqual(self.content, self.read(self.path))
        for trusted in (True, False):
            with opened(self.path) as fd:
                self.assertEqual(self.content, self.read(Passed(fd, self.path, trusted)))
        self.assertEqual((3, before), (self.asked, self.path.read_bytes()))

    def test_without_a_base_it_is_refused_with_what_to_say(self) -> None:
        self.refused(self.path, "backing-filename", "--parent")
        with opened(self.path) as fd:
            passed = Passed(fd, self.path, trusted=False)
            self.assertRaises(BadImageFile, source(passed, self.folder, self.room).__enter__)

    def test_what_stands_alone_needs_no_base(self) -> None:
        self.assertEqual([CONTENT, CONTENT], [self.read(self.raw), self.read(self.qcow2())])
        self.assertEqual(0, self.asked)

    def test_a_torn_one_is_refused_before_the_base_is_asked_for(self) -> None:
        with self.path.open("r+b") as file:
            file.truncate(self.path.stat().st_size // 2)
        error = self.assertRaises(BadImageFile, self.read, self.path)
        self.assertIn(str(self.path), str(error))
        self.assertEqual(0, self.asked)


def zstd(content: bytes) -> bytes:
    """Packed by the program, which is in Debian's package zstd."""
    return subprocess.run(["zstd", "--stdout"], input=content, capture_output=True, check=True).stdout


def skipped(content: bytes) -> bytes:
    """The same behind an empty frame."""
    return b"\x50\x2a\x4d\x18" + bytes(4) + zstd(content)


def tar(content: bytes) -> bytes:
    """In an archive of tar."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        member = tarfile.TarInfo("a disk within")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return whole.getvalue()


def zipped(content: bytes) -> bytes:
    """In an archive of its own."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("disk.img", content)
    return whole.getvalue()
