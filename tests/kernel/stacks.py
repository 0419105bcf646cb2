"""Tests of whole hosts: Volt on the origin and an agent of the kernel stack on each guest."""

from __future__ import annotations

import contextlib
import functools
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from lab.errors import CommandFailed
from lab.kernel.machine import COMMAND_TIMEOUT, Machine
from lab.kernel.services import Services, agent
from lab.process import attempts
from tests.kernel.machines import FAILED_PATH, KernelCase, changed_on_purpose, cluster
from virtman.errors import AgentUnreachable, CoordinatorDown

T = TypeVar("T")

READER = "/opt/virtman/tests/kernel/inside/reader.py"

WRITTEN = 2 << 20
"""Bytes at the start of a disk that a test writes."""
WRITE = "--rw=randwrite --do_verify=1"
CHECK = "--rw=randread --verify_only=1"

MAKE = "import random, sys; sys.stdout.buffer.write(random.Random(sys.argv[1]).randbytes(int(sys.argv[2])))"


def fio(path: str, mode: str, *, size: int = WRITTEN, **more: int | str) -> list[str]:
    """Write, or read and compare, a pattern with checksums at the start of a disk. ``more``: other options of fio."""
    always = ["--name=vm", "--bs=16k", "--direct=1", "--verify=crc32c", "--end_fsync=1"]
    options = {"filename": path, "size": size, **more}
    return ["fio", *always, *(f"--{name}={value}" for name, value in options.items()), *mode.split()]


@functools.cache
def services() -> Services:
    """Volt with trees of fanout 1, so that host-1 is the parent of host-2, and the agents; they end with the guests.

    So files whose tests want guests without an agent have names that come before those of files with these.
    """
    started = Services(cluster().machines, volt_settings=["VOLT_FANOUT=1"])
    started.start()
    changed_on_purpose()
    return started


def patiently(act: Callable[[], T]) -> T:
    """Do what asks Volt, and again while that does not answer in time: its guest may get no processor for seconds."""
    for _ in attempts(COMMAND_TIMEOUT):
        try:
            return act()
        except CoordinatorDown as error:
            silence = error
    raise silence


class StackCase(KernelCase):
    """A test that publishes images and makes VMs. Afterwards all is removed by the commands for it; nothing is left."""

    agent = staticmethod(agent)
    forgiven: tuple[str, ...] = FAILED_PATH

    def setUp(self) -> None:
        """Have all agents up."""
        services()
        super().setUp()
        self.hosts = [machine for name, machine in self.machines.items() if name != "origin"]
        self.addCleanup(self.forget)

    def publish(self, name: str, size: int) -> None:
        """Publish an image on the origin, made of its name as seed."""
        file = f"/var/tmp/{name}.raw"
        self.origin.run(["sh", "-c", f'python3 -c "$0" {name} {size} > {file}', MAKE])
        self.addCleanup(self.origin.run, ["rm", "-f", file])
        self.publish_file(name, Path(file))

    def publish_file(self, name: str, file: Path) -> None:
        """Publish a file of the origin's, there: the program that publishes a file opens it."""

        def publish() -> None:
            try:
                self.origin.run(["virtman", "publish", name, str(file)], timeout=COMMAND_TIMEOUT)
            except CommandFailed as error:
                if "when Volt answers" in error.output:
                    raise CoordinatorDown(error.output) from error
                raise

        patiently(publish)

    def create(self, machine: Machine, vm: str, image: str, size: int | None = None) -> str:
        """Make a VM's disk and return its path."""
        return str(patiently(lambda: self.agent(machine).create(vm, image, size)).disk.path)

    def begin_reading(
        self, machine: Machine, path: str, image: str, size: int, *, start: int = 0, seconds: float = 0.0
    ) -> subprocess.Popen[str]:
        """Begin to read a disk and compare it with an image; ``done_reading`` waits for it."""
        return machine.begin(["python3", READER, path, image, str(size), str(start), str(seconds)])

    def done_reading(self, process: subprocess.Popen[str]) -> None:
        """Wait for a reader; the test fails if it saw a wrong byte or an error."""
        said = process.communicate(timeout=COMMAND_TIMEOUT)[0]
        self.assertEqual(0, process.returncode, said)

    def read(self, machine: Machine, path: str, image: str, size: int, *, start: int = 0) -> None:
        """Read a disk once, from ``start`` on, and compare it with an image."""
        self.done_reading(self.begin_reading(machine, path, image, size, start=start))

    def fetched(self, machine: Machine) -> int:
        """Bytes that a host has read from all its parents' disks that are there now."""
        counts = machine.run(["sh", "-c", "cat /sys/block/sd*/stat"]).splitlines()
        return sum(int(line.split()[2]) for line in counts) * 512

    def wait_for(self, what: str, holds: Callable[[], bool]) -> None:
        """Wait until it holds of what agents say: to ask one costs a guest less than to start a command."""
        for _ in attempts(COMMAND_TIMEOUT):
            with contextlib.suppress(AgentUnreachable, CoordinatorDown):
                if holds():
                    return
        self.fail(f"still not: {what}")

    def wait_until(self, machine: Machine, command: str) -> None:
        """Wait until a shell command succeeds in a guest."""
        loop = f"until {{ {command}; }} > /dev/null 2>&1; do sleep 0.5; done"
        try:
            machine.run(["timeout", str(COMMAND_TIMEOUT), "sh", "-c", loop], timeout=COMMAND_TIMEOUT + 60)
        except CommandFailed:
            self.fail(f"{machine.name}: still not: {command}")

    def forget(self) -> None:
        """Destroy all VMs, withdraw all images, and have every host remove them."""
        for machine in reversed(self.hosts):
            for vm in self.agent(machine).vms():
                self.agent(machine).destroy(vm.name)
        self._collect(self.hosts)
        for image in patiently(self.agent(self.origin).images):
            patiently(partial(self.agent(self.origin).unpublish, image.name))
        self._collect([self.origin])

    def _collect(self, machines: Sequence[Machine]) -> None:
        """A host keeps what its children need until its next heartbeat says that they have left."""
        for _ in attempts(COMMAND_TIMEOUT):
            for machine in machines:
                patiently(self.agent(machine).gc)
            if not any(self.agent(machine).status().images for machine in machines):
                return
        self.fail("images are kept by hosts that nobody needs them of")
