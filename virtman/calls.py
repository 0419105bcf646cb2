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
from volt.deploymodels import Deployment, DeploymentList
from volt.models import HostList, ImageTree

A = TypeVar("A", bound=BaseModel)


@dataclass(frozen=True)
class Call(Generic[A]):
    """One call. ``path``: Flask's rule. ``members``: members of the agent's group may make the call, too."""

    method: str
    path: str
    answer: type[A]
    summary: str
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


# fmt: off
STATUS = Call("GET", "/v1/status", models.Status, members=True,
    summary="What this host has and does now")
GC = Call("POST", "/v1/gc", models.Removed,
    summary="Remove unused stacks and data")
GC_DRY_RUN = Call("GET", "/v1/gc", models.Removed,
    summary="What gc would remove")
REPAIR = Call("POST", "/v1/repair", models.Repaired,
    summary="Make the host what the records say")
SUSPEND = Call("POST", "/v1/suspend", Nothing,
    summary="Stop serving every image until the next start of the agent")

VOLUMES = Call("GET", "/v1/cache/volumes", models.VolumeList,
    summary="The volumes of the cache")
ADD_VOLUME = Call("POST", "/v1/cache/volumes", models.Volume,
    summary="Add a disk, a partition, or a file that is made, to the cache")
REMOVE_VOLUME = Call("DELETE", "/v1/cache/volumes", Nothing,
    summary="Remove the volume `?path=` from the cache; its content is fetched anew")
CACHED_DEVICES = Call("GET", "/v1/cache/devices", models.CachedDeviceList, members=True,
    summary="The devices of others that are read through the cache")
ATTACH_CACHED = LongCall("POST", "/v1/cache/devices", models.CachedDevice, members=True,
    summary="Have a device read through the cache, or give it the size that it has now")
DETACH_CACHED = Call("DELETE", "/v1/cache/devices", Nothing, members=True,
    summary="Detach the device `?path=`, which may also be the path that was handed out for it; with `&force=true` "
            "even while programs have that open")

IMAGES = Call("GET", "/v1/images", models.ImageList, members=True,
    summary="All published images")
IMAGE = Call("GET", "/v1/images/<image>", models.ImageDetails, members=True,
    summary="One published image, and what it shares with its parent")
PUBLISH = LongCall("POST", "/v1/images", models.Published, members=True,
    summary="Publish a copy of a file")
PUBLISH_VM = LongCall("POST", "/v1/vms/<vm>/publish", models.Published, members=True,
    summary="Publish a copy of a VM's disk")
PUBLISH_IN_PLACE = LongCall("POST", "/v1/images/<image>/in-place", models.Published, members=True,
    summary="Publish a file or a block device where it is")
UNPUBLISH = Call("DELETE", "/v1/images/<image>", models.Unpublished, members=True,
    summary="Be no origin of an image any more; without another one it is withdrawn at Volt; with "
            "`?when_unused=true` also one that is in use, which is removed when no host needs it")
EXPORT_IMAGE = LongCall("POST", "/v1/images/<image>/export", models.Exported, members=True,
    summary="Write an image to a new file of its own")
HYDRATE = LongCall("PUT", "/v1/images/<image>/hydration", models.Hydration,
    summary="Keep all of an image on this host; with ``until_ready`` answer when all of it is there")
END_HYDRATION = Call("DELETE", "/v1/images/<image>/hydration", Nothing,
    summary="Keep of an image what its VMs read, as of any other image")
TREE = Call("GET", "/v1/images/<image>/tree", ImageTree, members=True,
    summary="An image's tree of hosts")

HOSTS = Call("GET", "/v1/hosts", HostList,
    summary="All hosts, where they are, and the images of which they have all")
DEPLOYMENTS = Call("GET", "/v1/deployments", DeploymentList, members=True,
    summary="Whole images on their way to many hosts, the newest first, without their hosts")
DEPLOY = Call("POST", "/v1/deployments", Deployment, members=True,
    summary="Bring a whole image to many hosts")
DEPLOYMENT = Call("GET", "/v1/deployments/<deployment>", Deployment, members=True,
    summary="One deployment, and how far each of its hosts is")
CANCEL_DEPLOYMENT = Call("DELETE", "/v1/deployments/<deployment>", Nothing,
    summary="End a deployment; hosts that have all of the image keep it")

VMS = Call("GET", "/v1/vms", models.VmList, members=True,
    summary="The VMs of this host")
VM = Call("GET", "/v1/vms/<vm>", models.Vm, members=True,
    summary="One VM and its disk")
CREATE = Call("PUT", "/v1/vms/<vm>", models.Vm, members=True,
    summary="Create a VM's disk")
