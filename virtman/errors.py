"""What can go wrong in the agent.

VirtmanError
├── BadRequest               what was asked for cannot be: the message says what is allowed
│   ├── BadImageFile         the file to publish is not a whole raw or qcow2 image
│   ├── BadSize              a VM's disk cannot have this size
│   ├── BadVolume            a file or device that cannot be a volume of the cache
│   ├── BadDevice            a device that cannot be read through the cache
│   ├── BadStream            what is to be received is no whole stream of virtman send
│   │   └── NewerStream      it was sent by a newer release
│   ├── NoVolumes            the cache driver of this host has none
│   └── NotSupported         the driver of this host's disks cannot do it
├── Forbidden                the caller may not do this
├── NotFound
│   ├── UnknownVm
│   ├── UnknownSnapshot
│   ├── UnknownImage
│   └── UnknownVolume
├── Conflict
│   ├── VmExists             the name is taken by a VM of another image or size
│   ├── VmRuns               the VM runs, and not as was asked for, or must not
│   ├── VmSaved              libvirt has saved the VM's memory: the VM is neither on nor off
│   ├── VmMoving             the VM comes from another host, or went to another one
│   ├── DiskChanged          a VM's disk is not what was sent of it any more
│   ├── DiskAttached         the disk is attached to a VM
│   ├── DiskBusy             another program has the disk open: somebody's QEMU, or one that copies it
│   ├── VolumeBusy           devices of somebody else are attached to a volume of the cache
│   ├── ImageExists          the name is taken by other content
│   ├── FileExists           there is a file already where one is to be written
│   ├── StreamMisfit         a stream is of another image, or does not continue what the VM's disk holds
│   ├── ContentChanged       Volt has other content under the name of an image that this host has
│   ├── OriginChanged        what an image is served from in place is not what was published any more
│   ├── OriginMissing        what an image is served from in place is not there
│   ├── ImageUnlisted        Volt does not list an image any more that this host has
│   ├── ImageInUse           other hosts still have the image
│   ├── ImageWithdrawn       the image is withdrawn, and this host has not got it
│   ├── NeverBooted          the VM has a disk and no machine to start
│   ├── Interrupted          another call has ended what was under way: it destroyed the VM, say
│   └── DomainForeign        libvirt has a domain of this name that is not ours
├── NoRoom                   not enough space on the disk
├── CoordinatorDown          Volt is needed for this and does not answer
│   └── VoltRefused          Volt answers, and refuses
│       └── HostTaken        another agent runs under this host's name
├── Suspended                the host serves no image until its agent is started again
├── TooManyCalls             as many calls that last long as there may be are under way
├── HypervisorError          libvirt is missing, refuses or failed
│   └── HypervisorAbsent     there was no connection to libvirt: nothing was asked of it
├── DriverTrouble            a driver failed; the message is the driver's
├── HostTrouble              the host's own files fail: the message is the operating system's
├── StateLocked              another agent uses this state or run folder
├── StateDamaged             a record of the state folder cannot be read
├── ConfigError              the agent cannot start with these settings
├── CallerGone               who asked for a stream, or sent one, hung up
├── RepairIncomplete         repair went on after errors; the message has them all
├── AgentUnreachable         no agent answers on the socket
└── AgentFailed              the agent answered with an error that has no class of its own

``status`` is the HTTP status and ``kind`` the problem type (RFC 9457) of the local API; the client maps ``kind`` back.
"""

from __future__ import annotations


class VirtmanError(Exception):
    """Base of all errors that the agent reports; the message is one line for people."""

    status = 500
    kind = "internal"


class BadRequest(VirtmanError):
    """What was asked for cannot be.

    The API answers 409 where a valid request does not fit to what is on this host, and 400 to a request that is not
    what its document says.
    """

    status = 409
    kind = "bad-request"


class BadImageFile(BadRequest):
    """The file to publish is not a whole raw or qcow2 image."""

    kind = "bad-image-file"


class BadSize(BadRequest):
    """A VM's disk cannot have this size."""

    kind = "bad-size"


class BadVolume(BadRequest):
    """A file or device that cannot be a volume of the cache."""

    kind = "bad-volume"


class BadDevice(BadRequest):
    """A device that cannot be read through the cache."""

    kind = "bad-device"


class BadStream(BadRequest):
    """What is to be received is no whole stream of ``virtman send``: another file, cut off, or altered."""

    kind = "bad-stream"


class NewerStream(BadStream):
    """A stream was sent by a newer release."""

    kind = "newer-stream"


class NoVolumes(BadRequest):
    """The cache driver of this host has no volumes."""

    kind = "no-volumes"


class NotSupported(BadRequest):
    """The driver of this host's disks cannot do it."""

    kind = "not-supported"


class Forbidden(VirtmanError):
    """The caller may not do this."""

    status = 403
    kind = "forbidden"


class NotFound(VirtmanError):
    """What was named does not exist."""

    status = 404
    kind = "not-found"


class UnknownVm(NotFound):
    """No VM of this name on this host."""

    kind = "unknown-vm"


class UnknownSnapshot(NotFound):
    """The VM has no snapshot of this name."""

    kind = "unknown-snapshot"


class UnknownImage(NotFound):
    """No image of this name."""

    kind = "unknown-image"


