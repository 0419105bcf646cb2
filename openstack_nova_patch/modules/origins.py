"""Compute hosts that are attached to a base in Cinder, read-only, and serve it to all others: its origins.

The first host that needs a base attaches it, which Cinder grants to one host only if the volume is no multi-attach
volume; so the others wait until its image is known, and join the tree. ``[virtman] origin`` makes a host attach bases
itself where it can. Cinder remembers who is attached: such an attachment is that of a server which does not exist,
whose UUID is made of the node's name. What this host needs to let go of the device, after somebody has deleted the
attachment in Cinder, it keeps in a file that only its user reads, as it may have secrets.
"""

from __future__ import annotations

import logging
import os
import random
import time
import uuid
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nova.conf
import nova.context
import nova.privsep.path
from cinderclient import exceptions as cinder_exception
from keystoneauth1 import exceptions as keystone_exception
from nova import exception, utils
from nova.virtman import names, standins
from nova.virtman.agent import is_of_base, when_it_has_time
from nova.virtman.errors import AgentRefused, BaseUnavailable
from nova.virtman.notes import Note, notes
from nova.volume import cinder
from os_brick.initiator import connector
from oslo_concurrency import lockutils

if TYPE_CHECKING:
    from virtman.client import AgentClient
    from virtman.models import Vm

CONF = nova.conf.CONF
LOG = logging.getLogger(__name__)

BASES = "bases"
"""The notes of what this host is attached to: the ``attachment``'s ID, and the ``connection``."""

_PAUSE, _LONGEST_PAUSE = 0.2, 3.0
_refused: dict[tuple[str, str], tuple[float, str]] = {}
"""When Cinder said last why a node cannot attach a base, and why; only with the lock of both."""
_HOLDERS = uuid.UUID("76697274-6d61-4e6f-8465-000000000000")


def create(agent: AgentClient, node: str, disk: str, image: str, volume_id: str) -> Vm:
    """A private disk of a base, which is attached first if no host has it. Raises BaseUnavailable."""
    if CONF.virtman.origin:
        _be_another(agent, node, image, volume_id)
    end, pause, why = time.monotonic() + CONF.virtman.base_timeout, _PAUSE, ""
    while (made := _made(agent, disk, image)) is None:
        with _one_at_a_time(node, volume_id):
            if (made := _made(agent, disk, image)) is not None:  # for who waited while another thread attached it
                return made
            why = _attach_if_asked_long_ago(agent, node, volume_id)
        if why == "" and (made := _made(agent, disk, image)) is not None:
            return made
        if time.monotonic() > end:
            raise BaseUnavailable(reason=f"the base {volume_id}: no host has it, and this one cannot attach it: {why}")
        LOG.info("waiting for an origin of the base %s: %s", volume_id, why)
        time.sleep(pause * random.uniform(0.5, 1))  # noqa: S311  hosts of a wave do not ask in step
        pause = min(2 * pause, _LONGEST_PAUSE)
    return made


def _attach_if_asked_long_ago(agent: AgentClient, node: str, volume_id: str) -> str:
    """As ``_attach``, but what Cinder has just said to one thread of this host it need not say to the others."""
    at, why = _refused.get((node, volume_id), (-_LONGEST_PAUSE, ""))
    if why and time.monotonic() - at < _LONGEST_PAUSE:
        return why
    why = _attach(agent, node, volume_id)
    _refused[node, volume_id] = (time.monotonic(), why)
    return why


def _made(agent: AgentClient, disk: str, image: str) -> Vm | None:
    """The disk, if any host has the base."""
    from virtman.errors import UnknownImage

    try:
        return agent.create(disk, image)
    except UnknownImage:
        return None


def _be_another(agent: AgentClient, node: str, image: str, volume_id: str) -> None:
    """Attach a base that others have attached, before this host reads it from them; they stay, if it cannot be."""
    here = next((found for found in agent.images() if found.name == image), None)
    if here is None or here.here is not None:
        return
    with _one_at_a_time(node, volume_id):
        if why := _attach(agent, node, volume_id, here.digest):
            LOG.warning("this host does not become an origin of the base %s: %s", volume_id, why)


