"""What the agent wants and has done, kept so that kill -9 or a power cut at any point loses nothing.

One JSON file per VM and image under the state folder, replaced atomically: written to a temporary file, fsync'ed,
renamed, and the folder fsync'ed (rename(2), fsync(2)). A record is written before the first act it describes and
removed after the last, so everything on the host that belongs to a name has a record of that name.

A record has a steady state and at most one operation, which leads to another state: its kind, its arguments and its
last finished step. The code that carries out a kind also says whether repair finishes or undoes the operation. A record
with an unknown field, or with an operation of an unknown kind, is damaged: the agent reports and keeps the record.

Records have the secrets of Volt's assignments in them, so that a host can bring its stacks back while Volt is down.
They are for the agent's own user: the temporary files are so from the beginning (mkstemp(3)).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from drivers.base import Child, Image, Parent
from drivers.host.durable import sync, write_atomically
from drivers.host.folders import matching
from virtman.errors import StateDamaged
from virtman.hostfiles import translate_os_errors

log = logging.getLogger(__name__)


class Part(BaseModel):
    """Something in a record."""

    # An error with its cause gets into logs: it must not repeat a record, which may have secrets in it.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class Operation(Part):
    """What was begun and is not finished. ``done``: the last finished step, as the kind of operation names it."""

    kind: str
    arguments: dict[str, JsonValue] = {}
    done: str = ""


class State(StrEnum):
    """What a name has when no operation is under way. ``ABSENT``: nothing, so an operation brings it or takes it."""

    ABSENT = "absent"
    PRESENT = "present"


class Record(Part):
    """What is known of one name. ``phases``: the kinds of operations of a class of records, each with people's word."""

    phases: ClassVar[Mapping[str, str]]
    ready: ClassVar[str]
    """People's word for a record without an operation."""

    name: str
    state: State
    operation: Operation | None = None

    @model_validator(mode="after")
    def _is_of_a_known_kind(self) -> Self:
        if self.operation is not None and self.operation.kind not in self.phases:
            raise ValueError(f"there is no operation {self.operation.kind!r}")
        return self

    @property
    def steady(self) -> bool:
        """Whether all is there and nothing is under way."""
        return self.state is State.PRESENT and self.operation is None

    @property
    def phase(self) -> str:
        """For people: what is under way, else ``ready``."""
        return self.ready if self.operation is None else self.phases[self.operation.kind]

    @property
    def kind(self) -> str:
        return self._operation.kind

    def argument(self, name: str) -> Any:
        return self._operation.arguments[name]

    @property
    def _operation(self) -> Operation:
        if self.operation is None:
            raise ValueError(f"{self.name}: no operation is under way")
        return self.operation

    def doing(self, kind: str) -> bool:
        return self.operation is not None and self.operation.kind == kind

    def begin(self, kind: str, **arguments: JsonValue) -> Self:
        """The record with a new operation in the place of the one it may have."""
        return self.model_copy(update={"operation": Operation(kind=kind, arguments=arguments)})

    def reached(self, step: str) -> Self:
        """The record with its operation further on."""
        return self.model_copy(update={"operation": self._operation.model_copy(update={"done": step})})

    def settled(self, state: State = State.PRESENT, **fields: object) -> Self:
        """The record without an operation."""
        return self.model_copy(update={"state": state, "operation": None, **fields})


class Boot(Part):
    """How ``virtman boot`` starts the VM. ``memory`` in MiB."""

    memory: int
    cpus: int
    network: str


class Snapshot(Part):
    """A point in time of a VM's disk. ``parent``: the one before it, if any; ``size`` of the disk then, in bytes.

    ``taken`` in seconds since 1970; ``state``: one of ``FROZEN``, ``CRASH``, ``OFF``. ``temporary``: it is the agent's
    own, for something that it does now; one that an agent which died has left is dropped. ``id``: random; the
    same on all hosts that have received it.
    """

    name: str
    parent: str | None
    size: int
    taken: float
    state: str
    temporary: bool = False
    id: str


FROZEN, CRASH, OFF = "frozen", "crash", "off"
"""How a disk was when a snapshot of it was taken: its guest had written all down and held still; as after a power cut,
if the VM ran at all; not in use."""

