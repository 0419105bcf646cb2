"""Nova's pre-caching of an image (``aggregate cache-images``), where there are bases of the image.

A host that is asked to get an image before servers need it attaches each base that Cinder made of this image: it takes
its place in the tree, or becomes the base's origin. Nova gets the image as well, for servers that boot from it.
"""

from __future__ import annotations

import logging
import uuid
from typing import Any

import nova.conf
import nova.context
from nova import exception
from nova.virtman import names, origins
from nova.virtman.agent import agent_of
from nova.volume import cinder

CONF = nova.conf.CONF
LOG = logging.getLogger(__name__)


def attach_bases(host: Any, image_id: str) -> None:
    """``host``: Nova's libvirt host. What cannot be attached now is when a server needs it: it is logged."""
    if not CONF.virtman.use_vmtsnapshot:
        return
    try:
        for volume in _bases_of(image_id):
            _attach(host.get_hostname(), volume["id"])
    except exception.NovaException as error:
        LOG.warning("not all bases of image %s are attached: %s", image_id, error)


def _bases_of(image_id: str) -> list[Any]:
    wanted = {"all_tenants": True, "metadata": {names.MARK: names.MARKED}}
    found = cinder.API().get_all(nova.context.get_admin_context(), search_opts=wanted)
    return [volume for volume in found if volume.get("volume_image_metadata", {}).get("image_id") == image_id]


def _attach(node: str, volume_id: str) -> None:
    """Make a disk for a server that does not exist, and destroy it: the host keeps the base's stack for a while."""
    disk = names.disk_of(str(uuid.uuid4()), volume_id)
    with agent_of(node) as agent:
        origins.create(agent, node, disk, names.image_of(volume_id), volume_id)
        agent.destroy(disk)
