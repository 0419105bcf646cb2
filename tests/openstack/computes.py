"""Nova's functional test base, with computes that have real agents."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fixtures
from lxml import etree
from nova import context as nova_context
from nova import exception
from nova.tests import fixtures as nova_fixtures
from nova.tests.functional.api.client import OpenStackApiException, OpenStackApiNotFoundException
from nova.tests.functional.libvirt import base
from nova.virt.libvirt import host
from nova.virt.libvirt import utils as libvirt_utils
from os_brick.initiator.connectors.local import LocalConnector

from lab.cluster import Cluster, tool
from lab.tools import run
from tests.openstack.cinder import Cinder
from tests.patience import PATIENCE, wait_until
from virtman.client import AgentClient

BASE_SIZE = 16 << 20
GLANCE_IMAGE = "155d900f-4e14-4e4c-a73d-069cbf4541e6"
"""That of Nova's fixture which the bases were made of."""
DATABASE = "_use_file_backed_sqlite_with_wal"
"""Nova's function that makes a database for a test, and tells where it is."""
GLANCE = "nova.tests.fixtures.glance.GlanceFixture"
CONNECT, DISCONNECT, EXTEND = (
    LocalConnector.connect_volume, LocalConnector.disconnect_volume, LocalConnector.extend_volume,
)  # fmt: skip


