"""The doubles behind real sockets."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

from flask import Flask, Response, request
from pydantic import BaseModel
from testtools import TestCase
from werkzeug.serving import make_server

from drivers.base import Image
from tests.doubles.contract import Contract
from tests.doubles.volt import VoltDouble
from virtman.server import listen
from volt import errors
from volt.client import NodeReport
from volt.models import AGENT_HEADER

SOON = 10.0


def serve_volt(test: TestCase, volt: VoltDouble) -> str:
    """Serve the double as Volt is served. Returns its URL."""
    return serve_app(test, volt_app(volt))


def serve_app(test: TestCase, app: Flask) -> str:
    """Serve Volt's API, a double's or the real one. Returns its URL."""
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


def volt_app(volt: VoltDouble) -> Flask:
    """Volt's API over the double."""
    app = Flask("volt-double")
    app.register_error_handler(errors.Problem, _problem)

    @app.put("/v1/hosts/<host>")
    def register(host: str) -> Response:
        volt.register(host, request.get_json()["address"], _agent())
        now = "2026-01-01T00:00:00Z"
        return _json({"name": host, "address": volt.hosts[host], "state": "alive", "last_seen": now})

    @app.post("/v1/hosts/<host>/heartbeat")
    def heartbeat(host: str) -> Response:
        _known(volt, host)
        body = request.get_json()
        nodes = [NodeReport(**node) for node in body["nodes"]]
        return _model(volt.heartbeat(nodes, body["kept"], body["needed"], body["address"], _agent()))

    @app.get("/v1/images")
    def images() -> Response:
        return _json({"images": [image.model_dump() for image in volt.listing()]})

    @app.post("/v1/images")
    def publish() -> Response:
        body = request.get_json()
        _known(volt, body["origin"])
        return _model(volt.publish(Image(body["name"], body["size"], body["digest"]), body["origin"], _agent()))

    _add_nodes(app, volt)
    return app


def _add_nodes(app: Flask, volt: VoltDouble) -> None:
    @app.post("/v1/images/<image>/nodes")
    def join(image: str) -> Response:
        _known(volt, request.get_json()["host"])
        body = request.get_json()
        return _model(volt.join(image, _agent(), moving=bool(body["moving"])))

    @app.delete("/v1/images/<image>/nodes/<host>")
    def leave(image: str, host: str) -> Response:
        needed = request.args.get("needed") == "true"
        volt.leave(image, host, request.args.get("dropped", -1, int), _agent(), needed=needed)
        return Response(status=204)

    @app.get("/v1/images/<image>")
    def show_image(image: str) -> Response:
        return _model(volt.image(image))

    @app.delete("/v1/images/<image>")
    def remove_image(image: str) -> Response:
        volt.remove_image(image, when_unused=request.args.get("when_unused") == "true")
        return Response(status=204)

    @app.get("/v1/images/<image>/tree")
    def tree(image: str) -> Response:
        return _model(volt.tree(image))

    @app.post("/v1/images/<image>/reports")
    def report(image: str) -> Response:
        return _model(volt.report(image, request.get_json()["dead"], _agent()))


def _agent() -> str:
    return request.headers.get(AGENT_HEADER, "")


def _known(volt: VoltDouble, host: str) -> None:
    if host not in volt.hosts:
        raise errors.HostUnknown(f"host {host!r} is not registered")


def _model(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(), content_type="application/json")


def _json(answer: dict[str, object]) -> Response:
    return Response(json.dumps(answer), content_type="application/json")


def _problem(error: errors.Problem) -> Response:
    body = {
        "type": error.type(), "title": error.slug, "status": error.status, "detail": error.detail,
        "hosts": list(error.hosts),
    }  # fmt: skip
    return Response(json.dumps(body), status=error.status, content_type="application/problem+json")
