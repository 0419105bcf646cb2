"""Serve an image by the kernel's iSCSI target (LIO): one target per image and host.

The target exists, and children log in to it, before there is a disk in it; ``publish`` adds the disk. Who may log in is
listed in the target by name; nobody else may, and nobody may write. Configfs and device-mapper hold all there is to
know, so that nothing is remembered here.

Two maps lie between the published device and the target. The lower one has the same path whatever the device is called
after a reboot: VMs' disks are made on it, and both get another device under way by a new table in it. The upper one is
there because the target claims its disk for itself.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import re
import threading
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from drivers import devmapper, loopdev
from drivers.base import Device, Endpoint, Existing, Image, Place
from drivers.devmapper import SECTOR
from drivers.errors import BadAddress, BadDevice, LibraryMissing, TargetFailed
from drivers.names import checked

log = logging.getLogger(__name__)

PORT = 3260
"""iscsi-target in IANA's list of ports."""

PORTAL_GROUP = 1
"""The tag of the one portal group of each target."""

_AUTHORITY = "iqn.2026-01.org.virtman"
_LONGEST_NAME = 223  # RFC 3720, 3.2.6.1
_SCHEME = "iscsi"
_DISK = 0
_OWN = "virtman-"
_LOWER = "virtman-image-"
_UPPER = "virtman-export-"

_ATTRIBUTES = {
    "authentication": 0,  # secrets of children would be set on their ACLs (CHAP), and this be 1
    "generate_node_acls": 0,  # nobody but who has an ACL
    "cache_dynamic_acls": 0,
    "demo_mode_write_protect": 1,
}


def target_name(host: str, image: str) -> str:
    """The iSCSI name of the target by which a host serves an image. Raises BadName, BadAddress if it is too long."""
    return _iscsi_name(host, image)


def image_of(name: str) -> str | None:
    """The image that a host serves by a target of this name; None if it is not one of ours."""
    authority, *parts = name.split(":")
    return _decoded(parts[1]) if authority == _AUTHORITY and len(parts) == 2 else None


def serial_of(image: Image) -> str:
    """The serial of the image's disk, on every host the same: to a child they are paths to one disk."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, image.key))


def initiator_name(host: str) -> str:
    """The iSCSI name by which a host logs in to its parents. Raises BadName."""
    return _iscsi_name(host)


def portal_of(address: str) -> tuple[str, int]:
    """The IP address and port of a host that is reached at ``iscsi://<ip>:<port>``. Raises BadAddress."""
    try:
        parts = urlsplit(address)
        ip, port = str(ipaddress.ip_address(parts.hostname or "")), parts.port or PORT
    except ValueError:
        ip, port = "", 0
    if not ip or parts.scheme != _SCHEME or parts.path:
        raise BadAddress(f"{address!r} is not an address of this driver: {_SCHEME}://<ip>:<port>")
    return ip, port


