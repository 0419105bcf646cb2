"""A VM moves to another host while it runs: the whole of it, for who can reach both hosts.

Its disk goes first, as a stream of a snapshot, and what has changed since as another one; then libvirt moves the
memory, and the VM stands still until the last changes have come and it goes on. Each of these steps leaves the VM whole
at one of the two hosts. The destination is reached by a command that is "virtman" there: over ssh, for one.

The caller carries everything, and may die at any point: the record of each host says whether the VM is here, went, or
arrives, and the same command continues. Snapshots of a call have random names. The memory goes only while the newest
of them is the last change of the disk, so the later of two calls wins. The other host destroys only a VM that has such
a snapshot and does not run yet. A VM has arrived if what runs there has its UUID. The two libvirt daemons move the
memory through the connection between them, which needs no port and is as safe as that connection.

A VM that is off here went if libvirt says so, and stays if its guest shut down. If libvirt does not know any more, the
VM counts as gone, and a person decides (``--abort``). Disks of the kernel stack are refused: libvirt would open such a
device at the destination before the last changes are there.
"""

from __future__ import annotations

import logging
import re
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import BinaryIO, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from virtman import models
from virtman.client import AgentClient, OnProgress
from virtman.errors import (
    AgentFailed,
    BadRequest,
    HypervisorError,
    UnknownSnapshot,
    VirtmanError,
    VmExists,
    VmMoving,
)
from virtman.models import ABSENT, ANOTHER, ARRIVED, GIVEN_UP
from virtman.names import TRAVELLING

log = logging.getLogger(__name__)

ROUNDS = 3
"""Streams before the memory goes: what changed while one went, goes with the next."""
SMALL = 4 << 20
"""Bytes: so little may as well go while the VM stands still."""
MIGRATING = "migrating"
"""What it says of one whose memory moves."""
SSH = ["ssh", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]
"""A network that is gone without a word is noticed while a VM stands still for what would come over it."""

Send = Callable[[BinaryIO], models.Sent]
"""Writes a stream."""

Take = Callable[[Send], models.Sent]
"""Has a command take what a ``Send`` writes. Raises AgentFailed, and as the ``Send``."""

T = TypeVar("T")


@dataclass(frozen=True)
class Moved:
    """What a migration took. ``downtime``: seconds in which the VM stood still; ``sent``: bytes of its disk."""

    downtime: float
    sent: int


