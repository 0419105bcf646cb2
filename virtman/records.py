"""What the agent wants and has done, kept so that kill -9 or a power cut at any point loses nothing.

One JSON file per VM and image under the state folder, replaced atomically: written to a temporary file, fsync'ed,
renamed, and the folder fsync'ed (rename(2), fsync(2)). A record is written before the first act it describes and
removed after the last, so everything on the host that belongs to a name has a record of that name.

Records have the secrets of Volt's assignments in them, so that a host can bring its stacks back while Volt is down.
They are for the agent's own user: the temporary files are so from the beginning (mkstemp(3)).
"""

from __future__ import annotations

import logging
from enum import StrEnum
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from drivers.base import Child, Image, Parent
from drivers.durable import sync, write_atomically
from virtman.errors import StateDamaged

log = logging.getLogger(__name__)


class Record(BaseModel):
    """A record on disk."""

    # An error with its cause gets into logs: it must not repeat a record, which may have secrets in it.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class VmPhase(StrEnum):
    """How far a VM's disk is. ``CREATING`` is undone after a crash, ``DESTROYING`` is finished."""

    CREATING = "creating"
    READY = "ready"
    DESTROYING = "destroying"


class Boot(Record):
    """How ``virtman boot`` starts the VM. ``memory`` in MiB."""

    memory: int
    cpus: int
    network: str


class VmRecord(Record):
    """One VM's disk: ``size`` in bytes; ``boot`` is set once libvirt may know the VM."""

    name: str
    image: str
    size: int | None
    phase: VmPhase
    boot: Boot | None = None


class Role(StrEnum):
    """Whether the host published the image or reads it from parents."""

    ORIGIN = "origin"
    HOST = "host"


class ImagePhase(StrEnum):
    """How far a stack is. ``LEAVING``: nothing is left on this host, but Volt has not been told yet."""

    ATTACHING = "attaching"
    ATTACHED = "attached"
    DETACHING = "detaching"
    LEAVING = "leaving"


class ParentRecord(Record):
    """A parent as Volt named it. The secret is empty in records of before there were secrets."""

    host: str
    address: str
    secret: str = Field(default="", repr=False)


class ChildRecord(Record):
    """A child as Volt named it."""

    host: str
    secret: str = Field(default="", repr=False)

    @model_validator(mode="before")
    @classmethod
    def _of_name(cls, value: Any) -> Any:
        """Before there were secrets, records had the bare names."""
        return {"host": value} if isinstance(value, str) else value


class ImageRecord(Record):
    """One image's stack. ``size`` and ``digest`` are unknown (None) until Volt told them.

    ``assigned`` is the revision of the parents in the record; ``revision`` the last one of which it is certain that the
    stack reads from its parents and from no others.
    """

    name: str
    role: Role
    phase: ImagePhase
    size: int | None = None
    digest: str | None = None
    slot: int = 0
    assigned: int = 0
    revision: int = 0
    parents: tuple[ParentRecord, ...] = ()
    children: tuple[ChildRecord, ...] = ()

    @property
    def image(self) -> Image:
        """The image as drivers know it; only where size and digest are known."""
        if self.size is None or self.digest is None:
            raise StateDamaged(f"image {self.name!r}: its record has no size and digest yet")
        return Image(self.name, self.size, self.digest)

    @property
    def unconfirmed(self) -> bool:
        """The stack may still read from parents that it should have dropped."""
        return self.assigned != self.revision

    def parent_list(self) -> list[Parent]:
        """The parents as drivers know them, in order of preference."""
        return [Parent(parent.host, parent.address, parent.secret) for parent in self.parents]

    def child_list(self) -> list[Child]:
        """The children as drivers know them."""
        return [Child(child.host, child.secret) for child in self.children]


R = TypeVar("R", bound=Record)


class Shelf(Generic[R]):
    """The records of one kind, by name. Callers serialise writes to the same name."""

    def __init__(self, folder: Path, kind: type[R]) -> None:
        self._folder = folder
        self._kind = kind
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for torn in folder.glob(".*"):
            torn.unlink()

    def get(self, name: str) -> R | None:
        """The record, or None. Raises StateDamaged."""
        path = self._folder / f"{name}.json"
        try:
            return self._kind.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise StateDamaged(f"cannot read the record {path}: {error.errors()[0]['msg']}") from error

    def put(self, name: str, record: R) -> None:
        """Write the record durably."""
        write_atomically(self._folder / f"{name}.json", record.model_dump_json().encode())

    def remove(self, name: str) -> None:
        """Remove the record durably, if there is one."""
        (self._folder / f"{name}.json").unlink(missing_ok=True)
        sync(self._folder)

    def names(self) -> list[str]:
        """Names with a record, sorted."""
        return sorted(path.stem for path in self._folder.glob("[!.]*.json"))

    def all(self) -> list[R]:
        """All records that can be read, by name: one that cannot must not stop the others. See ``damaged``."""
        readable, _ = self._sorted_out()
        return readable

    def damaged(self) -> list[str]:
        """Names whose record cannot be read. Nobody knows what they need, so what they may need is to be kept."""
        _, damaged = self._sorted_out()
        return damaged

    def _sorted_out(self) -> tuple[list[R], list[str]]:
        readable, damaged = [], []
        for name in self.names():
            try:
                record = self.get(name)
            except StateDamaged as error:
                log.error("%s", error)
                damaged.append(name)
            else:
                readable += [record] if record is not None else []
        return readable, damaged