def _attach(agent: AgentClient, node: str, volume_id: str, digest: str | None = None) -> str:
    """Become an origin, alone on this host. Returns why not, if that is a reason to wait.

    ``digest``: of the image, if it is published: what is attached is the same volume.

    Raises BaseUnavailable, or AgentRefused if it is this host that cannot.
    """
    api, context = cinder.API(), nova.context.get_admin_context()
    try:
        attachment = _attachment(api, context, node, volume_id)
    except (exception.InvalidInput, exception.InvalidVolume) as error:
        return str(error.format_message())  # another host has it
    except exception.NovaException as error:
        raise BaseUnavailable(reason=f"the base {volume_id}: {error.format_message()}") from error
    note = Note(node, BASES, volume_id)
    try:
        note.write({"attachment": attachment["id"], "connection": attachment["connection_info"]})
        path = _connect(note)
        api.attachment_complete(context, attachment["id"])
        _publish(agent, volume_id, path, digest)
    except Exception as error:
        LOG.exception("the base %s cannot be attached to %s", volume_id, node)
        if _taken_back(agent, volume_id):
            _disconnect(note)
            note.remove()
            api.attachment_delete(context, attachment["id"])
        if _is_published(error):
            return ""
        cinders = isinstance(error, exception.NovaException)  # which says the same to all hosts
        failure = BaseUnavailable if cinders or is_of_base(error) else AgentRefused
        raise failure(reason=f"the base {volume_id} cannot be attached to {node}: {error}") from error
    LOG.info("%s is an origin of the base %s", node, volume_id)
    return ""


def _is_published(error: Exception) -> bool:
    """Another host was first."""
    from virtman.errors import ImageExists

    return isinstance(error, ImageExists)


def _one_at_a_time(node: str, volume_id: str) -> AbstractContextManager[Any]:
    """Two threads of this node's process do not attach and let go of the same base."""
    lock: AbstractContextManager[Any] = lockutils.lock(f"virtman-base-{node}-{volume_id}")
    return lock


def holder_of(node: str) -> str:
    """The server, which does not exist, in whose name a node is attached to bases."""
    return str(uuid.uuid5(_HOLDERS, node))


def _attachments(context: Any, node: str, **wanted: str) -> list[dict[str, Any]]:
    """This node's attachments of bases, of whichever project these are. Raises CinderConnectionFailed.

    ``nova.volume.cinder.API`` asks for those to volumes of the service user's own project alone.
    """
    options = {"instance_id": holder_of(node), "all_tenants": True, **wanted}
    try:
        found = cinder.cinderclient(context, "3.44", skip_version_check=True).attachments.list(search_opts=options)
    except (cinder_exception.ClientException, keystone_exception.ClientException) as error:
        raise exception.CinderConnectionFailed(reason=str(error)) from error
    return [one.to_dict() for one in found]


def _attachment(api: Any, context: Any, node: str, volume_id: str) -> dict[str, Any]:
    """This node's attachment of a base, with its connection. One that an earlier try left is used, or made anew."""
    for found in _attachments(context, node, volume_id=volume_id):
        attachment: dict[str, Any] = api.attachment_get(context, found["id"])
        if attachment["connection_info"].get("driver_volume_type"):
            return attachment
        api.attachment_delete(context, found["id"])
    properties = connector.get_connector_properties(
        utils.get_root_helper(), CONF.my_block_storage_ip, CONF.libvirt.volume_use_multipath,
        enforce_multipath=True, host=CONF.host,
    )  # fmt: skip
    properties["mode"] = "ro"  # else Cinder says that it is attached to be written
    made: dict[str, Any] = api.attachment_create(context, volume_id, holder_of(node), properties, "/dev/virtman")
    return made


def _connect(note: Note) -> Path:
    """Attach the device, which may be so already. Returns where it is."""
    connection = (note.read() or {})["connection"]
    path = _brick(connection).connect_volume(connection["data"])["path"]
    if not os.access(path, os.R_OK):
        nova.privsep.path.chown(path, uid=os.geteuid())
    return Path(path)


def _publish(agent: AgentClient, volume_id: str, path: Path, digest: str | None = None) -> None:
    when_it_has_time(lambda: agent.publish_in_place(names.image_of(volume_id), path, trust=digest))


def _taken_back(agent: AgentClient, volume_id: str) -> bool:
    """Whether the agent has nothing of what could not be published. If it has, ``look_after`` goes on with it."""
    from virtman.errors import UnknownImage, VirtmanError

    try:
        agent.unpublish(names.image_of(volume_id), when_unused=True)
    except UnknownImage:
        return True
    except VirtmanError as error:
        LOG.error("the base %s stays attached for now: %s", volume_id, error)
    return not _held(agent, volume_id)


