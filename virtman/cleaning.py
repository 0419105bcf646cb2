"""Removes the stacks and the data of this host that nobody needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from drivers.host.locks import NamedLocks
from virtman import models
from virtman.parallel import raise_all, side_by_side
from virtman.records import ImageRecord, Role
from virtman.retained import Retained
from virtman.stacks import Stacks
from virtman.voltlink import VoltLink


class Cleaning:
    """``publishing``: held by name while an image is being published."""

    def __init__(self, stacks: Stacks, retained: Retained, volt: VoltLink, publishing: NamedLocks) -> None:
        self._stacks, self._retained, self._volt, self._publishing = stacks, retained, volt, publishing

    def gc(self) -> models.Removed:
        """Remove the stacks and the cached and published data that nobody needs. Raises CoordinatorDown."""
        records = self._stacks.records()
        unlisted, kept = self._unlisted_origins(records)
        removed: list[str] = []

        def remove(name: str, act: Callable[[str], bool]) -> None:
            removed.extend([name] if act(name) else [])

        failed = side_by_side(
            [
                *(partial(remove, record.name, self._stacks.remove_if_idle) for record in records),
                *(partial(remove, record.name, self._drop_unlisted) for record in unlisted),
            ]
        )
        freed, more = self._retained.remove_all()
        raise_all([*failed, *more])
        return models.Removed(stacks=sorted(removed), freed_bytes=freed, kept=kept)

    def _drop_unlisted(self, name: str) -> bool:
        """Stop serving an image that Volt does not list as this host's: whoever publishes it again meanwhile asks Volt
        before or after that, and not in between.
        """
        with self._publishing.hold(name):
            return not self._volt.lists_origin(name) and self._stacks.drop_origin(name)

    def would_remove(self) -> models.Removed:
        """What ``gc`` would remove now, and nothing changes. Raises CoordinatorDown."""
        records = self._stacks.records()
        going = {record.name for record in records if self._stacks.idle(record)}
        unlisted, kept = self._unlisted_origins(records)
        going |= {record.name for record in unlisted if not self._stacks.needed(record)}
        unused = self._retained.unused([record for record in records if record.name not in going])
        freed = sum(self._retained.size(key) for key in unused)
        return models.Removed(stacks=sorted(going), freed_bytes=freed, kept=kept)

    def _unlisted_origins(self, records: list[ImageRecord]) -> tuple[list[ImageRecord], list[str]]:
        """Images that this host published and Volt does not list as its own any more; and the names of those among them
        that are kept: other hosts read them when Volt was heard last, and its database may have been set back since.

        Raises CoordinatorDown.
        """
        listed = self._volt.origins_here()
        origins = [record for record in records if record.role is Role.ORIGIN and record.steady]
        unlisted = [record for record in origins if record.name not in listed]
        return [record for record in unlisted if not record.children], [r.name for r in unlisted if r.children]