DESTROY = Call("DELETE", "/v1/vms/<vm>", Nothing, members=True,
    summary="Destroy a VM and its disk")
BOOT = Call("POST", "/v1/vms/<vm>/boot", models.Booted,
    summary="Start a VM, creating its disk if needed")
START = Call("POST", "/v1/vms/<vm>/start", models.Booted,
    summary="Start a VM as it was booted before; one that runs is left alone")
STOP = Call("POST", "/v1/vms/<vm>/stop", Nothing,
    summary="Shut a VM down; with ``force`` cut its power")
CONSOLE = Call("GET", "/v1/vms/<vm>/console", models.Console,
    summary="Where a VM's console is")
RENAME = Call("POST", "/v1/vms/<vm>/rename", models.Vm, members=True,
    summary="Give a VM that is off another name")
ATTACH_DISK = Call("PUT", "/v1/vms/<vm>/disks/<disk>", models.Vm,
    summary="Attach another disk to a VM, also while it runs; a disk that is attached already is left alone")
DETACH_DISK = Call("DELETE", "/v1/vms/<vm>/disks/<disk>", models.Vm,
    summary="Detach such a disk from a VM, also while it runs; a disk that is not attached is left alone")
RESIZE = Call("PUT", "/v1/vms/<vm>/size", models.Vm, members=True,
    summary="Grow a VM's disk to ``size`` bytes, also while it runs")

SNAPSHOTS = Call("GET", "/v1/vms/<vm>/snapshots", models.SnapshotList, members=True,
    summary="A VM's snapshots")
TAKE_SNAPSHOT = Call("PUT", "/v1/vms/<vm>/snapshots/<snapshot>", models.Snapshot, members=True,
    summary="Take a snapshot of a VM's disk, also while it runs; a snapshot of this name is left alone")
REVERT = Call("POST", "/v1/vms/<vm>/snapshots/<snapshot>/revert", models.Vm, members=True,
    summary="Revert the disk of a VM that is off to a snapshot; what was written since is lost")
DELETE_SNAPSHOT = Call("DELETE", "/v1/vms/<vm>/snapshots/<snapshot>", Nothing, members=True,
    summary="Delete a snapshot; what other snapshots and disks need of it stays")
CLONE = Call("POST", "/v1/vms/<vm>/clones", models.Clones, members=True,
    summary="New VMs with what a VM's disk holds now, without copying it; clones of these names are left alone")
EXPORT_VM = LongCall("POST", "/v1/vms/<vm>/export", models.Exported, members=True,
    summary="Write a VM's disk to a new file of its own")
SEND = LongCall("POST", "/v1/vms/<vm>/send", models.Sent, members=True, patient=True,
    summary="Write what a VM's disk has of its own to a socket, as a stream (docs/stream.md)")
RECEIVE = LongCall("POST", "/v1/vms/<vm>/receive", models.Vm, members=True, patient=True,
    summary="Make a VM of a stream that is written to a socket, or bring one up to date with what has changed")

MIGRATION_SOURCE = Call("GET", "/v1/vms/<vm>/migration-source", models.MigrationSource,
    summary="What a migration transfers besides the disk of a VM")
MIGRATE = LongCall("POST", "/v1/vms/<vm>/migration", models.Left, patient=True,
    summary="Move a VM's memory to another libvirt")
END_MIGRATION = Call("DELETE", "/v1/vms/<vm>/migration", models.Vm,
    summary="Abort a migration; once the memory is transferred, nothing is changed")
TAKE_BACK = Call("POST", "/v1/vms/<vm>/migration/take-back", models.Vm,
    summary="Allow a VM that was migrated, and is gone from the destination, to be started here again")
FINISH_MIGRATION = Call("POST", "/v1/vms/<vm>/migration/end", Nothing,
    summary="Destroy what is left of a VM that runs elsewhere")
CHECK_ARRIVAL = Call("POST", "/v1/arrivals/check", Nothing,
    summary="Check whether a VM can be migrated to this host")
GIVE_UP_ARRIVAL = Call("POST", "/v1/vms/<vm>/arrival/give-up", models.GivenUp,
    summary="Destroy what has arrived of a VM, unless the VM runs here already")
EXPECT = Call("POST", "/v1/vms/<vm>/arrival", models.Expected,
    summary="Prepare for a VM that arrives")
ARRIVE = Call("POST", "/v1/vms/<vm>/arrival/end", models.Booted,
    summary="Resume a VM that has arrived; a VM that runs already is left alone")
# fmt: on

ALL: list[Call[Any]] = [call for call in vars().values() if isinstance(call, Call)]