class UnknownVolume(NotFound):
    """The cache has no volume of this path."""

    kind = "unknown-volume"


class Conflict(VirtmanError):
    """What was asked for contradicts what exists."""

    status = 409
    kind = "conflict"


class VmExists(Conflict):
    """The name is taken by a VM of another image or size."""

    kind = "vm-exists"


class VmRuns(Conflict):
    """The VM runs, with another machine, other keys or user data than was asked for; or it should not."""

    kind = "vm-runs"


class VmSaved(Conflict):
    """libvirt has saved the VM's memory, which goes with the disk as that is now: the VM is neither on nor off."""

    kind = "vm-saved"


class VmMoving(Conflict):
    """The VM comes from another host, and does not go on yet; or it went to another one."""

    kind = "vm-moving"


class DiskChanged(Conflict):
    """A VM's disk is not what was sent of it any more."""

    kind = "disk-changed"


class DiskAttached(Conflict):
    """The disk is attached to a VM."""

    kind = "disk-attached"


class DiskBusy(Conflict):
    """Another program has a VM's disk, or a cached device, open: somebody's QEMU, or one that copies it."""

    kind = "disk-busy"


class VolumeBusy(Conflict):
    """Devices of somebody else are attached to a volume of the cache."""

    kind = "volume-busy"


class ImageExists(Conflict):
    """The name is taken by other content."""

    kind = "image-exists"


class FileExists(Conflict):
    """There is a file already where one is to be written."""

    kind = "file-exists"


class StreamMisfit(Conflict):
    """A stream is of another image, or does not continue what the VM's disk holds."""

    kind = "stream-misfit"


class ContentChanged(Conflict):
    """Volt has other content under the name of an image that this host has."""

    kind = "content-changed"


class OriginChanged(Conflict):
    """What an image is served from in place is not what was published any more: it is served to nobody."""

    kind = "origin-changed"


class OriginMissing(Conflict):
    """What an image is served from in place is not there, or cannot be opened; it may come back."""

    kind = "origin-missing"


class ImageUnlisted(Conflict):
    """Volt does not list an image any more that this host has."""

    kind = "image-unlisted"


class ImageInUse(Conflict):
    """Hosts other than its origins still have the image."""

    kind = "image-in-use"


class ImageWithdrawn(Conflict):
    """The image is withdrawn: only hosts that have it may use it."""

    kind = "image-withdrawn"


class NeverBooted(Conflict):
    """The VM has a disk, and nothing is recorded of a machine to start."""

    kind = "never-booted"


class Interrupted(Conflict):
    """Another call has ended what was under way: it destroyed the VM, say."""

    kind = "interrupted"


class DomainForeign(Conflict):
    """libvirt has a domain of this name that this agent did not define."""

    kind = "domain-foreign"


class NoRoom(VirtmanError):
    """Not enough space on the disk."""

    status = 507
    kind = "no-room"


class CoordinatorDown(VirtmanError):
    """Volt is needed for this and does not answer."""

    status = 503
    kind = "coordinator-down"


class VoltRefused(CoordinatorDown):
    """Volt answers, and refuses, for a reason that has no class of its own here (a wrong token, say).

    Who goes on while Volt is down goes on now, too.
    """

    status = 502
    kind = "volt-refused"


class HostTaken(VoltRefused):
    """Another agent runs under this host's name: Volt changes nothing for this agent."""

    status = 409
    kind = "host-taken"


class Suspended(VirtmanError):
    """The host serves no image until its agent is started again."""

    status = 503
    kind = "suspended"


class TooManyCalls(VirtmanError):
    """As many calls that last long as there may be at once are under way."""

    status = 503
    kind = "too-many-calls"


class HypervisorError(VirtmanError):
    """libvirt is missing, refuses or failed."""

    status = 502
    kind = "hypervisor"


class HypervisorAbsent(HypervisorError):
    """There was no connection to libvirt: nothing was asked of it."""

    kind = "hypervisor-absent"


class DriverTrouble(VirtmanError):
    """A driver failed."""

    kind = "driver"


class HostTrouble(VirtmanError):
    """The host's own files fail."""

    kind = "host"


class StateLocked(VirtmanError):
    """Another agent uses this state or run folder."""

    kind = "state-locked"


class StateDamaged(VirtmanError):
    """A record of the state folder cannot be read."""

    kind = "state-damaged"


class ConfigError(VirtmanError):
    """The agent cannot start with these settings."""

    kind = "config"


class CallerGone(VirtmanError):
    """Who asked for a stream, or sent one, hung up."""

    kind = "caller-gone"


class RepairIncomplete(VirtmanError):
    """Repair or teardown went on after errors; the message has them all."""

    kind = "repair-incomplete"


class AgentUnreachable(VirtmanError):
    """No agent answers on the socket."""

    kind = "agent-unreachable"


class AgentFailed(VirtmanError):
    """The agent answered with an error that has no class of its own."""

    kind = "agent-failed"


def _tree(cls: type[VirtmanError]) -> list[type[VirtmanError]]:
    return [cls, *(leaf for child in cls.__subclasses__() for leaf in _tree(child))]


BY_KIND: dict[str, type[VirtmanError]] = {cls.kind: cls for cls in _tree(VirtmanError)}
"""Problem type to class, for the client."""
