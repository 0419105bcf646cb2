"""A Glance that has one image, which is a file, behind the client code of Nova and of Cinder."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHUNK = 64 << 10
"""What glanceclient hands on at a time."""


class Chunks:
    """The content of a file, counted when it is read. ``wrapped``: what Nova looks at to see that there is any."""

    def __init__(self, client: ImageFile) -> None:
        self._client = client
        self.wrapped = client.file

    def __iter__(self) -> Iterator[bytes]:
        with self._client.file.open("rb") as content:
            while chunk := content.read(CHUNK):
                self._client.count(len(chunk))
                yield chunk


class ImageFile:
    """In place of the wrappers around glanceclient: any image that is downloaded is this file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.sent = 0
        """Bytes so far, by all downloads."""
        self.downloads = 0
        self._lock = threading.Lock()

    def call(self, _context: Any, *what: Any, **_more: Any) -> Chunks:
        """One call, of which only that for an image's data is known: Nova also says a version before it."""
        if "data" not in what:
            raise NotImplementedError(f"{what} of Glance")
        with self._lock:
            self.downloads += 1
        return Chunks(self)

    def count(self, size: int) -> None:
        """So much has gone over the link."""
        with self._lock:
            self.sent += size


def metadata(image_id: str, file: Path, size: int) -> dict[str, Any]:
    """What Glance says of the image, as Nova and Cinder know it. ``size`` in bytes, of the disk in it."""
    return {
        "id": image_id, "name": "image", "status": "active", "size": file.stat().st_size, "virtual_size": size,
        "disk_format": "qcow2", "container_format": "bare", "min_disk": 0, "min_ram": 0, "checksum": None,
        "is_public": True, "visibility": "public", "deleted": False, "protected": False, "tags": [], "properties": {},
    }  # fmt: skip
