"""What the agent's API takes and answers: the one description for the agent, its OpenAPI document, client and CLI.

From 0.3 on agent and client may be one minor version apart, whichever is older. So both ignore fields that they do not
know; a field that a later version adds has a default; words for states and roles are plain strings, since a later
version may have more of them.

Sizes are bytes, unless said otherwise.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from drivers.cachemodels import CachedDevice as CachedDevice  # noqa: PLC0414  (models of the API that drivers make)
from drivers.cachemodels import Volume as Volume  # noqa: PLC0414
from drivers.digests import PATTERN
from drivers.host.watch import Death
from virtman.names import NAME_PATTERN, PATH_PATTERN
from virtman.sizes import LARGEST_DISK, SECTOR

Name = Annotated[str, Field(pattern=NAME_PATTERN, description="1 to 63 letters, digits, '-' or '_'")]


def _integer(value: object) -> object:
    """JSON has one kind of number: 1.0 is an integer there, and "1" and true are none."""
    if isinstance(value, bool | str):
        raise ValueError("a number is needed")  # noqa: TRY004  pydantic takes no other
    return int(value) if isinstance(value, float) and value.is_integer() else value


INTEGER = BeforeValidator(_integer)
Flag = Annotated[bool, Field(strict=True)]
Size = Annotated[int, Field(gt=0, multiple_of=SECTOR, le=LARGEST_DISK, description="bytes, a multiple of 512"), INTEGER]
HostPath = Annotated[str, Field(pattern=PATH_PATTERN, max_length=4095, description="absolute, on this host")]
Text = Annotated[str, AfterValidator(lambda text: text.encode().decode())]
"""Text that can be written down: JSON can also spell halves of surrogates."""
Bytes = Annotated[int, Field(ge=0)]
BASE64_PATTERN = r"^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
Base64Str = Annotated[str, Field(pattern=BASE64_PATTERN, description="base64")]

NETWORK_PATTERN = r"^(user|none|(network|bridge):[A-Za-z0-9_.-]{1,63})$"
LIBVIRT_PATTERN = (
    r"^qemu(\+(ssh|tls|tcp)://([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9\[][A-Za-z0-9.:\[\]-]*/system"
    r"|\+unix:///system\?socket=/[A-Za-z0-9_./-]+)$"
)
"""Of another host's; parameters, with which a URI can name commands and keys, are not taken."""
Libvirt = Annotated[str, Field(pattern=LIBVIRT_PATTERN, max_length=500, description="libvirt of another host")]


class Model(BaseModel):
    """Base of all that goes over the API."""

    # A command needs few of these: each is built when it is used.
    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)


class Nothing(Model):
    """The answer of a call that has none (204)."""


# What is asked for


class VmPath(Model):
    """The VM in the URL."""

    vm: Name


class DeploymentPath(Model):
    """A deployment in a path."""

    deployment: int = Field(ge=1, le=2**31 - 1)


class ImagePath(Model):
    """The image in the URL."""

    image: Name


class SnapshotPath(VmPath):
    """The VM and its snapshot in the URL."""

    snapshot: Name


class DiskPath(VmPath):
    """The VM and another disk in the URL."""

    disk: Name


class ResizeRequest(Model):
    """The size that a VM's disk is to have."""

    size: Size


class CreateRequest(Model):
    """A disk of ``size`` bytes, or the image's size."""

    image: Name
    size: Size | None = None


class BootRequest(CreateRequest):
    """A VM to start. ``memory`` in MiB; ``user_data`` is handed to cloud-init as it is."""

    memory: Annotated[int, Field(ge=32, le=1 << 24), INTEGER] = 1024
    cpus: Annotated[int, Field(ge=1, le=512), INTEGER] = 1
    network: Annotated[str, Field(pattern=NETWORK_PATTERN)] = "user"
    ssh_keys: list[Text] = []
    user_data: Text | None = None


class ForceRequest(Model):
    """``force``: do not wait for anybody's consent."""

    force: Flag = False


class RenameRequest(Model):
    """The name that a VM is to have."""

    name: Name


class CloneRequest(Model):
    """The names of new VMs."""

    names: Annotated[list[Name], Field(min_length=1, max_length=10_000)]


class SendRequest(Model):
    """What of a VM is sent: a snapshot, or what its disk holds now; what changed ``since`` another snapshot, or all."""

    snapshot: Name | None = None
    since: Name | None = None
    with_snapshots: Flag = False


