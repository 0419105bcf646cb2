"""Volumes of servers that are read through the cache group.

The agent here has doubles for drivers, since the real ones need a kernel of their own: tests/kernel has these. What it
hands out is there by name only, which is all that Nova and its libvirt double need.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from nova import objects
from nova.compute import task_states
from nova.virtman import cachegroup
from nova.virtman.errors import AgentRefused
from nova.virtman.notes import Note, notes

from drivers.errors import DeviceRefused
from lab.tools import run
from tests.doubles.drivers import Host
from tests.doubles.plugin import install_doubles
from tests.doubles.servers import serve_agent
from tests.openstack.computes import ComputesTest
from virtman.agent import Agent
from virtman.api import create_app
from virtman.client import AgentClient
from virtman.config import AgentConfig


class Plain:
    """A volume driver of Nova's. ``connected``: the devices that are."""

    is_block_dev = True

    def __init__(self, host: Any) -> None:
        self.host = host
        self.connected: list[str] = []

    def connect_volume(self, connection_info: dict[str, Any], _instance: Any) -> None:
        self.connected.append(connection_info["data"]["device_path"])

    def disconnect_volume(self, connection_info: dict[str, Any], _instance: Any, force: bool = False) -> None:
        self.connected.remove(connection_info["data"]["device_path"])

    def extend_volume(self, connection_info: dict[str, Any], _instance: Any, size: int) -> int:
        return size if connection_info["data"]["device_path"] in self.connected else 0