class LioExport:
    """Targets named after ``host``, reached at ``ip`` and ``port``."""

    def __init__(self, _place: Place, *, host: str, ip: str, port: int = PORT) -> None:
        """Raises BadName, BadAddress."""
        self._host = checked(host)
        shown = f"[{ip}]" if ":" in ip else ip
        self._address = f"{_SCHEME}://{shown}:{port}"
        self._ip, self._port = portal_of(self._address)
        self._numbering = threading.Lock()  # rtslib picks the number of a new disk without one

    @property
    def address(self) -> str:
        """``iscsi://<ip>:<port>``."""
        return self._address

    def reserve(self, image: str) -> Endpoint:
        """Make the target, open for who is allowed, without a disk.

        Raises BadName, BadAddress, LibraryMissing, TargetFailed.
        """
        with _translated():
            self._group(image)
        return Endpoint(self.address, target_name(self._host, image))

    def publish(self, image: Image, device: Device, *, replace: bool = False) -> Endpoint:  # noqa: ARG002
        """Put the image's disk into its target. A published one gets another device without being taken away.

        ``replace`` changes nothing more: the connections to parents are below ``device``, and attach drops them.

        Raises BadDevice, BadName, BadAddress, LibraryMissing, TargetFailed, CommandFailed.
        """
        endpoint = self.reserve(image.name)
        with _translated():
            found = _disk(image.name)
            if found is not None and not (found.is_configured() and found.wwn == serial_of(image)):
                log.warning("image %s: replacing a disk that is half made or of other content", image.name)
                _remove_disk(image.name, found)
            with _block_device(image, device) as source:
                lower = _map(_LOWER + image.name, _linear(image, source))
            upper = _map(_UPPER + image.name, _linear(image, lower))
            disk = _disk(image.name) or self._make_disk(image, upper)
            group = self._group(image.name)
            self._plug_in(group, disk)
            for acl in group.node_acls:
                _show_disk(acl)
        return endpoint

    def local(self, image: Image) -> Device:
        """The map that follows every replacement of the device. It is there once the image is published."""
        return Device(size=image.size, path=devmapper.map_path(_LOWER + checked(image.name)))

    def serving(self, image: str) -> bool:
        """Whether there is a disk in an open target. Raises LibraryMissing, TargetFailed."""
        with _translated():
            target = self._target(image)
            return target is not None and any(group.enable and _plugged_in(group) for group in target.tpgs)

    def hit_bytes(self, image: str) -> int:
        """0: the kernel counts what the target's children read, not where the cache below found it."""
        checked(image)
        return 0

    def allow(self, image: str, children: Sequence[str]) -> None:
        """Let exactly these hosts log in; a host that was allowed before loses its session.

        Raises BadName, LibraryMissing, TargetFailed.
        """
        wanted = {initiator_name(child) for child in children}
        with _translated():
            group = self._group(image)
            for acl in list(group.node_acls):
                if acl.node_wwn not in wanted:
                    log.info("image %s: %s may not read any more", image, acl.node_wwn)
                    acl.delete()
            for name in sorted(wanted):
                _show_disk(_rtslib().NodeACL(group, name))

    def withdraw(self, image: str) -> None:
        """End the children's sessions and remove target, disk and maps.

        Raises BadName, LibraryMissing, TargetFailed, and CommandFailed while a VM's disk is on the lower map.
        """
        with _translated():
            target = self._target(image)
            if target is not None:
                target.delete()
            disk = _disk(image)
            if disk is not None:
                _remove_disk(image, disk)
        for prefix in (_UPPER, _LOWER):
            devmapper.remove(prefix + image)

    def existing(self) -> Existing:
        """Images with a target, a disk or a map. Raises LibraryMissing, TargetFailed, CommandFailed."""
        details: dict[str, str] = {}
        for prefix in (_LOWER, _UPPER):
            details |= {name.removeprefix(prefix): f"map {name}" for name in devmapper.names(prefix)}
        with _translated():
            disks = [disk.name for disk in _rtslib().RTSRoot().storage_objects if disk.name.startswith(_OWN)]
            targets = [target.wwn for target in _rtslib().FabricModule("iscsi").targets]
        details |= {name.removeprefix(_OWN): f"disk {name}" for name in disks}
        own = f"{_iscsi_name(self._host)}:"
        details |= {_decoded(name.removeprefix(own)): f"target {name}" for name in targets if name.startswith(own)}
        return Existing(frozenset(details), details)

    # All of these are called where _translated turns rtslib's errors into TargetFailed.

    def _target(self, image: str) -> Any:
        """The image's target, or None."""
        rtslib = _rtslib()
        with contextlib.suppress(rtslib.RTSLibNotInCFS):
            return rtslib.Target(rtslib.FabricModule("iscsi"), target_name(self._host, image), "lookup")
        return None

    def _group(self, image: str) -> Any:
        """The portal group of the image's target, made if it is not there, and open."""
        rtslib = _rtslib()
        target = rtslib.Target(rtslib.FabricModule("iscsi"), target_name(self._host, image))
        group = rtslib.TPG(target, PORTAL_GROUP)
        if not group.enable:
            for name, value in _ATTRIBUTES.items():
                group.set_attribute(name, value)
            rtslib.NetworkPortal(group, f"[{self._ip}]" if ":" in self._ip else self._ip, self._port)
            group.enable = True
        return group

    def _make_disk(self, image: Image, source: Path) -> Any:
        rtslib = _rtslib()
        path = f"/dev/dm-{devmapper.number(source).partition(':')[2]}"  # rtslib takes no other name for it
        with self._numbering:
            rtslib.RTSRoot().invalidate_caches()  # other programs make disks, too
            return rtslib.BlockStorageObject(_OWN + image.name, dev=path, wwn=serial_of(image), readonly=True)

    def _plug_in(self, group: Any, disk: Any) -> None:
        if _plugged_in(group):
            return
        for left_over in list(group.luns):
            left_over.delete()
        _rtslib().LUN(group, _DISK, disk)


