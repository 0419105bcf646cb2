"""A host that was installed as docs/operations.md says, word by word, on a guest as Debian delivers it."""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path

import pytest

from lab.kernel.machine import COMMAND_TIMEOUT, Machine
from lab.kernel.root import root
from lab.kernel.services import AGENT_SETTINGS, TOKEN_FILE, VOLT_PORT
from lab.kernel.tinyvm import tiny_vm
from lab.kernel.wheels import wheels
from lab.tools import CHECKOUT, run
from tests.kernel.machines import SUITE, changed_on_purpose
from tests.kernel.stacks import CHECK, WRITE, WRITTEN, StackCase, fio, services
from tests.kernel.test_stack import SMALL

pytestmark = pytest.mark.long

PROJECT = (
    "setup.py",
    "pyproject.toml",
    "virtman",
    "volt",
    "drivers",
    "opennebula_tm",
    "openstack_nova_patch",
    "chunkd",
    "deploy",
)
CACHE_BYTES = 600 << 20

AS_DELIVERED = """
touch /etc/lab-as-delivered
rm /usr/local/bin/virtman /usr/local/bin/volt /etc/systemd/system/virtman-*.service /etc/systemd/system/volt.service
rm -r /etc/multipath/conf.d /etc/lvm/lvmlocal.conf /opt/virtman
rm -r /usr/local/lib/python3.*/dist-packages
for unit in /etc/systemd/system/*; do
  case $(readlink "$unit") in /dev/null) rm "$unit" ;; esac
done
systemctl daemon-reload
systemctl --quiet enable libvirtd.service
"""
"""The lab's own files go, and what it keeps from being started. The chunk store stays: guests have no Rust."""

SLOW = f"""
unit=/etc/systemd/system/virtman-disks.service
mkdir $unit.d
{{
  printf '[Service]\\nTimeoutStopSec=infinity\\nExecStart=\\n'
  sed -n 's/^ExecStart=-timeout [0-9]*/ExecStart=-timeout {COMMAND_TIMEOUT:.0f}/p' $unit
}} > $unit.d/slow.conf
systemctl daemon-reload
"""
"""What an administrator of a slow machine does."""


def installing() -> str:
    """The commands that docs/operations.md has for a host, but for what the coordinator alone does."""
    [section] = re.findall(r"^### As services$(.*?)^## ", (CHECKOUT / "docs/operations.md").read_text(), re.M | re.S)
    lines = re.findall(r"^    (.*)$", section, re.M)
    return "\n".join(line for line in lines if "on the coordinator" not in line and "/etc/volt" not in line)


class InstalledTest(StackCase):
    def setUp(self) -> None:
        super().setUp()
        self.guest = self.hosts[1]
        self.addCleanup(self.as_the_lab_has_it)
        folder = Path(self.enterContext(tempfile.TemporaryDirectory(dir=self.guest.console_log.parent)))
        self.anew(folder)
        self.guest.run(["sh", "-ec", AS_DELIVERED])
        run(["tar", "--create", "--file", folder / "clone.tar", "--exclude=__pycache__", "-C", CHECKOUT, *PROJECT])
        run(["tar", "--create", "--file", folder / "wheels.tar", "-C", wheels(root(SUITE)), "."])
        for name in ("clone", "wheels"):
            self.guest.run(["mkdir", f"/root/{name}"])
            self.guest.run(["tar", "-x", "-C", f"/root/{name}", "-f", self.guest.send(folder / f"{name}.tar", "/root")])

    def anew(self, folder: Path) -> None:
        """Begin the guest with an empty root and two disks more."""
        self.guest.cut_power()
        self.guest.reset_disk()
        for name in ("first", "second"):
            with (folder / name).open("wb") as disk:
                os.truncate(disk.fileno(), CACHE_BYTES)
            self.guest.further_disks.append(folder / name)
        self.guest.start()
        self.guest.wait_up()

    def as_the_lab_has_it(self) -> None:
        """Begin the guest with an empty root once more, and its agent."""
        self.guest.cut_power()
        self.guest.reset_disk()
        self.guest.further_disks.clear()
        self.guest.start()
        self.guest.wait_up()
        services().settle(self.guest)
        services().start_agent(self.guest)
        changed_on_purpose()

    def install(self) -> None:
        """Do what the docs say, with what an administrator settles."""
        self.guest.run(["mkdir", "-p", "-m", "700", str(Path(TOKEN_FILE).parent)])
        self.guest.run(["sh", "-c", f"umask 077; cat > {TOKEN_FILE}"], stdin=self.origin.run(["cat", TOKEN_FILE]))
        # What is not compiled now is when it is imported: under emulation that saves minutes.
        no_index = ["PIP_NO_INDEX=1", "PIP_FIND_LINKS=/root/wheels", "PIP_NO_COMPILE=1"]
        before, enabling = installing().split("systemctl enable", 1)
        self.guest.run(["env", "-C", "/root/clone", *no_index, "sh", "-ec", before])
        settings = f"VIRTMAN_VOLT=http://{self.origin.address}:{VOLT_PORT}\nVIRTMAN_VOLT_TOKEN_FILE={TOKEN_FILE}\n"
        self.guest.run(["tee", "--append", AGENT_SETTINGS], stdin=settings)
        # The VM of this test listens to nobody who wants it to shut down.
        self.guest.run(["tee", "--append", "/etc/default/libvirt-guests"], stdin="SHUTDOWN_TIMEOUT=1\n")
        self.guest.run(["sh", "-ec", SLOW])
        self.guest.run(["sh", "-ec", f"systemctl enable{enabling}"])

    def end_of(self, machine: Machine, path: str) -> str:
        """The sum of what the test does not write to."""
        return machine.run(["sh", "-c", f"tail -c {SMALL} {path} | sha256sum"])

    def test_it_comes_back_from_a_reboot_with_its_vms_and_its_cache(self) -> None:
        tiny = tiny_vm(SUITE)
        self.addCleanup(self.origin.run, ["rm", "-f", f"/var/tmp/{tiny.disk.name}"])
        self.publish_file("tiny", Path(self.origin.send(tiny.disk, "/var/tmp")))
        self.publish("image", SMALL + WRITTEN)
        self.install()
        self.guest.run(["virtman", "cache", "add", "/dev/disk/by-id/virtio-second"])
        self.guest.run(["virtman", "cache", "remove", "/var/lib/virtman/cache/pool"])
        path = self.create(self.guest, "data", "image")
        self.assertEqual(self.end_of(self.origin, "/var/tmp/image.raw"), self.end_of(self.guest, path))
        self.guest.run(fio(path, WRITE))
        booted = json.loads(
            self.guest.run(["virtman", "boot", "vm", "tiny", "--memory", "128", "--network", "none", "--json"])
        )
        self.wait_until(self.guest, f"grep -q '{tiny.line}' {booted['machine']['console_log']}")
        self.guest.power_off()
        self.guest.further_disks.reverse()
        self.guest.start()
        self.guest.wait_up()
        self.wait_until(self.guest, "virsh list --name | grep -qx vm")
        self.guest.run(fio(path, CHECK))
        self.assertEqual(self.end_of(self.origin, "/var/tmp/image.raw"), self.end_of(self.guest, path))
        [volume] = json.loads(self.guest.run(["virtman", "cache", "list", "--json"]))
        self.assertEqual("running", volume["state"])
        self.assertEqual("", self.guest.run(["systemctl", "list-units", "--failed", "--plain", "--no-legend"]))
        self.forget()
