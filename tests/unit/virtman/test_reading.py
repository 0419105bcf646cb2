"""Reading the whole of something for its digest."""

from __future__ import annotations

import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor

from testtools import TestCase

from drivers.digests import PIECE, PIECES, SHA256, Sum
from tests.unit.virtman.scene import folder_for
from virtman.errors import HostTrouble
from virtman.reading import NICE, Reader, Readers, digest_of

SOON = 60.0


class DigestTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.file = folder_for(self) / "file"
        self.content = os.urandom(PIECE + 512)
        self.file.write_bytes(self.content)

    def digest(self, size: int, reader: Reader, kind: str = SHA256) -> str | None:
        """Read by a thread of its own, since a thread that reads comes after all others from then on."""

        def act() -> str | None:
            with self.file.open("rb") as file:
                found = digest_of(file.fileno(), size, Sum(kind), reader)
            self.assertEqual(NICE, os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            return found

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(act).result()

    def test_it_is_of_the_whole(self) -> None:
        expected = hashlib.sha256(self.content).hexdigest()
        self.assertEqual(f"sha256:{expected}", self.digest(len(self.content), Reader()))
        pieces = [hashlib.sha256(part).digest() for part in (self.content[:PIECE], self.content[PIECE:])]
        expected = hashlib.sha256(b"".join(pieces)).hexdigest()
        self.assertEqual(f"pieces:{expected}", self.digest(len(self.content), Reader(), PIECES))

    def test_one_that_is_to_end_has_none(self) -> None:
        reader = Reader()
        reader.ending.set()
        self.assertIsNone(self.digest(len(self.content), reader))

    def test_what_ends_early_has_none(self) -> None:
        error = self.assertRaises(HostTrouble, self.digest, len(self.content) + 512, Reader())
        self.assertIn(f"ends after {len(self.content)} bytes", str(error))


class ReadersTest(TestCase):
    def test_who_ends_one_waits_until_it_has_ended(self) -> None:
        readers, begun, log = Readers(), threading.Event(), []

        def read() -> None:
            with readers.reading("img") as reader:
                begun.set()
                reader.ending.wait(SOON)
                log.append("ended")

        thread = threading.Thread(target=read)
        thread.start()
        begun.wait(SOON)
        self.assertEqual({"img"}, readers.names())
        readers.end("img")
        log.append("let go")
        thread.join()
        self.assertEqual((["ended", "let go"], frozenset()), (log, readers.names()))

    def test_at_the_end_all_end_and_all_who_come(self) -> None:
        readers = Readers()
        with readers.reading("one") as first:
            readers.close()
            self.assertTrue(first.ending.is_set())
        with readers.reading("two") as second:
            self.assertTrue(second.ending.is_set())
