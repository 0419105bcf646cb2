"""``untarget IMAGE``: take an image's target away from the children of this host; its agent brings it back."""

from __future__ import annotations

import socket
import sys

import rtslib_fb

from drivers.iscsi.names import target_name


def main(image: str) -> None:
    """End the sessions and remove the target."""
    fabric = rtslib_fb.FabricModule("iscsi")
    rtslib_fb.Target(fabric, target_name(socket.gethostname(), image), "lookup").delete()


if __name__ == "__main__":
    main(*sys.argv[1:])
