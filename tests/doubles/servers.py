"""The doubles behind real sockets."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import cast
from unittest import mock

from flask import Flask
from testtools import TestCase
from werkzeug.serving import make_server

from tests.doubles.contract import Contract
from tests.doubles.volt import Calls, VoltDouble
from tests.patience import PATIENCE
from virtman.server import listen
from volt import client
from volt.api import create_app
from volt.coordinator import Coordinator
from volt.metrics import Metrics
from volt.store import Store

SOON = 10.0


class ServedDouble(Calls):
    """The double as Volt's API calls the coordinator."""

    metrics = Metrics(cast(Store, None))


def serve_volt(test: TestCase, volt: VoltDouble) -> str:
    """Serve the double by Volt's API. Returns its URL."""
    return serve_app(test, create_app(cast(Coordinator, ServedDouble(volt))))


def serve_app(test: TestCase, app: Flask) -> str:
    """Serve Volt's API, a double's or the real one. Returns its URL.

    Clients that are made from now on wait for it as long as tests wait for anything: a busy machine is no failure.
    """
    test.enterContext(mock.patch.object(client, "TIMEOUT", PATIENCE))
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, name="volt double")
    test.addCleanup(server.server_close)
    test.addCleanup(thread.join, SOON)
    test.addCleanup(server.shutdown)
    thread.start()
    return f"http://127.0.0.1:{server.server_port}"


def serve_agent(test: TestCase, app: Flask, path: Path, gid: int | None = None) -> None:
    """Serve an agent's API on a unix socket with the server that the agent uses, also for the members of a group.

    The test fails if anything is answered otherwise than the API's document says.
    """
    contract = Contract(app)
    test.addCleanup(lambda: test.assertEqual([], contract.broken))
    server = listen(app, path, 8, gid)

    done, guard = threading.Event(), threading.Lock()

    def run() -> None:
        while not done.is_set():
            server.asyncore.loop(map=server._map, count=1)
        with guard:
            for channel in list(server.active_channels.values()):
                channel.handle_close()
            server.close()

    def stop() -> None:
        server.task_dispatcher.shutdown()
        with guard:  # or the loop could close what it is woken by before it is
            done.set()
            server.pull_trigger()

    thread = threading.Thread(target=run, name="agent's api")
    test.addCleanup(thread.join, SOON)
    test.addCleanup(stop)
    thread.start()


def unused_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
