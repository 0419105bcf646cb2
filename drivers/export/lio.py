"""Serve an image by the kernel's iSCSI target (LIO): one target per image and host.

The target exists, and children log in to it, before there is a disk in it; ``publish`` adds the disk. Only the children
that the target lists by name may log in, and none may write. Configfs and device-mapper hold all there is to
know, so that nothing is remembered here.

Two maps lie over the published device: one for this host's VMs, whose disks are made on it, and one in the target. Each
has the same path whatever the device is called after a reboot, and gets another device under way by a new table. It
holds reads while there is no device, and those that the device failed until the image is published again: no VM and no
child is told of an error.

There are two because they end in different ways. A target goes only when all commands in it have ended, and whoever
removes it cannot be killed meanwhile (Linux: core_clear_lun_from_tpg, iscsit_stop_session). So what children wait for
is failed first: that is an error of the path to them (ABORTED COMMAND, Linux: TCM_LOGICAL_UNIT_COMMUNICATION_FAILURE),
after which they read by another one. What VMs wait for is held. The target would also claim their map for itself.

Parent and child authenticate each other by CHAP. A parent that cannot prove itself, or asks for no proof, is not used
(open-iscsi: usr/auth.c, acl_set_auth_method_valid). A child may log in before this host has heard of it: it is refused,
and tries again until the next heartbeat.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from drivers.base import Child, Device, Died, Image, Place
from drivers.door import door
from drivers.errors import BadDevice, DriverError, TargetFailed
from drivers.export.leaving import commands_wait
from drivers.host import retry
from drivers.host.folders import matching
from drivers.host.watch import Watch
from drivers.iscsi import names as iscsinames
from drivers.iscsi.names import DISK, PORTAL_GROUP, Side, image_of, initiator_name, serial_of, target_name
from drivers.kernel import devmapper, loopdev, multipath, ownership, scsi
from drivers.kernel.devmapper import SECTOR
from drivers.names import checked
from drivers.needs import CONFIGFS, DEVICE_MAPPER, DMSETUP, LOOP, LOSETUP, MODPROBE, MOUNT, UDEVADM, Library, Needs

log = logging.getLogger(__name__)

_OWN = scsi.MODEL
_CORE, _TARGETS = CONFIGFS.path / "target/core", CONFIGFS.path / "target/iscsi"
_SETTINGS = Path("/etc/target")
"""Where rtslib has the kernel keep what it must remember of targets; only Debian's package makes it."""
_FOR_VMS = "virtman-image-"
_FOR_CHILDREN = "virtman-export-"

_ALIAS = "emulate_model_alias"
"""Has the disk's name be its model, by which children know it for ours (see drivers.kernel.udevrules)."""

_REFUSED = ("emulate_pr", "emulate_3pc")
"""What disks do unless they are told not to: reservations, by which one child would keep the others from reading
(SPC-4, 5.13), and copies."""

_ATTRIBUTES = {
    "authentication": 1,  # by the secrets in the children's ACLs
    "generate_node_acls": 0,  # only initiators with an ACL
    "cache_dynamic_acls": 0,
    "demo_mode_write_protect": 1,
}


WALKS = 5.0
"""Seconds for which a call is tried again that has met a removal. To remove a target took 0.3 in an emulated guest."""


def met_removal(error: BaseException) -> bool:
    """Whether a call failed at a target or a disk of the kernel's that was gone.

    rtslib walks through the targets and disks of all images, also one that is just removed for another thread, and
    fails where that was. A walk after the removal does not meet it.
    """
    cause = error.__cause__ if isinstance(error, TargetFailed) else None
    if isinstance(cause, FileNotFoundError):
        return str(cause.filename).startswith(f"{CONFIGFS.path}/")
    return cause is not None and isinstance(cause, not_in_configfs(_rtslib()))


_again = retry.again(met_removal, limit=WALKS)


def not_in_configfs(rtslib: Any) -> type[Exception]:
    """What rtslib raises of something that is not there. Since 2.2, which pip installs, it has another name."""
    error: type[Exception] = getattr(rtslib, "RTSLibNotInCFS", None) or rtslib.RTSLibNotInCFSError
    return error


