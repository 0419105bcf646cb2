"""The agent's local API: HTTP over a unix socket, JSON, errors as problem documents (RFC 9457).

The permissions of the socket say who gets here at all, and ``virtman.roles`` what such a caller may do.
``/openapi.json`` is the document that validates the requests.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from flask import Response, request
from flask_openapi3.models.info import Info
from flask_openapi3.models.schema import Schema
from flask_openapi3.openapi import OpenAPI
from pydantic import ValidationError
from werkzeug.exceptions import HTTPException

from drivers import errors as driver_errors
from virtman import attaching, booting, creating, disks, migration, models, renaming, streams, views
from virtman.agent import Agent
from virtman.convert import Progress
from virtman.errors import (
    BadDevice,
    BadRequest,
    BadVolume,
    CallerGone,
    DiskBusy,
    DriverTrouble,
    HostTrouble,
    NoRoom,
    NotSupported,
    TooManyCalls,
    VirtmanError,
    VolumeBusy,
)
from virtman.fdpassing import Passed
from virtman.hostfiles import FULL
from virtman.models import DiskPath, ForceRequest, ImagePath, SnapshotPath, VmPath
from virtman.peer import Peer
from virtman.pipe import Caller, Pipe
from virtman.records import Boot
from virtman.roles import Permit, check_call, check_named, permit_of
from volt.client import ImageTree

log = logging.getLogger(__name__)

PEER = "virtman.peer"
"""Where the environment of a request has the ``Peer`` who made it (PEP 3333)."""
HUNG_UP = "waitress.client_disconnected"
"""Where the environment of a request has a function of the server that tells whether the caller has hung up."""

PROBLEM = "application/problem+json"
MAX_ECHO = 80
"""Characters of a wrong input that an error repeats."""

OF_DRIVERS: dict[type[Exception], type[VirtmanError]] = {
    driver_errors.BadVolume: BadVolume,
    driver_errors.DiskInUse: DiskBusy,
    driver_errors.DeviceInUse: DiskBusy,
    driver_errors.VolumeInUse: VolumeBusy,
    driver_errors.DeviceRefused: BadDevice,
    driver_errors.NotPossible: NotSupported,
}
"""Errors of drivers that have a class here; others are DriverTrouble."""

NDJSON = "application/x-ndjson"
REFERENCE = "#/components/schemas/{model}"
EXPORT = "Write {} to a new file of its own; lines of progress, then the file or a problem document"
Line = TypeVar(
    "Line", models.PublishLine, models.ExportLine, models.SendLine, models.ReceiveLine, models.MigrateLine,
    models.AttachLine,
)  # fmt: skip
Streamed = TypeVar(
    "Streamed", models.SendLine, models.ReceiveLine, models.PublishLine, models.ExportLine, models.AttachLine
)
Filed = TypeVar("Filed", models.PublishLine, models.ExportLine, models.AttachLine)
MOST_LONG = 32
"""Calls at once that answer by lines of progress. Each keeps a thread of the server (virtman/server.py) for as long as
it lasts, and who sends or reads a stream may take for ever. The other threads are for all else."""

MAX_BODY = 16 << 20
"""Bytes of a request: user data for cloud-init may be long."""


def problem(error: VirtmanError) -> models.Problem:
    """The problem document of an error."""
    return _problem(error.status, error.kind, str(error))


def _problem(status: int, kind: str, detail: str) -> models.Problem:
    line = " ".join(detail.split())
    return models.Problem(type=f"urn:virtman:problem:{kind}", title=kind.replace("-", " "), status=status, detail=line)


def as_virtman_error(error: Exception) -> VirtmanError:
    """The agent's error for any other."""
    if isinstance(error, VirtmanError):
        return error
    if isinstance(error, driver_errors.NoSpace) or (isinstance(error, OSError) and error.errno in FULL):
        return NoRoom(str(error))
    if type(error) in OF_DRIVERS:
        return OF_DRIVERS[type(error)](str(error))
    if isinstance(error, driver_errors.DriverError):
        return DriverTrouble(str(error))
    if isinstance(error, OSError):
        log.error("the host's files", exc_info=error)
        return HostTrouble(str(error))
    log.error("unexpected error", exc_info=error)
    return VirtmanError(f"unexpected {type(error).__name__}: {error}; the agent's log has more")


