"""The disk of a VM that runs in libvirt: points in time of it are kept and forgotten, and it grows."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import libvirt
import libvirt_qemu
import pytest

from drivers.errors import DriverError
from lab.cluster import Cluster
from lab.console import Console
from lab.localboot import block_nodes
from lab.login import io_errors, wait_login
from lab.process import attempts
from tests.boot.killing_agent import AGENT
from tests.boot.test_tree_boot import shut_down
from tests.boot.vms import VmTestCase
from tests.patience import PATIENCE
from virtman.errors import VirtmanError, VmRuns
from virtman.records import CRASH, FROZEN

pytestmark = pytest.mark.long

VM = "vm"
DATA = "data"
FURTHER = f"/dev/disk/by-id/scsi-0QEMU_QEMU_HARDDISK_{DATA}"
MIB = 1 << 20
USER = "libvirt-qemu"
"""Whom libvirt runs QEMU as, where it is not told otherwise."""

WRITER = """\
# Writes one of four files, and reads all of them back from the disk, again and again.
sum_up() { md5sum /root/turn-* > /run/sums; }
turn=0
sum_up
while :; do
  turn=$((turn + 1))
  echo 1 > /proc/sys/vm/drop_caches
  [ "$turn" = 1 ] || md5sum -c --status /run/sums || echo "turn $turn" >> /run/bad
  dd if=/dev/urandom of=/root/turn-$((turn % 4)) bs=64k count=2 conv=fsync status=none || echo "write" >> /run/bad
  sum_up
  echo "$turn" > /run/turn
