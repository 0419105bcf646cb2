"""What is told of a cache's volumes and devices: by drivers to the agent, and by the agent's API as it is."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel


class VolumeState(StrEnum):
    """How a volume of a cache is.

    ``idle``: no image is open; ``missing``: what the path leads to, if anything, is not what was made there.
    """

    RUNNING = "running"
    IDLE = "idle"
    FAILED = "failed"
    MISSING = "missing"


class Volume(BaseModel, frozen=True, extra="ignore", defer_build=True):
    """A volume of the cache: a file or disk that keeps what was read. ``size`` in bytes, 0 if it is missing.

    ``state``: see docs/operations.md. ``images``: names of the images whose reads the volume keeps now. ``devices``:
    paths of the devices of others that are read through it; drivers name their attachments instead. ``trouble``: why
    the last step of the volume failed; the agent tries again.
    """

    path: str
    size: int
    state: str
    images: list[str]
    devices: list[str] = []
    trouble: str = ""


class DeviceState(StrEnum):
    """How a device is read that was attached to the cache: by way of a volume, or straight until one takes it."""

    CACHED = "cached"
    DIRECT = "direct"


class CachedDevice(BaseModel, frozen=True, extra="ignore", defer_build=True):
    """A device of others that is read through the cache. ``path`` is handed out for it; VMs use it in its place.

    ``device``: the device's path; drivers name the attachment instead. ``state``: ``cached``; ``direct``: reads go to
    the device itself until a volume takes it; ``lost``: it was attached before the host was started; or what is under
    way. Since a volume took it, ``hits`` and ``misses`` count requests, and ``cache_bytes`` were read that the device
    was not asked for. What is held of it the kernel does not tell.
    """

    device: str
    path: str
    size: int
    state: str
    hits: int = 0
    misses: int = 0
    cache_bytes: int = 0
