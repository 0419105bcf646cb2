"""The agent's local API: HTTP over a unix socket, JSON, errors as problem documents (RFC 9457).

Access is by the permissions of the socket. ``/openapi.json`` is the document that validates the requests.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from flask import Response, jsonify
from flask_openapi3.models.info import Info
from flask_openapi3.openapi import OpenAPI
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from werkzeug.exceptions import HTTPException

from drivers import errors as driver_errors
from virtman.agent import Agent
from virtman.errors import BadVolume, DriverTrouble, NoRoom, VirtmanError
from virtman.names import NAME_PATTERN, PATH_PATTERN
from virtman.records import Boot

log = logging.getLogger(__name__)

PROBLEM = "application/problem+json"
NDJSON = "application/x-ndjson"

Name = Annotated[str, Field(pattern=NAME_PATTERN, description="1 to 63 letters, digits, '-' or '_'")]
Size = Annotated[int, Field(gt=0, multiple_of=512, le=1 << 60, description="bytes, a multiple of 512")]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class VmPath(_Model):
    """The VM in the URL."""

    vm: Name


class ImagePath(_Model):
    """The image in the URL."""

    image: Name


class CreateRequest(_Model):
    """A disk of ``size`` bytes, or the image's size."""

    image: Name
    size: Size | None = None


class BootRequest(CreateRequest):
    """A VM to start. ``memory`` in MiB; ``user_data`` is handed to cloud-init as it is."""

    memory: Annotated[int, Field(ge=32, le=1 << 24)] = 1024
    cpus: Annotated[int, Field(ge=1, le=512)] = 1
    network: Annotated[str, Field(pattern=r"^(user|none|(network|bridge):[A-Za-z0-9_.-]{1,63})$")] = "user"
    ssh_keys: list[str] = []
    user_data: str | None = None


class ForceRequest(_Model):
    """``force``: do not wait for anybody's consent."""

    force: bool = False


class PublishRequest(_Model):
    """``file`` is an absolute path on this host."""

    name: Name
    file: str


class VolumeRequest(_Model):
    """A volume of the cache: a disk, a partition, or a file."""

    path: Annotated[str, Field(pattern=PATH_PATTERN, max_length=4095, description="absolute, on this host")]


def problem(status: int, kind: str, detail: str) -> Response:
    """A problem document."""
    body = {"type": f"urn:virtman:problem:{kind}", "title": kind.replace("-", " "), "status": status, "detail": detail}
    return Response(json.dumps(body), status=status, content_type=PROBLEM)


def as_virtman_error(error: Exception) -> VirtmanError:
    """The agent's error for any other."""
    if isinstance(error, VirtmanError):
        return error
    if isinstance(error, driver_errors.NoSpace):
        return NoRoom(str(error))
    if isinstance(error, driver_errors.BadVolume):
        return BadVolume(str(error))
    if isinstance(error, driver_errors.DriverError):
        return DriverTrouble(str(error))
    log.error("unexpected error", exc_info=error)
    return VirtmanError(f"unexpected {type(error).__name__}: {error}; the agent's log has more")


