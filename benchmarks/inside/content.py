"""``content FILE BLOCKS``: an image in which no two blocks are alike, and whose every byte can be told at any time."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

BLOCK = 16 << 10
_SAME = 4  # a block is a page four times: making and comparing it has to be cheap under emulation


def block(number: int) -> bytes:
    """What the image holds there."""
    return hashlib.shake_128(number.to_bytes(8, "little")).digest(BLOCK // _SAME) * _SAME


def main(file: str, blocks: str) -> None:
    """Write the image."""
    with Path(file).open("wb") as image:
        for number in range(int(blocks)):
            image.write(block(number))


if __name__ == "__main__":
    main(*sys.argv[1:])
