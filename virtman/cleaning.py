"""Removes the stacks and the data of this host that nobody needs.

Content and caches without a stack stay until a person asks for gc, except of images that Volt says were withdrawn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from functools import partial

from drivers.digests import digest_of, key_of, proves_chunks
from drivers.errors import DriverError
from virtman import models
from virtman.errors import VirtmanError
from virtman.hosting import remove_if_idle
from virtman.origins import drop_origin
from virtman.parallel import raise_all, side_by_side
from virtman.records import ImageRecord, Role
from virtman.stacks import Stacks

log = logging.getLogger(__name__)


def gc(stacks: Stacks) -> models.Removed:
    """Remove the stacks and the cached and published data that nobody needs. Raises CoordinatorDown."""
    records = stacks.records.all()
    unlisted, kept = _unlisted_origins(stacks, records)
    removed: list[str] = []

    def remove(act: Callable[[Stacks, str], bool], name: str) -> None:
        removed.extend([name] if act(stacks, name) else [])

    failed = side_by_side(
        [
            *(partial(remove, remove_if_idle, record.name) for record in records),
            *(partial(remove, _drop_unlisted, record.name) for record in unlisted),
        ]
    )
    freed, more = _remove_all(stacks, kept_keys(stacks))
    raise_all([*failed, *more])
    return models.Removed(stacks=sorted(removed), freed_bytes=freed, kept=kept)


def would_remove(stacks: Stacks) -> models.Removed:
    """What ``gc`` would remove now; nothing changes. Raises CoordinatorDown."""
    records = stacks.records.all()
    unlisted, kept = _unlisted_origins(stacks, records)
    going = {record.name for record in records if stacks.idle(record)}
    going |= {record.name for record in unlisted if not stacks.needed(record)}
    unused = unreferenced(stacks, [record for record in records if record.name not in going], kept_keys(stacks))
    freed = sum(_size(stacks, key) for key in unused)
    return models.Removed(stacks=sorted(going), freed_bytes=freed, kept=kept)


def _drop_unlisted(stacks: Stacks, name: str) -> bool:
    """Stop serving an image that Volt does not list as this host's.

    Whoever publishes the image again meanwhile asks Volt before or after that, and not in between.
    """
    with stacks.store.publishing.hold(name):
        return name not in stacks.volt.origins_here() and drop_origin(stacks, name)


def _unlisted_origins(stacks: Stacks, records: list[ImageRecord]) -> tuple[list[ImageRecord], list[str]]:
    """Images that this host published and Volt does not list as this host's own any more.

    Also the names of those that are kept: other hosts read them when Volt was heard last, and Volt's database may have
    been set back since. Raises CoordinatorDown.
    """
    listed = stacks.volt.origins_here()
    origins = [record for record in records if record.role is Role.ORIGIN and record.steady]
    unlisted = [record for record in origins if record.name not in listed]
    return [record for record in unlisted if not record.children], [r.name for r in unlisted if r.children]


# Content, manifests and caches, by key (``Image.key``)


def kept_keys(stacks: Stacks) -> set[str]:
    """Keys of all content, manifests and caches of this host. Raises DriverError, HostTrouble."""
    return {*stacks.source.kept(), *stacks.store.keys()}


def unreferenced(stacks: Stacks, records: Collection[ImageRecord], keys: Iterable[str]) -> set[str]:
    """Those of the keys that none of these records refers to; none of them if there are unreadable records."""
    used = {digest for record in records if not record.leaving for digest in record.digests}
    return set() if stacks.records.unreadable() else {key for key in keys if digest_of(key) not in used}


def _size(stacks: Stacks, key: str) -> int:
    """The bytes that ``remove`` would free."""
    held = stacks.store.publishing.held()
    if held and proves_chunks(digest_of(key)):
        return 0
    return stacks.source.kept_size(key) + (0 if held else stacks.store.size(key))


def remove(stacks: Stacks, key: str, publishing: str = "") -> int:
    """Delete the content, manifest and cache of a key, unless a stack refers to the key or may do so.

    The content stays while an image other than ``publishing`` is being published, whose record is yet to come. So
    does a cache with a manifest, which may be that of the content. Returns the bytes freed. Raises DriverError,
    HostTrouble.
    """
    with stacks.store.lock:
        if not unreferenced(stacks, stacks.records.all(), [key]):
            return 0
        held = stacks.store.publishing.held(but=publishing)
        if held and proves_chunks(digest_of(key)):
            return 0
        freed = stacks.source.forget(key)  # first: the manifest tells what the cache has of the image
        return freed + (0 if held else stacks.store.remove(key))


def discard(stacks: Stacks, digests: Collection[str]) -> None:
    """Delete the data of images that were withdrawn. Raises VirtmanError with all errors."""
    _, failed = _remove_all(stacks, map(key_of, digests))
    raise_all(failed)


def _remove_all(stacks: Stacks, keys: Iterable[str]) -> tuple[int, list[Exception]]:
    """Delete the data of these keys that no stack refers to. Returns the bytes freed, and what went wrong."""
    freed, failed = 0, list[Exception]()
    for key in sorted(keys):
        try:
            freed += remove(stacks, key)
        except (VirtmanError, DriverError) as error:
            log.error("removing the data of %s: %s", digest_of(key), error)
            failed.append(error)
    return freed, failed