CREATE, DESTROY, BOOT, RENAME, RENAME_BACK = "create", "destroy", "boot", "rename", "rename back"
RESIZE, TAKE, REVERT, DROP, RECEIVE = "resize", "take snapshot", "revert", "delete snapshot", "receive"
ATTACH_DISK, DETACH_DISK = "attach disk", "detach disk"
MIGRATE, ARRIVE = "migrate", "arrive"
"""Operations of a VM (virtman/kinds.py). The attachment of a disk is in the record of the VM that uses the disk."""


class VmRecord(Record):
    """One VM's disk: ``size`` in bytes; ``boot`` is set once libvirt may know the VM.

    ``source``: the name that the VM had of which this one is a clone; ``source_uuid``: its UUID. ``current``: the
    snapshot that the disk was last at, if there is one. ``untidy``: a snapshot that is gone, whose space is not free
    yet. ``was``: the name that it had before this one. ``uuid``: random, and the same under all its names and on all
    hosts that it comes to. ``disks``: names of VMs, never booted, whose disks it uses besides its own. ``moved``: the
    libvirt that has its memory now. ``arriving``: its memory comes, or has come, and the VM does not go on yet;
    ``whole``: its disk has what it wrote last.
    """

    ready = "ready"
    phases = {
        CREATE: "creating", DESTROY: "destroying", BOOT: "booting", RENAME: "being renamed",
        RENAME_BACK: "being renamed", RESIZE: "resizing", TAKE: TAKE, REVERT: "reverting", DROP: DROP,
        RECEIVE: "receiving", ATTACH_DISK: "attaching a disk", DETACH_DISK: "detaching a disk", MIGRATE: "migrating",
        ARRIVE: "arriving",
    }  # fmt: skip

    image: str
    size: int | None
    uuid: str = Field(default_factory=lambda: str(uuid4()))
    boot: Boot | None = None
    source: str | None = None
    source_uuid: str | None = None
    snapshots: tuple[Snapshot, ...] = ()
    current: str | None = None
    untidy: str | None = None
    was: str | None = None
    disks: tuple[str, ...] = ()
    moved: str | None = None
    arriving: bool = False
    whole: bool = True

    @property
    def phase(self) -> str:
        """For people: what is under way, or where the VM is, else that the disk is ready."""
        if self.operation is None and (self.arriving or self.moved):
            return "arriving" if self.arriving else "moved"
        return super().phase

    @property
    def leftover(self) -> bool:
        """Whether there is something that nobody may need any more."""
        return self.untidy is not None or any(snapshot.temporary for snapshot in self.snapshots)

    @property
    def new_name(self) -> str | None:
        """The name that it is getting, if it is being renamed."""
        return str(self.argument("new")) if self.doing(RENAME) or self.doing(RENAME_BACK) else None

    def snapshot(self, name: str) -> Snapshot | None:
        return next((snapshot for snapshot in self.snapshots if snapshot.name == name), None)

    @property
    def coming(self) -> list[str]:
        """Names of the snapshots that a stream has which is being received."""
        snapshots = None if self.operation is None else self.operation.arguments.get("snapshots")
        return [str(name) for name in snapshots] if isinstance(snapshots, list) else []

    def uses_disk(self, name: str) -> bool:
        """Whether the VM has another one's disk, or may have it: it is being attached, or detached."""
        moving = self.argument("disk") if self.doing(ATTACH_DISK) or self.doing(DETACH_DISK) else None
        return name in (*self.disks, moving)

    def line(self, snapshot: Snapshot) -> list[Snapshot]:
        """The snapshots from the first one to this one, each the parent of the next."""
        line = [snapshot]
        while line[0].parent is not None and (parent := self.snapshot(line[0].parent)) is not None:
            line.insert(0, parent)
        return line

    def without(self, name: str) -> Self:
        """The record without a snapshot; those that came after it come after the one before it."""
        gone = self.snapshot(name)
        if gone is None:
            return self
        snapshots = tuple(
            snapshot.model_copy(update={"parent": gone.parent}) if snapshot.parent == name else snapshot
            for snapshot in self.snapshots
            if snapshot.name != name
        )
        current = gone.parent if self.current == name else self.current
        return self.model_copy(update={"snapshots": snapshots, "current": current})


class Role(StrEnum):
    """Whether the host published the image or reads it from parents."""

    ORIGIN = "origin"
    HOST = "host"