def _iscsi_name(*names: str) -> str:
    """The parts after the naming authority's. iSCSI names are of lower case and have no ``_`` (RFC 3722)."""
    name = ":".join((_AUTHORITY, *map(_encoded, names)))
    if len(name) > _LONGEST_NAME:
        raise BadAddress(f"the iSCSI name {name} has more than {_LONGEST_NAME} bytes: choose shorter names")
    return name


def _encoded(name: str) -> str:
    """The name as a part of an iSCSI name, each name as another one."""
    return re.sub("[A-Z_]", lambda found: "." + found[0].lower().replace("_", "-"), checked(name))


def _decoded(encoded: str) -> str:
    """The name that was encoded for an iSCSI name."""
    return re.sub("[.](.)", lambda found: "_" if found[1] == "-" else found[1].upper(), encoded)


def _linear(image: Image, source: Path) -> str:
    return f"0 {image.size // SECTOR} linear {devmapper.number(source)} 0"


def _map(name: str, table: str) -> Path:
    """A read-only map with this table."""
    if devmapper.exists(name) and devmapper.table(name) != table:
        devmapper.reload(name, [table], read_only=True)
    return devmapper.create(name, [table], read_only=True)


@contextlib.contextmanager
def _block_device(image: Image, device: Device) -> Iterator[Path]:
    """The block device, or one for a file: it is there while a map uses it."""
    if device.path is None or device.size != image.size or image.size % SECTOR:
        raise BadDevice(f"image {image.name}: {device} is no kernel device of {image.size} bytes, whole sectors")
    if device.path.is_block_device():
        yield device.path
    elif device.path.is_file():
        source = loopdev.attach(device.path, read_only=True, cached=True)  # many children read the same
        try:
            yield source
        finally:
            loopdev.detach(device.path)  # it goes when its last user does (losetup(8), --detach)
    else:
        raise BadDevice(f"image {image.name}: {device.path} is neither a block device nor a file")


def _disk(image: str) -> Any:
    """The storage object that the image's LUN is made of, or None."""
    return next((disk for disk in _rtslib().RTSRoot().storage_objects if disk.name == _OWN + checked(image)), None)


def _remove_disk(image: str, disk: Any) -> None:
    disk.delete()
    devmapper.remove(_UPPER + image)


def _plugged_in(group: Any) -> bool:
    """Whether there is a disk in the group; a LUN without one is what a killed agent leaves."""
    with contextlib.suppress(_rtslib().RTSLibError):
        return any(lun.lun == _DISK and lun.storage_object.is_configured() for lun in group.luns)
    return False


def _show_disk(acl: Any) -> None:
    """Let who has the ACL see the disk, if there is one by now."""
    rtslib = _rtslib()
    if not _plugged_in(acl.parent_tpg):
        return
    for mapped in list(acl.mapped_luns):
        if mapped.write_protect:
            return
        mapped.delete()  # half made
    rtslib.MappedLUN(acl, _DISK, _DISK, write_protect=True)


def _rtslib() -> Any:
    try:
        import rtslib_fb
    except ImportError as error:
        raise LibraryMissing("rtslib_fb", "python3-rtslib-fb") from error
    return rtslib_fb


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    error_class = _rtslib().RTSLibError
    try:
        yield
    except (error_class, OSError) as error:
        raise TargetFailed(error) from error
