"""The calls of the agent's API. Routes, OpenAPI document, client and the rights of callers follow from this table.

What a call takes is the ``body`` or the ``query`` of its route (``virtman.api``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from virtman import models
from virtman.models import Nothing
from virtman.names import check_name
from volt.models import ImageTree

A = TypeVar("A", bound=BaseModel)


@dataclass(frozen=True)
class Call(Generic[A]):
    """One call. ``path``: Flask's rule. ``members``: members of the agent's group may make the call, too."""

    method: str
    path: str
    summary: str
    answer: type[A]
    members: bool = False

    def url(self, **names: str) -> str:
        """The path with these names. Raises BadRequest for a name that cannot be."""
        return re.sub("<(.*?)>", lambda found: check_name(found[1], names[found[1]]), self.path)


@dataclass(frozen=True)
class LongCall(Call[A]):
    """A call that is answered by lines (``models.Line``); the last one has the answer, or a problem.

    ``patient``: a line may take as long as the caller, or another host, takes.
    """

    patient: bool = False


STATUS = Call("GET", "/v1/status", "What this host has and does now", models.Status, members=True)
GC = Call("POST", "/v1/gc", "Remove stacks and data that nobody needs", models.Removed)
GC_DRY_RUN = Call("GET", "/v1/gc", "What gc would remove", models.Removed)
REPAIR = Call("POST", "/v1/repair", "Make what the records say true", models.Repaired)
SUSPEND = Call("POST", "/v1/suspend", "Stop serving every image until the next start of the agent", Nothing)

VOLUMES = Call("GET", "/v1/cache/volumes", "The volumes of the cache", models.VolumeList)
ADD_VOLUME = Call(
    "POST", "/v1/cache/volumes", "Let the cache use a disk, a partition, or a file that is made", models.Volume
)  # fmt: skip
REMOVE_VOLUME = Call(
    "DELETE", "/v1/cache/volumes", "Take the volume `?path=` from the cache; what it held is fetched anew", Nothing
)  # fmt: skip
CACHED_DEVICES = Call(
    "GET", "/v1/cache/devices", "The devices of others that are read through the cache", models.CachedDeviceList,
    members=True,
)  # fmt: skip
ATTACH_CACHED = LongCall(
    "POST", "/v1/cache/devices", "Have a device read through the cache, or give it the size that it has now",
    models.CachedDevice, members=True,
)  # fmt: skip
DETACH_CACHED = Call(
    "DELETE", "/v1/cache/devices",
    "Detach the device `?path=`, which may also be the path that was handed out for it; with `&force=true` even while"
    " programs have that open",
    Nothing, members=True,
)  # fmt: skip

IMAGES = Call("GET", "/v1/images", "All published images", models.ImageList, members=True)
PUBLISH = LongCall("POST", "/v1/images", "Publish a file, or a VM's disk", models.Published, members=True)
PUBLISH_IN_PLACE = LongCall(
    "POST", "/v1/images/<image>/in-place", "Publish a file or a block device where it is", models.Published,
    members=True,
)  # fmt: skip
UNPUBLISH = Call(
    "DELETE", "/v1/images/<image>",
    "Be no origin of an image any more; without another one it is withdrawn at Volt; with `?when_unused=true` also one"
    " that is in use, which goes when nobody needs it",
    models.Unpublished, members=True,
)  # fmt: skip
EXPORT_IMAGE = LongCall(
    "POST", "/v1/images/<image>/export", "Write an image to a new file of its own", models.Exported, members=True
)  # fmt: skip
TREE = Call("GET", "/v1/images/<image>/tree", "An image's tree of hosts", ImageTree, members=True)

VMS = Call("GET", "/v1/vms", "The VMs of this host", models.VmList, members=True)
VM = Call("GET", "/v1/vms/<vm>", "One VM and its disk", models.Vm, members=True)
CREATE = Call("PUT", "/v1/vms/<vm>", "Create a VM's disk", models.Vm, members=True)
DESTROY = Call("DELETE", "/v1/vms/<vm>", "Destroy a VM and its disk", Nothing, members=True)
BOOT = Call("POST", "/v1/vms/<vm>/boot", "Start a VM, creating its disk if needed", models.Booted)
START = Call("POST", "/v1/vms/<vm>/start", "Start a VM as it was booted before", models.Booted)
STOP = Call("POST", "/v1/vms/<vm>/stop", "Shut a VM down", Nothing)
CONSOLE = Call("GET", "/v1/vms/<vm>/console", "Where a VM's console is", models.Console)
RENAME = Call(
    "POST", "/v1/vms/<vm>/rename", "Give a VM that is off another name", models.Vm, members=True
)  # fmt: skip
ATTACH_DISK = Call(
    "PUT", "/v1/vms/<vm>/disks/<disk>", "Let a VM use another disk besides its own, also while it runs", models.Vm
)  # fmt: skip
DETACH_DISK = Call(
    "DELETE", "/v1/vms/<vm>/disks/<disk>", "Take such a disk away from a VM, also while it runs", models.Vm
)  # fmt: skip
RESIZE = Call(
    "PUT", "/v1/vms/<vm>/size", "Let a VM's disk grow, also while it runs", models.Vm, members=True
)  # fmt: skip

SNAPSHOTS = Call("GET", "/v1/vms/<vm>/snapshots", "A VM's snapshots", models.SnapshotList, members=True)
TAKE_SNAPSHOT = Call(
    "PUT", "/v1/vms/<vm>/snapshots/<snapshot>",
    "Keep what a VM's disk holds now, also while it runs; a snapshot of this name is left alone",
    models.Snapshot, members=True,
)  # fmt: skip
REVERT = Call(
    "POST", "/v1/vms/<vm>/snapshots/<snapshot>/revert", "Let the disk of a VM that is off hold what it held then",
    models.Vm, members=True,
)  # fmt: skip
DELETE_SNAPSHOT = Call(
    "DELETE", "/v1/vms/<vm>/snapshots/<snapshot>", "Delete a snapshot", Nothing, members=True
)  # fmt: skip
CLONE = Call(
    "POST", "/v1/vms/<vm>/clones",
    "New VMs with what a VM's disk holds now, without copying it; clones of these names are left alone",
    models.Clones, members=True,
)  # fmt: skip
EXPORT_VM = LongCall(
    "POST", "/v1/vms/<vm>/export", "Write a VM's disk to a new file of its own", models.Exported, members=True
)  # fmt: skip
SEND = LongCall(
    "POST", "/v1/vms/<vm>/send", "Write what a VM's disk has of its own to a socket, as a stream (docs/stream.md)",
    models.Sent, members=True, patient=True,
)  # fmt: skip
RECEIVE = LongCall(
    "POST", "/v1/vms/<vm>/receive",
    "Make a VM of a stream that is written to a socket, or bring one up to date with what has changed",
    models.Vm, members=True, patient=True,
)  # fmt: skip

MIGRATION_SOURCE = Call(
    "GET", "/v1/vms/<vm>/migration-source", "What goes along with the disk of a VM that is to move",
    models.MigrationSource,
)  # fmt: skip
MIGRATE = LongCall("POST", "/v1/vms/<vm>/migration", "Move a VM's memory to another libvirt", models.Left, patient=True)
END_MIGRATION = Call(
    "DELETE", "/v1/vms/<vm>/migration", "End a migration that is under way; one whose memory has gone is left as it is",
    models.Vm,
)  # fmt: skip
TAKE_BACK = Call(
    "POST", "/v1/vms/<vm>/migration/take-back",
    "Let a VM that went, and is not there any more, be started here again", models.Vm,
)  # fmt: skip
FINISH_MIGRATION = Call(
    "POST", "/v1/vms/<vm>/migration/end", "Destroy what is left of a VM that goes on elsewhere", Nothing
)  # fmt: skip
CHECK_ARRIVAL = Call("POST", "/v1/arrivals/check", "Whether a VM can come to this host", Nothing)
GIVE_UP_ARRIVAL = Call(
    "POST", "/v1/vms/<vm>/arrival/give-up", "Destroy what has come of a VM, unless it goes on here already",
    models.GivenUp,
)  # fmt: skip
EXPECT = Call("POST", "/v1/vms/<vm>/arrival", "Make ready for a VM that comes", models.Expected)
ARRIVE = Call("POST", "/v1/vms/<vm>/arrival/end", "Let a VM go on that has come", models.Booted)

ALL: list[Call[Any]] = [call for call in vars().values() if isinstance(call, Call)]
