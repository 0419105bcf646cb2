"""Servers that come back from a shelf: what they had written is in an image of Glance's, and becomes one of VirtMan's.

The host that unshelves such a server publishes it; it is withdrawn when no disk is made of it any more.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import nova.conf
import nova.context
from nova.compute import vm_states
from nova.virt import images
from nova.virtman import scratch
from nova.virtman.agent import when_it_has_time
from oslo_concurrency import lockutils

if TYPE_CHECKING:
    from virtman.client import AgentClient
    from virtman.models import Vm

CONF = nova.conf.CONF
LOG = logging.getLogger(__name__)

_PREFIX = "nova-shelved-"


def image_of(instance: Any) -> str | None:
    """The image in Glance that has what a shelved server wrote."""
    found: str | None = instance.system_metadata.get("shelved_image_id")
    return found


def comes_back(instance: Any) -> bool:
    """Whether Nova makes a server again that was shelved, and taken from its host."""
    return instance.vm_state == vm_states.SHELVED_OFFLOADED and image_of(instance) is not None


def stays(instance: Any) -> bool:
    """Whether a server was shelved without an image: what it wrote is on its disk alone, which stays where it is."""
    return instance.vm_state in (vm_states.SHELVED, vm_states.SHELVED_OFFLOADED) and image_of(instance) is None


def create(agent: AgentClient, disk: str, instance: Any) -> Vm:
    """The private disk of a server that comes back."""
    glance = str(image_of(instance))
    with lockutils.lock(_PREFIX + glance), scratch.folder(CONF.instances_path) as folder:
        file = folder / "image"
        images.fetch(nova.context.get_admin_context(), glance, str(file))
        when_it_has_time(lambda: agent.publish(_PREFIX + glance, file))
        return agent.create(disk, _PREFIX + glance)


def look_after(agent: AgentClient) -> None:
    """Withdraw images of shelved servers that no disk is made of any more."""
    for image in agent.images():
        if not image.name.startswith(_PREFIX) or image.withdrawn or image.here is None or image.here.role != "origin":
            continue
        with lockutils.lock(image.name):
            if image.nodes == 0 and image.name not in {vm.disk.image for vm in agent.vms()}:
                agent.unpublish(image.name, when_unused=True)
                LOG.info("%s is withdrawn: no server needs it", image.name)