def _on_error(error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        return _refusal(problem(as_virtman_error(error)))
    status, kind = error.code or 500, error.name.lower().replace(" ", "-")
    response = _refusal(_problem(status, kind, f"{request.method} {request.path}: {error.description}"))
    response.headers.extend((name, value) for name, value in error.get_headers() if name == "Allow")
    return response


def _on_recursion(_error: RecursionError) -> Response:
    return _refusal(_problem(400, BadRequest.kind, "the body's JSON is nested too deeply"))


def _on_invalid(error: ValidationError) -> Response:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or "the request"
    got = repr(first["input"])
    # Nothing long, and not the whole request when something is missing: it may have a password in its user data.
    said = f" (got {got})" if first["type"] != "missing" and len(got) <= MAX_ECHO else ""
    return _refusal(_problem(400, BadRequest.kind, f"{where}: {first['msg']}{said}"))


def _refusal(document: models.Problem) -> Response:
    return Response(document.model_dump_json(), status=document.status, content_type=PROBLEM)


def create_app(agent: Agent) -> OpenAPI:
    """The API of one agent."""
    refusal = {"description": "A problem (RFC 9457)", "content": {PROBLEM: {"schema": _reference(models.Problem)}}}
    app = OpenAPI(
        "virtman", info=Info(title="VirtMan agent", version="1"), validation_error_status=400,
        validation_error_model=models.Problem, validation_error_callback=_on_invalid,
        responses={"default": refusal, "400": refusal}, security_schemes={},
        doc_prefix="",
    )  # fmt: skip
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY
    app.url_map.merge_slashes = False  # a path that is not in the document is an error, not a redirection
    app.register_error_handler(Exception, _on_error)
    app.register_error_handler(RecursionError, _on_recursion)
    app.before_request(_check_caller)
    _host_routes(app, agent)
    _volume_routes(app, agent)
    long_calls = LongCalls()
    _device_routes(app, agent, long_calls)
    _image_routes(app, agent, long_calls)
    _in_place_routes(app, agent, long_calls)
    _vm_routes(app, agent, long_calls)
    return app


def _check_caller() -> None:
    """Before anything of a call is done. A path that is not there is nobody's to call. Raises Forbidden."""
    if request.url_rule is not None:
        check_call(request.environ.get(PEER), request.method, request.url_rule.rule)


def _peer() -> Peer:
    """Who calls; one who is not known comes no further than ``_check_caller``."""
    peer: Peer = request.environ[PEER]
    return peer


def _permit() -> Permit:
    return permit_of(_peer())


def _pipes(agent: Agent) -> Callable[[], Pipe]:
    """Makes a pipe to who calls."""
    return partial(Pipe, agent.config.socket.parent, _peer().uid)


def _reference(model: type[models.Model]) -> dict[str, str]:
    return {"$ref": REFERENCE.format(model=model.__name__)}


def _answer(model: models.Model | ImageTree) -> Response:
    return Response(model.model_dump_json(), content_type="application/json")


def _done() -> Response:
    return Response(status=204)


def _host_routes(app: OpenAPI, agent: Agent) -> None:
    @app.get("/v1/status", summary="What this host has and does now", responses={200: models.Status})
    def status() -> Response:
        return _answer(agent.overview.status())

    @app.post("/v1/gc", summary="Remove stacks and data that nobody needs", responses={200: models.Removed})
    def gc() -> Response:
        return _answer(agent.cleaning.gc())

    @app.get("/v1/gc", summary="What gc would remove", responses={200: models.Removed})
    def would_remove() -> Response:
        return _answer(agent.cleaning.would_remove())

    @app.post("/v1/repair", summary="Make what the records say true", responses={200: models.Repaired})
    def repair() -> Response:
        return _answer(agent.repair())

    @app.post(
        "/v1/suspend", summary="Stop serving every image until the next start of the agent", responses={204: None}
    )
    def suspend(body: ForceRequest) -> Response:
        agent.suspend(force=body.force)
        return _done()


def _volume_routes(app: OpenAPI, agent: Agent) -> None:
    @app.get("/v1/cache/volumes", summary="The volumes of the cache", responses={200: models.VolumeList})
    def volumes() -> Response:
        return _answer(models.VolumeList(volumes=agent.volumes.all()))

    @app.post(
        "/v1/cache/volumes",
        summary="Let the cache use a disk, a partition, or a file that is made",
        responses={200: models.Volume},
    )
    def add_volume(body: models.VolumeRequest) -> Response:
        return _answer(agent.volumes.add(Path(body.path)))

    @app.delete(
        "/v1/cache/volumes",
        summary="Take the volume `?path=` from the cache; what it held is fetched anew",
        responses={204: None},
    )
    def remove_volume(query: models.VolumeRequest) -> Response:
        agent.volumes.remove(Path(query.path))
        return _done()


def _device_routes(app: OpenAPI, agent: Agent, long_calls: LongCalls) -> None:
    @app.get(
        "/v1/cache/devices",
        summary="The devices of others that are read through the cache",
        responses={200: models.CachedDeviceList},
    )
    def devices() -> Response:
        agent.volumes.require()
        return _answer(models.CachedDeviceList(devices=agent.overview.devices()))

    @app.post(
        "/v1/cache/devices",
        summary="Have a device read through the cache, or give it the size that it has now; lines, the last of which"
        " has it or a problem document",
        responses=_lines_of(app, models.AttachLine),
    )
    def attach_device(body: models.DeviceRequest) -> Response:
        def work(file: Path | Passed, _tell: Progress) -> models.AttachLine:
            passed = file if isinstance(file, Passed) else None
            attached = agent.devices.attach(Path(body.path), passed)
            return models.AttachLine(device=agent.overview.device(attached.name))

        return _with_file(agent, long_calls, models.AttachLine, f"attach {body.path}", body, work, alone=True)

    @app.delete(
        "/v1/cache/devices",
        summary="Let the device `?path=` go, which may also be called by what was handed out for it; with `&force=true`"
        " also from under who has that open",
        responses={204: None},
    )
    def detach_device(query: models.DetachQuery) -> Response:
        agent.devices.detach(Path(query.path), force=query.force)
        return _done()


def _image_routes(app: OpenAPI, agent: Agent, long_calls: LongCalls) -> None:
    @app.get("/v1/images", summary="All published images", responses={200: models.ImageList})
    def images() -> Response:
        return _answer(models.ImageList(images=agent.overview.images()))

    @app.post(
        "/v1/images",
        summary="Publish a file, or a VM's disk; lines of progress, then the image or a problem document",
        responses=_lines_of(app, models.PublishLine),
    )
    def publish(body: models.PublishRequest) -> Response:
        name = f"publish {body.name}"
        if body.vm is not None:
            vm = body.vm
            return long_calls.answer(
                models.PublishLine, name,
                lambda tell: models.PublishLine(image=agent.publishing.publish_vm(body.name, vm, tell)),
                alone=body.detach,
            )  # fmt: skip

        def work(file: Path | Passed, tell: Progress) -> models.PublishLine:
            return models.PublishLine(image=agent.publishing.publish(body.name, file, tell))

        return _with_file(agent, long_calls, models.PublishLine, name, body, work, alone=body.detach)

    @app.delete(
        "/v1/images/<image>",
        summary="Be no origin of an image any more; without another one it is withdrawn at Volt; with"
        " `?when_unused=true` also one that is in use, which goes when nobody needs it",
        responses={200: models.Unpublished},
    )
    def unpublish(path: ImagePath, query: models.UnpublishQuery) -> Response:
        return _answer(agent.publishing.unpublish(path.image, when_unused=query.when_unused))

    @app.post(
        "/v1/images/<image>/export", summary=EXPORT.format("an image"), responses=_lines_of(app, models.ExportLine)
    )
    def export_image(path: ImagePath, body: models.ExportRequest) -> Response:
        def work(file: Path | Passed, tell: Progress) -> models.ExportLine:
            return models.ExportLine(exported=agent.copies.export_image(path.image, file, body.format, tell))

        return _with_file(agent, long_calls, models.ExportLine, f"export {path.image}", body, work)

    @app.get("/v1/images/<image>/tree", summary="An image's tree of hosts", responses={200: ImageTree})
    def tree(path: ImagePath) -> Response:
        return _answer(agent.volt.tree(path.image))


def _in_place_routes(app: OpenAPI, agent: Agent, long_calls: LongCalls) -> None:
    @app.post(
        "/v1/images/<image>/in-place",
        summary="Publish a file or a block device where it is; the answer's last line is the image or a problem",
        responses=_lines_of(app, models.PublishLine),
    )
    def publish_in_place(path: ImagePath, body: models.InPlaceRequest) -> Response:
        def work(file: Path | Passed, tell: Progress) -> models.PublishLine:
            how = partial(agent.publishing.publish_in_place, digest=body.digest, progress=tell)
            return models.PublishLine(image=how(path.image, file, body.trust))

        return _with_file(agent, long_calls, models.PublishLine, f"publish {path.image}", body, work)


def _lines_of(app: OpenAPI, line: type[Line]) -> dict[str | int, Any]:
    """What the document says of an answer of such lines."""
    schema = line.model_json_schema(ref_template=REFERENCE, mode="serialization")
    for name, part in (schema.pop("$defs") | {line.__name__: schema}).items():
        app.components_schemas[name] = Schema(**part)
    content = {"content": {NDJSON: {"schema": _reference(line)}}}
    return {200: {"description": "One JSON object in each line", **content}}


class LongCalls:
    """Answers by lines of progress, of which there are at most ``MOST_LONG`` at once."""

    def __init__(self) -> None:
        self._free = threading.BoundedSemaphore(MOST_LONG)

    def answer(
        self, line: type[Line], name: str, work: Callable[[Progress], Line], *, alone: bool = True
    ) -> Response:  # fmt: skip
        """Lines of progress, and at last what ``work`` returns, or a problem. Raises TooManyCalls.

        ``work`` runs in a thread. ``alone``: it goes on when the caller hangs up; see ``_with_progress``.
        """
        return self._answer(lambda: _with_progress(line, name, work, alone=alone))

    def stream(
        self, line: type[Streamed], name: str, make: Callable[[], Pipe], work: Callable[[Caller, Progress], Streamed],
        *, alone: bool = True,
    ) -> Response:  # fmt: skip
        """As ``answer``, of work that needs the caller at a pipe, of which the first line tells."""
        return self._answer(lambda: _streaming(line, name, make(), work, alone=alone))

    def _answer(self, begin: Callable[[], Response]) -> Response:
        if not self._free.acquire(blocking=False):
            raise TooManyCalls(
                f"{MOST_LONG} calls that publish, export, send, receive, migrate or attach a device are under way, and"
                " more are not allowed at once; ask again when one of them has ended"
            )
        try:
            response = begin()
        except BaseException:
            self._free.release()
            raise
        # The server closes each answer, also one that it did not begin to read, or whose caller hung up (PEP 3333).
        response.call_on_close(self._free.release)
        return response


def _with_file(
    agent: Agent, long_calls: LongCalls, line: type[Filed], name: str,
    body: models.PublishRequest | models.InPlaceRequest | models.ExportRequest | models.DeviceRequest,
    work: Callable[[Path | Passed, Progress], Filed], *, alone: bool = False,
) -> Response:  # fmt: skip
    """Lines of progress of work with a file that the caller passes; an administrator may also just name it.

    ``alone``: the work goes on when the caller hangs up. Raises Forbidden, TooManyCalls.
    """
    peer, file = _peer(), Path(str(body.path if isinstance(body, models.DeviceRequest) else body.file))
    if not body.passed:
        check_named(peer, file)
        return long_calls.answer(line, name, partial(work, file), alone=alone)

    def with_file(caller: Caller, tell: Progress) -> Filed:
        with caller.passed() as fd:
            return work(Passed(fd, file, trusted=peer.administers), tell)

    return long_calls.stream(line, name, _pipes(agent), with_file, alone=alone)


def _streaming(
    line: type[Streamed], name: str, pipe: Pipe, work: Callable[[Caller, Progress], Streamed], *, alone: bool
) -> Response:  # fmt: skip
    """As ``_with_progress``, of work that needs the caller at a pipe, of which the first line tells."""

    def with_caller(tell: Progress) -> Streamed:
        with pipe.caller() as caller:
            return work(caller, tell)

    return _with_progress(line, name, with_caller, line(pipe=str(pipe.path)), alone=alone)


def _with_progress(
    line: type[Line], name: str, work: Callable[[Progress], Line], first: Line | None = None, *, alone: bool = True
) -> Response:
    """Lines of progress, and at last what ``work`` returns, or a problem.

    The work runs in a thread. With ``alone`` it goes on when the caller hangs up; asking again then finds it done.
    Else the work gets a CallerGone the next time that it tells how far it is.
    """
    lines: queue.Queue[Line] = queue.Queue()
    hung_up: Callable[[], bool] = request.environ.get(HUNG_UP, lambda: False)

    def tell(step: str, done: int, total: int) -> None:
        if hung_up() and not alone:
            raise CallerGone("the caller hung up")
        lines.put(line(progress=models.Progress(step=step, done=done, total=total)))

    def run() -> None:
        try:
            lines.put(work(tell))
        except Exception as error:  # noqa: BLE001  the caller gets it as a problem
            if hung_up():
                log.warning("%s failed after its caller had hung up: %s", name, error)
            lines.put(line(problem=problem(as_virtman_error(error))))

    # Now, and not with the first line: a caller who is gone by then would leave a pipe behind.
    threading.Thread(target=run, name=name, daemon=True).start()

    def told() -> Iterator[str]:
        if first is not None:
            yield first.model_dump_json() + "\n"
        last = False
        while not last:
            one = lines.get()
            last = one.progress is None
            yield one.model_dump_json() + "\n"

    return Response(told(), content_type=NDJSON)


def _vm_routes(app: OpenAPI, agent: Agent, long_calls: LongCalls) -> None:
    @app.get("/v1/vms", summary="The VMs of this host", responses={200: models.VmList})
    def list_vms() -> Response:
        return _answer(models.VmList(vms=agent.overview.vms()))

    @app.get("/v1/vms/<vm>", summary="One VM and its disk", responses={200: models.Vm})
    def show(path: VmPath) -> Response:
        return _answer(agent.overview.vm(path.vm))

    @app.put("/v1/vms/<vm>", summary="Create a VM's disk", responses={200: models.Vm})
    def create(path: VmPath, body: models.CreateRequest) -> Response:
        creating.create(agent.vms, path.vm, body.image, body.size)
        return _answer(agent.overview.vm(path.vm))

    @app.delete("/v1/vms/<vm>", summary="Destroy a VM and its disk", responses={204: None})
    def destroy(path: VmPath) -> Response:
        creating.destroy(agent.vms, path.vm, _permit())
        return _done()

    _machine_routes(app, agent)
    _disk_routes(app, agent, long_calls)
    _stream_routes(app, agent, long_calls)
    _migration_routes(app, agent, long_calls)
    _arrival_routes(app, agent)


def _stream_routes(app: OpenAPI, agent: Agent, long_calls: LongCalls) -> None:
    @app.post(
        "/v1/vms/<vm>/send",
        summary="Write what a VM's disk has of its own to a socket, as a stream (docs/stream.md)",
        responses=_lines_of(app, models.SendLine),
    )
    def send(path: VmPath, body: models.SendRequest) -> Response:
        def work(caller: Caller, tell: Progress) -> models.SendLine:
            sent = streams.send(
                agent.vms, agent.copies, path.vm, body.snapshot, body.since, caller.write, tell,
                with_snapshots=body.with_snapshots,
            )  # fmt: skip
            return models.SendLine(sent=sent)

        return long_calls.stream(models.SendLine, f"send {path.vm}", _pipes(agent), work)

    @app.post(
        "/v1/vms/<vm>/receive",
        summary="Make a VM of a stream that is written to a socket, or let one go on to what has changed",
        responses=_lines_of(app, models.ReceiveLine),
    )
    def receive(path: VmPath, body: models.ReceiveRequest) -> Response:
        permit = _permit()

        def work(caller: Caller, tell: Progress) -> models.ReceiveLine:
            streams.receive_from(agent.vms, path.vm, body.image, caller, tell, permit)
            return models.ReceiveLine(vm=agent.overview.vm(path.vm))

        return long_calls.stream(models.ReceiveLine, f"receive {path.vm}", _pipes(agent), work)


def _machine_routes(app: OpenAPI, agent: Agent) -> None:
    @app.post("/v1/vms/<vm>/boot", summary="Start a VM, creating its disk if needed", responses={200: models.Booted})
    def boot(path: VmPath, body: models.BootRequest) -> Response:
        how = Boot(memory=body.memory, cpus=body.cpus, network=body.network)
        booting.boot(agent.vms, path.vm, body.image, body.size, how, body.ssh_keys, body.user_data)
        return _answer(agent.overview.booted(path.vm))

    @app.post("/v1/vms/<vm>/start", summary="Start a VM as it was booted before", responses={200: models.Booted})
    def start(path: VmPath) -> Response:
        booting.start(agent.vms, path.vm)
        return _answer(agent.overview.booted(path.vm))

    @app.post("/v1/vms/<vm>/stop", summary="Shut a VM down", responses={204: None})
    def stop(path: VmPath, body: ForceRequest) -> Response:
        booting.stop(agent.vms, path.vm, force=body.force)
        return _done()

    @app.post("/v1/vms/<vm>/rename", summary="Let a VM that is off have another name", responses={200: models.Vm})
    def rename(path: VmPath, body: models.RenameRequest) -> Response:
        renaming.rename(agent.vms, path.vm, body.name, _permit())
        return _answer(agent.overview.vm(body.name))

    @app.put(
        "/v1/vms/<vm>/disks/<disk>",
        summary="Let a VM use another disk besides its own, also while it runs",
        responses={200: models.Vm},
    )
    def attach_disk(path: DiskPath) -> Response:
        attaching.attach(agent.vms, path.vm, path.disk)
        return _answer(agent.overview.vm(path.vm))

    @app.delete(
        "/v1/vms/<vm>/disks/<disk>",
        summary="Take such a disk away from a VM, also while it runs",
        responses={200: models.Vm},
    )
    def detach_disk(path: DiskPath) -> Response:
        attaching.detach(agent.vms, path.vm, path.disk)
        return _answer(agent.overview.vm(path.vm))

    @app.get("/v1/vms/<vm>/console", summary="Where a VM's console is", responses={200: models.Console})
    def console(path: VmPath) -> Response:
        return _answer(agent.overview.console(path.vm))


def _migration_routes(app: OpenAPI, agent: Agent, long_calls: LongCalls) -> None:
    @app.get(
        "/v1/vms/<vm>/migration-source", summary="What goes along with the disk of a VM that is to move",
        responses={200: models.MigrationSource},
    )  # fmt: skip
    def migration_source(path: VmPath) -> Response:
        return _answer(migration.migration_source(agent.vms, path.vm))

    @app.post(
        "/v1/vms/<vm>/migration",
        summary="Move a VM's memory to another libvirt; lines of progress, then that it left or a problem document",
        responses=_lines_of(app, models.MigrateLine),
    )
    def migrate(path: VmPath, body: models.MigrateRequest) -> Response:
        def work(tell: Progress) -> models.MigrateLine:
            told = partial(tell, "memory")
            downtime = migration.leave(agent.vms, path.vm, body.to, body.domain, body.snapshot, told)
            return models.MigrateLine(left=models.Left(downtime=downtime))

        # Nobody else lets the VM go on at the other host.
        return long_calls.answer(models.MigrateLine, f"migrate {path.vm}", work, alone=False)

    @app.delete(
        "/v1/vms/<vm>/migration",
        summary="End a migration that is under way; one whose memory has gone is left as it is",
        responses={200: models.Vm},
    )
    def end_migration(path: VmPath) -> Response:
        migration.abort(agent.vms, path.vm)
        return _answer(agent.overview.vm(path.vm))

    @app.post(
        "/v1/vms/<vm>/migration/take-back",
        summary="Let a VM that went, and is not there any more, be started here again",
        responses={200: models.Vm},
    )
    def take_back(path: VmPath, body: models.WentRequest) -> Response:
        migration.take_back(agent.vms, path.vm, body.to)
        return _answer(agent.overview.vm(path.vm))

    @app.post(
        "/v1/vms/<vm>/migration/end",
        summary="Destroy what is left of a VM that goes on elsewhere",
        responses={204: None},
    )
    def finish_migration(path: VmPath, body: models.WentRequest) -> Response:
        migration.finish(agent.vms, path.vm, body.to)
        return _done()


def _arrival_routes(app: OpenAPI, agent: Agent) -> None:
    @app.post("/v1/arrivals/check", summary="Whether a VM can come to this host", responses={204: None})
    def check_arrival(body: models.MigrationSource) -> Response:
        migration.check(agent.vms, body)
        return _done()

    @app.post(
        "/v1/vms/<vm>/arrival/give-up", summary="Destroy what has come of a VM, unless it goes on here already",
        responses={200: models.GivenUp},
    )  # fmt: skip
    def give_up_arrival(path: VmPath, body: models.GiveUpRequest) -> Response:
        return _answer(models.GivenUp(state=migration.give_up(agent.vms, path.vm, body.snapshots)))

    @app.post("/v1/vms/<vm>/arrival", summary="Make ready for a VM that comes", responses={200: models.Expected})
    def expect(path: VmPath, body: models.MigrationSource) -> Response:
        domain = migration.expect(agent.vms, path.vm, body)
        return _answer(models.Expected(domain=domain))

    @app.post("/v1/vms/<vm>/arrival/end", summary="Let a VM go on that has come", responses={200: models.Booted})
    def arrive(path: VmPath) -> Response:
        migration.arrive(agent.vms, path.vm)
        return _answer(agent.overview.booted(path.vm))


def _disk_routes(app: OpenAPI, agent: Agent, long_calls: LongCalls) -> None:
    @app.put("/v1/vms/<vm>/size", summary="Let a VM's disk grow, also while it runs", responses={200: models.Vm})
    def resize(path: VmPath, body: models.ResizeRequest) -> Response:
        disks.resize(agent.vms, path.vm, body.size, _permit())
        return _answer(agent.overview.vm(path.vm))

    @app.get("/v1/vms/<vm>/snapshots", summary="A VM's snapshots", responses={200: models.SnapshotList})
    def snapshots(path: VmPath) -> Response:
        return _answer(models.SnapshotList(snapshots=agent.overview.snapshots(path.vm)))

    @app.put(
        "/v1/vms/<vm>/snapshots/<snapshot>",
        summary="Keep what a VM's disk holds now, also while it runs; a snapshot of this name is left alone",
        responses={200: models.Snapshot},
    )
    def take_snapshot(path: SnapshotPath) -> Response:
        snapshot = disks.take(agent.vms, path.vm, path.snapshot, _permit())
        return _answer(views.snapshot(agent.vms.record(path.vm), snapshot))

    @app.post(
        "/v1/vms/<vm>/snapshots/<snapshot>/revert",
        summary="Let the disk of a VM that is off hold what it held then",
        responses={200: models.Vm},
    )
    def revert(path: SnapshotPath) -> Response:
        disks.revert(agent.vms, path.vm, path.snapshot, _permit())
        return _answer(agent.overview.vm(path.vm))

    @app.post(
        "/v1/vms/<vm>/clones",
        summary="New VMs with what a VM's disk holds now, without copying it; clones of these names are left alone",
        responses={200: models.Clones},
    )
    def clone(path: VmPath, body: models.CloneRequest) -> Response:
        creating.clone(agent.vms, path.vm, body.names)
        return _answer(models.Clones(vms=[agent.overview.vm(name) for name in body.names]))

    @app.post("/v1/vms/<vm>/export", summary=EXPORT.format("a VM's disk"), responses=_lines_of(app, models.ExportLine))
    def export_vm(path: VmPath, body: models.ExportRequest) -> Response:
        def work(file: Path | Passed, tell: Progress) -> models.ExportLine:
            return models.ExportLine(exported=agent.copies.export_vm(path.vm, file, body.format, tell))

        return _with_file(agent, long_calls, models.ExportLine, f"export {path.vm}", body, work)

    @app.delete("/v1/vms/<vm>/snapshots/<snapshot>", summary="Forget a snapshot", responses={204: None})
    def delete_snapshot(path: SnapshotPath) -> Response:
        disks.drop(agent.vms, path.vm, path.snapshot, _permit())
        return _done()
