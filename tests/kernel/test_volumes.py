"""A volume of a storage network, which os-brick brings to a host, is read through that host's cache.

The origin plays the storage; the two hosts are hosts of one cloud.
"""

from __future__ import annotations

import functools
import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lab.kernel.machine import Machine
from lab.kernel.root import root
from lab.kernel.storage import FILE, Storage
from tests.kernel import osbrick, stacks
from tests.kernel.machines import FAILED_PATH, SUITE, changed_on_purpose, cluster
from tests.kernel.stacks import CHECK, WRITE, StackCase, services
from virtman import models
from virtman.errors import DiskBusy

pytestmark = pytest.mark.long

SIZE = 32 << 20
BRICK = "/var/tmp/os-brick"
AWAY = 20
"""Seconds for which the storage is away."""

WRITE_ON = f"{WRITE} --loops=3"
KEPT, TRASHED = 0, SIZE // 2
"""Where on the volume the data are that have to be right in the end, and where a writer is cut off."""


def fio(path: str, offset: int, mode: str) -> list[str]:
    """Write half of the volume from an offset on, or read and compare it."""
    options: dict[str, int | str] = {"ioengine": "libaio", "iodepth": 8, "verify_fatal": 1, "serialize_overlap": 1}
    return stacks.fio(path, mode, size=SIZE // 2, offset=offset, **options)


@functools.cache
def warm_up() -> None:
    """Have os-brick on the hosts, and on the storage the folders of the iSCSI fabric, which stay."""
    services()
    storage, *hosts = cluster().machines.values()
    folder = osbrick.folder(root(SUITE))
    with ThreadPoolExecutor(len(hosts)) as pool:
        list(pool.map(lambda host: host.send(folder, "/var/tmp"), hosts))
    for host in hosts:
        host.run(["ln", "-sfn", folder.name, BRICK])
    Storage(storage).serve(1 << 20)
    Storage(storage).withdraw()
    changed_on_purpose()


class VolumeTest(StackCase):
    """``storage`` has a volume, to which no host has a session in the end."""

    forgiven = (*FAILED_PATH, "sd ", "blk_update_request: I/O error, dev sd", "Buffer I/O error on dev dm-")

    def setUp(self) -> None:
        warm_up()
        super().setUp()
        self.storage, (self.one, self.two) = self.origin, self.hosts[:2]
        self.volume = Storage(self.storage)
        self.addCleanup(self.volume.withdraw)
        self.volume.serve(SIZE)

    def brick(self, machine: Machine, act: str, *words: str) -> Any:
        """What os-brick returns."""
        program = ["python3", "-W", "ignore", "/opt/virtman/tests/kernel/inside/brick.py", act, self.storage.address]
        said = machine.run(["env", f"PYTHONPATH={BRICK}", *program, *words])
        return json.loads(said.splitlines()[-1])

    def connect(self, machine: Machine) -> Path:
        """The volume's device on a host."""
        self.addCleanup(self.brick, machine, "disconnect", "force")
        return Path(self.brick(machine, "connect")["path"])

    def attach(self, machine: Machine, device: Path) -> models.CachedDevice:
        """As the command line does it."""
        self.addCleanup(machine.run, ["virtman", "cache", "detach", "--force", str(device)])
        return models.CachedDevice.model_validate_json(
            machine.run(["virtman", "cache", "attach", "--json", str(device)])
        )

    def sum_of(self, machine: Machine, path: str) -> str:
        """A checksum of what is read past the page cache."""
        read = f"dd if={path} bs=64k count={SIZE >> 16} iflag=direct status=none | sha256sum"
        return machine.run(["sh", "-c", read]).split()[0]

    def ended(self, process: subprocess.Popen[str]) -> int:
        """How a command that was begun ended."""
        process.communicate(timeout=2400)
        return process.returncode

    def test_what_a_vm_writes_through_the_cache_of_one_host_is_right_on_another_one(self) -> None:
        device = self.connect(self.one)
        attached = self.attach(self.one, device)
        self.assertEqual((str(device), SIZE, "cached"), (attached.device, attached.size, attached.state))
        self.assertEqual(attached.path, self.attach(self.one, device).path)
        by_id = self.one.run(["sh", "-c", f"udevadm info --query=symlink {device}"]).split()[0]
        self.assertEqual(attached.path, self.attach(self.one, Path("/dev", by_id)).path)
        path = attached.path
        self.one.run(fio(path, KEPT, WRITE))
        self.storage_away_while_it_is_written(path)
        self.refused_and_by_force_while_it_is_written(path)
        self.brick(self.one, "disconnect")
        self.assertEqual("21", self.one.run(["sh", "-c", "iscsiadm --mode session > /dev/null 2>&1; echo $?"]).strip())
        right = self.sum_of(self.storage, FILE)
        device = self.connect(self.two)
        attached = self.attach(self.two, device)
        self.two.run(fio(attached.path, KEPT, CHECK))
        for _ in range(2):
            self.assertEqual(right, self.sum_of(self.two, attached.path))
        (found,) = self.agent(self.two).cached_devices()
        self.assertGreater(found.cache_bytes, SIZE // 2)
        self.two.run(["virtman", "cache", "detach", attached.path])
        self.brick(self.two, "disconnect")

    def storage_away_while_it_is_written(self, path: str) -> None:
        """For as long as somebody may take to mend a cable: no error, and right data."""
        writing = self.one.begin(fio(path, TRASHED, WRITE_ON))
        self.wait_until_open(path)
        away = f"ip link set eth1 down; sleep {AWAY}; ip link set eth1 up"
        self.storage.run(["sh", "-c", away])
        self.assertEqual(0, self.ended(writing))
        self.assertEqual(self.sum_of(self.storage, FILE), self.sum_of(self.one, path))

    def refused_and_by_force_while_it_is_written(self, path: str) -> None:
        writing = self.one.begin(fio(path, TRASHED, WRITE_ON))
        self.wait_until_open(path)
        self.assertRaises(DiskBusy, self.agent(self.one).detach_cached, Path(path))
        self.assertIsNone(writing.poll())
        self.agent(self.one).detach_cached(Path(path), force=True)
        self.assertNotEqual(0, self.ended(writing))
        self.assertEqual([], self.agent(self.one).cached_devices())

    def wait_until_open(self, path: str) -> None:
        self.wait_until(self.one, f"dmsetup info --columns --noheadings --options open {path} | grep -v '^ *0$'")
