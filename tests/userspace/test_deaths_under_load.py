"""Kill what serves a VM while fio reads its disk and verifies every block; fio may wait, and may see no error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from testtools.content import text_content

from tests.patience import PATIENCE, wait_until
from tests.programs import require
from tests.sweeps import WHOLE
from tests.userspace.hosts import HostProcess, HostsTestCase

ROUNDS = 20 if WHOLE else 1
"""How often an inner host is killed."""
REGION = 4 << 20
"""Bytes that one round reads, cold: 2 seconds at RATE."""
RATE = 2 << 20
PATTERN = ["--bs=16k", "--verify=crc32c", "--verify_fatal=1", "--verify_state_save=0", "--randseed=1"]
PATTERN += ["--output-format=json"]


class DeathsUnderLoadTest(HostsTestCase):
    """An origin, two inner hosts and below them one with a VM, whose disk a storage daemon of the test opens."""

    volt_options = ("--heartbeat", "0.5", "--lease", "60")

    def setUp(self) -> None:
        super().setUp()
        require(self, "fio")
        self.stalls: list[float] = []
        self.addCleanup(lambda: self.addDetail("stalls", text_content(f"longest stalls, seconds: {self.stalls}")))
        self.file = self.verifiable_image((max(ROUNDS, 5) + 1) * REGION)
        self.origin = self.host("origin")
        self.origin.start().publish("img", self.file)
        self.inner = {name: self.host(name) for name in ("in1", "in2")}
        for host in self.inner.values():
            host.start().create("vm", "img")
        self.leaf = self.host("leaf")
        self.client = self.leaf.start()
        self.socket = self.open_disk(Path(self.client.create("vm", "img").disk.path))

    def verifiable_image(self, size: int) -> Path:
        """A file in which fio can verify every block."""
        path = self.folder / "image.raw"
        argv = ["fio", "--name=fill", f"--filename={path}", "--rw=write", f"--size={size}", "--do_verify=0", *PATTERN]
        subprocess.run(argv, check=True, capture_output=True)
        return path

    def open_disk(self, disk: Path) -> Path:
        """Serve the VM's disk to fio, as a QEMU would open it: by its path alone."""
        socket = self.folder / "disk.sock"
        argv = ["qemu-nbd", "--read-only", "--persistent", "--shared=0", "-f", "qcow2", "-k", str(socket), "-x", "vm"]
        process = subprocess.Popen([*argv, str(disk)])
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        wait_until(socket.exists, "the VM's disk is open")
        return socket

    def read_region(self, number: int) -> subprocess.Popen[str]:
        """Begin to read and verify a region that nobody has read before; returns in the middle of it."""
        before = self.fetched()
        reader = self.begin_reading(number)
        wait_until(lambda: self.fetched() > before + REGION // 8, "fio reads")
        return reader

    def begin_reading(self, number: int) -> subprocess.Popen[str]:
        """Begin to read and verify a region."""
        argv = ["fio", "--name=verify", "--ioengine=nbd", f"--uri=nbd+unix:///vm?socket={self.socket}", "--rw=read"]
        argv += [f"--offset={number * REGION}", f"--size={REGION}", f"--rate={RATE}", "--iodepth=4", *PATTERN]
        return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def fetched(self) -> int:
        """Bytes that the leaf has fetched."""
        [image] = self.client.status().images
        return image.fetched_bytes

    def finish(self, reader: subprocess.Popen[str]) -> None:
        """Wait for a reader; it must have read and verified all."""
        out, err = reader.communicate(timeout=PATIENCE)
        self.assertEqual(0, reader.returncode, out + err)
        job: dict[str, Any] = json.loads(out[out.index("{") :])["jobs"][0]
        self.assertEqual(0, job["error"])
        self.assertEqual(REGION, job["read"]["io_bytes"])
        self.stalls.append(round(job["read"]["clat_ns"]["max"] / 1e9, 2))

    def parent_in_use(self) -> HostProcess | None:
        """The inner host that the leaf reads from, if it is one of them."""
        [image] = self.client.status().images
        active = [path.host for path in image.paths if path.state == "active"]
        return self.inner.get(active[0]) if active else None

    def wait_for_inner_parent(self) -> HostProcess:
        """The inner host that the leaf reads from, once Volt has given it one."""
        wait_until(lambda: self.parent_in_use() is not None, "the leaf reads from an inner host")
        parent = self.parent_in_use()
        assert parent is not None
        return parent

    def test_an_inner_host_killed_again_and_again_costs_no_error(self) -> None:
        for number in range(ROUNDS):
            victim = self.wait_for_inner_parent()
            reader = self.read_region(number)
            victim.kill()
            victim.kill_daemons()
            self.finish(reader)
            victim.start().repair()
        self.finish(self.read_region(ROUNDS))
        self.assert_same_content(Path(self.client.vm("vm").disk.path), self.file)

    @pytest.mark.long
    def test_a_daemon_that_is_killed_or_hangs_costs_no_error(self) -> None:
        """Whether its children have left a killed daemon in the meantime depends on how long its agent needs."""
        for number, (own, sent) in enumerate(
            ((True, signal.SIGKILL), (False, signal.SIGKILL), (False, signal.SIGSTOP))
        ):
            victim = self.leaf if own else self.wait_for_inner_parent()
            reader = self.read_region(number)
            for pid in victim.daemons():
                os.kill(pid, sent)
            self.finish(reader)
            if sent == signal.SIGKILL:
                wait_until(partial(self.has_one_daemon, victim), "its agent has started the daemon again")
        wait_until(lambda: self.parent_in_use() != victim, "the leaf has left the parent that hangs")
        self.assert_same_content(Path(self.client.vm("vm").disk.path), self.file)

    def has_one_daemon(self, host: HostProcess) -> bool:
        return len(host.daemons()) == 1

    @pytest.mark.long
    def test_the_origin_away_for_a_while_costs_no_error(self) -> None:
        """Every host loses all its parents; reads wait, and go on when the origin is back."""
        reader = self.read_region(0)
        self.origin.kill()
        self.origin.kill_daemons()
        later = self.begin_reading(1)
        wait_until(self.cut_off, "the hosts have noticed")
        self.assertIsNone(later.poll())
        self.origin.start()
        for each in (reader, later):
            self.finish(each)

    def cut_off(self) -> bool:
        """Whether those who read from the origin know that it is gone."""
        images = [host.client().status().images[0] for host in self.inner.values()]
        paths = [path for image in images for path in image.paths if path.host == "origin"]
        return all(path.state != "active" for path in paths)