class MigrateRequest(Model):
    """Where a VM moves to: the URI of a libvirt, and the domain (XML) that the agent there has asked for.

    ``snapshot``: the snapshot that was sent last.
    """

    to: Libvirt
    domain: str
    snapshot: Name


class WentRequest(Model):
    """The libvirt that a VM went to which was here."""

    to: Libvirt


class GiveUpRequest(Model):
    """The snapshots that a VM's migration made: what has come of it has one of them."""

    snapshots: Annotated[list[Name], Field(min_length=1, max_length=1000)]


class MigrationSource(Model):
    """What goes along with the disk of a VM that moves. ``memory`` in MiB; ``seed``: its file's content in base64.

    ``hardware``: QEMU's name of the machine that it emulates. ``network``: as libvirt has it, of any kind.
    """

    uuid: UUID
    memory: Annotated[int, Field(ge=1, le=1 << 24), INTEGER]
    cpus: Annotated[int, Field(ge=1, le=512), INTEGER]
    network: str
    seed: Base64Str
    hardware: Annotated[str, Field(pattern=r"^[a-z0-9.-]{1,63}$")]


class ReceiveRequest(Model):
    """The image that a stream's data lie over."""

    image: Name


class ExportRequest(Model):
    """A file to write, which is not there yet. ``passed``: the caller has made it, and passes it open."""

    file: HostPath
    passed: Flag = False
    format: Literal["raw", "qcow2"] = "raw"


class PublishRequest(Model):
    """A raw or qcow2 file to publish as an image. ``passed``: the caller has opened the file, and passes it.

    ``detach``: the work goes on when the caller hangs up. ``parent``: the image that this one was made of, and that
    holds what is below the file if that is an overlay.
    """

    name: Name
    file: HostPath
    passed: Flag = False
    detach: Flag = False
    parent: Name | None = None


class PublishVmRequest(Model):
    """The image that a VM's disk is published as. ``detach``: the work goes on when the caller hangs up."""

    image: Name
    detach: Flag = False


class InPlaceRequest(Model):
    """A raw file or a block device to serve an image from, where it is. ``passed``: the caller passes it open, too.

    ``trust``: the digest that it has, as the caller knows. ``digest``: its sum is to be computed in the background.
    """

    file: HostPath
    passed: Flag = False
    trust: Annotated[str, Field(pattern=PATTERN)] | None = None
    digest: Flag = False


class VolumeRequest(Model):
    """A volume of the cache: a disk, a partition, or a file."""

    path: HostPath


class DeviceRequest(Model):
    """A device of this host, to be read through the cache. ``passed``: the caller has opened it, and passes it."""

    path: HostPath
    passed: Flag = False


class DetachQuery(Model):
    """A device that is read through the cache, by its own path or the one that was handed out.

    ``force``: also while programs have that path open.
    """

    path: HostPath
    force: bool = False


# VMs


class Disk(Model):
    """A VM's private disk. ``size`` is None until the image's is known; ``phase``: how far it is, ``ready`` at last.

    ``source``: the VM that it was cloned from. ``attached_to``: the VM that uses it besides its own disk.
    """

    image: str
    size: Bytes | None
    phase: str
    source: str | None = None
    attached_to: str | None = None


class OpenDisk(Disk):
    """A disk that can be used: ``path`` opens it, and ``blockdev`` is the same for QEMU's ``--blockdev``.

    Both stay the same when snapshots are taken and gone back to.
    """

    path: str
    blockdev: dict[str, Any] | None


class Machine(Model):
    """What runs from a disk since ``virtman boot``. ``memory`` in MiB; ``accel``: what the agent starts VMs with.

    ``mac``: the address of its network card; None without one.

    ``state``: ``off``; ``saved``, if libvirt has stopped it and keeps its memory (``virsh managedsave``); while it has
    a QEMU what libvirt says: ``running``, ``paused``, ``in shutdown``, ``crashed``, ``pmsuspended``; or ``unknown``
    while libvirt does not answer.
    """

    state: str
    memory: int
    cpus: int
    network: str
    console_log: str
    accel: str
    mac: str | None = None


