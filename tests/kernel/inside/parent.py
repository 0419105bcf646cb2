"""``parent.py serve|withdraw IP IMAGE [CHILD...]``: export an image of known content from this guest, in a guest."""

from __future__ import annotations

import random
import socket
import sys
from pathlib import Path

from drivers.base import Child, Device, Image, Place
from drivers.export.lio import LioExport
from tests.kernel.inside.iscsi_tools import SECRET

SIZE = 16 << 20
FOLDER = Path("/var/tmp/parent")


def content(name: str) -> bytes:
    """What every parent has under this name."""
    return random.Random(name).randbytes(SIZE)


def image(name: str) -> Image:
    """The image of that content."""
    return Image(name, SIZE, f"sha256:{random.Random(name).getrandbits(256):064x}")


def main(act: str, ip: str, name: str, *children: str) -> None:
    """Do it."""
    export = LioExport(Place(FOLDER, FOLDER, host=socket.gethostname(), address=ip), died=print)
    file = FOLDER / name
    if act == "serve":
        FOLDER.mkdir(exist_ok=True)
        file.write_bytes(content(name))
        export.publish(image(name), Device(SIZE, file))
        export.allow(name, [Child(child, SECRET) for child in children])
    else:
        export.withdraw(name)
        file.unlink(missing_ok=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
