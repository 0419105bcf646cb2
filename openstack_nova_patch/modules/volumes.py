"""Cinder as Nova sees it, in which a server's attachment to a base is no attachment of the volume.

A volume that several servers may not attach can be attached once; a base is there for any number of servers at a time,
and none of them gets it. So what Nova asks of the attachment of a server to a base is answered here, and Cinder does
not hear of it. Nothing has to be kept for that: see ``names``. The private disk comes when Nova connects the volume on
the compute host, and goes with the server's other local disks (``disks``).
"""

from __future__ import annotations

import logging
from typing import Any

import nova.conf
from keystoneauth1 import exceptions as keystone_exception
from nova import exception, objects
from nova.compute import utils as compute_utils
from nova.virtman import names, standins

CONF = nova.conf.CONF
LOG = logging.getLogger(__name__)

DRIVER = "virtman"
"""The type of such a connection, for which Nova's libvirt driver has the volume driver in ``volumedriver``."""

USABLE = ("available", "reserved", "attaching", "in-use")
"""States of a volume from which servers may boot that share it."""


def shared(volume_api: Any, *, servers: bool = False) -> Any:
    """A ``nova.volume.cinder.API`` that knows bases; the same one if the option is off.

    ``servers``: the process reads the database of the servers' cell, so that the mark may be taken from a volume while
    there are servers of it.
    """
    return Volumes(volume_api, servers) if CONF.virtman.use_vmtsnapshot else volume_api


class Volumes:
    """``nova.volume.cinder.API``, of which everything that is not here is Nova's own."""

    def __init__(self, api: Any, servers: bool) -> None:
        self.cinder = api
        """Nova's own, which knows no bases."""
        self._servers = servers

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cinder, name)

    def get(self, context: Any, volume_id: str, microversion: str | None = None) -> Any:
        """The volume. Of a base each server has a disk of its own, whatever the volume is for others."""
        volume = self.cinder.get(context, volume_id, microversion=microversion)
        if not names.is_base(volume):
            return volume
        status = "available" if volume["status"] in USABLE else volume["status"]
        return {**volume, "multiattach": False, "shared_targets": False, "status": status}

    def create(
        self, context: Any, size: int, name: str, description: str, snapshot: Any = None, image_id: str | None = None,
        volume_type: str | None = None, metadata: Any = None, availability_zone: str | None = None,
    ) -> Any:  # fmt: skip
        """A volume; of a snapshot of a base that one which stands for it, for all servers."""
        if snapshot is not None and standins.is_of_base(self.cinder, context, snapshot):
            return standins.volume_of(
                self.cinder, context, snapshot, volume_type=volume_type, availability_zone=availability_zone
            )
        return self.cinder.create(
            context, size, name, description, snapshot, image_id, volume_type, metadata, availability_zone
        )

    def attachment_create(
        self, context: Any, volume_id: str, instance_id: str, connector: Any = None, mountpoint: str | None = None
    ) -> Any:
        """An attachment; one to a base is the same for each call. Raises InvalidVolume."""
        if self._has(context, volume_id, instance_id):
            return _attachment(names.attachment_of(instance_id, volume_id))
        volume = self.get(context, volume_id)
        if not names.is_base(volume):
            return self.cinder.attachment_create(context, volume_id, instance_id, connector, mountpoint)
        _check_usable(volume)
        return _attachment(names.attachment_of(instance_id, volume_id))

    def _has(self, context: Any, volume_id: str, instance_id: str) -> bool:
        """Whether the server has a private disk of the volume, marked or not."""
        if not self._servers:
            return False
        try:
            bdm = objects.BlockDeviceMapping.get_by_volume_and_instance(context, volume_id, instance_id)
        except exception.VolumeBDMNotFound:
            return False
        return names.is_ours(bdm.attachment_id)

    def attachment_get(self, context: Any, attachment_id: str) -> Any:
        """An attachment with its connection."""
        if names.is_ours(attachment_id):
            return _attachment(attachment_id)
        return self.cinder.attachment_get(context, attachment_id)

    def attachment_update(self, context: Any, attachment_id: str, connector: Any, mountpoint: str | None = None) -> Any:
        """An attachment with its connection to this host."""
        if names.is_ours(attachment_id):
            return _attachment(attachment_id)
        return self.cinder.attachment_update(context, attachment_id, connector, mountpoint)

    def attachment_complete(self, context: Any, attachment_id: str) -> None:
        """The host is connected."""
        if not names.is_ours(attachment_id):
            self.cinder.attachment_complete(context, attachment_id)

    def attachment_delete(self, context: Any, attachment_id: str) -> None:
        """Forget an attachment. A private disk is a local one, and goes when Nova destroys these."""
        if not names.is_ours(attachment_id):
            self.cinder.attachment_delete(context, attachment_id)

    def check_attached(self, context: Any, volume: Any) -> None:
        """A base may be attached to no host yet."""
        if not names.is_base(volume):
            self.cinder.check_attached(context, volume)

    def begin_detaching(self, context: Any, volume_id: str) -> None:
        """The volume itself is not detached from anything if it is a base."""
        if not names.is_base(self.get(context, volume_id)):
            self.cinder.begin_detaching(context, volume_id)

    def roll_detaching(self, context: Any, volume_id: str) -> None:
        """See ``begin_detaching``."""
        if not names.is_base(self.get(context, volume_id)):
            self.cinder.roll_detaching(context, volume_id)

    def delete(self, context: Any, volume_id: str) -> None:
        """No server takes a base with it, whatever its request says of the volume's deletion."""
        if names.is_base(self.get(context, volume_id)):
            LOG.info("the base %s stays when a server of it is deleted", volume_id)
        else:
            self.cinder.delete(context, volume_id)

    def reimage_volume(self, context: Any, volume_id: str, image_id: str, reimage_reserved: bool = False) -> None:
        """Other servers read a base. Raises InvalidVolume."""
        if names.is_base(self.get(context, volume_id)):
            raise exception.InvalidVolume(reason=f"volume {volume_id} is a base, which servers share")
        self.cinder.reimage_volume(context, volume_id, image_id, reimage_reserved=reimage_reserved)


