"""A real `volt serve` for a test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
from testtools import TestCase

from tests.patience import PATIENCE
from tests.unit.virtman.scene import folder_for
from tests.userspace.hosts import VoltProcess
from volt.client import VoltClient

DIGEST = "sha256:" + "a" * 64


class VoltCase(TestCase):
    """Starts Volt on a folder of its own; may kill and start it again."""

    options: tuple[str, ...] = ("--lease", "3600")  # no host of a slow test is evicted

    def setUp(self) -> None:
        """Volt listens and answers."""
        super().setUp()
        self.folder = folder_for(self)
        self.server = VoltProcess(self.folder, *self.options)
        self.start()
        self.addCleanup(self.server.stop)

    def start(self) -> None:
        """Start Volt."""
        self.server.start()
        self.url = self.server.url
        self.volt = self.client()

    def kill(self) -> None:
        """Kill Volt by signal 9."""
        self.server.process.kill()
        self.server.stop()

    def client(self, token_file: Path | None = None) -> VoltClient:
        """A client of this Volt."""
        client = VoltClient(self.url, token_file, PATIENCE)
        self.addCleanup(client.close)
        return client

    def http(self) -> httpx.Client:
        """A plain HTTP client, for what the proper one would never send."""
        client = httpx.Client(base_url=self.url, trust_env=False, timeout=PATIENCE)
        self.addCleanup(client.close)
        return client

    def log(self) -> str:
        """What Volt said."""
        return (self.folder / "volt.log").read_text(errors="replace")

    def publish(self, origin: str = "origin", image: str = "image") -> None:
        """An image with one origin."""
        self.volt.register(origin, f"unix:///run/{origin}")
        self.volt.publish(image, 1024, DIGEST, origin)

    def join(self, *hosts: str) -> None:
        """Hosts register and join."""
        for host in hosts:
            self.volt.register(host, f"unix:///run/{host}")
            self.volt.join("image", host)


def clean_env() -> dict[str, str]:
    """The environment without the settings of a Volt that somebody uses here."""
    return {name: value for name, value in os.environ.items() if not name.startswith("VOLT_")}


def run_volt(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command `volt` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "volt.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env=clean_env(),
    )
