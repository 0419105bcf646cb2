"""Volumes of servers that are read through the cache group of their host.

The agent's device goes between the volume's and libvirt when Nova connects a volume, and away before Nova disconnects
it. What goes wrong fails Nova's call: to go on without the cache could give a server, or another host, what is old.
Nova may have forgotten the device when it disconnects, since it asks Cinder anew for the connection: so it is noted.
A note with the connection in it is of one that is to be let go, or was never attached: ``look_after`` does it, where
Nova does not try again.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

import nova.conf
import nova.privsep.path
from nova.compute import task_states
from nova.virtman.agent import agent_of, when_it_has_time
from nova.virtman.errors import AgentRefused
from nova.virtman.notes import Note, notes
from oslo_concurrency import lockutils

CONF = nova.conf.CONF
LOG = logging.getLogger(__name__)

_BARE = "virtman_bare_device"
"""Where a connection keeps the path of the volume's own device."""


def cached(volume_driver: Any) -> Any:
    """A volume driver of Nova's whose devices are read through the cache; the same one if they are not to be."""
    return CachedVolumes(volume_driver) if CONF.virtman.use_cachegroup and volume_driver.is_block_dev else volume_driver


class CachedVolumes:
    """A volume driver, of which everything that is not here is Nova's own."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def connect_volume(self, connection_info: dict[str, Any], instance: Any) -> None:
        """Connect a volume, and give libvirt the agent's device for it. Raises AgentRefused.

        A volume that several servers may attach has other writers. One that comes by a live migration is still written
        at the other host: it is read past the cache until the server is started anew.
        """
        with self._alone(connection_info):
            self._connect(connection_info, instance)

    def _connect(self, connection_info: dict[str, Any], instance: Any) -> None:
        self._forget_earlier(connection_info)
        self._driver.connect_volume(connection_info, instance)
        data = connection_info["data"]
        device = Path(data.get("device_path") or "")
        if connection_info.get("multiattach") or instance.task_state == task_states.MIGRATING:
            return
        if not device.is_block_device() or data.get("access_mode") == "ro":
            return
        with contextlib.ExitStack() as undo:
            undo.callback(self.disconnect_volume, connection_info, instance, force=True)
            data[_BARE], data["device_path"] = str(device), self._attach(connection_info, device)
            undo.pop_all()

    def _forget_earlier(self, connection_info: dict[str, Any]) -> None:
        """Let go of what was attached before: Nova goes on where it cannot disconnect a volume after a live migration,
        and another host may have written since. What a server here has open is its own, and nobody else's meanwhile.
        """
        from virtman.errors import DiskBusy

        try:
            self._detach(connection_info, force=False)
        except AgentRefused as error:
            if not isinstance(error.__cause__, DiskBusy):
                raise

    def _attach(self, connection_info: dict[str, Any], device: Path) -> str:
        note = self._note(connection_info)
        note.write({"device": str(device), "boot": _boot(), "connection": _plain(connection_info)})
        if not os.access(device, os.R_OK | os.W_OK):  # root's and the group's "disk", as udev makes them
            nova.privsep.path.chown(str(device), uid=os.geteuid())
        with agent_of(self._node) as agent:
            path: str = when_it_has_time(lambda: agent.attach_cached(device)).path
        note.write({"device": str(device), "path": path})
        return path

    def disconnect_volume(self, connection_info: dict[str, Any], instance: Any, force: bool = False) -> None:
        """Take the agent's device away, then the volume. Raises AgentRefused; then nothing is disconnected."""
        try:
            self._detach(connection_info, force=force)
        except AgentRefused:
            note = self._noted(connection_info)
            note.write({**(note.read() or {}), "connection": _plain(connection_info)})
            raise
        connection_info["data"] = _bare(connection_info["data"])
        self._driver.disconnect_volume(connection_info, instance, force=force)

    def _detach(self, connection_info: dict[str, Any], *, force: bool) -> None:
        note = self._noted(connection_info)
        if (noted := note.read()) is None:
            return
        with agent_of(self._node) as agent:
            # The agent's device has a name of its own each time. The volume's own may be another volume's by now: it is
            # this one's where the note could not be finished, and no longer than the host runs on.
            found = [one.path for one in agent.cached_devices() if one.device == noted["device"]]
            unfinished = found if noted.get("boot") == _boot() else []
            for path in [noted["path"]] if "path" in noted else unfinished:
                agent.detach_cached(Path(path), force=force)
        note.remove()

    def finish(self, note: Note) -> None:
        """Disconnect what Nova could not, if it has not been connected since. Raises AgentRefused."""
        with self._alone({"serial": note.name}):
            connection = (note.read() or {}).get("connection")
            if connection is not None:
                LOG.warning("volume %s is disconnected, as Nova could not", note.name)
                self.disconnect_volume(connection, None)

    def _alone(self, connection_info: dict[str, Any]) -> contextlib.AbstractContextManager[Any]:
        """Nobody disconnects what is being connected."""
        lock: contextlib.AbstractContextManager[Any] = lockutils.lock(
            f"virtman-cached-{self._node}-{connection_info['serial']}"
        )
        return lock

    def extend_volume(self, connection_info: dict[str, Any], instance: Any, requested_size: int) -> Any:
        """The volume has grown: so does the agent's device. Raises AgentRefused."""
        size = self._driver.extend_volume(_plain(connection_info), instance, requested_size)
        if _BARE in connection_info["data"]:
            with agent_of(self._node) as agent:
                agent.attach_cached(Path(connection_info["data"][_BARE]))
        return size

    def _note(self, connection_info: dict[str, Any]) -> Note:
        return Note(self._node, "cached", str(connection_info["serial"]))

    def _noted(self, connection_info: dict[str, Any]) -> Note:
        """The note of what is connected. After Cinder has moved a volume, Nova calls it by its old ID, and not by the
        one that it had when it was connected: then the note is the one with the path.
        """
        note, data = self._note(connection_info), connection_info["data"]
        if note.read() is None and _BARE in data:
            found = notes(self._node, "cached")
            return next((one for one in found if (one.read() or {}).get("path") == data["device_path"]), note)
        return note

    @property
    def _node(self) -> str:
        name: str = self._driver.host.get_hostname()
        return name


def look_after(virt: Any, node: str) -> None:
    """Disconnect what Nova could not, as the agent was away, say. ``virt``: Nova's libvirt driver."""
    for note in notes(node, "cached"):
        connection = (note.read() or {}).get("connection")
        if connection is not None:
            try:
                virt._get_volume_driver(connection).finish(note)
            except Exception:
                LOG.exception("volume %s on %s stays connected, and is looked at again", note.name, node)


def _boot() -> str:
    """Since when the host runs, as nobody else has it (Linux: admin-guide/sysctl/kernel, random)."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _plain(connection_info: dict[str, Any]) -> dict[str, Any]:
    """How the volume's own driver is connected to it."""
    return {**connection_info, "data": _bare(connection_info["data"])}


def _bare(data: dict[str, Any]) -> dict[str, Any]:
    """Its data as the volume's own driver made them."""
    own = {name: value for name, value in data.items() if name != _BARE}
    return {**own, "device_path": data[_BARE]} if _BARE in data else own
