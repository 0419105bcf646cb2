"""What can go wrong in the agent; the message of each error is one line for people."""

from __future__ import annotations

import re


class VirtmanError(Exception):
    """Base of all errors that the agent reports.

    ``status`` is the HTTP status of the local API, and ``kind`` the problem type (RFC 9457). A class that names no
    ``kind`` has the words of the class's name: ``BadSize`` is ``bad-size``. A private class has its base's kind.
    """

    status = 500
    kind = "internal"

    def __init_subclass__(cls) -> None:
        if "kind" not in vars(cls) and not cls.__name__.startswith("_"):
            cls.kind = re.sub(r"(?<=.)(?=[A-Z])", "-", cls.__name__).lower()


class BadRequest(VirtmanError):
    """What was asked for cannot be. The API answers 400 to a request that is not what the API's document says."""

    status = 409


class BadImageFile(BadRequest):
    """The file to publish is not a whole raw or qcow2 image."""


class BadSize(BadRequest):
    """A VM's disk cannot have this size."""


class BadDevice(BadRequest):
    """A device that cannot be read through the cache."""


class BadStream(BadRequest):
    """The input is no whole stream of ``virtman send``: another file, cut off, altered, or of a newer version."""


class NoVolumes(BadRequest):
    """The cache driver of this host has no volumes."""


class NotSupported(BadRequest):
    """The driver of this host's disks cannot do it."""


class Forbidden(VirtmanError):
    """The caller may not do this."""

    status = 403


class NotFound(VirtmanError):
    """What was named does not exist."""

    status = 404


class UnknownVm(NotFound):
    """No VM of this name on this host."""


class UnknownSnapshot(NotFound):
    """The VM has no snapshot of this name."""


class UnknownImage(NotFound):
    """No image of this name."""


class Conflict(VirtmanError):
    """What was asked for contradicts what exists."""

    status = 409


class VmExists(Conflict):
    """The name is taken by a VM of another image or size."""


class VmRuns(Conflict):
    """The VM runs, with another machine, other keys or user data than was asked for; or it should not."""


class VmSaved(Conflict):
    """libvirt has saved the VM's memory, which goes with the disk as that is now: the VM is neither on nor off."""


class VmMoving(Conflict):
    """The VM comes from another host, and does not go on yet; or it went to another one."""


class DiskBusy(Conflict):
    """Another program uses a VM's disk, a cached device or a cache volume."""


class ImageExists(Conflict):
    """The name is taken by other content."""


class ContentChanged(Conflict):
    """Volt has other content under the name of an image that this host has."""


class OriginChanged(Conflict):
    """The file or device of an image in place is not what was published; it is not served any more."""


class OriginMissing(Conflict):
    """The file or device of an image in place is missing, or cannot be opened; it may come back."""


class ImageInUse(Conflict):
    """Hosts other than its origins still have the image."""


class ImageWithdrawn(Conflict):
    """The image is withdrawn: only hosts that have it may use it."""


class Interrupted(Conflict):
    """Another call ended the operation, for example destroyed the VM."""


class DomainForeign(Conflict):
    """libvirt has a domain of this name that this agent did not define."""


class NoRoom(VirtmanError):
    """Not enough space on the disk."""

    status = 507


class CoordinatorDown(VirtmanError):
    """Volt is needed for this and does not answer."""

    status = 503


class VoltRefused(CoordinatorDown):
    """Volt refuses, for a reason without a class here, such as a wrong token; callers go on as if Volt were down."""

    status = 502


class HostTaken(VoltRefused):
    """Another agent runs under this host's name: Volt changes nothing for this agent."""

    status = 409


class Suspended(VirtmanError):
    """The host serves no image until its agent is started again."""

    status = 503


class TooManyCalls(VirtmanError):
    """As many calls that last long as there may be at once are under way."""

    status = 503


class HypervisorError(VirtmanError):
    """libvirt is missing, refuses or failed."""

    status = 502
    kind = "hypervisor"


class HypervisorAbsent(HypervisorError):
    """There was no connection to libvirt: nothing was asked of it."""


class DriverTrouble(VirtmanError):
    """A driver failed."""

    kind = "driver"


class HostTrouble(VirtmanError):
    """The host's own files fail."""

    kind = "host"


class StateDamaged(VirtmanError):
    """A record of the state folder cannot be read."""


class ConfigError(VirtmanError):
    """The agent cannot start with these settings, or another one uses its folders."""

    kind = "config"


class CallerGone(VirtmanError):
    """The caller hung up."""


class AgentUnreachable(VirtmanError):
    """No agent answers on the socket."""


class AgentFailed(VirtmanError):
    """The agent answered with an error that has no class of its own."""


def _with_subclasses(cls: type[VirtmanError]) -> list[type[VirtmanError]]:
    return [cls, *(leaf for child in cls.__subclasses__() for leaf in _with_subclasses(child))]


BY_KIND = {cls.kind: cls for cls in _with_subclasses(VirtmanError)}
"""Problem type to class, for the client."""