class VmLine(Model):
    """One VM in a list. ``machine`` is None for one that ``virtman boot`` never started.

    ``disks``: those that it uses besides its own. ``moved_to``: the libvirt that it went to. ``arriving``: it comes
    from another host, and does not go on yet. ``uuid``: the same on all hosts.
    """

    name: str
    uuid: UUID
    disk: Disk
    machine: Machine | None
    disks: list[str] = []
    moved_to: str | None = None
    arriving: bool = False

    @property
    def state(self) -> str:
        """The machine's state; without one ``disk``, or where that is attached."""
        if self.arriving or self.moved_to is not None:
            return "arriving" if self.arriving else "moved"
        if self.machine is not None:
            return self.machine.state
        return "disk" if self.disk.attached_to is None else f"disk of {self.disk.attached_to}"


class Vm(VmLine):
    """One VM."""

    disk: OpenDisk


class Booted(Vm):
    """One VM that was started."""

    machine: Machine


class Snapshot(Model):
    """A point in time of a VM's disk. ``size`` is the disk's then; ``parent``: the snapshot that it came after.

    ``state``: how the disk was. ``frozen``: the guest had written all down and held still; ``crash``: as after a power
    cut, if the VM ran at all; ``off``: not in use. ``current``: the disk has gone on from this one.
    """

    name: str
    parent: str | None
    size: Bytes
    taken: datetime
    state: str
    current: bool


class SnapshotList(Model):
    """All snapshots of a VM, in the order in which they were taken."""

    snapshots: list[Snapshot]


class VmList(Model):
    """All VMs of the host, by name."""

    vms: list[VmLine]


class Clones(Model):
    """VMs that were cloned, in the order in which they were asked for."""

    vms: list[Vm]


class Console(Model):
    """Where a VM's console is: a domain of a libvirt, and the file that keeps what it printed."""

    libvirt: str
    domain: str
    log: str


# Images


class InPlace(Model):
    """The file or block device that this host serves an image from without having copied it.

    ``held``: this host may have it open. ``trouble``: why it is not served now. ``digest``: of its content;
    ``computing`` until that is known, if that was asked for.
    """

    path: str
    held: bool
    trouble: str | None = None
    digest: str | None = None
    computing: bool = False


class ImageHere(Model):
    """How far a published image is on this host. ``role``: ``origin`` or ``host``; ``held_bytes``: in the cache."""

    role: str
    phase: str
    held_bytes: Bytes
    in_place: InPlace | None = None


class Image(Model):
    """A published image. ``nodes`` counts the hosts that have it besides its origins.

    ``withdrawn``: only hosts that have it may use it; the last host that needs it removes it. ``parent``: the image
    that it was made of, if its publisher said so; that one may be gone.
    """

    name: str
    size: Bytes
    digest: str
    origins: list[str]
    nodes: int
    here: ImageHere | None
    withdrawn: bool = False
    parent: str | None = None


class ImageDetails(Image):
    """One published image. ``verified``: hosts check each chunk that they read. ``hosts``: those besides its origins.

    ``data_bytes``: its chunks that do not hold only zeros. ``own_bytes``: those of them that its parent does not have;
    ``shared_bytes``: the others. None if that is unknown on this host, which lacks the list of chunks (the manifest) of
    the image, or of the parent.
    """

    verified: bool
    hosts: list[str]
    data_bytes: Bytes | None = None
    own_bytes: Bytes | None = None
    shared_bytes: Bytes | None = None


class ImageList(Model):
    """All published images."""

    images: list[Image]


class HydrateRequest(Model):
    """``until_ready``: answer when all of the image is there. Who hangs up before that does not end the hydration."""

    until_ready: Flag = False


class Hydration(Model):
    """How far a host is that is to keep all of an image: ``done`` of ``total`` bytes, with those that hold nothing.

    ``whole``: all is there, so this host needs no parents.
    """

    done: Bytes
    total: Bytes
    whole: bool


class Published(Model):
    """An image that this host is an origin of."""

    name: str
    size: Bytes
    digest: str


class UnpublishQuery(Model):
    """``when_unused``: also an image that hosts still have; it is removed when no host needs it."""

    when_unused: bool = False


class Unpublished(Model):
    """An image that this host is no origin of any more, or will not be. ``serving``: this host still serves it.

    ``withdrawn``: Volt still lists it with this host as an origin, until no host needs it.
    """

    name: str
    serving: bool
    withdrawn: bool = False


class Exported(Model):
    """A file that was written. ``size`` of the disk in it; ``state``: how a VM's disk was, see ``Snapshot``."""

    file: str
    format: str
    size: Bytes
    state: str | None = None


class Expected(Model):
    """The domain (XML) that libvirt is to make of a VM that comes."""

    domain: str


