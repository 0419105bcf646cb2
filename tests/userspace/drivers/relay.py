"""A HAProxy between two hosts that counts the bytes on the wire."""

from __future__ import annotations

import csv
import socket
import subprocess
from pathlib import Path

from drivers.base import Image, Parent
from drivers.nbd.probe import listens
from tests.userspace.drivers.hosts import Host, until

CONFIG = """
global
  stats socket {folder}/stats
defaults
  mode tcp
  timeout connect 1s
  timeout client 1h
  timeout server 1h
frontend child
  bind unix@{folder}/{image}.sock
  default_backend parent
backend parent
  server host unix@{socket}
"""


class Relay:
    """Stands for ``host`` as a parent; ends with ``close``."""

    def __init__(self, folder: Path, image: Image, host: Host) -> None:
        folder.mkdir()
        self._folder, self._host = folder, host
        config = folder / "cfg"
        config.write_text(CONFIG.format(folder=folder, image=image.name, socket=host.socket(image)))
        self._process = subprocess.Popen(["haproxy", "-db", "-q", "-f", config])
        until(lambda: listens(folder / f"{image.name}.sock"))

    @property
    def parent(self) -> Parent:
        """What a child is told to read from."""
        return Parent(self._host.name, f"unix://{self._folder}")

    def sent(self) -> int:
        """Bytes that went from the host to its children, on connections that have ended."""
        return int(self._frontend()["bout"])

    def until_idle(self) -> None:
        """Wait until no connection is left."""
        until(lambda: self._frontend()["scur"] == "0")

    def _frontend(self) -> dict[str, str]:
        with socket.socket(socket.AF_UNIX) as stats:
            stats.connect(str(self._folder / "stats"))
            stats.sendall(b"show stat child 1 -1\n")
            with stats.makefile() as answer:
                (row,) = csv.DictReader(line.removeprefix("# ") for line in answer if line.strip())
        return row

    def close(self) -> None:
        """End the HAProxy."""
        self._process.terminate()
        self._process.wait()
