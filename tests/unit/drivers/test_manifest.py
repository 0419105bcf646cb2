"""Manifests of images."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from blake3 import blake3
from testtools import TestCase
from testtools.matchers import LessThan

from drivers import manifest
from drivers.digests import PIECE, ZEROS, key_of
from drivers.manifest import CHUNK, NAME, PAGE, Missing, Reader, length_of, names_of, page_offset, path_of, writing
from tests.unit.virtman.scene import folder_for

SIZE = 4097 * CHUNK - 512
"""That of chunkd/src/manifest.rs: the last chunk is short, and has a page of its own."""
NO_NAME = bytes(NAME)


def hash_of(data: bytes) -> bytes:
    return blake3(data).digest()


class NamesTest(TestCase):
    def test_a_chunk_is_named_by_its_hash_and_one_of_zeros_by_zeros(self) -> None:
        data, almost = os.urandom(CHUNK), bytes(CHUNK - 1) + b"x"
        self.assertEqual(hash_of(data) + NO_NAME + hash_of(almost), names_of(data + bytes(CHUNK) + almost))

    def test_the_last_chunk_is_filled_up(self) -> None:
        self.assertEqual(NO_NAME + hash_of(b"end".ljust(CHUNK, b"\0")), names_of(bytes(CHUNK) + b"end"))
        self.assertEqual(NO_NAME, names_of(bytes(512)))

    def test_a_piece_of_zeros_has_the_same_names_as_the_piece_that_costs_nothing(self) -> None:
        self.assertEqual(names_of(bytes(PIECE)), names_of(ZEROS))


class ManifestCase(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.state = folder_for(self)
        self.folder = self.state / manifest.FOLDER
        self.folder.mkdir()

    def written(self, content: bytes) -> Path:
        """The manifest of some content."""
        with writing(self.state, len(content)) as writer:
            for at in range(0, len(content), PIECE):
                writer.add(content[at : at + PIECE])
            digest = writer.digest()
            writer.keep()
        return path_of(self.state, key_of(digest))


class ReaderTest(ManifestCase):
    def setUp(self) -> None:
        """A manifest whose second page has one name."""
        super().setUp()
        self.names = [number.to_bytes(NAME) for number in range(PAGE + 1)]
        self.patch(manifest, "names_of", lambda piece: piece)
        with writing(self.state, SIZE) as writer:
            for at in range(0, len(self.names), PIECE // CHUNK):
                writer.add(b"".join(self.names[at : at + PIECE // CHUNK]))
            self.digest = writer.digest()
            writer.keep()
        self.file = path_of(self.state, key_of(self.digest))

    def open(self, digest: str = "", size: int = SIZE) -> Reader:
        reader = Reader(self.state, digest or self.digest, size)
        self.addCleanup(reader.__exit__)
        return reader

    def test_it_reads_what_was_written(self) -> None:
        reader = self.open()
        self.assertEqual([self.names[:PAGE], self.names[PAGE:]], [reader.names(page) for page in (0, 1)])
        pages = [b"".join(self.names[:PAGE]), self.names[PAGE]]
        self.assertEqual([hash_of(page) for page in pages], reader.pages)

    def test_a_page_that_was_not_fetched_or_is_torn_is_missing(self) -> None:
        whole = self.file.read_bytes()
        for at, content in ((page_offset(SIZE, 1), bytes(NAME)), (page_offset(SIZE, 1), b"x")):
            self.file.write_bytes(whole[:at] + content + whole[at + len(content) :])
            reader = self.open()
            self.assertEqual(PAGE, len(reader.names(0)))
            self.assertRaises(Missing, reader.names, 1)
        self.file.write_bytes(whole[: page_offset(SIZE, 1)])
        self.assertRaises(Missing, self.open().names, 1)

    def test_without_the_list_of_pages_all_is_missing(self) -> None:
        with self.file.open("r+b") as file:
            file.write(bytes(2 * NAME))
        self.assertRaises(Missing, self.open)

    def test_an_image_without_a_manifest_or_of_another_kind(self) -> None:
        self.assertRaises(Missing, self.open, size=SIZE + 512)
        for kind in ("blake3-64k:", "sha256:"):
            self.assertRaises(Missing, self.open, kind + 64 * "0")


class WriterTest(ManifestCase):
    def test_the_layout_is_that_of_the_chunk_store(self) -> None:
        self.assertEqual((4096, 135_168), (page_offset(SIZE, 0), page_offset(SIZE, 1)))
        self.assertEqual((135_680, 4096 + 512), (length_of(SIZE), length_of(512)))

    def test_the_digest_is_that_of_other_languages(self) -> None:
        """chunkd/src/manifest.rs has the same."""
        chunks = [bytes(4) if number == 7 else number.to_bytes(4, "little") for number in range(PAGE + 1)]
        names = [hash_of(chunk) if any(chunk) else NO_NAME for chunk in chunks]
        self.patch(manifest, "names_of", lambda piece: piece)
        with writing(self.state, SIZE) as writer:
            for at in range(0, len(names), PIECE // CHUNK):
                writer.add(b"".join(names[at : at + PIECE // CHUNK]))
            digest = writer.digest()
            writer.keep()
        self.assertEqual("blake3-64k:3d6e4ea0ba9573576987f60647192390ef392fd1ee7c9064697bd5fdaeae4b6f", digest)
        file = path_of(self.state, key_of(digest)).read_bytes()
        pages = [b"".join(names[:PAGE]), names[PAGE]]
        self.assertEqual(b"".join(map(hash_of, pages)).ljust(4096, b"\0") + pages[0] + pages[1].ljust(512, b"\0"), file)

    def test_the_file_has_the_names_in_their_places_and_is_for_its_owner(self) -> None:
        content = os.urandom(CHUNK) + bytes(CHUNK) + b"end".ljust(512, b".")
        file = self.written(content)
        names = names_of(content)
        self.assertEqual(hash_of(names).ljust(4096, b"\0") + names.ljust(512, b"\0"), file.read_bytes())
        digest = hash_of(len(content).to_bytes(8, "little") + hash_of(names)).hex()
        self.assertEqual(key_of(f"blake3-64k:{digest}"), file.name)
        self.assertEqual(0o600, stat.S_IMODE(file.stat().st_mode))

    def test_holes_have_holes_in_the_manifest(self) -> None:
        size = 64 << 30
        with writing(self.state, size) as writer:
            for _ in range(size // PIECE):
                writer.add(ZEROS)
            file = path_of(self.state, key_of(writer.digest()))
            writer.keep()
        self.assertEqual(length_of(size), file.stat().st_size)
        self.assertThat(file.stat().st_blocks * 512, LessThan(1 << 17))

    def test_what_is_not_kept_leaves_nothing(self) -> None:
        with writing(self.state, 512) as writer:
            writer.add(bytes(512))
            writer.digest()
        self.assertEqual([], list(self.folder.iterdir()))

    def test_it_is_written_in_the_place_of_the_one_that_was_there(self) -> None:
        content = os.urandom(512)
        file = self.written(content)
        whole = file.read_bytes()
        file.write_bytes(b"torn")
        self.assertEqual((file, whole), (self.written(content), file.read_bytes()))
        self.assertEqual([file], list(self.folder.iterdir()))
