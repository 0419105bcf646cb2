"""Volt and the agent answer as their OpenAPI documents say: Schemathesis tries every operation."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import libvirt
import pytest
from flask import Flask
from testtools import TestCase

from tests.doubles.servers import serve_app
from tests.unit.virtman.agents import Site
from tests.unit.virtman.scene import folder_for
from tests.unit.volt.databases import new_database
from virtman import creating, pipe
from virtman.api import PEER
from virtman.api import create_app as agent_app
from virtman.peer import Peer
from volt.api import create_app as volt_app
from volt.coordinator import Coordinator
from volt.store import Store

NAME = "0"
"""What Schemathesis calls things first, so that its calls meet something that is there."""
SUSPEND = "/v1/suspend"
"""After this call an agent refuses all others (503), so it is tried by itself."""


@pytest.mark.long
class OpenApiTest(TestCase):
    """No finding, by all checks."""

    def try_all(self, app: Flask, *options: str) -> None:
        url = serve_app(self, app) + "/openapi.json"
        argv = [sys.executable, "-m", "schemathesis.cli", "run", url, "--checks=all", "--max-examples=10", "--seed=1"]
        argv += ["--continue-on-failure", "--no-color", "--generation-database=none", *options]
        folder = folder_for(self)  # Schemathesis leaves files where it runs
        done = subprocess.run(argv, cwd=folder, check=False, capture_output=True, text=True)
        self.assertEqual(0, done.returncode, done.stdout + done.stderr)

    def test_volt(self) -> None:
        store = Store(new_database(self))
        self.addCleanup(store.close)
        self.try_all(volt_app(Coordinator(store)))

    def agent(self) -> Flask:
        """An agent over doubles, called by root, with an image and a VM."""
        self.patch(pipe, "COMES_WITHIN", 0.05)  # Schemathesis never writes or reads a stream
        # libvirt's test driver has none, which the agent reports as an error of the hypervisor (502).
        self.patch(libvirt.virConnect, "getDomainCapabilities", lambda *_arguments: "")
        site = Site(self)
        site.volt.offer(NAME, size=1 << 20)
        agent = site.agent(cache="group")
        creating.create(agent.vms, NAME, NAME, None)
        app = agent_app(agent)
        inside = app.wsgi_app

        def as_root(environment: dict[str, Any], start: Any) -> Iterable[bytes]:
            return inside({**environment, PEER: Peer(pid=1, uid=0, gid=0)}, start)

        app.wsgi_app = as_root  # type: ignore[assignment, method-assign]
        return app

    def test_the_agent(self) -> None:
        self.try_all(self.agent(), f"--exclude-path={SUSPEND}")

    def test_suspending_the_agent(self) -> None:
        self.try_all(self.agent(), f"--include-path={SUSPEND}")