class ComputesTest(base.ServersTestBase):  # type: ignore[misc]
    """A cloud of ``COMPUTES`` hosts, each with an agent, and a base that any number of servers boots from."""

    api_major_version = "v2.1"
    microversion = "latest"
    COMPUTES = 2
    ADMIN_API = True
    CAST_AS_CALL = False
    """What Nova's services do for each other without an answer is not waited for, as in a cloud."""

    def setUp(self) -> None:
        self.begin_cluster()
        for number, name in enumerate(self.cluster.names):
            link = self.folder / f"{name}.sock"
            link.unlink(missing_ok=True)
            link.symlink_to(self.cluster.socket(number))
        self.programs = self.folder / "bin"
        self.programs.mkdir(exist_ok=True)
        self.ssh('shift 3; exec "$@"')
        tools = f"{self.programs}:{tool('virtman').parent}:{os.environ['PATH']}"
        self.useFixture(fixtures.EnvironmentVariable("PATH", tools))
        for module in ("nova.tests.fixtures.nova", "nova.tests.functional.fixtures"):
            self.useFixture(
                fixtures.MonkeyPatch(f"{module}.{DATABASE}", _patient(getattr(sys.modules[module], DATABASE)))
            )
        self.flags(use_vmtsnapshot=True, socket=str(self.folder / "{node}.sock"), group="virtman")
        # No service is taken for dead on a slow machine, and no call for lost. The first is read as services are made.
        self.flags(service_down_time=10 * int(PATIENCE))
        super().setUp()
        self.flags(rpc_response_timeout=int(PATIENCE))
        self.flags(state_path=str(self.folder / "nova"))  # not before: Nova looks for its API's configuration there
        # os-brick's own connector for local devices, which Nova's fixture has replaced by one that does nothing
        for name, real in (("connect_volume", CONNECT), ("disconnect_volume", DISCONNECT), ("extend_volume", EXTEND)):
            self.useFixture(fixtures.MonkeyPatch(f"os_brick.initiator.connectors.local.LocalConnector.{name}", real))
        self.useFixture(fixtures.MonkeyPatch("nova.virt.libvirt.LibvirtDriver._create_image", _make_folder))
        self.xml: dict[str, Any] = {}
        """What libvirt was told of a server last."""
        self.useFixture(fixtures.MonkeyPatch("nova.virt.libvirt.host.Host.write_instance_config", self._defining()))
        self.useFixture(fixtures.MonkeyPatch(f"{GLANCE}.update", self._keeping_data()))
        self.flags(instances=-1, cores=-1, ram=-1, group="quota")
        self.begin_storage()
        self.admin = nova_context.get_admin_context()
        for name in self.cluster.names:
            self.start_compute(hostname=name)

    def begin_cluster(self) -> None:
        """The hosts' agents, and a folder for all that the test makes."""
        self.folder = Path(tempfile.mkdtemp(prefix="virtman-nova-"))
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.cluster = Cluster(self.folder / "cluster", self.COMPUTES)
        self.addCleanup(self.cluster.stop)
        self.cluster.start()

    def begin_storage(self) -> None:
        """Cinder, and the base in it."""
        self.cinder = self.useFixture(Cinder(self))
        self.content = os.urandom(BASE_SIZE)
        self.file = self.folder / "base.raw"
        self.file.write_bytes(self.content)
        self.volume = self.cinder.add(self.file)

    def _defining(self) -> Any:
        define = host.Host.write_instance_config

        def write_instance_config(libvirt: Any, xml: str) -> Any:
            tree = etree.fromstring(xml)
            self.xml[tree.find("uuid").text] = tree
            return define(libvirt, xml)

        return write_instance_config

    def _keeping_data(self) -> Any:
        update = nova_fixtures.GlanceFixture.update

        def update_with_data(glance: Any, context: Any, image: str, meta: Any, data: Any = None, **more: Any) -> Any:
            if data is not None:
                glance._imagedata[image] = data.read()
                meta = {**meta, "status": "active"}
            return update(glance, context, image, meta, None, **more)

        return update_with_data

    def ssh(self, script: str) -> None:
        """What happens instead of ssh -o BatchMode=yes ADDRESS COMMAND: all hosts are this machine."""
        program = self.programs / "ssh"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    def agent(self, node: str) -> AgentClient:
        """The agent of a node."""
        return self.cluster.agents[self.cluster.names.index(node)]

    def request(self, volume: str | None = None, **more: Any) -> dict[str, Any]:
        """What is asked of the API for a server that boots from a volume."""
        server: dict[str, Any] = self._build_server(image_uuid="", networks="none")
        server.pop("imageRef", None)
        return {**server, "block_device_mapping_v2": self.devices(volume or self.volume), **more}

    def devices(self, *volumes: str) -> list[dict[str, Any]]:
        """What is asked of the API for a server with these volumes; it boots from the first one."""
        kind = {"source_type": "volume", "destination_type": "volume"}
        return [{"boot_index": 0 if volume is volumes[0] else -1, "uuid": volume, **kind} for volume in volumes]

    def lose(self, node: str) -> None:
        """Have a compute end, and an operator say so."""
        self.computes[node].stop()
        service = self.admin_api.get_services(host=node, binary="nova-compute")[0]
        self.admin_api.put_service(service["id"], {"forced_down": True})

    def let_stacks_go(self) -> None:
        """What computes do minute by minute until no host has anything of a base that nobody needs any more."""
        self.all_upkeep()
        self.soon(lambda: not self.stacks())
        self.all_upkeep()

    def boot(self, volume: str | None = None, state: str = "ACTIVE", **more: Any) -> dict[str, Any]:
        """A server, when Nova says that it is in a state."""
        return self.until(self.api.post_server({"server": self.request(volume, **more)}), state)

    def until(self, server: dict[str, Any], state: str) -> dict[str, Any]:
        """The server when it has this state; fails when it is in ERROR instead."""
        end = time.monotonic() + PATIENCE
        while True:
            found: dict[str, Any] = self.admin_api.get_server(server["id"])
            if found["status"] == state and found["OS-EXT-STS:task_state"] is None:
                return found
            stuck = found["status"] == "ERROR" or (found["OS-EXT-STS:task_state"] is None and self.failures(server))
            if (stuck and state != "ERROR") or time.monotonic() > end:
                why = found.get("fault") or self.failures(server)
                self.fail(f"the server is {found['status']} and not {state}: {why}")
            time.sleep(0.05)

    def _wait_until_deleted(self, server: dict[str, Any]) -> None:
        """As Nova's own, which gives up after 20 seconds."""
        failed_before = server.get("status") == "ERROR"

        def is_gone() -> bool:
            try:
                found = self.api.get_server(server["id"])
            except OpenStackApiNotFoundException:
                return True
            self.assertTrue(failed_before or found["status"] != "ERROR", "it is in ERROR instead")
            return False

        self.soon(is_gone)

    def upkeep(self, node: str) -> None:
        """What the compute of a node does each minute."""
        self.computes[node].manager._virtman_upkeep(self.admin)

    def all_upkeep(self) -> None:
        """What all computes do each minute."""
        for node in self.cluster.names:
            self.upkeep(node)

    def stacks(self) -> list[str]:
        """The images that agents have stacks of."""
        return [stack.name for node in self.cluster.names for stack in self.agent(node).status().images]

    def disk_of(self, server: dict[str, Any], volume: str) -> str:
        """What a server's private disk is called."""
        from nova.virtman import names

        return names.disk_of(server["id"], volume)

    def node_of(self, server: dict[str, Any]) -> str:
        """Where a server is."""
        name: str = self.admin_api.get_server(server["id"])["OS-EXT-SRV-ATTR:hypervisor_hostname"]
        return name

    def disks(self, node: str) -> dict[str, str]:
        """Paths of the private disks on a node, by server."""
        found = self.agent(node).vms()
        return {vm.name[5:41]: self.agent(node).vm(vm.name).disk.path for vm in found}

    def all_disks(self) -> list[str]:
        """The servers that have a disk anywhere, once for each."""
        return sorted(server for node in self.cluster.names for server in self.disks(node))

    def read(self, server: dict[str, Any]) -> bytes:
        """What the disk of a server holds."""
        return self.read_qcow2(Path(self.disks(self.node_of(server))[server["id"]]))

    def read_qcow2(self, file: Path) -> bytes:
        """What a qcow2 file and its backing hold, up to the size of the base."""
        raw = self.folder / "read.raw"
        run(["qemu-img", "convert", "--force-share", "-f", "qcow2", "-O", "raw", file, raw])
        with raw.open("rb") as content:
            return content.read(BASE_SIZE)

    def write(self, server: dict[str, Any], data: bytes) -> None:
        """Write to the start of a server's disk, as its guest does."""
        file, path = self.folder / "data", self.disks(self.node_of(server))[server["id"]]
        file.write_bytes(data)
        run(["qemu-io", "-f", "qcow2", "-c", f"write -s {file} 0 {len(data)}", path])

    def unreachable(self) -> Exception:
        """What Nova says of a Cinder that does not answer."""
        return exception.CinderConnectionFailed(reason="storage is away")

    def soon(self, condition: Callable[[], bool]) -> None:
        """Wait for what hosts do by themselves."""
        wait_until(condition)

    def act(self, server: dict[str, Any], action: dict[str, Any], state: str) -> None:
        """One action of the API; returns when the server has this state."""
        self.api.post_server_action(server["id"], action)
        self.until(server, state)

    def failures(self, server: dict[str, Any]) -> list[str]:
        """Why the last action of the API failed, which had only taken it, if it failed."""
        last = self.admin_api.get_instance_actions(server["id"])[0]["request_id"]
        events = self.admin_api.get_instance_action_details(server["id"], last)["events"]
        return [f"{event['details']}\n{event['traceback']}" for event in events if event["result"] == "Error"]

    def refused(self, call: Callable[[], object]) -> str:
        """What the API says to a request that it refuses as wrong."""
        error = self.assertRaises(OpenStackApiException, call)
        self.assertEqual(400, error.response.status_code)
        return str(json.loads(error.response.content)["badRequest"]["message"])

    def image(self) -> str:
        """The image that stands for the base."""
        return f"cinder-{self.volume}"

    def images(self) -> dict[str, list[str]]:
        """The origins of each image that Volt lists."""
        return {image.name: image.origins for image in self.cluster.volt.images()}


class ServerCase(ComputesTest):
    """A test with a server that has booted from the base: ``node`` is where it is, ``other`` another host."""

    def setUp(self) -> None:
        super().setUp()
        self.server = self.boot()
        self.node = self.node_of(self.server)
        self.other = next(name for name in self.cluster.names if name != self.node)


def _patient(make: Callable[[str], tuple[str, str]]) -> Callable[[str], tuple[str, str]]:
    """Databases for which a writer waits its turn on a slow machine: SQLite gives up after 5 seconds (PRAGMA
    busy_timeout).
    """

    def make_patient(name: str) -> tuple[str, str]:
        url, path = make(name)
        return f"{url}?timeout={PATIENCE:g}", path

    return make_patient


def _make_folder(_driver: Any, _context: Any, instance: Any, *_more: Any, **_options: Any) -> tuple[bool, bool]:
    """What is left of the images of a server whose disk is none."""
    Path(libvirt_utils.get_instance_path(instance)).mkdir(exist_ok=True)
    return False, False


def sha256(data: bytes) -> str:
    """The digest of bytes, for messages that can be read."""
    return hashlib.sha256(data).hexdigest()