ABSENT, GIVEN_UP, ARRIVED, ANOTHER = "absent", "given up", "arrived", "another"
"""What there is of a VM that was to come: nothing; nothing any more; all, and it goes on; another VM of its name."""


class GivenUp(Model):
    """What there is of a VM that was to come. ``state``: ``ABSENT``, ``GIVEN_UP`` now, ``ARRIVED`` or ``ANOTHER``; the
    last two are left alone.
    """

    state: str


class Left(Model):
    """A VM whose memory went to another libvirt, where it is paused. ``downtime``: seconds that it had stood still."""

    downtime: float


class Progress(Model):
    """How far long work is, in bytes. ``step``: copy, digest, send, receive, memory or hydrate."""

    step: str
    done: Bytes
    total: Bytes


class Problem(Model):
    """Why a call failed (RFC 9457). ``type`` ends with the error's kind, ``detail`` is one line for people."""

    type: str
    title: str
    status: int
    detail: str


class Line(Model):
    """One line of the answer to a long call: progress; at last the answer, an object of its own, or a problem.

    If the caller has to pass a file, or to read or write a stream, the first line has the socket for that.
    """

    pipe: str | None = None
    progress: Progress | None = None
    answer: dict[str, Any] | None = None
    problem: Problem | None = None


class Sent(Model):
    """A stream that was sent, of ``total`` bytes of disk. ``state``: how the disk was, see ``Snapshot``."""

    total: Bytes
    snapshots: Annotated[int, Field(ge=0)]
    state: str


# The host


class CachedDeviceList(Model):
    """The devices of others that are read through the cache."""

    devices: list[CachedDevice]


class VolumeList(Model):
    """The volumes of the cache."""

    volumes: list[Volume]


class Route(Model):
    """One way to a parent. ``state``: ``active``, ``standby`` or ``lost``."""

    host: str
    address: str
    state: str


class Stack(Model):
    """One image's stack on this host. ``fetched_bytes``: read from parents; ``children``, ``vms``: its readers.

    ``verified``: the digest proves each chunk that is read; None before the digest is known.
    """

    name: str
    role: str
    phase: str
    serving: bool
    slot: int
    size: Bytes | None
    fetched_bytes: Bytes
    cache_file_bytes: Bytes
    cache_hit_bytes: Bytes | None
    paths: list[Route]
    children: list[str]
    vms: list[str]
    in_place: InPlace | None = None
    hydration: Hydration | None = None
    verified: bool | None = None


class VoltStatus(Model):
    """Whether Volt answered the last heartbeat; if not, ``trouble`` says why."""

    url: str
    connected: bool
    trouble: str | None


class Accel(Model):
    """What VMs are started with, ``kvm`` or ``tcg``, and why."""

    use: str
    reason: str


class Disks(Model):
    """What keeps VMs from writing to their disks, or soon will; and the room for disks, caches and published images.

    ``total``: what the file system of the state folder has; ``free``: what of it the agent can still use.
    """

    trouble: str | None
    total: Bytes = 0
    free: Bytes = 0


class Status(Model):
    """What a host has and does now.

    ``orphans``: disks without a record; ``damaged``: why records cannot be read, by ``vm NAME``, ``image NAME`` or
    ``device NAME``; ``deaths``: threads of the agent that died;
    ``troubles``: errors of jobs that are tried again, by key: ``image NAME``, ``content of NAME`` (the digest of an
    image in place), ``place of NAME`` (in Volt's tree), ``lost parents of NAME``, ``children of NAME``, ``vm NAME``,
    ``device NAME``, ``volume PATH``, ``Volt`` and others; ``suspended``: nothing is served or checked until the agent
    is started again.
    """

    host: str
    pid: int
    volt: VoltStatus
    accel: Accel
    repairing: bool
    suspended: bool = False
    images: list[Stack]
    vms: list[VmLine]
    disks: Disks
    cache_volumes: list[Volume]
    cached_devices: list[CachedDevice] = []
    orphans: list[str]
    damaged: dict[str, str]
    deaths: list[Death]
    troubles: dict[str, str]


class Repaired(Model):
    """Names of what was not as the records say; of devices that are read through the cache their paths."""

    vms: list[str]
    images: list[str]
    orphans: list[str]
    devices: list[str] = []


class Removed(Model):
    """What a ``gc`` removed, or would remove: stacks by image, and the disk space of caches and published files.

    ``kept``: images that this host published, that Volt does not list, and that other hosts read when it did.
    """

    stacks: list[str]
    freed_bytes: Bytes
    kept: list[str] = []
