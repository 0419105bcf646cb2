"""What this host keeps of images that it has no stack for: content that it published, and caches.

All of it stays until a person asks for gc, except what Volt says was withdrawn.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from drivers.base import ImageSource
from drivers.digests import digest_of, key_of
from drivers.errors import DriverError
from drivers.host.locks import NamedLocks
from virtman.errors import VirtmanError
from virtman.imagestore import ImageStore
from virtman.parallel import raise_all
from virtman.records import ImageRecord
from virtman.stacks import Stacks

log = logging.getLogger(__name__)

MOST_TOLD = 10000
"""Digests that Volt is told of at most."""


class Retained:
    """``publishing``: held by name while an image is being published."""

    def __init__(self, stacks: Stacks, store: ImageStore, source: ImageSource, publishing: NamedLocks) -> None:
        self._stacks = stacks
        self._store = store
        self._source = source
        self._publishing = publishing
        self.digests: tuple[str, ...] = ()
        """What is kept, as of the last look."""

    def look(self) -> None:
        """See what is kept. Raises DriverError."""
        self.digests = tuple(digest_of(key) for key in sorted(self.unused(self._stacks.records()))[:MOST_TOLD])

    def keys(self) -> set[str]:
        """Keys of all content and caches."""
        return {*self._source.kept(), *self._store.keys()}

    def unused(self, records: Collection[ImageRecord]) -> set[str]:
        """Keys of what none of these records refers to; nothing if there may be more records."""
        used = {record.digest for record in records if not record.leaving}
        return set() if self._stacks.troubles() else {key for key in self.keys() if digest_of(key) not in used}

    def size(self, key: str) -> int:
        """The bytes that ``remove`` would free."""
        content = 0 if self._publishing.held() else self._store.size(key)
        return content + self._source.kept_size(key)

    def remove(self, key: str, publishing: str = "") -> int:
        """Delete the content and cache of a key that no stack refers to, as far as known. Returns the bytes freed.

        The content stays while something else than ``publishing`` is being published, whose record is yet to come.
        Raises DriverError, HostTrouble.
        """
        with self._stacks.content:
            here = [record for record in self._stacks.records() if not record.leaving]
            if self._stacks.troubles() or any(record.digest == digest_of(key) for record in here):
                return 0
            content = 0 if self._publishing.held(but=publishing) else self._store.remove(key)
            return content + self._source.forget(key)

    def remove_all(self) -> tuple[int, list[Exception]]:
        """Delete the content and caches that no stack refers to. Returns the bytes freed, and what went wrong."""
        freed, failed = 0, list[Exception]()
        for key in sorted(self.keys()):
            try:
                freed += self.remove(key)
            except (VirtmanError, DriverError) as error:
                log.error("gc: %s", error)
                failed.append(error)
        return freed, failed

    def discard(self, digests: Collection[str]) -> None:
        """Delete what was withdrawn, if no stack refers to it by now. Raises RepairIncomplete with all errors."""
        failed = list[Exception]()
        for digest in sorted(digests):
            try:
                freed = self.remove(key_of(digest))
                log.info("%s was withdrawn: %d bytes of it deleted here", digest, freed)
            except (VirtmanError, DriverError) as error:
                failed.append(error)
        self.look()
        raise_all(failed)