class CachedTest(ComputesTest):
    COMPUTES = 1

    def setUp(self) -> None:
        super().setUp()
        self.flags(use_cachegroup=True, use_vmtsnapshot=False, group="virtman")
        (self.node,) = self.cluster.names
        self.computes[self.node].driver.volume_drivers.clear()
        self.group = self.agent_with_volumes()
        self.use_socket(self.socket)
        self.data = self.device()

    def use_socket(self, socket: Path | None) -> None:
        """Have Nova find an agent by this socket, or none."""
        link = self.folder / f"{self.node}.sock"
        link.unlink(missing_ok=True)
        if socket is not None:
            link.symlink_to(socket)

    def agent_with_volumes(self) -> AgentClient:
        """An agent whose cache driver has volumes, one of which runs."""
        state, run_folder = self.folder / "cached", Path(tempfile.mkdtemp(prefix="vm-", dir="/tmp"))
        self.addCleanup(shutil.rmtree, run_folder, ignore_errors=True)
        install_doubles(self, self.folder / "plugin")
        self.host = Host.known[state] = Host()
        config = AgentConfig(
            "cached", state, run_folder, self.cluster.volt_url, accel="tcg",
            source="", attach="double", cache="group", export="double", snapshot="double",
        )  # fmt: skip
        agent = Agent(config)
        agent.start()
        self.addCleanup(agent.stop)
        self.socket = run_folder / "agent.sock"
        serve_agent(self, create_app(agent), self.socket)
        return AgentClient(self.socket)

    def device(self) -> str:
        """A volume that is a block device of this machine."""
        file = self.folder / f"data-{len(self.cinder.volumes)}"
        file.write_bytes(bytes(1 << 20))
        loop = run(["losetup", "--find", "--show", file]).strip()
        self.addCleanup(subprocess.run, ["losetup", "--detach", loop], check=True)
        volume = self.cinder.add(file, base=False)
        self.cinder.volumes[volume]["file"] = loop
        return volume

    def sources(self, server: dict[str, Any]) -> list[str]:
        """The devices that libvirt got."""
        return [source.get("dev") for source in self.xml[server["id"]].iterfind("devices/disk/source")]

    def cached(self) -> list[str]:
        return [device.path for device in self.group.cached_devices()]

    def test_a_volume_is_given_to_libvirt_by_the_agents_device_until_the_server_goes(self) -> None:
        server = self.boot(self.data)
        before = self.cached()
        self.assertEqual((1, before), (len(before), self.sources(server)))
        self.act(server, {"reboot": {"type": "HARD"}}, "ACTIVE")
        self.assertEqual(self.cached(), self.sources(server))
        self.assertNotEqual(before, self.cached())
        self._delete_server(server)
        self.assertEqual([], self.cached())

    def test_a_volume_that_servers_share_is_read_past_the_cache(self) -> None:
        self.cinder.volumes[self.data]["multiattach"] = True
        server = self.boot(self.data)
        self.assertEqual([], self.cached())
        self.assertEqual([self.cinder.volumes[self.data]["file"]], self.sources(server))

    def test_a_volume_that_the_agent_refuses_fails_the_boot_and_is_free_again(self) -> None:
        self.host.failing["cache.attach_device"] = DeviceRefused("it is mounted")
        server = self.boot(self.data, state="ERROR")
        self.assertEqual([], self.cached())
        self._delete_server(server)
        self.assertEqual("available", self.cinder.volumes[self.data]["status"])

    def test_where_it_is_not_alone_or_does_not_write_it_is_read_past_the_cache(self) -> None:
        for task, more in ((task_states.MIGRATING, {}), (None, {"access_mode": "ro"})):
            volume = Plain(self.computes[self.node].driver._host)
            connection = self.connection(**more)
            cachegroup.cached(volume).connect_volume(connection, objects.Instance(task_state=task))
            self.assertEqual([connection["data"]["device_path"]], volume.connected)
            self.assertEqual([], self.cached())

    def connection(self, **more: str) -> dict[str, Any]:
        """How Nova is connected to the volume."""
        return {"serial": self.data, "data": {"device_path": self.cinder.volumes[self.data]["file"], **more}}

    def connected(self) -> tuple[Plain, Any, dict[str, Any]]:
        """A volume that is read through the cache, its driver, and its connection."""
        volume, connection = Plain(self.computes[self.node].driver._host), self.connection()
        driver = cachegroup.cached(volume)
        driver.connect_volume(connection, objects.Instance(task_state=None))
        self.assertEqual([connection["data"]["device_path"]], self.cached())
        return volume, driver, connection

    def test_one_that_a_program_has_open_is_disconnected_by_force_only(self) -> None:
        volume, driver, connection = self.connected()
        self.host.open_devices.update(self.host.devices)
        self.assertRaises(AgentRefused, driver.disconnect_volume, connection, None)
        self.assertEqual(1, len(volume.connected))
        driver.disconnect_volume(connection, None, force=True)
        self.assertEqual(([], []), (volume.connected, self.cached()))

    def test_after_a_reboot_a_device_of_its_name_may_be_another_volumes(self) -> None:
        _, driver, connection = self.connected()
        # As if nova-compute had been killed before it noted the agent's device, in an earlier boot of the host.
        Note(self.node, "cached", self.data).write(
            {"device": self.cinder.volumes[self.data]["file"], "boot": "earlier"}
        )
        driver.disconnect_volume(connection, None, force=True)
        self.assertEqual(1, len(self.cached()))

    def test_one_that_grows_grows_for_its_server(self) -> None:
        _, driver, connection = self.connected()
        (device,) = self.host.devices.values()
        self.host.sizes[self.host.numbers[device.device]] = 2 * device.size
        driver.extend_volume(connection, None, 2 * device.size)
        self.assertEqual([2 * device.size], [one.size for one in self.host.devices.values()])

    def test_without_its_agent_no_volume_is_connected(self) -> None:
        self.use_socket(None)
        server = self.boot(self.data, state="ERROR")
        self._delete_server(server)
        self.assertEqual("available", self.cinder.volumes[self.data]["status"])
        self.upkeep(self.node)
        self.assertEqual([self.data], [note.name for note in notes(self.node, "cached")])  # until it is back
        self.use_socket(self.socket)
        self.upkeep(self.node)
        self.assertEqual([], notes(self.node, "cached"))

    def test_what_nova_could_not_disconnect_is_disconnected_when_the_agent_is_back(self) -> None:
        volume, driver, connection = self.connected()
        self.stub_out("nova.virt.libvirt.LibvirtDriver._get_volume_driver", lambda *_more: driver)
        self.use_socket(None)
        self.assertRaises(AgentRefused, driver.disconnect_volume, connection, None)
        self.use_socket(self.socket)
        self.upkeep(self.node)
        self.assertEqual(([], [], []), (volume.connected, self.cached(), notes(self.node, "cached")))

    def test_a_host_without_a_cache_group_says_so(self) -> None:
        self.use_socket(self.cluster.socket(0))
        server = self.boot(self.data, state="ERROR")
        self.assertIn("the cache driver of this host, qcow2, has no volumes", server["fault"]["message"])
