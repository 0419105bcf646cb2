"""What a compute host does now and then: private disks without a server, and bases, are looked after."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import nova.conf
from nova import exception, objects
from nova.compute import vm_states
from nova.virtman import cachegroup, names, origins, scratch, shelves
from nova.virtman.agent import agent_of

if TYPE_CHECKING:
    from virtman.client import AgentClient

CONF = nova.conf.CONF
LOG = logging.getLogger(__name__)

_UNSETTLED = (vm_states.BUILDING, vm_states.RESIZED, vm_states.ERROR)
"""States of a server whose data may be on another host than its own, or on several."""


def run(context: Any, virt: Any, host: str) -> None:
    """One round; what goes wrong is logged, and tried again in the next one. ``host``: the name of the service."""
    node = virt._host.get_hostname()
    if CONF.virtman.use_cachegroup:
        with _logged("volumes"):
            cachegroup.look_after(virt, node)
    if not CONF.virtman.use_vmtsnapshot:
        return
    with _logged("folders"):
        scratch.look_after()
    with _logged("attachments"):  # also if the agent is away: other hosts wait for the base
        origins.forget_unfinished(node)
    with _logged("disks"), agent_of(node) as agent:
        _destroy_unneeded(context, agent, virt, host)
    with _logged("bases"), agent_of(node) as agent:
        origins.look_after(agent, node)
    with _logged("images of shelved servers"), agent_of(node) as agent:
        shelves.look_after(agent)


@contextmanager
def _logged(what: str) -> Iterator[None]:
    """The others are looked after although one cannot be, whoever raises what: Keystone's errors are not Nova's."""
    try:
        yield
    except exception.NovaException as error:
        LOG.error("VirtMan's %s cannot be looked after now: %s", what, error)
    except Exception:
        LOG.exception("VirtMan's %s cannot be looked after now", what)


def _destroy_unneeded(context: Any, agent: AgentClient, virt: Any, host: str) -> None:
    """Destroy disks whose server is deleted, or has gone to another host.

    One that a user detaches goes with its server: libvirt, which has the server, is asked first, at no cost for Nova.
    """
    from virtman.errors import VirtmanError

    for vm in agent.vms():
        server = names.server_of(vm.name)
        if server is None or _runs(virt, server) or _needed(context, server, vm.name, host):
            continue
        LOG.warning("the disk %s is destroyed: its server is not on this host", vm.name)
        try:
            agent.destroy(vm.name)
        except VirtmanError as error:  # somebody has it open, say
            LOG.error("the disk %s stays for now: %s", vm.name, error)


def _runs(virt: Any, server: str) -> bool:
    """Whether the hypervisor has the server; then Nova is to destroy it first."""
    return virt.instance_exists(objects.Instance(uuid=server))


def _needed(context: Any, server: str, disk: str, host: str) -> bool:
    """What an interrupted resize has left is not: then the server is active, on the host that it came from."""
    try:
        instance = objects.Instance.get_by_uuid(context, server)
    except exception.InstanceNotFound:
        return False
    if instance.task_state is not None or instance.vm_state in _UNSETTLED or shelves.stays(instance):
        return True
    return instance.host == host and any(
        bdm.volume_id and names.is_ours(bdm.attachment_id) and names.disk_of(server, bdm.volume_id) == disk
        for bdm in instance.get_bdms()
    )
