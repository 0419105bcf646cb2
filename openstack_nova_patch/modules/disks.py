"""The private disks of servers: made, found, moved, copied and destroyed by the agents of their hosts.

They are local disks, and do as Nova's contracts say of these: who rebuilds or evacuates a server gives up what it
wrote, who resizes it to another host takes that along, and the old host keeps its copy until that is confirmed.
"""

from __future__ import annotations

import logging
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import nova.conf
import nova.context
from nova import exception, objects
from nova.compute import task_states
from nova.virt import driver
from nova.virtman import names, origins, scratch, shelves
from nova.virtman.agent import agent_of, socket_of, when_it_has_time
from nova.virtman.errors import AgentRefused, BaseUnavailable, DiskLost, VirtmanError
from nova.virtman.volumes import DRIVER
from oslo_utils import fileutils, units

if TYPE_CHECKING:
    from virtman.client import AgentClient
    from virtman.models import Vm

CONF = nova.conf.CONF
LOG = logging.getLogger(__name__)

RAW = "raw"


@dataclass(frozen=True)
class Disk:
    """What libvirt opens: a block device, which is raw, or a qcow2 file."""

    path: str
    format: str


def ready(node: str, instance: Any, volume_id: str) -> Disk:
    """The disk of a server on this host, which is made if Nova makes the server now.

    Raises DiskLost if it had to be here and is not; AgentRefused, BaseUnavailable.
    """
    name, image = names.disk_of(instance.uuid, volume_id), names.image_of(volume_id)
    with agent_of(node) as agent:
        if instance.task_state == task_states.REBUILD_SPAWNING:
            _destroy(agent, name)  # Nova has, unless the agent was away
        elif instance.task_state != task_states.SPAWNING or shelves.stays(instance):
            return _found(agent, name, node, instance)
        if shelves.comes_back(instance):
            if not _is_root(instance, volume_id):  # the image has the root disk, and no others were shelved
                why = f"volume {volume_id} is a base, attached while the server was shelved: detach it, then unshelve"
                raise BaseUnavailable(reason=why)
            return _disk(shelves.create(agent, name, instance))
        vm = origins.create(agent, node, name, image, volume_id)
        return _disk(_grown(agent, vm, instance, volume_id))


def _is_root(instance: Any, volume_id: str) -> bool:
    return any(bdm.is_root and bdm.volume_id == volume_id for bdm in instance.get_bdms())


def _grown(agent: AgentClient, vm: Vm, instance: Any, volume_id: str) -> Vm:
    """The disk with the size of the volume that was asked for: of a snapshot, that may be more than the base has."""
    context = nova.context.get_admin_context()
    size = objects.BlockDeviceMapping.get_by_volume_and_instance(context, volume_id, instance.uuid).volume_size
    if size is None or vm.disk.size is None or size * units.Gi <= vm.disk.size:
        return vm
    return agent.resize(vm.name, size * units.Gi)


def _found(agent: AgentClient, name: str, node: str, instance: Any) -> Disk:
    from virtman.errors import UnknownVm

    try:
        return _disk(agent.vm(name))
    except UnknownVm as error:
        if instance.task_state is None:
            why = "the volume is a base, from which servers boot: it is not attached to one that is there"
            raise BaseUnavailable(reason=why) from error
        raise DiskLost(
            reason=f"{node} has no disk {name}: the server's data are not there, and none are made"
        ) from error


def _disk(vm: Vm) -> Disk:
    """A path that is a device, or a link to one, is raw."""
    return Disk(vm.disk.path, RAW if Path(vm.disk.path).is_block_device() else "qcow2")


def _destroy(agent: AgentClient, name: str) -> None:
    from virtman.errors import UnknownVm

    try:
        agent.destroy(name)
    except UnknownVm:
        LOG.debug("%s is not there", name)


def of_server(agent: AgentClient, server: str) -> list[str]:
    """The names of a server's disks on a host."""
    return [vm.name for vm in agent.vms() if names.server_of(vm.name) == server]


def destroy(host: Any, instance: Any) -> None:
    """Destroy what a server has on this host, when Nova destroys its local disks.

    ``host``: Nova's libvirt host. What cannot be destroyed is logged, and is by ``upkeep`` later: that keeps nobody's
    server. A server that is shelved without an image of it keeps its disk.
    """
    if not CONF.virtman.use_vmtsnapshot:
        return
    node = host.get_hostname()
    if instance.task_state in _SHELVING and shelves.image_of(instance) is None:
        LOG.error("server %s is shelved without an image: its disk stays on %s", instance.uuid, node)
        return
    try:
        with agent_of(node) as agent:
            for name in of_server(agent, instance.uuid):
                _destroy(agent, name)
    except AgentRefused as error:
        LOG.error("the disks of server %s stay on %s for now: %s", instance.uuid, node, error)