@door
class LioExport:
    """Targets named after the host, reached at its address. No process serves them, so none dies."""

    needs = Needs(
        tools=(DMSETUP, LOSETUP, MODPROBE, MOUNT, UDEVADM),
        libraries=(Library("rtslib_fb", "python3-rtslib-fb", "rtslib-fb"),),
        modules=("target_core_mod", "iscsi_target_mod", "target_core_iblock", "dm_multipath", "dm_service_time"),
        nodes=(CONFIGFS, DEVICE_MAPPER, LOOP),
        root=True,
        address=True,
    )

    def __init__(self, place: Place, *, died: Died, port: int = iscsinames.PORT) -> None:  # noqa: ARG002
        """Raises BadName, BadAddress."""
        ownership.claim(place.state)
        _SETTINGS.mkdir(exist_ok=True)
        self._host = checked(place.host)
        self._address = iscsinames.address_of(place.address, port)
        self._ip, self._port = iscsinames.portal_of(self._address)
        self._numbering = threading.Lock()  # held while a new disk gets its number
        self._admitting = threading.Lock()
        """Held while children are let in or locked out, and never while their reads are waited for."""
        self._leaving: dict[str, object] = {}
        """By image, the mark of the thread that ends the sessions of children that are locked out."""

    @property
    def address(self) -> str:
        """``iscsi://<ip>:<port>``."""
        return self._address

    @_again
    def reserve(self, image: str) -> None:
        """Make the target, open for the children that are allowed, without a disk.

        Raises BadName, BadAddress, NotOurs, TargetFailed.
        """
        _check_ours(image)
        with _translated():
            # This says where the kernel keeps what it must remember, which it hears only while there is no disk
            # (rtslib: root.py, _set_dbroot).
            _rtslib().RTSRoot()
            self._group(image)

    @_again
    def publish(self, image: Image, device: Device, *, replace: bool = False) -> None:  # noqa: ARG002
        """Put the image's disk into its target. A published one gets another device without being taken away.

        ``replace`` changes nothing more: the connections to parents are below ``device``, and attach drops them.

        Raises BadDevice, BadName, BadAddress, TargetFailed, CommandFailed.
        """
        path = _check_device(image, device)
        self.reserve(image.name)
        with _translated():
            found = _disk(image.name)
            if found is not None and not _complete(found, image):
                log.warning("image %s: replacing a disk that is half made or of other content", image.name)
                _remove_disk(image.name, found)
            with _block_device(path) as source:
                number = devmapper.number(source)
                self._map_to(_FOR_VMS, image, number)
                served = self._map_to(_FOR_CHILDREN, image, number)
            disk = _disk(image.name) or self._make_disk(image, served)
            group = self._group(image.name)
            self._plug_in(group, disk)
            for acl in group.node_acls:
                _show_disk(acl)

    def local(self, image: Image) -> Device:
        """The map that follows every replacement of the device. It is there once the image is published."""
        return Device(size=image.size, path=devmapper.map_path(_FOR_VMS + checked(image.name)))

    def serving(self, image: str) -> bool:
        """Whether there is a disk in an open target that can be read.

        Asked of every image with every heartbeat: small files tell it, where rtslib walks through all targets.
        """
        group = _TARGETS / target_name(self._host, image) / f"tpgt_{PORTAL_GROUP}"
        if not any(map(_is_on, matching(group / "lun" / f"lun_{DISK}", "*"))) or not _is_on(group):
            return False
        return not any(multipath.state(prefix + image).failed for prefix in (_FOR_VMS, _FOR_CHILDREN))

    def hit_bytes(self, image: str) -> int | None:
        """None: the kernel counts what the target's children read, not where the cache below found it."""
        checked(image)
        return None

    @_again
    def allow(self, image: str, children: Sequence[Child]) -> None:
        """Let exactly these hosts log in, by their secrets; a host that was allowed before loses its session.

        It loses the disk at once. A session with a read that waits ends after that read, and this does not wait for it.

        Raises BadName, NotOurs, TargetFailed.
        """
        _check_ours(image)
        wanted = {initiator_name(child.host): child.secret for child in children}
        with _translated(), self._admitting:
            group = self._group(image)
            for acl in list(group.node_acls):
                if acl.node_wwn not in wanted:
                    log.info("image %s: %s may not read any more", image, acl.node_wwn)
                    _lock_out(acl)
            for name, secret in sorted(wanted.items()):
                acl = _rtslib().NodeACL(group, name)
                _set_passwords(acl, secret)
                _show_disk(acl)
        if not self._end_sessions(image):
            log.info("image %s: sessions of children that may not read any more end with their reads", image)
            this = self._leaving[image] = object()
            Watch(f"sessions-end-{image}", partial(self._end_sessions_later, image, this)).start()

    def _end_sessions_later(self, image: str, this: object) -> None:
        """Wait for the reads of children that are locked out, until another thread does."""
        retry.until(lambda: self._leaving[image] is not this or self._end_sessions(image), limit=math.inf, first=0.1)

    @_again
    def _end_sessions(self, image: str) -> bool:
        """End the sessions of children that are locked out and wait for no command. Returns whether none is left."""
        with _translated(), self._admitting:
            target = self._target(image)
            groups = [] if target is None else target.tpgs
            locked_out = [acl for group in groups for acl in group.node_acls if _is_locked_out(acl)]
            waiting = [acl for acl in locked_out if commands_wait((Path(acl.path) / "info").read_text())]
            for acl in locked_out:
                if acl not in waiting:
                    acl.delete()
        return not waiting

    @_again
    def withdraw(self, image: str) -> None:
        """End the children's sessions and remove target, disk and maps. The device must hold no reads any more.

        Children's reads end as by a broken path. While VMs' disks are on their map, it stays without the
        device, and holds their reads until ``publish``.

        Raises BadName, NotOurs, TargetFailed, CommandFailed.
        """
        _check_ours(image)
        with _translated():
            _hold_no_children(image)
            target = self._target(image)
            if target is not None:
                target.delete()
            disk = _disk(image)
            if disk is not None:
                disk.delete()
        devmapper.remove(_FOR_CHILDREN + image)
        kept = _FOR_VMS + image
        if devmapper.exists(kept) and devmapper.openers(kept):
            log.warning("image %s: VMs' disks are on it, and their reads wait", image)
            sectors = int(devmapper.table(kept).split()[1])
            devmapper.reload(kept, [_table(sectors)], read_only=True)
        else:
            devmapper.remove(kept)

    @_again
    def existing(self) -> frozenset[str]:
        """Images with a target, a disk or a map. Raises TargetFailed, CommandFailed."""
        prefixes = (_FOR_VMS, _FOR_CHILDREN)
        maps = {name.removeprefix(prefix) for prefix in prefixes for name in devmapper.names(prefix)}
        others = {name.removeprefix(prefix) for prefix in prefixes for name in devmapper.others(prefix)}
        with _translated():
            disks = {folder.name.removeprefix(_OWN) for folder in matching(_CORE, "iblock_*", f"{_OWN}*")}
            own = [folder.name for folder in matching(_TARGETS, f"{initiator_name(self._host)}:*")]
        return frozenset(maps | disks | {image_of(name) or name for name in own}) - others

    # All of these are called where _translated turns rtslib's errors into TargetFailed.

    def _target(self, image: str) -> Any:
        """The image's target, or None."""
        rtslib = _rtslib()
        with contextlib.suppress(not_in_configfs(rtslib)):
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
            group.set_parameter("DefaultTime2Wait", 0)  # a child that lost its connection comes back at once
        # Also for a group that is open: the host may have another address than the agent before this one.
        ip = f"[{self._ip}]" if ":" in self._ip else self._ip
        rtslib.NetworkPortal(group, ip, self._port)
        group.enable = True
        for portal in list(group.network_portals):
            if (portal.ip_address, portal.port) != (ip, self._port):
                portal.delete()  # its sessions stay until the children have heard of the new one
        return group

    def _map_to(self, prefix: str, image: Image, number: str) -> Path:
        """Make one of the image's maps, or have it read by another block device, given by its number."""
        name = prefix + image.name
        table = [_table(image.size // SECTOR, number)]
        if devmapper.exists(name) and _unlike(name, number):
            devmapper.reload(name, table, read_only=True)
        return devmapper.create(name, table, read_only=True)

    def _make_disk(self, image: Image, source: Path) -> Any:
        block_device = _rtslib().BlockStorageObject
        with self._numbering:
            name, number = _OWN + image.name, _free_number()
            disk = block_device(name, dev=_plain(source), wwn=serial_of(image), readonly=True, index=number)
        for refused in _REFUSED:
            disk.set_attribute(refused, 0)
        disk.set_attribute(_ALIAS, 1)  # last: a disk with it is complete
        return disk

    def _plug_in(self, group: Any, disk: Any) -> None:
        if _plugged_in(group):
            return
        for left_over in list(group.luns):
            left_over.delete()
        _rtslib().LUN(group, DISK, disk)


def _check_ours(image: str) -> None:
    """Targets and disks of an image belong to whom its maps do. Raises BadName, NotOurs."""
    for prefix in (_FOR_VMS, _FOR_CHILDREN):
        devmapper.exists(prefix + checked(image))


def _unlike(name: str, path: str) -> bool:
    """Whether the map reads by something else, by nothing, not any more after an error, or is to hold nothing."""
    table = devmapper.table(name)
    return devmapper.numbers_in(table) != [path] or multipath.HOLDS not in table or bool(multipath.state(name).failed)


def _hold_no_children(image: str) -> None:
    """Fail the children's reads that wait for a device, and all further reads."""
    name = _FOR_CHILDREN + image
    if devmapper.exists(name) and multipath.HOLDS in devmapper.table(name):
        devmapper.message(name, multipath.FAILS)


def _table(sectors: int, *paths: str) -> str:
    """Reads by a device, or for now by none.

    It is a multipath target because that holds requests when it has no path or its path failed. It cannot be replaced
    by a target of another type.
    """
    return multipath.table(sectors, [[path] for path in paths], "service-time", holds=True)


def _check_device(image: Image, device: Device) -> Path:
    """The device's path. Raises BadDevice."""
    if device.path is None or device.size != image.size or image.size % SECTOR:
        raise BadDevice(f"image {image.name}: {device} is no kernel device of {image.size} bytes, whole sectors")
    if not (device.path.is_block_device() or device.path.is_file()):
        raise BadDevice(f"image {image.name}: {device.path} is neither a block device nor a file")
    return device.path


@contextlib.contextmanager
def _block_device(path: Path) -> Iterator[Path]:
    """The block device, or one for a file: it is there while a map uses it."""
    if path.is_block_device():
        yield path
    else:
        # Many children read the same; and images of one digest have one file.
        with loopdev.held(path) as source:
            yield source


def _disk(image: str) -> Any:
    """The storage object that the image's LUN is made of, or None."""
    name = _OWN + checked(image)
    # Not by rtslib's walk through all disks: it makes a disk anew that goes between its two looks (rtslib: node.py,
    # _create_in_cfs_ine).
    for folder in matching(_CORE, "iblock_*", name):
        return _rtslib().BlockStorageObject(name, index=int(folder.parent.name.rpartition("_")[2]))
    return None


def _free_number() -> int:
    """A number that no disk has, also none that is being removed: for rtslib a place is free once it is empty."""
    taken = {folder.name.rpartition("_")[2] for folder in matching(_CORE, "iblock_*")}
    return next(number for number in itertools.count() if str(number) not in taken)


def _remove_disk(image: str, disk: Any) -> None:
    _hold_no_children(image)
    disk.delete()
    devmapper.remove(_FOR_CHILDREN + image)


def _complete(disk: Any, image: Image) -> bool:
    """Whether the disk has all that it gets when it is made, and is this image's.

    After a reboot targetcli's service may have made it over another device that has the number of the former one.
    """
    served = _FOR_CHILDREN + image.name
    return bool(
        disk.is_configured()
        and disk.wwn == serial_of(image)
        and disk.get_attribute(_ALIAS) == "1"
        and devmapper.exists(served)
        and disk.udev_path == _plain(devmapper.map_path(served))
    )


def _plain(device: Path) -> str:
    """The only name of a map's device that rtslib takes."""
    return f"/dev/dm-{devmapper.number(device).partition(':')[2]}"


def _set_passwords(acl: Any, secret: str) -> None:
    """Have both sides prove themselves. Sessions that are there stay."""
    acl.chap_userid = acl.chap_mutual_userid = iscsinames.CHAP_USER
    acl.chap_password = iscsinames.password(secret, Side.CHILD)
    acl.chap_mutual_password = iscsinames.password(secret, Side.PARENT)


def _lock_out(acl: Any) -> None:
    """Refuse logins by the ACL (Linux: chap_server_open refuses without a name), and hide the disk from sessions."""
    acl.chap_password = acl.chap_userid = ""
    for mapped in list(acl.mapped_luns):
        mapped.delete()


def _is_locked_out(acl: Any) -> bool:
    return not acl.chap_userid


def _plugged_in(group: Any) -> bool:
    """Whether there is a disk in the group; a LUN without one is what a killed agent leaves."""
    with contextlib.suppress(_rtslib().RTSLibError):
        return any(lun.lun == DISK and lun.storage_object.is_configured() for lun in group.luns)
    return False


def _is_on(item: Path) -> bool:
    """Whether there is a portal group, or a disk, and it is enabled. Raises OSError."""
    try:
        return (item / "enable").read_text().startswith("1")
    except (FileNotFoundError, NotADirectoryError):  # also of one that goes just now
        return False


def _show_disk(acl: Any) -> None:
    """Let the child with the ACL see the disk, if there is one, and the child is not locked out."""
    rtslib = _rtslib()
    if _is_locked_out(acl) or not _plugged_in(acl.parent_tpg):
        return
    for mapped in list(acl.mapped_luns):
        if mapped.write_protect:
            return
        mapped.delete()  # half made
    rtslib.MappedLUN(acl, DISK, DISK, write_protect=True)


def _rtslib() -> Any:
    try:
        import rtslib_fb
    except ImportError as error:
        raise DriverError("the Python library rtslib_fb is not installed (Debian: python3-rtslib-fb)") from error
    return rtslib_fb


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    error_class = _rtslib().RTSLibError
    try:
        yield
    except (error_class, OSError) as error:
        raise TargetFailed(error) from error
