"""A VM moves to another host while it runs: the whole of it, for who can reach both hosts.

Its disk goes first, as a stream of a snapshot, and what has changed since as another one; then libvirt moves the
memory, and the VM stands still until the last changes have come and it goes on. Each of these steps leaves the VM whole
at one of the two hosts. The destination is reached by a command that is "virtman" there: over ssh, for one.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO, TypeVar, cast

from pydantic import ValidationError

from virtman import models
from virtman.client import AgentClient, OnProgress
from virtman.errors import AgentFailed, BadRequest, HypervisorError, VirtmanError, VmExists

log = logging.getLogger(__name__)

POINT = "virtman-migration-"
"""How the names of the snapshots begin that are made on the way."""
ROUNDS = 3
"""Streams before the memory goes: what changed while one went, goes with the next."""
SMALL = 4 << 20
"""Bytes: so little may as well go while the VM stands still."""

M = TypeVar("M", bound=models.Model)


@dataclass(frozen=True)
class Moved:
    """What a migration took. ``downtime``: seconds in which the VM stood still; ``sent``: bytes of its disk."""

    downtime: float
    sent: int


class Destination:
    """The other host's agent. ``command`` is "virtman" there, as a list of arguments."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = [*command]

    def find(self, vm: str) -> models.Vm | None:
        """The VM, if it is there. Raises AgentFailed."""
        if vm not in self._names(["list"]):
            return None
        return self._model(models.Vm, ["show", vm])

    def expect(self, vm: str, traveller: models.Traveller) -> str:
        """Have it make ready. Returns the domain that it asks for. Raises AgentFailed."""
        return self._model(models.Expected, ["arrival", "begin", vm], traveller.model_dump_json()).domain

    def destroy(self, vm: str) -> None:
        """Have it destroy what has come. Raises AgentFailed."""
        self._run(["destroy", vm])

    def forget(self, vm: str, point: str) -> None:
        """Have it delete a snapshot. Raises AgentFailed."""
        self._run(["snapshot", "delete", vm, point])

    def points(self, vm: str) -> list[str]:
        """The snapshots of the VM there that were made on the way. Raises AgentFailed."""
        return [name for name in self._names(["snapshot", "list", vm]) if name.startswith(POINT)]

    def receive(self, vm: str, image: str, send: Callable[[BinaryIO], models.Sent]) -> models.Sent:
        """Have it receive what ``send`` writes. Raises BadRequest, AgentFailed, and as ``send``."""
        return self._take(["receive", vm, image], send)

    def arrive(self, vm: str, image: str, send: Callable[[BinaryIO], models.Sent]) -> models.Sent:
        """As ``receive``, of what a VM that arrives wrote last; then it goes on there."""
        return self._take(["arrival", "end", vm, image], send)

    def _take(self, arguments: Sequence[str], send: Callable[[BinaryIO], models.Sent]) -> models.Sent:
        with self._start([*arguments, "--json"]) as process:
            failed: VirtmanError | None = None
            try:
                sent = send(cast("BinaryIO", process.stdin))
            except VirtmanError as error:
                failed = error
            _out, said = process.communicate()
        if process.returncode:
            raise self._failed(said, "" if failed is None else f" (and sending ended: {failed})")
        if failed is not None:
            raise failed
        return sent

    def _start(self, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        try:
            return subprocess.Popen([*self._command, *arguments], stdin=pipe, stdout=pipe, stderr=pipe)
        except OSError as error:
            raise BadRequest(f"{self._command[0]} cannot be run: {error.strerror}") from error

    def _names(self, arguments: Sequence[str]) -> list[str]:
        answer = self._run([*arguments, "--json"])
        try:
            return [one["name"] for one in json.loads(answer)]
        except (ValueError, TypeError, KeyError) as error:
            raise self._unknown(answer) from error

    def _model(self, kind: type[M], arguments: Sequence[str], given: str = "") -> M:
        answer = self._run([*arguments, "--json"], given)
        try:
            return kind.model_validate_json(answer)
        except ValidationError as error:
            raise self._unknown(answer) from error

    def _unknown(self, answer: str) -> AgentFailed:
        return AgentFailed(f"{self._name} answers what this release does not know: {answer[:80]!r}")

    def _run(self, arguments: Sequence[str], given: str = "") -> str:
        with self._start(arguments) as process:
            out, said = process.communicate(given.encode())
        if process.returncode:
            raise self._failed(said)
        return out.decode(errors="replace")

    def _failed(self, said: bytes, more: str = "") -> AgentFailed:
        lines = said.decode(errors="replace").strip().splitlines()
        return AgentFailed(f"{self._name}: {lines[-1] if lines else 'it ended without a word'}{more}")

    @property
    def _name(self) -> str:
        return " ".join(self._command)


def ssh(uri: str) -> list[str] | None:
    """The command that is "virtman" on the host of a libvirt that is reached by ssh."""
    found = re.fullmatch(r"qemu\+ssh://(?P<host>[^/:\[\]]+)(:(?P<port>\d+))?/system", uri)
    if found is None:
        return None
    port = ["-p", found["port"]] if found["port"] else []
    return ["ssh", *port, "--", found["host"], "virtman"]


class Migration:
    """Moves one VM of ``client``'s host to a destination whose libvirt is at ``to``."""

    def __init__(
        self, client: AgentClient, destination: Destination, vm: str, to: str, on_progress: OnProgress
    ) -> None:  # fmt: skip
        self._client, self._destination, self._vm, self._to = client, destination, vm, to
        self._on_progress = on_progress
        self._sent = 0
        self._image = ""

    def run(self) -> Moved:
        """Move the VM, or end what was cut off after its memory had gone.

        Raises VmExists if the destination has a VM of this name, BadRequest, AgentFailed, and as the agent's calls do.
        """
        if re.fullmatch(models.LIBVIRT_PATTERN, self._to) is None:
            raise BadRequest(f"{self._to!r} is not the libvirt of another host: qemu+ssh://[USER@]HOST/system, for one")
        found = self._client.vm(self._vm)
        self._image = found.disk.image
        if found.moved_to is None:
            point, domain = self._go()
            downtime = self._leave(domain) + self._arrive(point)
        elif found.moved_to != self._to:
            raise BadRequest(f"vm {self._vm!r} went to {found.moved_to} already; say that")
        else:
            downtime = self._arrive_if_needed()
        self._client.destroy(self._vm)
        for name in self._destination.points(self._vm):
            self._destination.forget(self._vm, name)
        return Moved(downtime, self._sent)

    def _go(self) -> tuple[str, str]:
        """Send the disk. Returns the last snapshot of it that is there, and the domain that is asked for."""
        traveller = self._client.traveller(self._vm)
        self._make_room()
        try:
            return self._send_disk(), self._destination.expect(self._vm, traveller)
        except VirtmanError as error:
            log.warning("vm %s: it stays: %s", self._vm, error)
            self._undo()
            raise

    def _make_room(self) -> None:
        """Remove what is left of a migration that was cut off: at the destination, what has a snapshot of ours."""
        points, there = self._points(), self._destination.find(self._vm)
        if there is not None:
            came = there.arriving or there.machine is None
            if not came or not set(points) & set(self._destination.points(self._vm)):
                raise VmExists(f"the destination has a vm {self._vm!r}; destroy it there first, or rename one of them")
            self._destination.destroy(self._vm)
        for point in points:
            self._client.delete_snapshot(self._vm, point)

    def _leave(self, domain: str) -> float:
        """Have the memory moved. Returns seconds in which the VM stood still."""
        try:
            return self._client.migrate(self._vm, self._to, domain, self._on_progress).downtime
        except VirtmanError:
            if self._stays():
                self._undo()
            raise

    def _stays(self) -> bool:
        """Whether it is certain that the VM runs here still."""
        try:
            found = self._client.vm(self._vm)
        except VirtmanError:
            return False
        return found.moved_to is None and found.disk.phase == "ready"

    def _send_disk(self) -> str:
        base: str | None = None
        for number in range(ROUNDS):
            point = f"{POINT}{number}-{secrets.token_hex(4)}"
            self._client.take_snapshot(self._vm, point)
            sent = self._send(point, base)
            base = point
            if number > 0 and sent < SMALL:
                break
        assert base is not None  # noqa: S101
        return base

    def _send(self, point: str | None, base: str | None) -> int:
        def send(target: BinaryIO) -> models.Sent:
            return self._client.send(self._vm, target, point, base, self._on_progress, with_snapshots=base is None)

        receive = self._destination.arrive if point is None else self._destination.receive
        sent = receive(self._vm, self._image, send).total
        self._sent += sent
        return sent

    def _undo(self) -> None:
        """Remove what has come so far, and the snapshots that were made; the first error is the one to raise."""
        try:
            if self._destination.find(self._vm) is not None:
                self._destination.destroy(self._vm)
            for point in self._points():
                self._client.delete_snapshot(self._vm, point)
        except VirtmanError as second:
            log.error("vm %s: something of its migration may be left: %s", self._vm, second)

    def _arrive_if_needed(self) -> float:
        """As ``_arrive``, of a VM that may have arrived already."""
        there = self._destination.find(self._vm)
        if there is None:
            raise HypervisorError(f"vm {self._vm!r} went to {self._to}, and its agent there does not have it")
        if not there.arriving:
            return 0.0
        points = self._points()
        if not points:
            raise BadRequest(f"vm {self._vm!r} has lost the snapshots that its migration goes by; use --abort")
        return self._arrive(points[-1])

    def _arrive(self, point: str) -> float:
        """Send what was written last, and have the VM go on. Returns the seconds that it took."""
        began = time.monotonic()
        self._send(None, point)
        return time.monotonic() - began

    def _points(self) -> list[str]:
        return [one.name for one in self._client.snapshots(self._vm) if one.name.startswith(POINT)]


def abort(client: AgentClient, destination: Destination | None, vm: str) -> models.Vm:
    """End a migration of a VM. One that went is destroyed there, so that it can be started here again.

    Raises BadRequest if none is under way, AgentFailed.
    """
    found = client.vm(vm)
    if found.moved_to is not None:
        if destination is None:
            raise BadRequest(f"vm {vm!r} went to {found.moved_to}: say with --agent what command is 'virtman' there")
        there = destination.find(vm)
        if there is not None and not there.arriving:
            raise BadRequest(f"vm {vm!r} has arrived and goes on there; 'virtman migrate' again ends its migration")
        if there is not None:
            destination.destroy(vm)
    return client.end_migration(vm)
