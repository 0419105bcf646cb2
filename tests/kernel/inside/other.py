"""``other.py STATE VERB [WORD...]``: do one thing as an agent with this state folder would, in a guest.

The last line of the output is a JSON object: what came of it, or the kind of the error and its words.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drivers.attach.iscsi import IscsiAttach
from drivers.base import Child, Device, Image, Parent, Place
from drivers.cache.bcache import BcacheCache
from drivers.errors import DriverError
from drivers.export.lio import LioExport
from drivers.snapshot.dmthin import DmThinDisks

SIZE = 4 << 20
IP = "127.0.0.1"
IMAGE = Image("image", SIZE, f"sha256:{'0' * 64}")
NOBODY = Parent("gone", f"iscsi://{IP}:1")
STEP = 32 << 20


class Other:
    """The drivers of a host's kernel stack, over one state folder."""

    def __init__(self, state: Path) -> None:
        place = Place(state, state / "run", host="host", address=IP)
        self.snapshot = DmThinDisks(place, step=STEP)
        self.cache = BcacheCache(place, pool_size=1 << 30)
        self.export = LioExport(place, died=print)
        self.attach = IscsiAttach(place, lost=lambda _image, _parent: None)

    def hold(self) -> str:
        """Be there until the input ends."""
        print("ready", flush=True)  # noqa: T201
        sys.stdin.read()
        return "done"

    def create(self, vm: str, origin: str) -> str:
        return str(self.snapshot.create(vm, Device(SIZE, Path(origin)), SIZE).path)

    def open(self, vm: str) -> str:
        return str(self.snapshot.open(vm).path)

    def delete(self, vm: str) -> None:
        self.snapshot.delete(vm)

    def trouble(self) -> str:
        return self.snapshot.trouble()

    def existing(self) -> list[str]:
        """All that the drivers would have the agent remove if it knew nothing of it, but what is in files."""
        return sorted(name for driver in (self.snapshot, self.export, self.attach) for name in driver.existing())

    def publish(self, file: str) -> None:
        self.export.publish(IMAGE, Device(SIZE, Path(file)))
        self.export.allow(IMAGE.name, [Child("child", "secret")])

    def withdraw(self) -> None:
        self.export.withdraw(IMAGE.name)

    def allow(self) -> None:
        self.export.allow(IMAGE.name, [])

    def reserve(self) -> None:
        self.export.reserve(IMAGE.name)

    def connect(self) -> None:
        self.attach.connect(IMAGE, [NOBODY])

    def disconnect(self) -> None:
        self.attach.disconnect(IMAGE.name)


def main(state: str, verb: str, *words: str) -> None:
    """Do it, and end at once, as if killed: nothing is closed."""
    try:
        act: Callable[..., Any] = getattr(Other(Path(state)), verb)
        told: dict[str, Any] = {"result": act(*words)}
    except DriverError as error:
        told = {"error": type(error).__name__, "words": str(error)}
    print(json.dumps(told), flush=True)  # noqa: T201
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
