"""What an image shares with its parent."""

from __future__ import annotations

from testtools import TestCase

from drivers.base import Image
from drivers.digests import key_of
from drivers.host.space import Room
from drivers.manifest import CHUNK, NAME_OF_ZEROS, PAGE, Reader, page_offset, path_of
from tests.doubles.volt import digest_of
from tests.unit.virtman.scene import folder_for
from virtman.imagestore import ImageStore
from virtman.sharing import Amounts, amounts

ZEROS = bytes(CHUNK)


def chunk(number: int) -> bytes:
    return bytes([number]) * CHUNK


class SharingTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.state = folder_for(self)
        self.store = ImageStore(self.state, Room(self.state))

    def image(self, *chunks: bytes) -> Image:
        """An image whose manifest is here."""
        content = b"".join(chunks)
        with self.store.adding_up("blake3-64k:", len(content)) as total:
            for at in range(0, len(content), 4 << 20):
                total.add(content[at : at + (4 << 20)])
            image = Image("image", len(content), total.digest())
            total.keep()
        return image

    def amounts(self, image: Image, parent: Image | None = None) -> tuple[int | None, ...]:
        """In chunks."""
        found = amounts(self.state, image, parent)
        return tuple(each if each is None else each // CHUNK for each in (found.data, found.own, found.shared))

    def test_chunks_are_shared_wherever_the_parent_has_them_and_zeros_count_as_nothing(self) -> None:
        parent = self.image(chunk(1), ZEROS, chunk(2), chunk(3))
        self.assertEqual((3, None, None), self.amounts(parent))
        child = self.image(chunk(1), chunk(3), chunk(4), ZEROS, chunk(4), chunk(2), b"end".ljust(512, b"."))
        self.assertEqual((6, 3, 3), self.amounts(child, parent))
        self.assertEqual((3, 0, 3), self.amounts(parent, child))
        self.assertEqual((3, 0, 3), self.amounts(parent, parent))

    def test_a_page_that_is_the_parents_is_shared_as_a_whole_and_other_pages_by_chunks(self) -> None:
        page = [chunk(1), *[ZEROS] * (PAGE - 1)]
        parent, child = self.image(*page, chunk(2)), self.image(*page, chunk(2), chunk(3))
        self.assertEqual((3, 1, 2), self.amounts(child, parent))

    def test_what_is_not_here_is_unknown(self) -> None:
        child, elsewhere = self.image(chunk(1)), Image("image", CHUNK, digest_of("elsewhere"))
        self.assertEqual((1, None, None), self.amounts(child, elsewhere))
        self.assertEqual(Amounts(), amounts(self.state, elsewhere, child))

    def test_an_image_of_which_some_pages_are_here_is_unknown(self) -> None:
        child = self.image(*[ZEROS] * PAGE, chunk(1))
        with path_of(self.state, key_of(child.digest)).open("r+b") as file:
            file.seek(page_offset(child.size, 1))
            file.write(NAME_OF_ZEROS)
        with Reader(self.state, child.digest, child.size) as reader:
            self.assertEqual({NAME_OF_ZEROS}, set(reader.names(0)))
        self.assertEqual((None, None, None), self.amounts(child))
