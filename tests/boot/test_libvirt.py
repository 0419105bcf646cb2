"""The lab's private libvirtd."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import libvirt
import pytest

from lab.libvirt import PrivateLibvirt
from lab.process import processes_of
from tests.boot.vms import VmTestCase
from tests.patience import PATIENCE

pytestmark = pytest.mark.long

DOMAIN = """
<domain type='qemu'><name>idle</name><memory unit='MiB'>64</memory>
<os><type arch='x86_64' machine='q35'>hvm</type></os></domain>
"""


def mounts(folder: Path) -> list[str]:
    """The mounts that other programs see, but for those in temporary folders of other tests, which run beside this."""
    found = Path("/proc/self/mounts").read_text().splitlines()
    snapshots = [Path(line.split()[1]) for line in found]
    temporary = Path(tempfile.gettempdir())
    return [
        line
        for line, snapshot in zip(found, snapshots, strict=True)
        if not snapshot.is_relative_to(temporary) or snapshot.is_relative_to(folder)
    ]


class PrivateLibvirtTest(VmTestCase):
    def start_domain(self, uri: str) -> list[str]:
        """Start a VM. Returns the names of all that there are."""
        connection = libvirt.open(uri)
        try:
            connection.createXML(DOMAIN)
            return [domain.name() for domain in connection.listAllDomains()]
        finally:
            connection.close()

    def test_it_starts_vms_and_leaves_nothing(self) -> None:
        before = mounts(self.folder)
        with PrivateLibvirt(self.folder) as private:
            self.assertEqual(["idle"], self.start_domain(private.uri))
            self.assertEqual(before, mounts(self.folder))
            run_folder = Path(private.uri.partition("socket=")[2]).parent
            self.assertNotEqual({}, processes_of(run_folder))
        self.assertEqual({}, processes_of(run_folder))
        self.assertFalse(run_folder.exists())

    def test_its_vms_end_when_the_lab_is_killed(self) -> None:
        program = (
            "import sys; from pathlib import Path; from lab.libvirt import PrivateLibvirt\n"
            "it = PrivateLibvirt(Path(sys.argv[1])); it.start(); print(it.uri, flush=True); sys.stdin.read()"
        )
        lab = subprocess.Popen(
            [sys.executable, "-c", program, str(self.folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.addCleanup(lab.communicate)
        assert lab.stdout is not None
        uri = lab.stdout.readline().strip()
        run_folder = Path(uri.partition("socket=")[2]).parent
        self.addCleanup(shutil.rmtree, run_folder)
        self.start_domain(uri)
        pidfds = [os.pidfd_open(pid) for pid in processes_of(run_folder)]
        for pidfd in pidfds:
            self.addCleanup(os.close, pidfd)
        self.assertNotEqual([], pidfds)
        lab.send_signal(signal.SIGKILL)
        for pidfd in pidfds:
            self.assertEqual([pidfd], select.select([pidfd], [], [], PATIENCE)[0], "libvirtd outlived the lab")