_SHELVING = (task_states.SHELVING, task_states.SHELVING_OFFLOADING)


def confirm(host: Any, instance: Any) -> None:
    """A server has gone to another host for good: its disks here are not needed any more."""
    if CONF.virtman.use_vmtsnapshot and instance.node != host.get_hostname():
        destroy(host, instance)


def send(host: Any, instance: Any, address: str) -> None:
    """Copy the disks of a server that is off to the host that it is resized or migrated to, by ssh as Nova's own.

    What an earlier try left there is destroyed. Raises InstanceFaultRollback: the server stays as it was.
    """
    if not CONF.virtman.use_vmtsnapshot:
        return
    migration = objects.Migration.get_by_id(nova.context.get_admin_context(), instance.migration_context.migration_id)
    if migration.source_compute == migration.dest_compute:
        return
    there = ["ssh", "-o", "BatchMode=yes", address, "virtman", "--socket", str(socket_of(migration.dest_node))]
    try:
        with agent_of(host.get_hostname()) as agent:
            for name in of_server(agent, instance.uuid):
                _send(agent, name, there)
    except VirtmanError as error:
        reason = f"the server's disk could not be sent to {migration.dest_compute}: {error.format_message()}"
        raise exception.InstanceFaultRollback(exception.ResizeError(reason=reason)) from error


def _send(agent: AgentClient, name: str, there: list[str]) -> None:
    image = agent.vm(name).disk.image
    gone = subprocess.run(
        [*there, "destroy", name], check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if gone.returncode not in (0, _NOT_FOUND):
        raise AgentRefused(reason=_last_line(gone.stderr))
    with tempfile.TemporaryFile("w+") as said:
        receiver = subprocess.Popen(
            [*there, "receive", name, image], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=said
        )
        try:
            with cast(BinaryIO, receiver.stdin) as stream:
                when_it_has_time(lambda: agent.send(name, stream))
        finally:
            if receiver.wait():  # it says more than who could not write to it
                said.seek(0)
                raise AgentRefused(reason=_last_line(said.read()))


_NOT_FOUND = 3
"""How virtman exits if it does not know what is to be destroyed."""


def _last_line(said: str) -> str:
    return said.strip().rpartition("\n")[2] or "ssh said nothing"


def refuse_live_migration(block_device_info: Any) -> None:
    """Before anything of a server moves: its private disk is on this host alone. Raises MigrationPreCheckError."""
    devices = driver.block_device_info_get_mapping(block_device_info) if CONF.virtman.use_vmtsnapshot else ()
    for device in devices:
        if device["connection_info"].get("driver_volume_type") == DRIVER:
            raise exception.MigrationPreCheckError(
                reason="the server has a private snapshot of a base, which only a cold migration takes along"
            )


def snapshot(virt: Any, context: Any, instance: Any, image_id: str, update_task_state: Any) -> bool:
    """Export the private root disk of a server to an image in Glance. False: it is Nova's own to do.

    ``virt`` is the libvirt driver. So it is if the disk is a file that a running QEMU has open: libvirt copies it then.
    Raises AgentRefused for a server that is to be shelved with private disks besides the root's: no image has these.
    """
    if not CONF.virtman.use_vmtsnapshot:
        return False
    private = [bdm for bdm in instance.get_bdms() if names.is_ours(bdm.attachment_id)]
    if instance.task_state in _SHELVING and any(not bdm.is_root for bdm in private):
        raise AgentRefused(reason="the server has private disks besides its root disk, which no image would keep")
    root = next((bdm for bdm in private if bdm.is_root), None)
    if root is None:
        return False
    image_format = CONF.libvirt.snapshot_image_format or "qcow2"
    update_task_state(task_state=task_states.IMAGE_PENDING_UPLOAD)
    fileutils.ensure_tree(CONF.libvirt.snapshots_directory)
    with scratch.folder(CONF.libvirt.snapshots_directory) as folder:
        file = folder / image_id
        with agent_of(virt._host.get_hostname()) as agent:
            disk = names.disk_of(instance.uuid, root.volume_id)
            when_it_has_time(lambda: agent.export_vm(disk, file, image_format))
        update_task_state(task_state=task_states.IMAGE_UPLOADING, expected_state=task_states.IMAGE_PENDING_UPLOAD)
        name = virt._image_api.get(context, image_id)["name"]
        metadata = virt._create_snapshot_metadata(instance.image_meta, instance, image_format, name)
        with file.open("rb") as content:
            virt._image_api.update(context, image_id, metadata, content)
    return True
