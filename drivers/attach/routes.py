"""What attach drivers have in common: the disk of an origin, and the routes to parents that a driver watches."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from drivers.base import Image, Opened
from drivers.errors import BadDisk, NotAttached
from drivers.names import checked


class Route(Protocol):
    """One image's way to its parents, with the threads that keep it up to date."""

    def close(self) -> None:
        """Stop the threads, and leave what the host reads by."""


R = TypeVar("R", bound=Route)


class Routes(Generic[R]):
    """A driver's routes by image, for several threads. Calls for one image come one after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_image: dict[str, R] = {}

    def find(self, image: str) -> R | None:
        """The route, if the image has one. Raises BadName."""
        with self._lock:
            return self._by_image.get(checked(image))

    def of(self, image: str) -> R:
        """The route. Raises NotAttached, BadName."""
        route = self.find(image)
        if route is None:
            raise NotAttached(image)
        return route

    def add(self, image: str, route: R) -> R:
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
