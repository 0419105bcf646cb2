"""Digests and the keys made of them."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from testtools import TestCase

from drivers import digests
from drivers.base import Image
from drivers.cache.cachefiles import file_of, key_of, label
from tests.unit.virtman.scene import folder_for

DIGITS = st.text("0123456789abcdef", min_size=64, max_size=64)
KINDS = (digests.BLAKE3, digests.SHA256, digests.PIECES, digests.DRAWN)
DIGESTS = st.tuples(st.sampled_from(KINDS), DIGITS).map("".join)


class DigestsTest(TestCase):
    @given(DIGESTS)
    def test_a_key_leads_back_to_its_digest(self, digest: str) -> None:
        self.assertTrue(re.match(digests.PATTERN, digest))
        key = digests.key_of(digest)
        self.assertEqual(digest, digests.digest_of(key))
        self.assertTrue(re.fullmatch(f"[0-9a-z]{{1,{digests.LONGEST_KEY}}}", key))

    @given(DIGESTS, DIGESTS)
    def test_no_two_digests_have_one_key(self, one: str, other: str) -> None:
        self.assertEqual(one == other, digests.key_of(one) == digests.key_of(other))

    def test_what_is_drawn_is_always_something_else(self) -> None:
        drawn = {digests.draw() for _ in range(9)}
        self.assertEqual(9, len(drawn))
        self.assertEqual([], [digest for digest in drawn if not re.match(digests.PATTERN, digest)])

    def test_only_names_of_chunks_prove_chunks(self) -> None:
        self.assertEqual([digests.BLAKE3], [kind for kind in KINDS if digests.proves_chunks(kind + "1" * 64)])

    def test_caches_have_files_and_maps_of_all_kinds(self) -> None:
        folder = folder_for(self)
        images = [Image("debian", 512, f"{kind}:{'1' * 64}") for kind in ("blake3-64k", "sha256", "id")]
        self.assertEqual(3, len({label(image) for image in images}))
        for image in images:
            file = file_of(folder, image, "qcow2")
            file.touch()
            self.assertEqual(image.key, key_of(file))