def is_shared(volume_api: Any, context: Any, volume_id: str) -> bool:
    """Whether any number of servers may boot from a volume at once."""
    if not CONF.virtman.use_vmtsnapshot:
        return False
    try:
        return names.is_base(volume_api.get(context, volume_id))
    except (exception.NovaException, keystone_exception.ClientException):  # Nova says what is wrong
        return False


def on_base(block_devices: Any) -> bool:
    """Whether the root disk of a server, by its block device mappings, is a private snapshot of a base."""
    root = block_devices.root_bdm() if CONF.virtman.use_vmtsnapshot else None
    return root is not None and "attachment_id" in root and names.is_ours(root.attachment_id)


def on_volume(context: Any, instance: Any, block_devices: Any = None) -> bool:
    """Whether the root disk of a server is a volume in Cinder, and not a disk of its host."""
    known = () if block_devices is None else (block_devices,)
    if not compute_utils.is_volume_backed_instance(context, instance, *known):
        return False
    return not (CONF.virtman.use_vmtsnapshot and on_base(block_devices or instance.get_bdms()))


def _check_usable(volume: Any) -> None:
    if volume.get("encrypted"):
        raise exception.InvalidVolume(reason=f"volume {volume['id']} is encrypted: it can be no base")
    if volume["status"] not in USABLE:
        raise exception.InvalidVolume(
            reason=f"the base {volume['id']} is {volume['status']}; servers boot from one that is {' or '.join(USABLE)}"
        )


def _attachment(attachment_id: str) -> dict[str, Any]:
    return {"id": attachment_id, "connection_info": {"driver_volume_type": DRIVER, "data": {}}}
