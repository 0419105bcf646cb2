"""An image source of three layers: a driver that reaches parents, one that keeps what was read, one that serves.

A stack whose parents are gone ends in seconds, in this order. Reads that wait at the parents fail, and then their
connections end: else a parent that waits for its own parents would keep them. Then the export goes, whose commands have
ended, and at last the cache and the parents' map. VMs' reads wait in a map of their own meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from drivers.base import (
    AttachDriver,
    CacheDriver,
    CacheStats,
    Child,
    Device,
    ExportDriver,
    Filled,
    Image,
    Opened,
    Parent,
    PathStatus,
    Range,
    Taken,
)
from drivers.blocks import open_blocks
from drivers.errors import DriverError, NotAttached, NotPossible
from drivers.host.locks import NamedLocks

log = logging.getLogger(__name__)

PIECE = 1 << 20
"""Bytes that ``fill`` reads at once."""


class LayeredSource:
    """Its calls: see ``ImageSource``. ``step`` hears of each step, where the agent may be cut off."""

    fills = False

    def __init__(
        self, attach: AttachDriver, cache: CacheDriver, export: ExportDriver,
        step: Callable[[str], None] = lambda _step: None,
    ) -> None:  # fmt: skip
        self._attach, self._cache, self._export, self._step = attach, cache, export, step
        self._admitting = NamedLocks()
        """By image. A stack takes seconds to make, and children that Volt names meanwhile do not wait for it: they log
        in, and find the disk when it is there.
        """
        self._admitted: dict[str, int] = {}
        """The revision of Volt's word that says who may read, by image; an image without one is closed."""
        self._half_built: set[str] = set()
        """Images whose building was cut off: the export may still read from an earlier parent."""

    @property
    def address(self) -> str:
        return self._export.address

    def reserve(self, image: str) -> None:
        self._export.reserve(image)

    def ensure(self, image: Image, parents: Sequence[Parent], *, fresh: bool = False) -> None:
        base = self._attach.connect(image, parents)
        self._half_built.add(image.name)
        self._step("attach:connected")
        device = self._cache.open(image, base)
        self._step("attach:cached")
        self._publish(image, device, fresh=fresh)
        self._half_built.discard(image.name)

    def ensure_origin(self, image: Image, content: Path | Opened) -> None:
        self._publish(image, self._attach.origin(image, content), fresh=False)

    def _publish(self, image: Image, device: Device, *, fresh: bool) -> None:
        with self._admitting.hold(image.name):  # the disk is being shown to those who are there
            self._export.publish(image, device, replace=fresh)
        self._step("attach:published")

    def follow(self, image: Image, parents: Sequence[Parent], *, sure: bool) -> None:
        moved = self._attach.update(image, parents)
        if moved or not sure or image.name in self._half_built:
            log.info("image %s: dropping the old parents", image.name)
            self.ensure(image, parents, fresh=True)

    def unsettled(self, image: str) -> bool:
        return self._attach.unsettled(image) or image in self._half_built

    def admit(
        self,
        image: str,
        revision: int,
        children: Sequence[Child],
        *,
        serving_key: str = "",  # noqa: ARG002
        new: bool = False,
    ) -> None:
        """These drivers name each child to their target; they need no ``serving_key``."""
        with self._admitting.hold(image):
            known = self._admitted.get(image)
            later = new if known is None else revision > known or (new and revision == known)
            if later:
                self._export.allow(image, children)
                self._admitted[image] = revision

    def close(self, image: str) -> None:
        with self._admitting.hold(image):
            self._admitted.pop(image, None)

    def drop(self, image: str, content: Image | None) -> None:
        self.close(image)
        acts: list[Callable[[], None]] = [
            lambda: self._attach.abandon(image),
            lambda: self._export.withdraw(image),
            lambda: self._attach.disconnect(image),
        ]
        if content is not None:
            acts.insert(2, lambda: self._cache.close(content))
        errors = []
        for act in acts:
            try:
                act()
            except DriverError as error:
                log.error("image %s: while removing its stack: %s", image, error)
                errors.append(error)
            self._step("detach:layer")
        self._half_built.discard(image)
        if errors:
            raise errors[0]

    def device(self, image: Image, *, of_vm: bool = True) -> Device:  # noqa: ARG002
        return self._export.local(image)

    def serving(self, image: str) -> bool:
        return self._export.serving(image)

    def paths(self, image: str) -> Sequence[PathStatus]:
        try:
            return self._attach.paths(image)
        except NotAttached:
            return []

    def hit_bytes(self, image: str) -> int | None:
        return self._export.hit_bytes(image)

    def held(self, image: Image) -> CacheStats:
        return self._cache.stats(image)

    def fill(
        self, image: Image, ranges: Sequence[Range], *, idle: bool = False, rate: int | None = None  # noqa: ARG002
    ) -> None:  # fmt: skip
        with open_blocks(image.name, self._export.local(image)) as blocks:
            for wanted in ranges:
                for offset in range(wanted.offset, wanted.offset + wanted.length, PIECE):
                    blocks.read(offset, min(PIECE, wanted.offset + wanted.length - offset))

    def filled(self, image: str) -> Filled:  # noqa: ARG002
        return Filled()

    def lacking(self, image: Image) -> Sequence[Range]:
        raise NotPossible(f"image {image.name}: this cache does not tell what it lacks")

    def put(self, image: Image, ranges: Sequence[Range], file: int) -> Taken:  # noqa: ARG002
        raise NotPossible(f"image {image.name}: this cache takes nothing but from parents")

    def get(self, image: Image, ranges: Sequence[Range], file: int) -> None:  # noqa: ARG002
        raise NotPossible(f"image {image.name}: this cache gives nothing but to children and disks")

    def pin(self, image: Image, until: float) -> None:  # noqa: ARG002
        raise NotPossible(f"image {image.name}: this cache cannot promise to keep it")

    def boot_set(self, image: str) -> Sequence[Range] | None:  # noqa: ARG002
        """Nobody records it."""
        return None

    def stop(self) -> None:
        """Nothing runs without an image."""

    def existing(self) -> frozenset[str]:
        return self._export.existing() | self._attach.existing()

    def kept(self) -> frozenset[str]:
        return self._cache.existing()

    def kept_size(self, key: str) -> int:
        return self._cache.size(key)

    def forget(self, key: str) -> int:
        return self._cache.remove(key)
