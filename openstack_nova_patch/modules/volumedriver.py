"""How libvirt gets a server's private disk: the volume driver of connections to a base."""

from __future__ import annotations

import logging
from typing import Any

from nova.virt.libvirt import config
from nova.virt.libvirt.volume import volume
from nova.virtman import disks

LOG = logging.getLogger(__name__)


class PatientDisk(config.LibvirtConfigGuestDisk):  # type: ignore[misc]
    """Its guest waits while there is no room, or no parent, as in VirtMan's own VMs. Nova has no option for that."""

    def format_dom(self) -> Any:
        """The XML."""
        disk = super().format_dom()
        for policy in ("error_policy", "rerror_policy"):
            disk.find("driver").set(policy, "stop")
        return disk


class LibvirtVirtmanVolumeDriver(volume.LibvirtBaseVolumeDriver):  # type: ignore[misc]
    """Private disks by the agent of this host."""

    def __init__(self, host: Any) -> None:
        super().__init__(host, is_block_dev=False)

    def connect_volume(self, connection_info: dict[str, Any], instance: Any) -> None:
        """Make or find the server's disk. Raises AgentRefused, DiskLost, BaseUnavailable."""
        disk = disks.ready(self.host.get_hostname(), instance, connection_info["serial"])
        connection_info["data"]["device_path"] = disk.path
        connection_info["data"]["format"] = disk.format

    def get_config(self, connection_info: dict[str, Any], disk_info: dict[str, Any]) -> Any:
        """What libvirt is told of the disk."""
        conf = PatientDisk()
        conf.__dict__.update(vars(super().get_config(connection_info, disk_info)))
        data = connection_info["data"]
        conf.source_type = "block" if data["format"] == disks.RAW else "file"
        conf.source_path = data["device_path"]
        conf.driver_format = data["format"]
        conf.driver_discard = "unmap"  # else QEMU drops what the guest discards
        return conf

    def disconnect_volume(self, connection_info: dict[str, Any], instance: Any, force: bool = False) -> None:
        """The disk stays: it goes with the server's other local disks (``disks.destroy``)."""

    def extend_volume(self, connection_info: dict[str, Any], instance: Any, requested_size: int) -> int:
        """Refused: the base is as it is. Raises NotImplementedError, as Nova expects."""
        raise NotImplementedError
