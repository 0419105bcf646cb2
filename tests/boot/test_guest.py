"""The lab's guest, booted by a plain QEMU."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
from pathlib import Path

import pycdlib
import pytest

from lab.login import io_errors, wait_login
from lab.process import attempts
from tests.boot.vms import VmTestCase
from tests.patience import PATIENCE

pytestmark = pytest.mark.long

PRESS_AGAIN = 10.0


class GuestTest(VmTestCase):
    def boot(self, *options: str) -> subprocess.Popen[bytes]:
        """A QEMU that writes its console to a file and keeps nothing."""
        argv = ["qemu-system-x86_64", "-m", "256", "-display", "none", "-serial", f"file:{self.folder}/console"]
        argv += ["-qmp", f"unix:{self.folder}/qmp,server=on,wait=off", "-snapshot", *options]
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def seed(self, meta_data: str) -> Path:
        """A NoCloud seed (cloud-init: ISO 9660 with the label cidata)."""
        path, iso = self.folder / "seed.iso", pycdlib.PyCdlib()
        iso.new(interchange_level=3, joliet=3, vol_ident="cidata")
        for name, text in (("meta-data", meta_data), ("user-data", "#cloud-config\n")):
            (self.folder / name).write_text(text)
            iso.add_file(str(self.folder / name), f"/{name.replace('-', '').upper()}.;1", joliet_path=f"/{name}")
        iso.write(str(path))
        iso.close()
        return path

    def press_power_button(self) -> None:
        """What libvirt's shutdown does."""
        with socket.socket(socket.AF_UNIX) as monitor:
            for _ in attempts(10):
                if monitor.connect_ex(f"{self.folder}/qmp") == 0:
                    break
            for command in ("qmp_capabilities", "system_powerdown"):
                monitor.sendall(json.dumps({"execute": command}).encode())
            # QEMU drops commands of a monitor that hangs up before it has read them.
            received = b""
            while b"POWERDOWN" not in received and (some := monitor.recv(4096)):
                received += some

    def test_the_disk_boots_by_itself_and_powers_off_at_the_button(self) -> None:
        process = self.boot(str(self.guest.disk))
        wait_login("guest", self.folder / "console", PATIENCE)
        for _ in attempts(PATIENCE):  # the prompt may come before anybody in the guest listens to the button
            with contextlib.suppress(OSError):  # QEMU is about to end
                self.press_power_button()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PRESS_AGAIN)
                break
        self.assertEqual(0, process.returncode)
        self.assertEqual(0, io_errors(self.folder / "console"))

    def test_the_prompt_shows_the_name_that_the_seed_gives(self) -> None:
        disk = f"file={self.guest.disk},if=virtio,format=raw"
        seed = self.seed('{"instance-id": "1",\n "local-hostname": "vm-7"}\n')
        self.boot("-M", "q35", "-drive", disk, "-drive", f"file={seed},if=virtio,format=raw")
        wait_login("vm-7", self.folder / "console", PATIENCE)
