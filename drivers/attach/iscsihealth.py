"""When a parent that does not answer reads is left.

One rule: no read of the parent's disk has come back for ``STALL`` seconds (drivers/attach/iscsimonitor.py), and another
parent answers one. Then the connection is ended, and the parent comes last for a minute. A parent in quarantine is no
reason to leave another: all may wait for the same range, as when the origin hangs. If no other parent answers, the
network may pause, and nothing is better: the connection stays, until open-iscsi makes a new one after a long silence.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from pathlib import Path

from drivers.attach.iscsimonitor import Monitor
from drivers.attach.quarantine import Quarantine
from drivers.base import Image
from drivers.errors import DriverError
from drivers.iscsi.disks import first_that_answers, readable_number_of
from drivers.iscsi.records import Target
from drivers.iscsi.sessions import sessions

log = logging.getLogger(__name__)


class HealthCheck:
    """Checks the parents of one image. ``parents`` are on the list; ``disks`` are those of all its sessions."""

    def __init__(self, image: Image, monitor: Monitor, quarantine: Quarantine[Target]) -> None:
        self._image, self._monitor, self._quarantine = image, monitor, quarantine
        self.parents: Set[Target] = frozenset()
        self.disks: Mapping[str, Target] = {}

    def check(self, target: Target) -> None:
        """Leave a stalled parent if another answers a read. Repeat this while the parent is stalled. Raises OSError."""
        if target not in self.parents:
            self._leave(target, "is not on the list any more")  # another table for the map waits for its reads
            return
        better = first_that_answers(self._others(target))
        if better is not None and self._is_stalled(target):
            self._quarantine.add(target)
            self._leave(target, f"{better} does")

    def _is_stalled(self, target: Target) -> bool:
        return any(self._monitor.is_stalled(number) for number, other in self.disks.items() if other == target)

    def _others(self, target: Target) -> dict[Target, Path]:
        """The disks of the other parents for which a parent may be left, whether they are in the map or not."""
        found = {}
        for other, session in sessions(self._image.name).items():
            known = other in self.parents and other != target and not self._quarantine.holds(other)
            if known and not self._is_stalled(other) and readable_number_of(session, self._image) is not None:
                found[other] = session.disk()
        return {other: disk for other, disk in found.items() if disk is not None}

    def _leave(self, target: Target, why: str) -> None:
        """End the connection: the map sends the reads by another path at once."""
        log.warning("image %s: %s does not answer reads, and %s", self._image.name, target, why)
        try:
            if (session := sessions(self._image.name).get(target)) is not None:
                session.cut()
        except (DriverError, OSError) as error:
            log.warning("image %s: ending the connection to %s: %s", self._image.name, target, error)