class Destination:
    """The other host's agent. ``command`` is "virtman" there, as a list of arguments. All calls raise AgentFailed."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = [*command]
        self._name = " ".join(command)

    def find(self, vm: str) -> models.VmLine | None:
        return next((one for one in self._answer(list[models.VmLine], "list") if one.name == vm), None)

    def check(self, source: models.MigrationSource) -> None:
        """Whether the VM can come."""
        self._run(["arrival", "check"], source.model_dump_json())

    def expect(self, vm: str, source: models.MigrationSource) -> str:
        """Have it make ready. Returns the domain that it asks for."""
        return self._answer(models.Expected, "arrival", "begin", vm, given=source.model_dump_json()).domain

    def give_up(self, vm: str, snapshots: Sequence[str]) -> str:
        """Have it destroy what has come, with one of these snapshots, of a VM that does not go on there.

        Returns what there is of it (``models.GivenUp``).
        """
        return self._answer(models.GivenUp, "arrival", "give-up", vm, *snapshots).state

    def forget(self, vm: str, snapshot: str) -> None:
        """Have it delete a snapshot."""
        self._run(["snapshot", "delete", vm, snapshot])

    def snapshots(self, vm: str) -> list[str]:
        """The snapshots of the VM there that were made on the way."""
        found = self._answer(list[models.Snapshot], "snapshot", "list", vm)
        return [one.name for one in found if one.name.startswith(TRAVELLING)]

    def receive(self, vm: str, image: str, send: Send) -> models.Sent:
        """Have it receive what ``send`` writes. Raises BadRequest, and as ``send``."""
        with self._taking("receive", vm, image) as take:
            return take(send)

    def arrival(self, vm: str, image: str) -> AbstractContextManager[Take]:
        """Have it wait for what a VM that arrives wrote last, with which it goes on there. Raises BadRequest."""
        return self._taking("arrival", "end", vm, image)

    @contextmanager
    def _taking(self, *arguments: str) -> Iterator[Take]:
        """Begin a command that takes a stream. If it has none at the end of the block, it is ended."""
        process = self._start([*arguments, "--json"])

        def take(send: Send) -> models.Sent:
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

        try:
            yield take
        finally:
            process.kill()
            for pipe in (process.stdin, process.stdout, process.stderr):
                with suppress(OSError):  # what it did not read is of no use any more
                    cast("BinaryIO", pipe).close()
            process.wait()

    def _start(self, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        try:
            return subprocess.Popen([*self._command, *arguments], stdin=pipe, stdout=pipe, stderr=pipe)
        except OSError as error:
            raise BadRequest(f"{self._command[0]} cannot be run: {error.strerror}") from error

    def _answer(self, kind: type[T], *arguments: str, given: str = "") -> T:
        answer = self._run([*arguments, "--json"], given)
        try:
            return TypeAdapter(kind).validate_json(answer)
        except ValidationError as error:
            said = answer[:80].decode(errors="replace")
            raise AgentFailed(f"{self._name} answers what this virtman does not know: {said!r}") from error

    def _run(self, arguments: Sequence[str], given: str = "") -> bytes:
        with self._start(arguments) as process:
            out, said = process.communicate(given.encode())
        if process.returncode:
            raise self._failed(said)
        return out

    def _failed(self, said: bytes, more: str = "") -> AgentFailed:
        lines = said.decode(errors="replace").strip().splitlines()
        return AgentFailed(f"{self._name}: {lines[-1] if lines else 'it ended without a word'}{more}")


def ssh(uri: str) -> list[str] | None:
    """The command that is "virtman" on the host of a libvirt that is reached by ssh."""
    found = re.fullmatch(r"qemu\+ssh://(?P<host>[^/:\[\]]+)(:(?P<port>\d+))?/system", uri)
    if found is None:
        return None
    port = ["-p", found["port"]] if found["port"] else []
    return [*SSH, *port, "--", found["host"], "virtman"]


class Migration:
    """Moves one VM of ``client``'s host to a destination whose libvirt is at ``to``."""

    def __init__(
        self, client: AgentClient, destination: Destination, vm: str, to: str, on_progress: OnProgress
    ) -> None:  # fmt: skip
        self._client, self._destination, self._vm, self._to = client, destination, vm, to
        self._on_progress = on_progress
        self._sent = 0
        self._image = ""
        self._made: list[str] = []
        """The snapshots of this call. Their random names tell what this call has made from what others have."""

    def run(self) -> Moved:
        """Move the VM, or end what was cut off after its memory had gone.

        Raises VmExists if the destination has another VM of this name, BadRequest, AgentFailed, and as the agent's
        calls do. A KeyboardInterrupt is undone as an error is.
        """
        if re.fullmatch(models.LIBVIRT_PATTERN, self._to) is None:
            raise BadRequest(f"{self._to!r} is not the libvirt of another host: qemu+ssh://[USER@]HOST/system, for one")
        found = self._client.vm(self._vm)
        self._image = found.disk.image
        if found.moved_to is None:
            downtime = self._move()
        elif found.moved_to != self._to:
            raise BadRequest(f"vm {self._vm!r} went to {found.moved_to} already; say that")
        else:
            downtime = self._arrive_if_needed()
        for name in self._destination.snapshots(self._vm):
            self._destination.forget(self._vm, name)
        self._client.finish_migration(self._vm, self._to)
        return Moved(downtime, self._sent)

    def _move(self) -> float:
        """All of it. Returns the seconds in which the VM stood still."""
        source = self._client.migration_source(self._vm)
        self._destination.check(source)
        with ExitStack() as stack:
            try:
                snapshot = self._send_disk()
                domain = self._destination.expect(self._vm, source)
                # Now: the VM does not stand still for the start of the command.
                take = stack.enter_context(self._destination.arrival(self._vm, self._image))
            except (VirtmanError, KeyboardInterrupt) as error:
                self._undo(error)
                raise
            downtime = self._leave(domain, snapshot)
            try:
                return downtime + self._arrive(take, snapshot)
            except AgentFailed as error:  # it may have been gone for long, or only its answer
                log.warning("vm %s: its end is tried again: %s", self._vm, error)
        return downtime + self._arrive_if_needed()

    def _send_disk(self) -> str:
        """Send the disk. Returns the last snapshot of it that is there."""
        old, base = _snapshots(self._client, self._vm), None
        for number in range(ROUNDS):
            snapshot = f"{TRAVELLING}{number}-{secrets.token_hex(4)}"
            self._made.append(snapshot)
            self._client.take_snapshot(self._vm, snapshot)
            if base is None:  # from now on no other call can have its memory moved (``Migrations.leave``)
                self._make_room(old)
            sent = self._destination.receive(self._vm, self._image, self._sender(snapshot, base)).total
            self._sent += sent
            base = snapshot
            if number > 0 and sent < SMALL:
                break
        return self._made[-1]

    def _make_room(self, old: Sequence[str]) -> None:
        """Remove what is left of a migration that was cut off: at the destination, what has a snapshot of it."""
        if self._destination.find(self._vm) is not None:
            state = self._destination.give_up(self._vm, [*old, *self._made])
            if state == ARRIVED:
                raise BadRequest(f"vm {self._vm!r} is at the destination already: is that another host than this one?")
            if state == ANOTHER:
                raise VmExists(f"the destination has a vm {self._vm!r}; destroy it there first, or rename one of them")
        _drop(self._client, self._vm, old)

    def _sender(self, snapshot: str | None, base: str | None) -> Send:
        """Sends a snapshot, and whatever others there are after ``base``; or what the disk holds now."""

        def send(target: BinaryIO) -> models.Sent:
            return self._client.send(
                self._vm, target, snapshot, base, self._on_progress, with_snapshots=snapshot is not None
            )  # fmt: skip

        return send

    def _leave(self, domain: str, snapshot: str) -> float:
        """Have the memory moved. Returns seconds in which the VM stood still."""
        try:
            return self._client.migrate(self._vm, self._to, domain, snapshot, self._on_progress).downtime
        except (VirtmanError, KeyboardInterrupt) as error:
            if self._stays(error):
                self._undo(error)
            raise

    def _stays(self, error: BaseException) -> bool:
        """Whether it is certain that the VM runs here still; after Ctrl-C its move is ended first."""
        try:
            if isinstance(error, KeyboardInterrupt):
                with suppress(BadRequest):  # it is not being moved any more
                    self._client.end_migration(self._vm)
            found = self._client.vm(self._vm)
        except VirtmanError as second:
            error.add_note(f"whether it is moved is not known: {second}")
            return False
        return found.moved_to is None and found.disk.phase != MIGRATING

    def _undo(self, error: BaseException) -> None:
        """Remove what has come so far, and the snapshots that were made; the error is the one to raise."""
        try:
            if self._made:
                self._destination.give_up(self._vm, self._made)
            _drop(self._client, self._vm, self._made)
        except VirtmanError as second:
            error.add_note(f"something of its migration may be left: {second}")

    def _arrive(self, take: Take, snapshot: str) -> float:
        """Send what was written last, and have the VM go on. Returns the seconds that it took."""
        began = time.monotonic()
        self._sent += take(self._sender(None, snapshot)).total
        return time.monotonic() - began

    def _arrive_if_needed(self) -> float:
        """As ``_arrive``, of a VM that may have arrived already."""
        here, there = self._client.vm(self._vm), self._destination.find(self._vm)
        if there is None:
            raise HypervisorError(
                f"vm {self._vm!r} went to {self._to}, and its agent there does not have it: 'virtman migrate --abort"
                " --force' lets it be started here again"
            )
        if there.uuid != here.uuid:
            raise VmExists(f"the vm {self._vm!r} that the destination has is another VM than the one that went there")
        if not there.arriving:
            return 0.0
        snapshots = _snapshots(self._client, self._vm)
        if not snapshots:
            raise BadRequest(f"vm {self._vm!r} has lost the snapshots that its migration goes by; use --abort")
        with self._destination.arrival(self._vm, self._image) as take:
            return self._arrive(take, snapshots[-1])