def _held(agent: AgentClient, volume_id: str) -> bool:
    """Whether the agent has the device open, or will have; not where it reads the base from another host."""
    stacks = agent.status().images
    return any(stack.name == names.image_of(volume_id) and stack.in_place is not None for stack in stacks)


def _brick(connection: dict[str, Any]) -> Any:
    """What attaches such devices to a host."""
    return connector.InitiatorConnector.factory(
        connection["driver_volume_type"], utils.get_root_helper(),
        use_multipath=CONF.libvirt.volume_use_multipath, device_scan_attempts=CONF.libvirt.num_volume_scan_tries,
        conn=connection, do_local_attach=True, nfs_mount_point_base=CONF.libvirt.nfs_mount_point_base,
    )  # fmt: skip


def _disconnect(note: Note) -> None:
    """Detach the device from this host; the note stays. Once more does no harm."""
    if (kept := note.read()) is not None:
        _brick(kept["connection"]).disconnect_volume(kept["connection"]["data"], None, force=True, ignore_errors=True)


def look_after(agent: AgentClient, node: str) -> None:
    """Serve again what is attached here, after a reboot say, and give up what is to be a base no more.

    A base that lost its mark, its snapshot or its attachment in Cinder, or which is gone itself, is withdrawn: it is
    served until no host needs it, and then let go. The others are looked after although one cannot be.
    """
    for note in notes(node, BASES):
        with _one_at_a_time(node, note.name):
            try:
                _look_after(agent, node, note)
            except Exception:
                LOG.exception("the base %s on %s is left as it is, and looked at again", note.name, node)


def _look_after(agent: AgentClient, node: str, note: Note) -> None:
    from virtman.errors import UnknownImage

    kept = note.read()
    if kept is None:
        return
    image = names.image_of(note.name)
    api, context = cinder.API(), nova.context.get_admin_context()
    if not _is_ended(api, context, note.name, kept["attachment"]):
        if not _is_served(agent, image):
            _publish(agent, note.name, _connect(note))
        return
    if any(found.name == image and not found.withdrawn for found in agent.images()):
        try:
            agent.unpublish(image, when_unused=True)
        except UnknownImage:
            LOG.debug("%s is not published here", image)
    if not _held(agent, note.name):  # before that, who deletes the attachment takes the device from under servers
        _disconnect(note)
        _delete_attachment(api, context, kept["attachment"])
        _delete_standin(api, context, note.name)
        note.remove()
        LOG.info("%s has let go of the base %s", node, note.name)


def _is_ended(api: Any, context: Any, volume_id: str, attachment: str) -> bool:
    """Whether a volume that is attached here is to be a base no more."""
    try:
        api.attachment_get(context, attachment)
        volume = api.get(context, volume_id)
    except (exception.VolumeAttachmentNotFound, exception.VolumeNotFound):
        return True
    standins.delete_younger(api, context, volume)
    return not names.is_base(volume) or standins.has_lost_its_snapshot(api, context, volume)


def _delete_attachment(api: Any, context: Any, attachment: str) -> None:
    try:
        api.attachment_delete(context, attachment)
    except exception.VolumeAttachmentNotFound:
        LOG.debug("attachment %s is gone", attachment)


def _is_served(agent: AgentClient, image: str) -> bool:
    """Whether all is well with a base, so that nothing is done: to connect it makes the host look for devices anew."""
    found = (stack for stack in agent.status().images if stack.name == image)
    return any(stack.serving and stack.in_place is not None and stack.in_place.trouble is None for stack in found)


def _delete_standin(api: Any, context: Any, volume_id: str) -> None:
    """Delete a volume that stood for a snapshot which is gone."""
    try:
        if standins.has_lost_its_snapshot(api, context, api.get(context, volume_id)):
            api.delete(context, volume_id)
    except exception.VolumeNotFound:
        LOG.debug("the base %s is gone", volume_id)


def forget_unfinished(node: str) -> None:
    """Attachments of this node without a note: it was killed before the device was there."""
    api, context = cinder.API(), nova.context.get_admin_context()
    for found in _attachments(context, node):
        with _one_at_a_time(node, found["volume_id"]):
            if Note(node, BASES, found["volume_id"]).read() is None:
                api.attachment_delete(context, found["id"])
                LOG.warning("%s was killed while it attached the base %s", node, found["volume_id"])