ATTACH, PUBLISH, DETACH = "attach", "publish", "detach"
"""Operations of a stack. A crash undoes ``ATTACH``. ``PUBLISH`` and ``DETACH`` are finished, but a refused ``PUBLISH``
is undone."""

REMOVED, SERVED = "removed", "served"
"""``REMOVED``: the stack that is detached is gone, and Volt does not know. ``SERVED``: Volt may know the image that is
published."""


FILE, DEVICE = "file", "device"
"""Kinds of what is served in place."""


class InPlace(Part):
    """What an image is served from in place, as it was when it was published. ``path`` leads there; ``size`` in bytes.

    A file is known by ``inode`` and the times, in nanoseconds since 1970, of its last changes, of which nobody can set
    ``ctime_ns``. Its file system's number (``device``) is for people: it is another one after each mount. A block
    device is known by its ``identity`` (drivers/host/blockdev.py).

    ``locked``: this agent has the kernel refuse writes to the device, and unlocks it in the end; ``lockable``: the
    publisher may write to the device, so the agent may lock it.
    ``digest``: the sum of the content is wanted; ``content``: the digest that was computed.
    """

    path: str
    kind: str
    size: int
    device: int = 0
    inode: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    identity: str = ""
    locked: bool = False
    lockable: bool = True
    digest: bool = False
    content: str | None = None


class ImageRecord(Record):
    """One image's stack. On a host that is no origin ``size`` and ``digest`` are None until Volt told them.

    ``in_place``: what an origin serves that has no copy in its store. ``parent``: the image that an origin's image was
    made of, if that is known: Volt is told of it, and nothing here depends on it.
    ``given_up``: this host is to be its origin no more, as was asked for; it is served while VMs of this host read it.
    ``assigned`` is the revision of the parents in the record; ``revision`` the last one of which it is certain that the
    stack reads from its parents and from no others. ``serving_key``: see ``ImageSource.admit``.
    ``hydrate``: this host is to keep all of the image, until ``hydrate_until`` in seconds since 1970, if that is given.
    ``first``: the parent to read from before all others. ``boot_told``: Volt knows what VMs of this host read first.
    """

    ready = "attached"
    phases = {ATTACH: "attaching", PUBLISH: "publishing", DETACH: "detaching"}

    role: Role
    size: int | None = None
    digest: str | None = None
    in_place: InPlace | None = None
    parent: str | None = None
    given_up: bool = False
    slot: int = 0
    assigned: int = 0
    revision: int = 0
    parents: tuple[Parent, ...] = ()
    children: tuple[Child, ...] = ()
    serving_key: str = Field(default="", repr=False)
    hydrate: bool = False
    hydrate_until: float | None = None
    first: str = ""
    boot_told: bool = False

    @property
    def phase(self) -> str:
        """For people: what is under way, else that the stack is attached."""
        return "leaving" if self.leaving else super().phase

    @property
    def leaving(self) -> bool:
        """Nothing is left on this host, but Volt has not been told yet."""
        return self.operation is not None and (self.operation.kind, self.operation.done) == (DETACH, REMOVED)

    @property
    def image(self) -> Image:
        """The image as drivers know it; only where size and digest are known."""
        if self.size is None or self.digest is None:
            raise StateDamaged(f"image {self.name!r}: its record has no size and digest yet")
        return Image(self.name, self.size, self.digest)

    @property
    def sources(self) -> tuple[Parent, ...]:
        """The parents in the order in which this host reads from them."""
        return tuple(sorted(self.parents, key=lambda parent: parent.host != self.first))

    @property
    def digests(self) -> set[str]:
        """Those of content, caches and manifests that the stack may need: of an image in place also what it holds."""
        held = None if self.in_place is None else self.in_place.content
        return {digest for digest in (self.digest, held) if digest is not None}

    def with_in_place(self, **fields: object) -> Self:
        """The record of an image in place, with other facts of the file or device."""
        if self.in_place is None:
            raise ValueError(f"{self.name}: is not served in place")
        return self.model_copy(update={"in_place": self.in_place.model_copy(update=fields)})

    @property
    def unconfirmed(self) -> bool:
        """The stack may still read from parents that it should have dropped."""
        return self.assigned != self.revision