def _snapshots(client: AgentClient, vm: str) -> list[str]:
    """The snapshots of a VM that migrations made, in their order."""
    return [one.name for one in client.snapshots(vm) if one.name.startswith(TRAVELLING)]


def _drop(client: AgentClient, vm: str, snapshots: Sequence[str]) -> None:
    for snapshot in snapshots:
        with suppress(UnknownSnapshot):  # another call of the same migration removes them, too
            client.delete_snapshot(vm, snapshot)


def abort(client: AgentClient, destination: Destination | None, vm: str, *, force: bool = False) -> models.Vm:
    """End a migration of a VM, and remove what is left of one. One that went, and does not go on there yet, is
    destroyed there, so that it can be started here again; with ``force`` without a look there.

    Whoever moves its memory now removes what came himself. Raises BadRequest if none is under way, or if it is not
    said where it goes; VmMoving if it is not certain that nothing of it goes on there; AgentFailed.
    """
    found, under_way = client.vm(vm), False
    if found.disk.phase == MIGRATING:
        found, under_way = client.end_migration(vm), True
    snapshots = _snapshots(client, vm)
    if found.moved_to is not None:
        if not force:
            _give_up(destination, found, snapshots)
        client.take_back(vm, found.moved_to)
    elif destination is not None and snapshots:
        destination.give_up(vm, snapshots)
    elif under_way:
        return found
    elif not snapshots:
        raise BadRequest(f"vm {vm!r} is not being moved")
    elif not force:
        raise BadRequest(
            f"say with --to where vm {vm!r} was to go, so that what has come there goes; --force leaves it"
        )
    _drop(client, vm, snapshots)
    return client.vm(vm)


def _give_up(destination: Destination | None, vm: models.Vm, snapshots: Sequence[str]) -> None:
    """Have what went destroyed there. Raises BadRequest, VmMoving."""
    if destination is None:
        raise BadRequest(f"vm {vm.name!r} went to {vm.moved_to}: say with --agent what command is 'virtman' there")
    state = destination.give_up(vm.name, snapshots) if snapshots else ABSENT
    if state == ARRIVED:
        raise VmMoving(f"vm {vm.name!r} has arrived and goes on there; 'virtman migrate' again ends its migration")
    if state != GIVEN_UP:
        raise VmMoving(
            f"vm {vm.name!r} went to {vm.moved_to}, and is not found there; if it is certain that it does not run"
            " there, --force lets it be started here again"
        )
