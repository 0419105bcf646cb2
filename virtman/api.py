"""The agent's local API: HTTP over a unix socket, JSON, errors as problem documents (RFC 9457).

Here is what the agent does for each call of ``virtman.calls``. The permissions of the socket say who may connect,
and ``virtman.roles`` what a caller may do. ``/openapi.json`` is the document that validates the requests.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from flask import Response, request
from flask_openapi3.models.info import Info
from flask_openapi3.models.schema import Schema
from flask_openapi3.openapi import OpenAPI
from pydantic import BaseModel, ValidationError
from werkzeug.exceptions import HTTPException

from drivers import errors as driver_errors
from drivers.errors import FULL
from virtman import (
    attaching,
    booting,
    calls,
    cleaning,
    copies,
    creating,
    disks,
    errors,
    hydrating,
    migration,
    models,
    renaming,
    streams,
)
from virtman.agent import Agent
from virtman.calls import Call, LongCall
from virtman.convert import Progress
from virtman.deploying import HYDRATION
from virtman.errors import VirtmanError
from virtman.fdpassing import Passed
from virtman.models import DeploymentPath, DiskPath, ForceRequest, ImagePath, SnapshotPath, VmPath
from virtman.peer import Peer
from virtman.pipe import Caller, Pipe
from virtman.records import Boot
from virtman.roles import Permit, check_call, check_named, permit_of
from volt.deploymodels import Deployment, DeploymentList, DeploymentRequest
from volt.models import HostList, ImageTree

log = logging.getLogger(__name__)

PEER = "virtman.peer"
"""Key of the caller (``Peer``) in the environment of a request (PEP 3333)."""
HUNG_UP = "waitress.client_disconnected"
"""Key of the server's function that tells whether the caller has hung up."""

PROBLEM = "application/problem+json"
MAX_ECHO = 80
"""Characters of a wrong input that an error repeats."""

OURS: tuple[tuple[type[Exception], type[VirtmanError]], ...] = (
    (driver_errors.NoSpace, errors.NoRoom),
    (driver_errors.BadVolume, errors.BadRequest),
    (driver_errors.DiskInUse, errors.DiskBusy),
    (driver_errors.DeviceInUse, errors.DiskBusy),
    (driver_errors.VolumeInUse, errors.DiskBusy),
    (driver_errors.DeviceRefused, errors.BadDevice),
    (driver_errors.NotPossible, errors.NotSupported),
    (driver_errors.DriverError, errors.DriverTrouble),
    (OSError, errors.HostTrouble),
)
"""The agent's class for errors of drivers and of the host's files: the first that fits."""

NDJSON = "application/x-ndjson"
REFERENCE = "#/components/schemas/{model}"

MOST_LONG = 32
"""Calls at once that answer by lines of progress. Each keeps a thread of the server (virtman/server.py) while
it lasts, which may be for ever for a stream. The other threads are for all other calls."""

MAX_BODY = 16 << 20
"""Bytes of a request: user data for cloud-init may be long."""


def problem(error: VirtmanError) -> models.Problem:
    return _problem(error.status, error.kind, str(error))


def _problem(status: int, kind: str, detail: str) -> models.Problem:
    line = " ".join(detail.split())
    return models.Problem(type=f"urn:virtman:problem:{kind}", title=kind.replace("-", " "), status=status, detail=line)


def as_virtman_error(error: Exception) -> VirtmanError:
    """The agent's error for any other."""
    if isinstance(error, VirtmanError):
        return error
    if isinstance(error, OSError) and error.errno in FULL:
        return errors.NoRoom(str(error))
    if not isinstance(error, driver_errors.DriverError):
        log.error("unexpected error", exc_info=error)
    for theirs, ours in OURS:
        if isinstance(error, theirs):
            return ours(str(error))
    return VirtmanError(f"unexpected {type(error).__name__}: {error}; the agent's log has more")