def _on_error(error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return problem(error.code or 500, error.name.lower().replace(" ", "-"), error.description or error.name)
    ours = as_virtman_error(error)
    return problem(ours.status, ours.kind, str(ours))


def _on_invalid(error: ValidationError) -> Response:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or "the request"
    return problem(422, "bad-request", f"{where}: {first['msg']} (got {first['input']!r})")


def create_app(agent: Agent) -> OpenAPI:
    """The API of one agent."""
    app = OpenAPI(
        "virtman", info=Info(title="VirtMan agent", version="1"), validation_error_status=422,
        validation_error_callback=_on_invalid,
        doc_prefix="",
    )  # fmt: skip
    app.register_error_handler(Exception, _on_error)
    _host_routes(app, agent)
    _volume_routes(app, agent)
    _image_routes(app, agent)
    _vm_routes(app, agent)
    return app


def _host_routes(app: OpenAPI, agent: Agent) -> None:
    @app.get("/v1/status", summary="What this host has and does now")
    def status() -> Response:
        return jsonify(agent.status())

    @app.post("/v1/gc", summary="Remove stacks and data that nobody needs")
    def gc() -> Response:
        return jsonify(agent.gc())

    @app.post("/v1/repair", summary="Make what the records say true")
    def repair() -> Response:
        return jsonify(agent.repair())

    @app.post("/v1/suspend", summary="Stop serving every image until the next start of the agent")
    def suspend(body: ForceRequest) -> Response:
        agent.suspend(force=body.force)
        return jsonify({"suspended": True})


def _volume_routes(app: OpenAPI, agent: Agent) -> None:
    @app.get("/v1/cache/volumes", summary="The volumes of the cache")
    def volumes() -> Response:
        return jsonify(agent.volumes())

    @app.post("/v1/cache/volumes", summary="Let the cache use a disk, a partition, or a file that is made")
    def add_volume(body: VolumeRequest) -> Response:
        return jsonify(agent.add_volume(Path(body.path)))

    @app.delete("/v1/cache/volumes", summary="Take the volume `?path=` from the cache; what it held is fetched anew")
    def remove_volume(query: VolumeRequest) -> Response:
        agent.remove_volume(Path(query.path))
        return Response(status=204)


def _image_routes(app: OpenAPI, agent: Agent) -> None:
    @app.get("/v1/images", summary="All published images")
    def images() -> Response:
        return jsonify(agent.images())

    @app.post("/v1/images", summary="Publish a file; lines of progress, then the result or a problem document")
    def publish(body: PublishRequest) -> Response:
        return Response(_publish_lines(agent, body), content_type=NDJSON)

    @app.get("/v1/images/<image>/tree", summary="An image's tree of hosts")
    def tree(path: ImagePath) -> Response:
        return Response(agent.tree(path.image).model_dump_json(), content_type="application/json")


def _publish_lines(agent: Agent, body: PublishRequest) -> Iterator[str]:
    """Publishing runs in a thread and goes on when the caller hangs up; asking again then finds it done."""
    lines: queue.Queue[dict[str, Any]] = queue.Queue()

    def work() -> None:
        try:
            record = agent.publish(
                body.name,
                Path(body.file),
                lambda what, done, total: lines.put({"step": what, "done": done, "total": total}),
            )
            lines.put({"image": record.model_dump(mode="json", include={"name", "size", "digest"})})
        except Exception as error:  # noqa: BLE001  the caller gets it as a problem
            ours = as_virtman_error(error)
            lines.put({"problem": {"kind": ours.kind, "detail": str(ours)}})

    threading.Thread(target=work, name=f"publish {body.name}", daemon=True).start()
    line: dict[str, Any] = {}
    while "image" not in line and "problem" not in line:
        line = lines.get()
        yield json.dumps(line) + "\n"


def _vm_routes(app: OpenAPI, agent: Agent) -> None:
    @app.get("/v1/vms", summary="The VMs of this host")
    def list_vms() -> Response:
        return jsonify(agent.vms())

    @app.get("/v1/vms/<vm>", summary="One VM and its disk")
    def show(path: VmPath) -> Response:
        return jsonify(agent.vm(path.vm))

    @app.put("/v1/vms/<vm>", summary="Create a VM's disk")
    def create(path: VmPath, body: CreateRequest) -> Response:
        return jsonify(agent.create(path.vm, body.image, body.size))

    @app.delete("/v1/vms/<vm>", summary="Destroy a VM and its disk")
    def destroy(path: VmPath) -> Response:
        agent.destroy(path.vm)
        return Response(status=204)

    @app.post("/v1/vms/<vm>/boot", summary="Start a VM, creating its disk if needed")
    def boot(path: VmPath, body: BootRequest) -> Response:
        how = Boot(memory=body.memory, cpus=body.cpus, network=body.network)
        return jsonify(agent.boot(path.vm, body.image, body.size, how, body.ssh_keys, body.user_data))

    @app.post("/v1/vms/<vm>/stop", summary="Shut a VM down")
    def stop(path: VmPath, body: ForceRequest) -> Response:
        agent.stop_vm(path.vm, force=body.force)
        return Response(status=204)

    @app.get("/v1/vms/<vm>/console", summary="Where a VM's console is")
    def console(path: VmPath) -> Response:
        return jsonify(agent.console(path.vm))
