"""Nova's pre-caching of an image (``aggregate cache-images``), where there are bases of the image.

A host that is asked to get an image before servers need it keeps all of each base that Cinder made of this image. It
takes its place in the tree, or becomes the base's origin, and then has the base deployed to itself. Nova gets the image
as well, for servers that boot from it.
"""

from __future__ import annotations

import logging
import time
import uuid
from typing import TYPE_CHECKING, Any

import nova.conf
import nova.context
from nova import exception
from nova.virtman import names, origins
from nova.virtman.agent import agent_of
from nova.virtman.errors import AgentRefused
from nova.volume import cinder

if TYPE_CHECKING:
    from virtman.client import AgentClient
    from virtman.models import Status

CONF = nova.conf.CONF
LOG = logging.getLogger(__name__)

_PAUSE = 0.5


def keep_bases(host: Any, image_id: str) -> bool:
    """Have this host keep all of the bases of an image. Returns whether it got something of them.

    ``host``: Nova's libvirt host. A base that cannot be kept is read when a server needs it: that is logged.
    """
    got = False
    if not CONF.virtman.use_vmtsnapshot:
        return got
    try:
        for volume in _bases_of(image_id):
            got |= _keep(host.get_hostname(), volume["id"])
    except exception.NovaException as error:
        LOG.warning("not all bases of image %s are kept whole: %s", image_id, error)
    return got


def _bases_of(image_id: str) -> list[Any]:
    wanted = {"all_tenants": True, "metadata": {names.MARK: names.MARKED}}
    found = cinder.API().get_all(nova.context.get_admin_context(), search_opts=wanted)
    return [volume for volume in found if volume.get("volume_image_metadata", {}).get("image_id") == image_id]


def _keep(node: str, volume_id: str) -> bool:
    """Attach a base, by a disk for a server that does not exist, and keep all of it. Returns whether it was not here.

    Raises BaseUnavailable, AgentRefused.
    """
    disk, image = names.disk_of(str(uuid.uuid4()), volume_id), names.image_of(volume_id)
    with agent_of(node) as agent:
        origins.create(agent, node, disk, image, volume_id)
        agent.destroy(disk)
        before = agent.status()
        made = agent.deploy({"image": image, "hosts": [before.host]})
        _wait(agent, made.id, image)
        return not _is_whole(before, image)


def _is_whole(status: Status, image: str) -> bool:
    """Whether the host is an origin of the base, or keeps all of it."""
    here = next((stack for stack in status.images if stack.name == image), None)
    return here is not None and (here.role == "origin" or (here.hydration is not None and here.hydration.whole))


def _wait(agent: AgentClient, deployment: int, image: str) -> None:
    """Wait until this host has all of a base, as long as Nova waits for this host. Raises AgentRefused."""
    end = time.monotonic() + CONF.long_rpc_timeout
    while not (now := agent.deployment(deployment)).ended:
        if time.monotonic() > end:
            raise AgentRefused(reason=f"{image} is not whole yet; deployment {deployment} goes on")
        time.sleep(_PAUSE)
    (part,) = now.hosts
    if part.state != "whole":
        raise AgentRefused(reason=f"{image} is not whole here: {part.error or part.state.value}")