def _on_error(error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        return _refusal(problem(as_virtman_error(error)))
    why = "this agent has no such call; it is of another version" if error.code in (404, 405) else error.description
    response = _refusal(_problem(error.code or 500, errors.AgentFailed.kind, f"{request.method} {request.path}: {why}"))
    response.headers.extend((name, value) for name, value in error.get_headers() if name == "Allow")
    return response


def _on_recursion(_error: RecursionError) -> Response:
    return _refusal(_problem(400, errors.BadRequest.kind, "the body's JSON is nested too deeply"))


def _on_invalid(error: ValidationError) -> Response:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or "the request"
    got = repr(first["input"])
    # Nothing long, and not the whole request when something is missing: it may have a password in its user data.
    said = f" (got {got})" if first["type"] != "missing" and len(got) <= MAX_ECHO else ""
    return _refusal(_problem(400, errors.BadRequest.kind, f"{where}: {first['msg']}{said}"))


def _refusal(document: models.Problem) -> Response:
    return Response(document.model_dump_json(), status=document.status, content_type=PROBLEM)


class Application(OpenAPI):
    """A Flask application whose routes are calls: they answer with models, or with nothing."""

    def serve(self, call: Call[Any]) -> Callable[..., Any]:
        """Decorate the function that does a call; what it takes is its ``path``, ``query`` and ``body``."""
        if isinstance(call, LongCall):
            answer: dict[int, Any] = {200: self._lines(call)}
        else:
            answer = {204: None} if call.answer is models.Nothing else {200: call.answer}
        decorate: Callable[..., Any] = getattr(self, call.method.lower())
        return decorate(call.path, summary=call.summary, responses=answer)  # type: ignore[no-any-return]

    def _lines(self, call: LongCall[Any]) -> dict[str, Any]:
        """What the document says of an answer of lines."""
        line = models.Line.model_json_schema(ref_template=REFERENCE, mode="serialization")
        answer = call.answer.model_json_schema(ref_template=REFERENCE, mode="serialization")
        name = f"LineOf{call.answer.__name__}"
        line["properties"]["answer"]["anyOf"][0] = _reference(call.answer.__name__)
        schemas = {**line.pop("$defs"), **answer.pop("$defs", {}), call.answer.__name__: answer, name: line}
        self.components_schemas.update((each, Schema(**schema)) for each, schema in schemas.items())
        content = {NDJSON: {"schema": _reference(name)}}
        return {"description": "One JSON object in each line, the last has the answer or a problem", "content": content}

    def make_response(self, rv: Any) -> Response:
        if rv is None:
            return Response(status=204)
        if isinstance(rv, BaseModel):
            return Response(rv.model_dump_json(), content_type="application/json")
        return super().make_response(rv)


def create_app(agent: Agent) -> Application:
    refusal = {"description": "A problem (RFC 9457)", "content": {PROBLEM: {"schema": _reference("Problem")}}}
    app = Application(
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
    long_calls = LongCalls(agent)
    _host_routes(app, agent)
    _cache_routes(app, agent, long_calls)
    _image_routes(app, agent, long_calls)
    _hydration_routes(app, agent, long_calls)
    _deployment_routes(app, agent)
    _vm_routes(app, agent)
    _machine_routes(app, agent)
    _disk_routes(app, agent)
    _copy_routes(app, agent, long_calls)
    _migration_routes(app, agent, long_calls)
    _arrival_routes(app, agent)
    return app


def _check_caller() -> None:
    """Check the rights of the caller before a call does anything. An unknown path is answered 404. Raises Forbidden."""
    if request.url_rule is not None:
        check_call(request.environ.get(PEER), request.method, request.url_rule.rule)


def _peer() -> Peer:
    """The caller, which ``_check_caller`` has checked."""
    peer: Peer = request.environ[PEER]
    return peer


def _permit() -> Permit:
    return permit_of(_peer())


def _reference(model: str) -> dict[str, str]:
    return {"$ref": REFERENCE.format(model=model)}


class LongCalls:
    """Answers by lines, of which there are at most ``MOST_LONG`` at once.

    The work of such a call runs in a thread. With ``detached`` it goes on when the caller hangs up; asking again then
    finds it done. Else it gets a CallerGone the next time that it tells how far it is.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._free = threading.BoundedSemaphore(MOST_LONG)

    def run(self, name: str, work: Callable[[Progress], BaseModel], *, detached: bool) -> Response:
        """Lines of progress, and at last what ``work`` returns, or a problem. Raises TooManyCalls."""
        return self._answer(lambda: _lines(name, work, detached=detached))

    def run_with_caller(
        self, name: str, work: Callable[[Caller, Progress], BaseModel], *, detached: bool = True
    ) -> Response:
        """As ``run``, of work that needs the caller at a socket, of which the first line tells."""

        def begin() -> Response:
            pipe = Pipe(self._agent.config.socket.parent, _peer().uid)

            def with_caller(tell: Progress) -> BaseModel:
                with pipe.caller() as caller:
                    return work(caller, tell)

            return _lines(name, with_caller, models.Line(pipe=str(pipe.path)), detached=detached)

        return self._answer(begin)

    def run_with_file(
        self, name: str, file: Path, work: Callable[[Path | Passed, Progress], BaseModel], *, passed: bool,
        detached: bool = False,
    ) -> Response:  # fmt: skip
        """As ``run``, of work with a file that the caller passes; an administrator may also just name it.

        Raises Forbidden, TooManyCalls.
        """
        peer = _peer()
        if not passed:
            check_named(peer, file)
            return self.run(name, partial(work, file), detached=detached)

        def with_file(caller: Caller, tell: Progress) -> BaseModel:
            with caller.passed() as fd:
                return work(Passed(fd, file, trusted=peer.administers), tell)

        return self.run_with_caller(name, with_file, detached=detached)

    def _answer(self, begin: Callable[[], Response]) -> Response:
        if not self._free.acquire(blocking=False):
            raise errors.TooManyCalls(
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


def _lines(
    name: str, work: Callable[[Progress], BaseModel], first: models.Line | None = None, *, detached: bool
) -> Response:
    """Begin the work in a thread, and answer with its lines."""
    lines: queue.Queue[models.Line] = queue.Queue()
    hung_up: Callable[[], bool] = request.environ.get(HUNG_UP, lambda: False)

    def tell(step: str, done: int, total: int) -> None:
        if hung_up() and not detached:
            raise errors.CallerGone("the caller hung up")
        lines.put(models.Line(progress=models.Progress(step=step, done=done, total=total)))

    def run() -> None:
        try:
            lines.put(models.Line(answer=work(tell).model_dump(mode="json")))
        except Exception as error:  # noqa: BLE001  the caller gets it as a problem
            if hung_up():
                log.warning("%s failed after its caller had hung up: %s", name, error)
            lines.put(models.Line(problem=problem(as_virtman_error(error))))

    # Now, and not with the first line: a caller that hangs up before that would leave a pipe behind.
    threading.Thread(target=run, name=name, daemon=True).start()

    def told() -> Iterator[str]:
        if first is not None:
            yield first.model_dump_json() + "\n"
        last = False
        while not last:
            line = lines.get()
            last = line.progress is None
            yield line.model_dump_json() + "\n"

    return Response(told(), content_type=NDJSON)


def _host_routes(app: Application, agent: Agent) -> None:
    @app.serve(calls.STATUS)
    def status() -> models.Status:
        return agent.overview.status()

    @app.serve(calls.GC)
    def gc() -> models.Removed:
        return cleaning.gc(agent.stacks)

    @app.serve(calls.GC_DRY_RUN)
    def gc_dry_run() -> models.Removed:
        return cleaning.would_remove(agent.stacks)

    @app.serve(calls.REPAIR)
    def repair() -> models.Repaired:
        return agent.repair()

    @app.serve(calls.SUSPEND)
    def suspend(body: ForceRequest) -> None:
        agent.suspend(force=body.force)


def _cache_routes(app: Application, agent: Agent, long_calls: LongCalls) -> None:
    @app.serve(calls.VOLUMES)
    def volumes() -> models.VolumeList:
        return models.VolumeList(volumes=agent.volumes.all())

    @app.serve(calls.ADD_VOLUME)
    def add_volume(body: models.VolumeRequest) -> models.Volume:
        agent.stacks.check_not_suspended()
        return agent.volumes.add(Path(body.path))

    @app.serve(calls.REMOVE_VOLUME)
    def remove_volume(query: models.VolumeRequest) -> None:
        agent.stacks.check_not_suspended()
        agent.volumes.remove(Path(query.path))

    @app.serve(calls.CACHED_DEVICES)
    def cached_devices() -> models.CachedDeviceList:
        agent.volumes.require()
        return models.CachedDeviceList(devices=agent.overview.devices())

    @app.serve(calls.ATTACH_CACHED)
    def attach_cached(body: models.DeviceRequest) -> Response:
        def attach(file: Path | Passed, _tell: Progress) -> models.CachedDevice:
            attached = agent.devices.attach(Path(body.path), file if isinstance(file, Passed) else None)
            return agent.overview.device(attached.name)

        name = f"attach {body.path}"
        return long_calls.run_with_file(name, Path(body.path), attach, passed=body.passed, detached=True)

    @app.serve(calls.DETACH_CACHED)
    def detach_cached(query: models.DetachQuery) -> None:
        agent.devices.detach(Path(query.path), force=query.force)


def _image_routes(app: Application, agent: Agent, long_calls: LongCalls) -> None:
    @app.serve(calls.IMAGES)
    def images() -> models.ImageList:
        return models.ImageList(images=agent.overview.images())

    @app.serve(calls.IMAGE)
    def image(path: ImagePath) -> models.ImageDetails:
        return agent.overview.image(path.image)

    @app.serve(calls.PUBLISH)
    def publish(body: models.PublishRequest) -> Response:
        name, copy = f"publish {body.name}", partial(agent.publishing.publish, body.name, parent=body.parent)
        return long_calls.run_with_file(name, Path(body.file), copy, passed=body.passed, detached=body.detach)

    @app.serve(calls.PUBLISH_VM)
    def publish_vm(path: VmPath, body: models.PublishVmRequest) -> Response:
        copy = partial(agent.publishing.publish_vm, body.image, path.vm)
        return long_calls.run(f"publish {body.image}", copy, detached=body.detach)

    @app.serve(calls.PUBLISH_IN_PLACE)
    def publish_in_place(path: ImagePath, body: models.InPlaceRequest) -> Response:
        def publish(file: Path | Passed, tell: Progress) -> models.Published:
            return agent.publishing.publish_in_place(path.image, file, body.trust, tell, digest=body.digest)

        return long_calls.run_with_file(f"publish {path.image}", Path(body.file), publish, passed=body.passed)

    @app.serve(calls.UNPUBLISH)
    def unpublish(path: ImagePath, query: models.UnpublishQuery) -> models.Unpublished:
        return agent.publishing.unpublish(path.image, when_unused=query.when_unused)

    @app.serve(calls.TREE)
    def tree(path: ImagePath) -> ImageTree:
        return agent.stacks.volt.tree(path.image)


def _deployment_routes(app: Application, agent: Agent) -> None:
    @app.serve(calls.HOSTS)
    def hosts() -> HostList:
        return HostList(hosts=agent.stacks.volt.hosts())

    @app.serve(calls.DEPLOYMENTS)
    def deployments() -> DeploymentList:
        return DeploymentList(deployments=agent.stacks.volt.deployments())

    @app.serve(calls.DEPLOY)
    def deploy(body: DeploymentRequest) -> Deployment:
        return agent.stacks.volt.deploy(body)

    @app.serve(calls.DEPLOYMENT)
    def deployment(path: DeploymentPath) -> Deployment:
        return agent.stacks.volt.deployment(path.deployment)

    @app.serve(calls.CANCEL_DEPLOYMENT)
    def cancel_deployment(path: DeploymentPath) -> None:
        agent.stacks.volt.cancel_deployment(path.deployment)


def _hydration_routes(app: Application, agent: Agent, long_calls: LongCalls) -> None:
    @app.serve(calls.HYDRATE)
    def hydrate(path: ImagePath, body: models.HydrateRequest) -> Response:
        def work(tell: Progress) -> models.Hydration:
            record = hydrating.begin(agent.stacks, path.image)
            if body.until_ready:
                hydrating.wait(agent.stacks, path.image, partial(agent.upkeep.trouble, HYDRATION + path.image), tell)
            return agent.overview.hydration(record)

        return long_calls.run(f"hydrate {path.image}", work, detached=False)

    @app.serve(calls.END_HYDRATION)
    def end_hydration(path: ImagePath) -> None:
        hydrating.cancel(agent.stacks, path.image)


def _vm_routes(app: Application, agent: Agent) -> None:
    @app.serve(calls.VMS)
    def vms() -> models.VmList:
        return models.VmList(vms=agent.overview.vms())

    @app.serve(calls.VM)
    def vm(path: VmPath) -> models.Vm:
        return agent.overview.vm(path.vm)

    @app.serve(calls.CREATE)
    def create(path: VmPath, body: models.CreateRequest) -> models.Vm:
        creating.create(agent.vms, path.vm, body.image, body.size)
        return agent.overview.vm(path.vm)

    @app.serve(calls.DESTROY)
    def destroy(path: VmPath) -> None:
        creating.destroy(agent.vms, path.vm, _permit())

    @app.serve(calls.RENAME)
    def rename(path: VmPath, body: models.RenameRequest) -> models.Vm:
        renaming.rename(agent.vms, path.vm, body.name, _permit())
        return agent.overview.vm(body.name)


def _machine_routes(app: Application, agent: Agent) -> None:
    @app.serve(calls.BOOT)
    def boot(path: VmPath, body: models.BootRequest) -> models.Booted:
        how = Boot(memory=body.memory, cpus=body.cpus, network=body.network)
        booting.boot(agent.vms, path.vm, body.image, body.size, how, body.ssh_keys, body.user_data)
        return agent.overview.booted(path.vm)

    @app.serve(calls.START)
    def start(path: VmPath) -> models.Booted:
        booting.start(agent.vms, path.vm)
        return agent.overview.booted(path.vm)

    @app.serve(calls.STOP)
    def stop(path: VmPath, body: ForceRequest) -> None:
        booting.stop(agent.vms, path.vm, force=body.force)

    @app.serve(calls.CONSOLE)
    def console(path: VmPath) -> models.Console:
        return agent.overview.console(path.vm)

    @app.serve(calls.ATTACH_DISK)
    def attach_disk(path: DiskPath) -> models.Vm:
        attaching.attach(agent.vms, path.vm, path.disk)
        return agent.overview.vm(path.vm)

    @app.serve(calls.DETACH_DISK)
    def detach_disk(path: DiskPath) -> models.Vm:
        attaching.detach(agent.vms, path.vm, path.disk)
        return agent.overview.vm(path.vm)


def _disk_routes(app: Application, agent: Agent) -> None:
    @app.serve(calls.RESIZE)
    def resize(path: VmPath, body: models.ResizeRequest) -> models.Vm:
        disks.resize(agent.vms, path.vm, body.size, _permit())
        return agent.overview.vm(path.vm)

    @app.serve(calls.SNAPSHOTS)
    def snapshots(path: VmPath) -> models.SnapshotList:
        return models.SnapshotList(snapshots=agent.overview.snapshots(path.vm))

    @app.serve(calls.TAKE_SNAPSHOT)
    def take_snapshot(path: SnapshotPath) -> models.Snapshot:
        snapshot = disks.take(agent.vms, path.vm, path.snapshot, _permit())
        return agent.overview.snapshot(agent.vms.record(path.vm), snapshot)

    @app.serve(calls.REVERT)
    def revert(path: SnapshotPath) -> models.Vm:
        disks.revert(agent.vms, path.vm, path.snapshot, _permit())
        return agent.overview.vm(path.vm)

    @app.serve(calls.DELETE_SNAPSHOT)
    def delete_snapshot(path: SnapshotPath) -> None:
        disks.drop(agent.vms, path.vm, path.snapshot, _permit())

    @app.serve(calls.CLONE)
    def clone(path: VmPath, body: models.CloneRequest) -> models.Clones:
        creating.clone(agent.vms, path.vm, body.names)
        return models.Clones(vms=[agent.overview.vm(name) for name in body.names])


def _copy_routes(app: Application, agent: Agent, long_calls: LongCalls) -> None:
    @app.serve(calls.EXPORT_IMAGE)
    def export_image(path: ImagePath, body: models.ExportRequest) -> Response:
        def export(file: Path | Passed, tell: Progress) -> models.Exported:
            return copies.export_image(agent.stacks, path.image, file, body.format, tell)

        return long_calls.run_with_file(f"export {path.image}", Path(body.file), export, passed=body.passed)

    @app.serve(calls.EXPORT_VM)
    def export_vm(path: VmPath, body: models.ExportRequest) -> Response:
        def export(file: Path | Passed, tell: Progress) -> models.Exported:
            return copies.export_vm(agent.vms, path.vm, file, body.format, tell)

        return long_calls.run_with_file(f"export {path.vm}", Path(body.file), export, passed=body.passed)

    @app.serve(calls.SEND)
    def send(path: VmPath, body: models.SendRequest) -> Response:
        def write(caller: Caller, tell: Progress) -> models.Sent:
            return streams.send(
                agent.vms, path.vm, body.snapshot, body.since, caller.write, tell,
                with_snapshots=body.with_snapshots,
            )  # fmt: skip

        return long_calls.run_with_caller(f"send {path.vm}", write)

    @app.serve(calls.RECEIVE)
    def receive(path: VmPath, body: models.ReceiveRequest) -> Response:
        permit = _permit()

        def read(caller: Caller, tell: Progress) -> models.Vm:
            streams.receive_from(agent.vms, path.vm, body.image, caller, tell, permit)
            return agent.overview.vm(path.vm)

        return long_calls.run_with_caller(f"receive {path.vm}", read)


def _migration_routes(app: Application, agent: Agent, long_calls: LongCalls) -> None:
    @app.serve(calls.MIGRATION_SOURCE)
    def migration_source(path: VmPath) -> models.MigrationSource:
        return migration.migration_source(agent.vms, path.vm)

    @app.serve(calls.MIGRATE)
    def migrate(path: VmPath, body: models.MigrateRequest) -> Response:
        def leave(tell: Progress) -> models.Left:
            told = partial(tell, "memory")
            downtime = migration.leave(agent.vms, path.vm, body.to, body.domain, body.snapshot, told)
            return models.Left(downtime=downtime)

        # Only the caller resumes the VM at the destination.
        return long_calls.run(f"migrate {path.vm}", leave, detached=False)

    @app.serve(calls.END_MIGRATION)
    def end_migration(path: VmPath) -> models.Vm:
        migration.abort(agent.vms, path.vm)
        return agent.overview.vm(path.vm)

    @app.serve(calls.TAKE_BACK)
    def take_back(path: VmPath, body: models.WentRequest) -> models.Vm:
        migration.take_back(agent.vms, path.vm, body.to)
        return agent.overview.vm(path.vm)

    @app.serve(calls.FINISH_MIGRATION)
    def finish_migration(path: VmPath, body: models.WentRequest) -> None:
        migration.finish(agent.vms, path.vm, body.to)


def _arrival_routes(app: Application, agent: Agent) -> None:
    @app.serve(calls.CHECK_ARRIVAL)
    def check_arrival(body: models.MigrationSource) -> None:
        migration.check(agent.vms, body)

    @app.serve(calls.GIVE_UP_ARRIVAL)
    def give_up_arrival(path: VmPath, body: models.GiveUpRequest) -> models.GivenUp:
        return models.GivenUp(state=migration.give_up(agent.vms, path.vm, body.snapshots))

    @app.serve(calls.EXPECT)
    def expect(path: VmPath, body: models.MigrationSource) -> models.Expected:
        domain = migration.expect(agent.vms, path.vm, body)
        return models.Expected(domain=domain)

    @app.serve(calls.ARRIVE)
    def arrive(path: VmPath) -> models.Booted:
        migration.arrive(agent.vms, path.vm)
        return agent.overview.booted(path.vm)