ATTACH_DEVICE, DETACH_DEVICE = "attach device", "detach device"
"""Operations of a device that is read through the cache. A crash undoes the first. The second is finished, unless
a program has the device open."""


class DeviceRecord(Record):
    """A device of others that VMs read through the cache. ``name``: random when it was attached.

    ``device``: the path that it was called by; ``number``: its own, as the kernel writes it, for as long as the host
    runs; ``boot``: of the host, drawn by the kernel. ``path``: what was handed out; ``size`` in bytes at that time.
    """

    ready = "attached"
    phases = {ATTACH_DEVICE: "attaching", DETACH_DEVICE: "leaving"}

    device: str
    number: str
    boot: str
    path: str = ""
    size: int = 0


R = TypeVar("R", bound=Record)

_END = ".json"


class RecordStore(Generic[R]):
    """The records of one kind, by name, in files and in memory: no other process writes the files.

    Callers serialise writes to the same name. A record that cannot be read is read again whenever the agent needs the
    record, since an administrator may restore the file. Nobody knows what such a record needs, so all of that stays.
    """

    def __init__(self, folder: Path, kind: type[R]) -> None:
        """Raises HostTrouble if the folder cannot be read: nobody is to take that for no records."""
        self._folder = folder
        self._kind = kind
        self._records: dict[str, R] = {}
        self._unreadable: dict[str, str] = {}
        """Why records cannot be read, by name."""
        with translate_os_errors(f"reading the records in {folder}"):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for torn in matching(folder, ".*"):
                torn.unlink()
            for file in matching(folder, f"[!.]*{_END}"):
                self._load(file.name.removesuffix(_END))

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{_END}"

    def _load(self, name: str) -> None:
        path = self._path(name)
        try:
            self._records[name] = self._kind.model_validate_json(path.read_bytes())
            why = None
        except FileNotFoundError:
            why = None
        except OSError as error:
            why = f"cannot read the record {path}: {error.strerror}"
        except ValidationError as error:
            why = f"cannot read the record {path}: {error.errors()[0]['msg']}"
        if why is None:
            self._unreadable.pop(name, None)
            return
        if self._unreadable.get(name) != why:
            log.error("%s", why)
        self._unreadable[name] = why

    def get(self, name: str) -> R | None:
        """The record, or None. Raises StateDamaged."""
        if name in self._unreadable and (why := self.unreadable().get(name)) is not None:
            raise StateDamaged(why)
        return self._records.get(name)

    def put(self, name: str, record: R) -> None:
        """Write the record durably. Raises NoRoom, HostTrouble; then the record is what it was.

        Raises StateDamaged if the record could not be read again: nobody could remove what such a record is of.
        """
        path = self._path(name)
        content = record.model_dump_json().encode()
        try:
            written = self._kind.model_validate_json(content)
        except ValidationError as error:
            where = ".".join(map(str, error.errors()[0]["loc"]))
            raise StateDamaged(f"the record {path} is not written: its {where} could not be read again") from error
        with translate_os_errors(f"writing the record {path}"):
            write_atomically(path, content)
        self.remember(name, written)

    def remember(self, name: str, record: R) -> None:
        """Keep a record in memory only, since the record cannot be written: until the next ``put`` or ``remove``."""
        self._records[name] = record
        self._unreadable.pop(name, None)

    def remove(self, name: str) -> None:
        """Remove the record durably, if there is one. Raises HostTrouble."""
        path = self._path(name)
        with translate_os_errors(f"removing the record {path}"):
            path.unlink(missing_ok=True)
            sync(self._folder)
        self._records.pop(name, None)
        self._unreadable.pop(name, None)

    def names(self) -> list[str]:
        return sorted({*self._records.copy(), *self._unreadable.copy()})

    def all(self) -> list[R]:
        """All records that can be read, by name: one that cannot must not stop the others. See ``unreadable``."""
        readable, _ = self.sorted_out()
        return readable

    def unreadable(self) -> dict[str, str]:
        """Why records cannot be read, by name."""
        for name in self._unreadable.copy():
            self._load(name)
        return self._unreadable.copy()

    def sorted_out(self) -> tuple[list[R], dict[str, str]]:
        unreadable = self.unreadable()
        return [record for _, record in sorted(self._records.copy().items())], unreadable