done
"""


GUEST_AGENT = "pidof qemu-ga > /dev/null || qemu-ga --daemonize --path /dev/virtio-ports/org.qemu.guest_agent.0"


class SnapshotsTest(VmTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.order = self.folder / "order"
        self.folder.chmod(0o711)
        self.private = self.libvirt(USER)
        self.cluster_ = Cluster(
            self.folder,
            1,
            libvirt=self.private.uri,
            agent=[sys.executable, "-m", "tests.boot.killing_agent", self.order],
        )
        self.addCleanup(self.cluster_.stop)
        self.cluster_.start()
        self.cluster_.run_folder(0).parent.chmod(0o711)
        self.agent = self.cluster_.agents[0]
        self.agent.publish("guest", self.guest.disk)
        self.agent.create(VM, "guest")
        self.agent.take_snapshot(VM, "empty")  # the VM begins with two layers
        booted = self.agent.boot(VM, "guest", memory=256, network="none")
        self.console_log = Path(booted.machine.console_log)
        self.log_in()

    def log_in(self) -> None:
        """Wait until the VM has booted, and begin a shell in it."""
        wait_login(VM, self.console_log, PATIENCE)
        self.console = Console(self.private.uri, VM, PATIENCE)
        self.addCleanup(self.console.close)

    # In the guest

    def write(self) -> str:
        """Have the guest write new data over the old. Returns its checksum."""
        self.console.run("dd if=/dev/urandom of=data bs=1M count=8 conv=fsync status=none")
        return self.read()

    def read(self) -> str:
        """The checksum of what the guest reads from its disk."""
        self.console.run("echo 1 > /proc/sys/vm/drop_caches")
        return self.console.run("md5sum data")

    def size(self) -> int:
        """The size of the disk, as the guest sees it."""
        return 512 * int(self.console.run("cat /sys/class/block/vda/size"))

    def begin_writing(self) -> None:
        """Start the program that writes and reads for as long as the VM runs."""
        self.console.run(f"cat > /run/writer <<'END'\n{WRITER}END")
        self.console.run("touch /root/turn-0; echo 0 > /run/turn; sh /run/writer < /dev/null > /dev/null 2>&1 &")

    def assert_goes_on(self, data: str) -> None:
        """The guest has what it wrote, and goes on writing and reading, without any error."""
        self.assertEqual(data, self.read())
        whole = 2 + int(self.console.run("cat /run/turn"))
        self.console.run(f"until [ $(cat /run/turn) -ge {whole} ]; do sleep 0.1; done")
        self.assertEqual("", self.console.run("cat /run/bad 2>/dev/null || true"))
        self.assertEqual(0, io_errors(self.console_log))

    # From outside

    def names(self) -> list[str]:
        """The snapshots that the agent tells of."""
        return [snapshot.name for snapshot in self.agent.snapshots(VM)]

    def take_frozen(self, name: str) -> None:
        """Keep a snapshot while the guest holds still; a slow one is asked again."""
        self.console.run(GUEST_AGENT)
        for _ in attempts(PATIENCE):
            if self.agent.take_snapshot(VM, name).state == FROZEN:
                return
            self.agent.delete_snapshot(VM, name)
        self.fail("the guest does not hold still")

    def domain(self) -> Any:
        """The VM, as libvirt has it."""
        connection = libvirt.open(self.private.uri)
        self.addCleanup(connection.close)
        return connection.lookupByName(VM)

    def assert_defined(self) -> None:
        """Whoever starts the VM begins with the layer that it writes to now."""
        definition = self.domain().XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE)
        [disk] = [node for node in block_nodes(ET.fromstring(definition)) if node["node-name"] == "virtman-disk-node"]
        self.assertEqual(Path(self.agent.vm(VM).disk.path).resolve(), Path(disk["file"]["filename"]))

    def cut_off(self, when: str, pid: int, act: Callable[[], object]) -> None:
        """Have a process killed right before a command, and then the agent end what it had begun.

        It does so by itself, too, in a while.
        """
        self.order.write_text(f"{when} {pid}")
        error = self.assertRaises((VirtmanError, DriverError), act)
        self.assertFalse(self.order.exists(), f"nobody was killed: {error}")
        if pid == AGENT:
            self.cluster_.restart_agent(0)
        self.private.wait_ready()
        self.agent.repair()

    def test_snapshots_of_a_vm_that_runs_are_kept_and_forgotten_whoever_is_killed_and_its_disk_grows(self) -> None:
        """One test, because a boot takes long."""
        first = self.write()
        self.begin_writing()
        self.take_and_forget(first)
        second = self.write()
        self.take_frozen("second")
        third = self.write()
        self.grow(third)
        self.cut_off_taking(third)
        self.cut_off_forgetting(third)
        self.further_disk(third)
        self.start_by_libvirt()
        self.go_back("second", second)

    def take_and_forget(self, first: str) -> None:
        """A snapshot of a guest without an agent; it is merged while the guest writes."""
        self.assertEqual(CRASH, self.agent.take_snapshot(VM, "first").state)
        self.assert_goes_on(first)
        self.assert_defined()
        data = self.write()
        self.agent.take_snapshot(VM, "other")
        self.agent.delete_snapshot(VM, "first")
        self.assertEqual(["empty", "other"], self.names())
        self.assert_goes_on(data)
        self.assert_defined()
        self.agent.delete_snapshot(VM, "other")
        self.assert_goes_on(data)

    def grow(self, data: str) -> None:
        """The guest sees the new size at once. Nothing goes back while it runs."""
        before = self.size()
        self.agent.resize(VM, before + 64 * MIB)
        self.assertEqual(before + 64 * MIB, self.size())
        error = self.assertRaises(VmRuns, self.agent.revert, VM, "second")
        self.assertEqual(f"vm {VM!r} is running; stop it before its disk goes back to a snapshot", str(error))
        self.assert_goes_on(data)

    def cut_off_taking(self, data: str) -> None:
        """The agent and libvirtd are killed while the guest holds still, before its QEMU goes over to the new layer."""
        self.cut_off("blockdev-snapshot", AGENT, lambda: self.agent.take_snapshot(VM, "third"))
        self.assertEqual(["empty", "second", "third"], self.names())
        self.assert_goes_on(data)
        self.assert_defined()
        self.cut_off("blockdev-snapshot", self.private.pid, lambda: self.agent.take_snapshot(VM, "fourth"))
        self.assertEqual(["empty", "second", "third"], self.names())
        self.assert_goes_on(data)
        self.assert_defined()

    def cut_off_forgetting(self, data: str) -> None:
        """The agent and libvirtd are killed when all is copied, before QEMU changes what the layer above is over."""
        self.take_frozen("fifth")
        self.cut_off("job-finalize", AGENT, lambda: self.agent.delete_snapshot(VM, "third"))
        self.assertEqual(["empty", "second", "fifth"], self.names())
        self.assert_goes_on(data)
        self.cut_off("job-finalize", self.private.pid, lambda: self.agent.delete_snapshot(VM, "fifth"))
        self.assertEqual(["empty", "second"], self.names())
        self.assert_goes_on(data)
        self.assert_defined()

    def further_disk(self, data: str) -> None:
        """Another disk comes, grows, is kept, and goes, while the guest writes to its own; it keeps what it has."""
        self.agent.create(DATA, "guest")
        self.cut_off("device_add", AGENT, lambda: self.agent.attach_disk(VM, DATA))
        self.assertEqual([DATA], self.agent.vm(VM).disks)
        written = self.write_further()
        self.agent.take_snapshot(DATA, "snapshot")
        size = self.agent.vm(DATA).disk.size or 0
        self.agent.resize(DATA, size + 64 * MIB)
        self.console.run(f"until [ $(blockdev --getsize64 {FURTHER}) = {size + 64 * MIB} ]; do sleep 0.1; done")
        self.assert_goes_on(data)
        self.cut_off("device_del", self.private.pid, lambda: self.agent.detach_disk(VM, DATA))
        self.agent.detach_disk(VM, DATA)
        self.console.run(f"until [ ! -e {FURTHER} ]; do sleep 0.1; done")
        self.agent.attach_disk(VM, DATA)
        self.assertEqual(written, self.read_further())
        self.agent.delete_snapshot(DATA, "snapshot")
        self.agent.detach_disk(VM, DATA)
        self.assertEqual([], [name for name in self.opened() if DATA in name])
        self.agent.attach_disk(VM, DATA)
        self.further = written

    def write_further(self) -> str:
        """Have the guest write to its further disk. Returns the checksum."""
        self.console.run(f"until [ -b {FURTHER} ]; do sleep 0.1; done")
        self.console.run(f"dd if=/dev/urandom of={FURTHER} bs=1M seek=1 count=8 conv=fsync status=none")
        return self.read_further()

    def read_further(self) -> str:
        """The checksum of what the guest reads from its further disk."""
        self.console.run(f"until [ -b {FURTHER} ]; do sleep 0.1; done; echo 1 > /proc/sys/vm/drop_caches")
        return self.console.run(f"dd if={FURTHER} bs=1M skip=1 count=8 status=none | md5sum")

    def opened(self) -> list[str]:
        """The files that the VM's QEMU has open."""
        command = json.dumps({"execute": "query-named-block-nodes", "arguments": {"flat": True}})
        answer = json.loads(libvirt_qemu.qemuMonitorCommand(self.domain(), command, 0))
        return [node["file"] for node in answer["return"]]

    def start_by_libvirt(self) -> None:
        """What starts the VM without the agent begins with what it wrote last."""
        self.agent.take_snapshot(VM, "last")
        data = self.write()
        self.shut_down()
        self.domain().create()
        self.log_in()
        self.assertEqual((data, self.further), (self.read(), self.read_further()))
        self.agent.detach_disk(VM, DATA)
        self.agent.destroy(DATA)

    def go_back(self, snapshot: str, data: str) -> None:
        """A VM that is off goes back to a snapshot, in size, too."""
        size = self.guest.disk.stat().st_size
        self.shut_down()
        self.agent.revert(VM, snapshot)
        self.assert_defined()
        self.agent.start(VM)
        self.log_in()
        self.assertEqual((data, size), (self.read(), self.size()))
        self.assertEqual(0, io_errors(self.console_log))

    def shut_down(self) -> None:
        """Shut the VM down in good order."""
        self.console.run("sync")
        shut_down(self.cluster_, VM, host=0)
