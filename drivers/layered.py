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
    Image,
    Opened,
    Parent,
    PathStatus,
    Range,
)
from drivers.blocks import open_blocks
from drivers.errors import DriverError, NotAttached
from drivers.host.locks import NamedLocks

log = logging.getLogger(__name__)

PIECE = 1 << 20
"""Bytes that ``fill`` reads at once."""


class LayeredSource:
    """All that a host has of images: it reads each from parents, keeps what it read, and serves it to children.

    An image whose content this host has as a whole is an *origin's*: it has no parents. The agent serialises calls for
    one image, except ``admit``, ``unsettled`` and calls that change nothing. ``step`` hears of each step, where the
    agent may be cut off.
    """

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
        """Images that may be read from another parent than their routes lead to."""

    @property
    def address(self) -> str:
        """What this host registers at Volt, as a URI; children compute an image's endpoint from it."""
        return self._export.address

    def reserve(self, image: str) -> None:
        """Make the endpoint exist now. Children may connect; their reads wait until ``ensure``."""
        self._export.reserve(image)

    def ensure(self, image: Image, parents: Sequence[Parent], *, fresh: bool = False) -> None:
        """Serve the image, and read misses from the first parent that lives; never wait for a parent's data.

        Asked again it changes nothing. ``fresh``: no connection to a host that is no parent is left when this returns.
        """
        base = self._attach.connect(image, parents)
        self._half_built.add(image.name)
        self._step("attach:connected")
        device = self._cache.open(image, base)
        self._step("attach:cached")
        self._publish(image, device, fresh=fresh)
        self._half_built.discard(image.name)

    def ensure_origin(self, image: Image, content: Path | Opened) -> None:
        """Serve the image from a file or block device of this host. Asked again it changes nothing."""
        self._publish(image, self._attach.origin(image, content), fresh=False)

    def _publish(self, image: Image, device: Device, *, fresh: bool) -> None:
        with self._admitting.hold(image.name):  # the disk is being shown to those who are there
            self._export.publish(image, device, replace=fresh)
        self._step("attach:published")

    def follow(self, image: Image, parents: Sequence[Parent], *, sure: bool) -> None:
        """Read from other parents. ``sure``: it is certain that the source reads from no host of an earlier list.

        No connection to a host that is no parent is left when this returns.
        """
        moved = self._attach.update(image, parents)
        if moved or not sure or image.name in self._half_built:
            log.info("image %s: dropping the old parents", image.name)
            self.ensure(image, parents, fresh=True)

    def unsettled(self, image: str) -> bool:
        """Whether ``ensure`` with the same parents would read from a better one now. May take seconds."""
        return self._attach.unsettled(image) or image in self._half_built

    def admit(self, image: str, revision: int, children: Sequence[Child], *, new: bool = False) -> None:
        """Let exactly these children read. Volt's words may arrive in any order: the highest revision counts.

        An image without an endpoint stays closed, unless ``new``: then the endpoint is being made, or Volt counts its
        revisions anew. Does not wait for calls that make or change the source.
        """
        with self._admitting.hold(image):
            known = self._admitted.get(image)
            later = new if known is None else revision > known or (new and revision == known)
            if later:
                self._export.allow(image, children)
                self._admitted[image] = revision

    def close(self, image: str) -> None:
        """Let no further children in until ``admit`` says ``new``."""
        with self._admitting.hold(image):
            self._admitted.pop(image, None)

    def drop(self, image: str, content: Image | None) -> None:
        """Stop serving and forget the parents; reads that wait end. What was kept stays for the next ``ensure``.

        ``content``: the image, if its size and digest are known and it is no origin's. Goes on after an error, and
        raises the first.
        """
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

    def device(self, image: Image) -> Device:
        """What VMs' disks of this host are made on: the same data that children get."""
        return self._export.local(image)

    def serving(self, image: str) -> bool:
        """Whether the image is being served at this moment."""
        return self._export.serving(image)

    def paths(self, image: str) -> Sequence[PathStatus]:
        """The routes to parents in their order; none of an origin, nor before ``ensure``. Asks no parent."""
        try:
            return self._attach.paths(image)
        except NotAttached:
            return []

    def hit_bytes(self, image: str) -> int | None:
        """See ``ExportDriver.hit_bytes``."""
        return self._export.hit_bytes(image)

    def held(self, image: Image) -> CacheStats:
        """What is kept of the image now (``CacheDriver.stats``)."""
        return self._cache.stats(image)

    def fill(self, image: Image, ranges: Sequence[Range]) -> None:
        """Have what these ranges hold kept here, read from parents where it is not."""
        with open_blocks(image.name, self._export.local(image)) as blocks:
            for wanted in ranges:
                for offset in range(wanted.offset, wanted.offset + wanted.length, PIECE):
                    blocks.read(offset, min(PIECE, wanted.offset + wanted.length - offset))

    def existing(self) -> frozenset[str]:
        """Names of images with anything of a source on the host."""
        return self._export.existing() | self._attach.existing()

    def kept(self) -> frozenset[str]:
        """Keys (``Image.key``) of images of which something is kept."""
        return self._cache.existing()

    def kept_size(self, key: str) -> int:
        """The bytes of disk space that ``forget`` would free."""
        return self._cache.size(key)

    def forget(self, key: str) -> int:
        """Delete what is kept under an image's key. Returns the bytes of disk space freed."""
        return self._cache.remove(key)
