"""Nova's services with the settings of a plan, for each way of getting servers their disks.

API, conductor, scheduler and computes are Nova's, in one process, on its functional test base: libvirt is its fake one,
so no server boots. What that base replaces of the disks' way is put back.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fixtures
from nova.image import glance
from nova.tests import fixtures as nova_fixtures
from nova.tests.functional.libvirt import base
from nova.virt import block_device
from nova.virt.libvirt import driver, imagebackend
from nova.virt.libvirt import utils as libvirt_utils

from benchmarks.errors import Failed, TookTooLong
from benchmarks.figures import MIB
from benchmarks.openstack.copyingcinder import CopyingCinder
from benchmarks.openstack.imagefile import ImageFile, metadata
from benchmarks.openstack.plan import IMAGE, NOTHING, VIRTMAN, VOLUME, Plan
from benchmarks.processes import cpu_seconds, file_bytes_read
from lab.process import processes_of
from tests.openstack.computes import CONNECT, ComputesTest

LIMIT = 3600
"""Seconds that a wave may take."""
IMAGE_ID = "5a5a5a5a-0000-4000-8000-000000000001"
REAL = {
    "nova.virt.libvirt.imagebackend.Backend.backend": imagebackend.Backend.backend,
    "nova.virt.libvirt.utils.fetch_image": libvirt_utils.fetch_image,
    "nova.virt.libvirt.LibvirtDriver._create_image": driver.LibvirtDriver._create_image,
    "os_brick.initiator.connectors.local.LocalConnector.connect_volume": CONNECT,
}
"""What Nova's test base replaces."""


class Wave(base.ServersTestBase):  # type: ignore[misc]
    """What all ways have in common. ``plan`` and ``work``, a folder for disks, are set before a cloud is made."""

    api_major_version = "v2.1"
    microversion = "latest"
    ADMIN_API = True
    CAST_AS_CALL = False
    plan: ClassVar[Plan]
    work: ClassVar[Path]
    source: ClassVar[Path]
    """The image, or for ours the volume with its content."""
    measured: ClassVar[Callable[[Wave], None]]
    """What is done with a cloud that is up."""

    def tune(self) -> None:
        """Before Nova's services start."""
        self.flags(**self.plan.settings())
        self.flags(instances=-1, cores=-1, ram=-1, group="quota")

    def make_flavor(self) -> None:
        """The same for all ways."""
        flavor = {"name": "wave", "vcpus": 1, "ram": 512, "disk": self.plan.gib, "id": "wave"}
        self.api.post_flavor({"flavor": flavor})
        logging.disable(logging.DEBUG)  # a test formats what a cloud does not log
        self.addCleanup(logging.disable, logging.NOTSET)

    def disk_request(self) -> dict[str, Any]:
        """What a request for servers says of their disks."""
        raise NotImplementedError

    def time_disks(self, owner: type, step: str) -> None:
        """Keep how long each call takes of the step in which a server gets its disk, and when the last one ends."""
        self.disk_s: list[float] = []
        self.last_disk = 0.0
        act = getattr(owner, step)

        def timed(*args: Any, **more: Any) -> Any:
            began = time.monotonic()
            try:
                return act(*args, **more)
            finally:
                self.last_disk = time.monotonic()
                self.disk_s.append(self.last_disk - began)

        self.useFixture(fixtures.MonkeyPatch(f"{owner.__module__}.{owner.__qualname__}.{step}", timed))

    def start_wave(self) -> float:
        """All servers with one call of the API. Returns the seconds until the last one is active.

        Raises Failed, TookTooLong.
        """
        count = self.plan.servers
        server = {
            "name": "wave", "flavorRef": "wave", "networks": "none", "min_count": count, "max_count": count,
            **self.disk_request(),
        }  # fmt: skip
        self.began = time.monotonic()
        self.api.post_server({"server": server})
        self._wait(count)
        return time.monotonic() - self.began

    def _wait(self, count: int) -> None:
        """By Nova's notifications, as whoever asks the API all the time would slow it down."""
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            try:
                self.notifier.wait_for_versioned_notifications("instance.create.end", count, timeout=1)
            except AssertionError:
                self._check_errors()
            else:
                return
        raise TookTooLong(f"not all of {count} servers were active after {LIMIT} s")

    def _check_errors(self) -> None:
        for said in self.notifier.versioned_notifications:
            if said["event_type"] in ("instance.create.error", "compute_task.build_instances.error"):
                raise Failed(f"a server could not be made: {said['payload']}")

    def servers(self) -> list[dict[str, Any]]:
        """All of them, as the API tells. Raises Failed if one is not active."""
        found: list[dict[str, Any]] = self.admin_api.get_servers()
        if states := {server["status"] for server in found} - {"ACTIVE"}:
            raise Failed(f"servers are {', '.join(sorted(states))}")
        return found

    def server_disks(self) -> list[tuple[Path, str]]:
        """Path and format of each server's disk."""
        raise NotImplementedError

    def moved(self) -> dict[str, int]:
        """Bytes that went over a link so far, by what moved them."""
        raise NotImplementedError

    def cpu_seconds(self) -> dict[str, float]:
        """Processor time so far, by what took it, besides this process."""
        return {}

    def measure(self) -> None:
        """The test of this name."""
        type(self).measured(self)


