"""A HAProxy between two hosts that counts the bytes on the wire, in each connection from its beginning to its end."""

from __future__ import annotations

import csv
import socket
import subprocess
from pathlib import Path

from drivers.base import Image, Parent
from drivers.nbd.probe import listens
from tests.patience import wait_until
from tests.userspace.drivers.hosts import Host

CONFIG = """
global
  stats socket {folder}/stats
  log stdout format raw local0
defaults
  mode tcp
  timeout connect 1s
  timeout client 1h
  timeout server 1h
  log global
  log-format "%U %B"
frontend child
  bind unix@{folder}/{image}.sock
  default_backend parent
backend parent
  server host unix@{socket}
"""


PING_ANSWER = 20
"""More bytes than this for each byte asked come to who reads clusters; a ping asks in 28 bytes for 528."""


class Relay:
    """Stands for ``host`` as a parent; ends with ``close``."""

    def __init__(self, folder: Path, image: Image, host: Host) -> None:
        folder.mkdir()
        self._folder, self._host = folder, host
        config = folder / "cfg"
        config.write_text(CONFIG.format(folder=folder, image=image.name, socket=host.socket(image)))
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(["haproxy", "-db", "-f", config], stdout=log)
        wait_until(lambda: listens(folder / f"{image.name}.sock"))

    @property
    def parent(self) -> Parent:
        """What a child is told to read from."""
        return Parent(self._host.name, f"unix://{self._folder}")

    def sent(self) -> int:
        """Bytes that went from the host to its child's daemon, on connections that have ended: not to its watch."""
        connections = [tuple(map(int, line.split())) for line in self._log.read_text().splitlines()]
        return sum(sent for asked, sent in connections if sent > PING_ANSWER * asked)

    def until_idle(self) -> None:
        """Wait until no connection is left, and all are in the log."""
        wait_until(lambda: self._frontend()["scur"] == "0" and self._logged() == int(self._frontend()["stot"]))

    def _logged(self) -> int:
        return len(self._log.read_text().splitlines())

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
