"""The agent's API for Python programs and the command line.

Every method returns a model of ``virtman.models`` or nothing, and raises the class of ``virtman.errors`` that the agent
raised, AgentUnreachable when nobody answers, AgentFailed when the answer is not an agent's.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import urlencode

from pydantic import BaseModel, ValidationError

from virtman import calls, models
from virtman.calls import A, Call, LongCall
from virtman.errors import BY_KIND, AgentFailed, AgentUnreachable, BadRequest, CoordinatorDown, VoltRefused
from virtman.names import check_name, check_path
from virtman.places import places
from volt.deploymodels import Deployment
from volt.models import Host, ImageTree

TIMEOUT = 600.0
"""Seconds that one call may take: an attach may have to wait for a parent."""

M = TypeVar("M", bound=BaseModel)
OnProgress = Callable[[str, int, int], None]


def silently(_step: str, _done: int, _total: int) -> None:
    """Ignore progress."""


class _Connection(HTTPConnection):
    """A connection to a unix socket. The standard library's HTTP client is imported in a fifth of httpx's time."""

    def __init__(self, path: Path, timeout: float | None) -> None:
        super().__init__("agent", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        """Connect; ``request`` calls it."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class AgentClient:
    """One agent. May be shared by threads: each call has a connection of its own.

    A method makes the call of the same name in ``virtman.calls``, whose summary says what the call does. The class has
    a method for each call, however many there are: so programs find all calls, with their types, in one place.
    """

    def __init__(self, socket: Path | None = None, timeout: float = TIMEOUT) -> None:
        """``timeout``: seconds that one call may take. ``socket``: by default that of this user's agent."""
        self._socket = socket or places().socket
        self._timeout = timeout

    # Images

    def images(self) -> list[models.Image]:
        return self._call(calls.IMAGES).images

    def image(self, image: str) -> models.ImageDetails:
        return self._call(calls.IMAGE, image=image)

    def tree(self, image: str) -> ImageTree:
        return self._call(calls.TREE, image=image)

    def publish(
        self, name: str, file: Path, on_progress: OnProgress = silently, *, detach: bool = False,
        parent: str | None = None,
    ) -> models.Published:  # fmt: skip
        """Publish a raw or qcow2 file of this host, which is opened here, with this user's rights.

        ``on_progress`` gets the step, the bytes done and the bytes in all. ``detach``: the agent goes on if this
        program ends, or leaves the call; else nothing is published then. ``parent``: the image that this one was made
        of; the file may be an overlay of what that image holds.
        """
        from virtman.fdpassing import opened, pass_to

        body = {"name": check_name("image", name), "file": check_path(file), "passed": True, "detach": detach}
        body["parent"] = None if parent is None else check_name("image", parent)
        with opened(file) as fd:
            return self._follow(calls.PUBLISH, body, on_progress, partial(pass_to, fd=fd))

    def publish_in_place(
        self, name: str, path: Path, trust: str | None = None, *, digest: bool = False
    ) -> models.Published:  # fmt: skip
        """Publish a raw file, or a block device, without copying it; the agent serves it as long as it is the same.

        ``trust``: the digest (``blake3-64k:…``, ``sha256:…``, ``pieces:…`` or ``id:…``) that its content has, as the
        caller knows. ``digest``: have the sum computed in the background. A caller that is not root opens the file
        with its own rights, and passes it.
        """
        from virtman.fdpassing import opened, pass_to

        passed = os.geteuid() != 0
        body = {"file": check_path(path), "passed": passed, "trust": trust, "digest": digest}
        with opened(path, device=True) if passed else nullcontext(-1) as fd:
            return self._follow(calls.PUBLISH_IN_PLACE, body, on_pipe=partial(pass_to, fd=fd), image=name)

    def publish_vm(
        self, name: str, vm: str, on_progress: OnProgress = silently, *, detach: bool = False
    ) -> models.Published:  # fmt: skip
        body = {"image": check_name("image", name), "detach": detach}
        return self._follow(calls.PUBLISH_VM, body, on_progress, vm=vm)

    def unpublish(self, image: str, *, when_unused: bool = False) -> models.Unpublished:
        """Be no origin of an image any more; without another one it is withdrawn at Volt.

        ``when_unused``: also an image that is in use; it is removed when no host needs it.
        """
        return self._call(calls.UNPUBLISH, {"when_unused": _flag(when_unused)}, image=image)

    def hydrate(
        self, image: str, on_progress: OnProgress = silently, *, until_ready: bool = False
    ) -> models.Hydration:  # fmt: skip
        """Have this host keep all of an image. ``until_ready``: return when all of it is there."""
        return self._follow(calls.HYDRATE, {"until_ready": until_ready}, on_progress, image=image)

    def end_hydration(self, image: str) -> None:
        self._call(calls.END_HYDRATION, image=image)

    def export_vm(
        self, vm: str, file: Path, image_format: str = "raw", on_progress: OnProgress = silently
    ) -> models.Exported:
        return self._export(calls.EXPORT_VM, file, image_format, on_progress, vm=vm)

    def export_image(
        self, image: str, file: Path, image_format: str = "raw", on_progress: OnProgress = silently
    ) -> models.Exported:
        return self._export(calls.EXPORT_IMAGE, file, image_format, on_progress, image=image)

    def _export(
        self, call: LongCall[models.Exported], file: Path, image_format: str, on_progress: OnProgress, **names: str
    ) -> models.Exported:
        """The file gets its name when all is well. Also raises Conflict, NoRoom, HostTrouble for it."""
        from virtman.fdpassing import pass_to
        from virtman.newfile import new_file

        body = {"file": check_path(file), "format": image_format, "passed": True}
        with new_file(file) as made:
            return self._follow(call, body, on_progress, partial(pass_to, fd=made.fd), **names)

    # VMs

    def vms(self) -> list[models.VmLine]:
        return self._call(calls.VMS).vms

    def vm(self, vm: str) -> models.Vm:
        return self._call(calls.VM, vm=vm)

    def create(self, vm: str, image: str, size: int | None = None) -> models.Vm:
        return self._call(calls.CREATE, {"image": check_name("image", image), "size": size}, vm=vm)

    def destroy(self, vm: str) -> None:
        self._call(calls.DESTROY, vm=vm)

    def boot(self, vm: str, image: str, size: int | None = None, **how: Any) -> models.Booted:
        """Start a VM, creating its disk if needed. ``how``: memory (MiB), cpus, network, ssh_keys, user_data."""
        return self._call(calls.BOOT, {"image": check_name("image", image), "size": size, **how}, vm=vm)

    def start(self, vm: str) -> models.Booted:
        return self._call(calls.START, vm=vm)

    def stop(self, vm: str, *, force: bool = False) -> None:
        self._call(calls.STOP, {"force": force}, vm=vm)

    def console(self, vm: str) -> models.Console:
        return self._call(calls.CONSOLE, vm=vm)

    def rename(self, vm: str, new: str) -> models.Vm:
        return self._call(calls.RENAME, {"name": check_name("vm", new)}, vm=vm)

    def attach_disk(self, vm: str, disk: str) -> models.Vm:
        return self._call(calls.ATTACH_DISK, vm=vm, disk=disk)

    def detach_disk(self, vm: str, disk: str) -> models.Vm:
        return self._call(calls.DETACH_DISK, vm=vm, disk=disk)

    def resize(self, vm: str, size: int) -> models.Vm:
        return self._call(calls.RESIZE, {"size": size}, vm=vm)

    def snapshots(self, vm: str) -> list[models.Snapshot]:
        return self._call(calls.SNAPSHOTS, vm=vm).snapshots

    def take_snapshot(self, vm: str, name: str) -> models.Snapshot:
        return self._call(calls.TAKE_SNAPSHOT, vm=vm, snapshot=name)

    def revert(self, vm: str, snapshot: str) -> models.Vm:
        return self._call(calls.REVERT, vm=vm, snapshot=snapshot)

    def delete_snapshot(self, vm: str, name: str) -> None:
        self._call(calls.DELETE_SNAPSHOT, vm=vm, snapshot=name)

    def clone(self, vm: str, names: Sequence[str]) -> list[models.Vm]:
        return self._call(calls.CLONE, {"names": [check_name("vm", name) for name in names]}, vm=vm).vms

    def send(
        self,
        vm: str,
        target: BinaryIO,
        snapshot: str | None = None,
        since: str | None = None,
        on_progress: OnProgress = silently,
        *,
        with_snapshots: bool = False,
    ) -> models.Sent:
        """Write what a snapshot of a VM, or its disk, has besides its image; or what changed ``since`` a snapshot.

        No timeout ends it: the reader of the target sets the pace. After an error the target has no whole stream, and
        no agent accepts it. Also raises NoRoom, HostTrouble if it cannot be written.
        """
        from virtman.pipe import Pump, into

        body = {"snapshot": snapshot, "since": since, "with_snapshots": with_snapshots}
        with Pump(partial(into, target)) as pump:
            return self._follow(calls.SEND, body, on_progress, pump.start, vm=vm)

    def receive(self, vm: str, image: str, source: BinaryIO, on_progress: OnProgress = silently) -> models.Vm:
        """Make a VM of a stream, or bring one up to date with what has changed since a snapshot that it has.

        No timeout ends it: the source sets the pace. With an unbuffered source the agent sees each part at once, and so
        refuses a wrong stream early. Also raises HostTrouble if it cannot be read.
        """
        from virtman.pipe import Pump, out_of

        body = {"image": check_name("image", image)}
        with Pump(partial(out_of, source)) as pump:
            return self._follow(calls.RECEIVE, body, on_progress, pump.start, vm=vm)

    # Migration

    def migration_source(self, vm: str) -> models.MigrationSource:
        return self._call(calls.MIGRATION_SOURCE, vm=vm)

    def migrate(self, vm: str, to: str, domain: str, snapshot: str, on_progress: OnProgress = silently) -> models.Left:
        """Move a VM's memory to the libvirt at ``to``, as the domain that ``expect`` told; it is paused there then.

        ``snapshot``: the snapshot that was sent last.
        """
        body = {"to": to, "domain": domain, "snapshot": snapshot}
        return self._follow(calls.MIGRATE, body, on_progress, vm=vm)

    def end_migration(self, vm: str) -> models.Vm:
        return self._call(calls.END_MIGRATION, vm=vm)

    def take_back(self, vm: str, uri: str) -> models.Vm:
        return self._call(calls.TAKE_BACK, {"to": uri}, vm=vm)

    def finish_migration(self, vm: str, to: str) -> None:
        self._call(calls.FINISH_MIGRATION, {"to": to}, vm=vm)

    def check_arrival(self, migration_source: models.MigrationSource) -> None:
        self._call(calls.CHECK_ARRIVAL, migration_source.model_dump(mode="json"))

    def give_up_arrival(self, vm: str, snapshots: Sequence[str]) -> models.GivenUp:
        return self._call(calls.GIVE_UP_ARRIVAL, {"snapshots": [*snapshots]}, vm=vm)

    def expect(self, vm: str, migration_source: models.MigrationSource) -> models.Expected:
        return self._call(calls.EXPECT, migration_source.model_dump(mode="json"), vm=vm)

    def arrive(self, vm: str) -> models.Booted:
        return self._call(calls.ARRIVE, vm=vm)

    # Deployments

    def hosts(self) -> list[Host]:
        return self._call(calls.HOSTS).hosts

    def deployments(self) -> list[Deployment]:
        return self._call(calls.DEPLOYMENTS).deployments

    def deploy(self, wanted: Mapping[str, object]) -> Deployment:
        """Bring a whole image to many hosts. ``wanted``: the fields of ``volt.deploymodels.DeploymentRequest``."""
        return self._call(calls.DEPLOY, dict(wanted))

    def deployment(self, number: int) -> Deployment:
        return self._call(calls.DEPLOYMENT, deployment=str(number))

    def cancel_deployment(self, number: int) -> None:
        self._call(calls.CANCEL_DEPLOYMENT, deployment=str(number))

    def follow_deployment(
        self, number: int, on_progress: OnProgress = silently, look: Callable[[Deployment], None] | None = None,
        every: float = 1.0, say: Callable[[str], None] = lambda _words: None,
    ) -> Deployment:  # fmt: skip
        """Wait until no host of a deployment is under way any more, also while Volt does not answer.

        ``look`` is called with it each ``every`` seconds, or more often. ``say`` hears that Volt is waited for.
        """
        import math

        from drivers.host.retry import until

        absent = False

        def ended() -> Deployment | None:
            nonlocal absent
            try:
                now = self.deployment(number)
            except VoltRefused:
                raise
            except CoordinatorDown as error:
                if not absent:
                    say(f"{error}; waiting for Volt, while the deployment goes on")
                absent = True
                return None
            absent = False
            if look is not None:
                look(now)
            done = [now.size if host.state == "whole" else host.done for host in now.hosts]
            on_progress("deploy", sum(done), now.size * len(done))
            return now if now.ended else None

        last = until(ended, limit=math.inf, longest=every)
        assert last is not None  # noqa: S101
        return last

    # The host

    def status(self) -> models.Status:
        return self._call(calls.STATUS)

    def gc(self, *, dry_run: bool = False) -> models.Removed:
        return self._call(calls.GC_DRY_RUN if dry_run else calls.GC)

    def repair(self) -> models.Repaired:
        return self._call(calls.REPAIR)

    def suspend(self, *, force: bool = False) -> None:
        self._call(calls.SUSPEND, {"force": force})

    def volumes(self) -> list[models.Volume]:
        return self._call(calls.VOLUMES).volumes

    def add_volume(self, path: Path) -> models.Volume:
        return self._call(calls.ADD_VOLUME, {"path": check_path(path)})

    def remove_volume(self, path: Path) -> None:
        self._call(calls.REMOVE_VOLUME, {"path": check_path(path)})

    def cached_devices(self) -> list[models.CachedDevice]:
        return self._call(calls.CACHED_DEVICES).devices

    def attach_cached(self, device: Path) -> models.CachedDevice:
        """Have a block device read through the cache.

        VMs use the ``path`` of what is returned; nothing may use the device itself. A device that is attached already
        keeps its path, and gets its present size. A caller that is not root opens the device with its own rights.
        """
        # Root needs no proof: udev probes a device again whenever a writable descriptor of it is closed.
        return self._attach_cached(device, passed=os.geteuid() != 0)

    def _attach_cached(self, device: Path, *, passed: bool) -> models.CachedDevice:
        from virtman.fdpassing import opened_device, pass_to

        body = {"path": check_path(device), "passed": passed}
        with opened_device(device) if passed else nullcontext(-1) as fd:
            return self._follow(calls.ATTACH_CACHED, body, on_pipe=partial(pass_to, fd=fd))

    def detach_cached(self, device: Path, force: bool = False) -> None:
        """Detach a device, named by its own path or the one that was handed out. Does nothing if it is not attached.

        Raises DiskBusy, and changes nothing, while a program has the device open; with ``force`` the program gets
        errors. Raises DriverTrouble, and the agent goes on to try, if the storage does not finish its requests.
        """
        self._call(calls.DETACH_CACHED, {"path": check_path(device), "force": _flag(force)})

    # How they are made

    def _call(self, call: Call[A], given: dict[str, Any] | None = None, **names: str) -> A:
        """The answer of a call. ``given``: the query of a DELETE, else the body. ``names``: in the path."""
        url, body = call.url(**names), given
        if given and call.method == "DELETE":
            url, body = f"{url}?{urlencode(given)}", None
        with self._answer(call.method, url, body, self._timeout) as response, self._reached():
            return _read(call.answer, response.read() or b"{}")

    def _follow(
        self, call: LongCall[A], body: dict[str, Any], on_progress: OnProgress = silently,
        on_pipe: Callable[[str], None] | None = None, **names: str,
    ) -> A:  # fmt: skip
        """The answer of a long call. ``on_pipe`` gets the socket that the first line names."""
        timeout = None if call.patient else self._timeout
        with self._answer(call.method, call.url(**names), body, timeout) as response:
            while True:
                with self._reached():
                    text = response.readline()
                if not text:
                    raise AgentUnreachable("the agent ended before it was done")
                line = _read(models.Line, text)
                if line.problem is not None:
                    raise _error(line.problem)
                if line.answer is not None:
                    return _read(call.answer, json.dumps(line.answer))
                if line.pipe is not None and on_pipe is not None:
                    on_pipe(line.pipe)
                if line.progress is not None:
                    on_progress(line.progress.step, line.progress.done, line.progress.total)

    @contextmanager
    def _answer(
        self, method: str, path: str, body: dict[str, Any] | None, timeout: float | None
    ) -> Iterator[HTTPResponse]:
        """The agent's answer to a call. Raises what the agent raised, AgentUnreachable, BadRequest."""
        try:
            content = None if body is None else json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise BadRequest(f"what was given is not UTF-8: {error.object[error.start : error.end]!r}") from error
        headers = {} if content is None else {"Content-Type": "application/json"}
        with closing(_Connection(self._socket, timeout)) as connection:
            with self._reached():
                with suppress(BrokenPipeError):  # what is too long the agent refuses before it was sent
                    connection.request(method, path, content, headers)
                answer = connection.getresponse()
            with answer:
                if answer.status >= 400:
                    with self._reached():
                        content = answer.read()
                    raise _refusal(answer.status, content)
                yield answer

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Raises AgentUnreachable for what goes wrong with the connection."""
        try:
            yield
        except (OSError, HTTPException) as error:
            raise AgentUnreachable(
                f"no agent answers on {self._socket}: {error}; is 'virtman agent' running, and is the socket yours to"
                " use?"
            ) from error


def _read(kind: type[M], content: bytes | str) -> M:
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc'])) or 'the answer'}: {first['msg']}"
        raise AgentFailed(f"what answers is not an agent of about this version: {why}") from error


def _refusal(status: int, content: bytes) -> Exception:
    try:
        return _error(models.Problem.model_validate_json(content))
    except ValidationError:
        return AgentFailed(f"the agent answered {status} without a reason")


def _error(document: models.Problem) -> Exception:
    return BY_KIND.get(document.type.rpartition(":")[2], AgentFailed)(document.detail)


def _flag(value: bool) -> str:
    """A flag in a query."""
    return str(value).lower()