class StockCloud(Wave):
    """Computes as Nova comes. Without more, servers have no disk."""

    def setUp(self) -> None:
        self.tune()
        super().setUp()
        self.useFixture(nova_fixtures.PrivsepFixture())
        instances = Path(tempfile.mkdtemp(dir=self.work, prefix="instances-"))
        self.flags(instances_path=str(instances))
        self.instances = instances
        self.put_back()
        for number in range(self.plan.computes):
            self.start_compute(hostname=f"host-{number}")
        self.make_flavor()

    def put_back(self) -> None:
        """Replace what Nova's test base has replaced."""

    def real(self, *names: str) -> None:
        """Put Nova's own back."""
        for name in names:
            self.useFixture(fixtures.MonkeyPatch(name, REAL[name]))

    def know_image(self) -> None:
        """Glance says that it has the image."""
        self.glance.create(None, metadata(IMAGE_ID, self.source, self.plan.size * MIB))

    def disk_request(self) -> dict[str, Any]:
        return {"imageRef": "155d900f-4e14-4e4c-a73d-069cbf4541e6"}

    def server_disks(self) -> list[tuple[Path, str]]:
        return []

    def moved(self) -> dict[str, int]:
        return {}


class ImageCloud(StockCloud):
    """Disks by Nova's qcow2 backend, over an image that each host downloads."""

    def put_back(self) -> None:
        self.real(*list(REAL)[:3])
        self.know_image()
        self.client = ImageFile(self.source)
        service = glance.GlanceImageServiceV2(self.client)

        def download(_glance: Any, context: Any, image: str, data: Any = None, dst_path: Any = None, **_: Any) -> Any:
            return service.download(context, image, data, dst_path)

        self.useFixture(fixtures.MonkeyPatch("nova.tests.fixtures.glance.GlanceFixture.download", download))
        self._tell_hosts_apart()
        self.time_disks(driver.LibvirtDriver, "_try_fetch_image_cache")

    def _tell_hosts_apart(self) -> None:
        """All computes have one instances_path here: the files of their image caches begin with the host's name."""
        fetch = driver.LibvirtDriver._try_fetch_image_cache

        def own(virt: Any, image: Any, fetch_func: Any, context: Any, filename: str, *more: Any) -> Any:
            return fetch(virt, image, fetch_func, context, f"{virt._host.get_hostname()}-{filename}", *more)

        self.useFixture(fixtures.MonkeyPatch("nova.virt.libvirt.LibvirtDriver._try_fetch_image_cache", own))

    def disk_request(self) -> dict[str, Any]:
        return {"imageRef": IMAGE_ID}

    def server_disks(self) -> list[tuple[Path, str]]:
        return [(self.instances / server["id"] / "disk", "qcow2") for server in self.servers()]

    def moved(self) -> dict[str, int]:
        return {"downloaded": self.client.sent, "downloads": self.client.downloads}


class VolumeCloud(StockCloud):
    """Each server boots from a volume that Cinder copies from the image."""

    def put_back(self) -> None:
        self.real(list(REAL)[3])
        self.know_image()
        self.time_disks(block_device.DriverVolImageBlockDevice, "attach")
        self.cinder = self.useFixture(CopyingCinder(self, self.work / "cinder", self.source, self.plan))

    def disk_request(self) -> dict[str, Any]:
        device = {
            "boot_index": 0, "uuid": IMAGE_ID, "source_type": "image", "destination_type": "volume",
            "volume_size": self.plan.gib, "delete_on_termination": True,
        }  # fmt: skip
        return {"block_device_mapping_v2": [device]}

    def server_disks(self) -> list[tuple[Path, str]]:
        servers, volumes = self.servers(), self.cinder.volumes.values()
        if len(servers) != sum(volume["status"] == "in-use" for volume in volumes):
            raise Failed("not every server is attached to a volume of its own")
        return [(Path(volume["file"]), "raw") for volume in volumes]

    def moved(self) -> dict[str, int]:
        return {"downloaded": self.cinder.driver.sent}


class VirtmanCloud(ComputesTest, Wave):
    """Private disks of a base volume, made by the hosts' agents."""

    def setUp(self) -> None:
        type(self).COMPUTES = self.plan.computes
        self.tune()
        super().setUp()
        self.make_flavor()
        from nova.virtman import volumedriver  # which only a patched Nova has

        self.time_disks(volumedriver.LibvirtVirtmanVolumeDriver, "connect_volume")
        self.base = self.cinder.add(self.source)
        self.cinder.volumes[self.base]["size"] = self.plan.gib

    def disk_request(self) -> dict[str, Any]:
        return {"block_device_mapping_v2": self.request(self.base)["block_device_mapping_v2"]}

    def server_disks(self) -> list[tuple[Path, str]]:
        """See Wave."""
        found = [(Path(agent.vm(vm.name).disk.path), "qcow2") for agent in self.cluster.agents for vm in agent.vms()]
        if len(found) != len(self.servers()):
            raise Failed("not every server has a disk of its own")
        return found

    def moved(self) -> dict[str, int]:
        """What hosts fetched, and what agents read of files: of the volume for anything but serving it at the most."""
        states = [agent.status() for agent in self.cluster.agents]
        return {
            "fetched": sum(stack.fetched_bytes for state in states for stack in state.images if stack.role == "host"),
            "agents_read": sum(file_bytes_read(pid) for pid in self._agents()),
        }

    def cpu_seconds(self) -> dict[str, float]:
        return {"agents": sum(cpu_seconds(pid) for pid in self._agents())}

    def _agents(self) -> list[int]:
        """Their process IDs."""
        found = processes_of(self.cluster.run_folder(0).parent)
        return [pid for pid, line in found.items() if " agent --name " in line]


CLOUDS: dict[str, type[Wave]] = {
    NOTHING: StockCloud, VIRTMAN: VirtmanCloud, IMAGE: ImageCloud, VOLUME: VolumeCloud
}  # fmt: skip
