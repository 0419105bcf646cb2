"""Reach parents over iSCSI: one session per parent (open-iscsi), and one multipath map per image.

The map exists before any parent is reached (drivers/attach/iscsimap.py). A thread per image keeps the paths in the map
equal to the parents that can be read (drivers/attach/iscsiroute.py).

Host and parent prove themselves to each other by CHAP (drivers/iscsi).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from drivers.attach.iscsimap import PREFIX, fail_reads
from drivers.attach.iscsimonitor import Monitor
from drivers.attach.iscsiroute import Host, Route
from drivers.base import Device, Image, LostParent, Opened, Parent, PathStatus, Place
from drivers.door import door
from drivers.errors import BadDisk, DriverError, NotAttached
from drivers.iscsi.names import image_of, initiator_name
from drivers.iscsi.sessions import known_targets, log_out, sessions
from drivers.kernel import devmapper, ownership
from drivers.names import checked
from drivers.needs import DEVICE_MAPPER, DMSETUP, MODPROBE, UDEVADM, Needs, Tool

log = logging.getLogger(__name__)

_SS = Tool("ss", "iproute2")

PATIENCE = 30.0
"""Seconds that a first parent has to make its own stack, before the others are logged in to; and for which a parent may
be away until its session begins anew, and Volt is told: most pauses of the network are shorter."""


@door
class IscsiAttach:
    """Maps ``virtman-attach-<image>``, read by the first usable parent or by all, as the path policy says."""

    needs = Needs(
        tools=(Tool("iscsiadm", "open-iscsi"), Tool("iscsid", "open-iscsi"), _SS, DMSETUP, MODPROBE, UDEVADM),
        modules=("iscsi_tcp", "dm_multipath", "dm_service_time", "dm_round_robin", "dm_queue_length", "tcp_diag"),
        nodes=(DEVICE_MAPPER,),
        root=True,
    )

    def __init__(self, place: Place, *, lost: LostParent, patience: float = PATIENCE) -> None:
        """``patience``: see PATIENCE."""
        ownership.claim(place.state)
        self._host = Host(initiator_name(place.host), place.path_policy, lost, patience, Monitor(PREFIX))
        self._routes = _Routes()

    def origin(self, image: Image, file: Path | Opened) -> Device:
        """The device of a host that has the whole image in ``file``. Raises BadDisk."""
        return Device(size=image.size, path=origin_file(image, file))

    def connect(self, image: Image, parents: Sequence[Parent]) -> Device:
        """Begin to log in to the parents. Reads of the map wait for the first of them; its path never changes.

        Raises NoParents, BadAddress, BadName, BadDisk, CommandFailed, ToolMissing.
        """
        route = self._routes.find(image.name)
        if route is None:
            route = self._routes.add(image.name, Route(image, parents, self._host))
            try:
                route.start()
            except BaseException:
                self._routes.drop(image.name)  # and its threads
                raise
        else:
            route.follow(parents)
        return Device(size=image.size, path=devmapper.map_path(route.map))

    def update(self, image: Image, parents: Sequence[Parent]) -> bool:
        """Follow a new list. False: parents that are not on it are out of the map when this returns.

        Raises NotAttached, NoParents, BadAddress, CommandFailed.
        """
        self._routes.of(image.name).follow(parents)
        return False

    def unsettled(self, image: str) -> bool:  # noqa: ARG002
        """Never: the image's own thread puts the map's paths in order."""
        return False

    def abandon(self, image: str) -> None:
        """Stop watching. Reads that wait fail, in the map or at a parent. Raises BadName, NotOurs, CommandFailed."""
        try:
            if (route := self._routes.find(image)) is not None:
                route.stop()
                self._fail(image)  # the route's threads may wait for reads
        finally:
            self._routes.drop(image)
        self._fail(image)

    @staticmethod
    def _fail(image: str) -> None:
        """Fail all reads of the image's map."""
        if not devmapper.exists(PREFIX + image):
            return
        fail_reads(PREFIX + image)
        # A parent that waits for its own parents answers pings but no reads. SCSI takes a minute to give up on it.
        for session in sessions(image).values():
            try:
                session.cut()
            except (DriverError, OSError) as error:
                log.debug("ending the connection to %s: %s", session.target, error)  # there may be none

    def disconnect(self, image: str) -> None:
        """Remove the map and all sessions and records of the image's parents. The map has no reader any more.

        Raises BadName, NotOurs, CommandFailed.
        """
        self.abandon(image)
        devmapper.remove(PREFIX + image)
        targets = {target for target in known_targets() if image_of(target.name) == image}
        if targets:
            with ThreadPoolExecutor(len(targets)) as pool:
                list(pool.map(log_out, targets))

    def paths(self, image: str) -> list[PathStatus]:
        """The routes in the order of the parents. Raises NotAttached."""
        return self._routes.of(image).statuses()

    def existing(self) -> frozenset[str]:
        """Images with a map, a session or a record. Raises CommandFailed, ToolMissing."""
        maps = {name.removeprefix(PREFIX) for name in devmapper.names(PREFIX)}
        others = {name.removeprefix(PREFIX) for name in devmapper.others(PREFIX)}
        reached = {image for target in known_targets() if (image := image_of(target.name)) is not None}
        return frozenset(maps | reached - others)

    def close(self) -> None:
        """Stop watching, but leave maps and sessions: the next driver object goes on with them."""
        self._routes.close()
        self._host.monitor.close()


class _Routes:
    """The routes by image, for several threads. Calls for one image come one after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_image: dict[str, Route] = {}

    def find(self, image: str) -> Route | None:
        """The route, if the image has one. Raises BadName."""
        with self._lock:
            return self._by_image.get(checked(image))

    def of(self, image: str) -> Route:
        """The route. Raises NotAttached, BadName."""
        route = self.find(image)
        if route is None:
            raise NotAttached(image)
        return route

    def add(self, image: str, route: Route) -> Route:
        with self._lock:
            self._by_image[image] = route
        return route

    def drop(self, image: str) -> None:
        """Close the route, if there is one, and forget it. Raises BadName."""
        with self._lock:
            route = self._by_image.pop(checked(image), None)
        if route is not None:
            route.close()

    def close(self) -> None:
        with self._lock:
            images = list(self._by_image)
        for image in images:
            self.drop(image)


def origin_file(image: Image, file: Path | Opened) -> Path:
    """Where a host has the whole image: a file or a block device. Raises BadDisk."""
    path = file.path if isinstance(file, Opened) else file
    if path.is_file() or path.is_block_device():
        with path.open("rb", buffering=0) as disk:
            if disk.seek(0, os.SEEK_END) == image.size:
                return path
    raise BadDisk(f"{path} is not a raw disk of {image.size} bytes")
