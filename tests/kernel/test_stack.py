"""Hosts of the kernel stack, as their users and callers see them: what ``test_story.py`` does not tell."""

from __future__ import annotations

import base64
import hashlib
import io
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lab.kernel.machine import Machine
from lab.kernel.tinyvm import tiny_vm
from tests.kernel.machines import SUITE
from tests.kernel.stacks import CHECK, MAKE, WRITE, WRITTEN, StackCase, fio, patiently, services
from tests.programs import qemu_io
from tests.unit.virtman.scene import folder_for
from tests.userspace.hosts import HostProcess, VoltProcess
from virtman.errors import AgentUnreachable, VmRuns

pytestmark = pytest.mark.long

SIZE = 8 << 20
SMALL = 2 << 20
LINK = "/run/in-place"

PAUSE = "5"
"""Seconds for which the network pauses: longer than a parent may take to answer a read."""

INDEX_IS_WRITTEN = """
while now=$(cut -d. -f1 /proc/uptime) value=$(cat /sys/fs/bcache/*-*/cache0/btree_written); do
  [ "$value" = "$last" ] || { last=$value since=$now; }
  [ $((now - since)) -lt 40 ] || exit 0
  sleep 1
done
"""
"""Ends when bcache has written down what it holds. What it fetches is not in its journal, and not known at once when a
reader has it; it is in the index 30 s after the first of what is not, by the guest's clock (Linux:
drivers/md/bcache/btree.c, bch_btree_leaf_dirty). So the index was not written for longer than that."""

SECTORS_FETCHED = """
for map in /dev/mapper/virtman-cachefrom-"$0"-*; do
  number=$(dmsetup info --columns --noheadings --separator : -o major,minor "$map")
  awk '{ print $3 }' "/sys/dev/block/$number/stat"
done
"""
"""What the cache of an image has read from the parents since it was opened."""


JOURNAL = "/var/log/journal"
"""Where this folder is, the journal outlives the machine's reboot (systemd-journald.service(8))."""

_PATIENT = "/run/systemd/system/virtman-disks.service.d"
NO_TIMEOUT = (
    f"mkdir -p {_PATIENT} && printf '[Service]\\nTimeoutStopSec=infinity\\n' > {_PATIENT}/patient.conf"
    " && systemctl daemon-reload"
)
"""Until the reboot a suspend may take as long as a slow machine needs. The lab limits how long a power-off takes."""

READ_WAITS = (
    "number=$(dmsetup info --columns --noheadings --separator : -o major,minor virtman-export-image)"
    ' && read -r reads rest < "/sys/dev/block/$number/inflight" && [ "$reads" -gt 0 ]'
)
"""A shell command that fails while no child's read of ``image`` waits."""

STEPPING = Path("/run/systemd/system/virtman-agent.service.d/stepping.conf")
STEPPING_AGENT = "/usr/bin/python3 /opt/virtman/tests/kernel/inside/stepping.py"
RESTART = "systemctl daemon-reload && systemctl restart virtman-agent.service"
HOW_IT_ENDED = """
while systemctl --quiet is-active virtman-agent.service; do sleep 0.1; done
systemctl show --value --property=Result --property=ExecMainStatus virtman-agent.service
"""


class BootTest(StackCase):
    def test_a_vm_boots_inside_a_host_with_two_parents_and_reads_the_right_bytes(self) -> None:
        tiny = tiny_vm(SUITE)
        self.addCleanup(self.origin.run, ["rm", "-f", f"/var/tmp/{tiny.disk.name}"])
        self.publish_file("tiny", Path(self.origin.send(tiny.disk, "/var/tmp")))
        parent, host = self.hosts[:2]
        self.create(parent, "other", "tiny")
        log = self.agent(host).boot("vm", "tiny", memory=128, network="none").machine.console_log
        self.wait_until(host, f"grep -q '{tiny.line}' {log}")
        self.assertEqual(["running"], [vm.state for vm in self.agent(host).vms()])
        [image] = self.agent(host).status().images
        self.assertEqual(["host-1", "origin"], [path.host for path in image.paths])
        host.run(["virtman", "resize", "vm", "128M"])
        nodes = host.run(["virsh", "qemu-monitor-command", "--hmp", "vm", "info block -v"])
        self.assertIn("virtual size: 128 MiB", nodes)
        host.run(["virtman", "snapshot", "create", "vm", "running"])
        self.assertEqual(["crash"], [snapshot.state for snapshot in self.agent(host).snapshots("vm")])
        self.assertRaises(VmRuns, self.agent(host).revert, "vm", "running")
        self.further_disk(host)

    def further_disk(self, host: Machine) -> None:
        """Another disk comes to the VM and goes, now and when it is started."""
        host.run(["virtman", "create", "data", "tiny"])
        for _ in range(2):
            host.run(["virtman", "attach-disk", "vm", "data"])
        host.run(["virtman", "resize", "data", "256M"])
        self.assertEqual("crash", self.agent(host).take_snapshot("data", "kept").state)
        blocks = host.run(["virsh", "qemu-monitor-command", "--hmp", "vm", "info block -v"])
        self.assertIn("/dev/mapper/virtman-vm-data", blocks)
        self.assertIn("virtual size: 256 MiB", blocks)
        host.run(["virtman", "stop", "--force", "vm"])
        host.run(["virtman", "start", "vm"])
        self.assertIn("virtman-vm-data", host.run(["virsh", "domblklist", "vm"]))
        for _ in range(2):
            host.run(["virtman", "detach-disk", "vm", "data"])
        self.assertNotIn("virtman-vm-data", host.run(["virsh", "domblklist", "vm"]))
        self.assertNotIn("virtman-vm-data", host.run(["virsh", "domblklist", "--inactive", "vm"]))
        host.run(["virtman", "destroy", "data"])


class InPlaceTest(StackCase):
    def test_a_block_device_is_served_where_it_is_as_long_as_it_is_the_same(self) -> None:
        self.device("image")
        self.device("other")
        before = self.origin.run(["sha256sum", "/dev/mapper/image"])
        self.origin.run(["ln", "-s", "/dev/mapper/image", LINK])
        self.addCleanup(self.origin.run, ["rm", "-f", LINK])
        published = self.origin.run(["virtman", "publish", "image", LINK, "--in-place"])
        self.assertIn("id:", published)
        self.assertEqual("1", self.origin.run(["blockdev", "--getro", LINK]).strip())
        path = self.create(self.host, "vm", "image")
        self.read(self.host, path, "image", SMALL // 2)
        self.origin.run(["ln", "-sfn", "/dev/mapper/other", LINK])
        self.wait_for("noticed", lambda: "is another device now" in self.trouble())
        # The agent says it first, and then takes away what others read by.
        self.wait_until(self.origin, "dmsetup ls > /tmp/maps && ! grep -q virtman-export /tmp/maps")
        self.wait_until(self.origin, "! blockdev --getro /dev/mapper/image | grep -q 1")
        self.origin.run(["ln", "-sfn", "/dev/mapper/image", LINK])
        self.wait_for("served again", lambda: not self.trouble())
        self.read(self.host, path, "image", SMALL)
        again = self.origin.run(["virtman", "publish", "image", "/dev/mapper/image", "--in-place"])
        self.assertEqual(published, again)
        self.assertIn(" /dev/mapper/image", self.origin.run(["virtman", "status"]))
        self.agent(self.host).destroy("vm")
        self._collect([self.host])
        self.origin.run(["virtman", "unpublish", "image"])
        self.assertEqual(before, self.origin.run(["sha256sum", "/dev/mapper/image"]))
        self.origin.run(["dmsetup", "remove", "image"])  # nobody has it any more

    def trouble(self) -> str:
        """Why the origin does not serve its only image; empty if it does."""
        [image] = self.agent(self.origin).status().images
        return (image.in_place and image.in_place.trouble) or ("" if image.serving else "it is not served")

    def device(self, name: str) -> None:
        """A map of the origin's that has a lasting name, over a loop device whose file is made of a seed."""
        file = f"/var/tmp/{name}.raw"
        self.origin.run(["sh", "-c", f'python3 -c "$0" {name} {SMALL} > {file}', MAKE])
        self.addCleanup(self.origin.run, ["rm", "-f", file])
        loop = self.origin.run(["losetup", "--find", "--show", file]).strip()
        self.addCleanup(self.origin.run, ["losetup", "--detach", loop])
        table = f"0 {SMALL // 512} linear {loop} 0"
        self.origin.run(["dmsetup", "create", name, "--uuid", f"LVM-{name}", "--table", table])
        self.addCleanup(self.origin.run, ["sh", "-c", f"! test -e /dev/mapper/{name} || dmsetup remove {name}"])


class ParentsTest(StackCase):
    """A parent or the network falls silent: reads wait, and none fails."""

    def setUp(self) -> None:
        super().setUp()
        self.parent, self.child = self.hosts[:2]

    def reader(self, image: str) -> str:
        """The path of a disk on a child of host-1, which has read nothing yet."""
        self.publish(image, SMALL)
        self.create(self.parent, f"vm-{image}", image)
        path = self.create(self.child, f"reader-{image}", image)
        self.wait_for("its child", lambda: self.states(image) == {"host-1": "active", "origin": "standby"})
        return path

    def states(self, image: str) -> dict[str, str]:
        """The states of the child's parents."""
        [found] = [one for one in self.agent(self.child).status().images if one.name == image]
        return {path.host: path.state for path in found.paths}

    def test_a_parent_that_hangs_or_is_cut_off_is_left_for_another(self) -> None:
        export = "virtman-export-hangs"
        for image, strike, mend in (
            ("hangs", ["dmsetup", "suspend", export], ["dmsetup", "resume", export]),
            ("silent", ["ip", "link", "set", "eth1", "down"], ["ip", "link", "set", "eth1", "up"]),
        ):
            path = self.reader(image)
            self.addCleanup(self.parent.run, ["sh", "-c", f"{' '.join(mend)} || true"])
            self.parent.run(strike)
            self.read(self.child, path, image, SMALL)
            self.assertEqual("active", self.states(image)["origin"])
            self.parent.run(mend)

    def test_a_network_that_pauses_costs_no_error_and_no_parent(self) -> None:
        path = self.reader("pauses")
        device = ["dev", "eth1", "root"]
        self.addCleanup(self.child.run, ["sh", "-c", f"tc qdisc del {' '.join(device)} 2>&1 || true"])
        self.child.run(["tc", "qdisc", "add", *device, "netem", "loss", "100%"])
        reading = self.begin_reading(self.child, path, "pauses", SMALL)
        self.child.run(["sleep", PAUSE])
        self.assertIsNone(reading.poll(), "it waits")
        self.child.run(["tc", "qdisc", "del", *device])
        self.done_reading(reading)
        self.wait_for("its parents", lambda: "lost" not in self.states("pauses").values())
        self.assertEqual(["host-1", "origin"], list(self.states("pauses")), "Volt gives no host other parents")


class CallersTest(StackCase):
    def test_eight_creates_of_three_images_at_once_succeed(self) -> None:
        for number in range(3):
            self.publish(f"image-{number}", SMALL)
        host = self.hosts[0]
        wanted = [(f"vm-{number}", f"image-{number % 3}") for number in range(8)]
        clients = [self.agent(host) for _ in wanted]
        with ThreadPoolExecutor(len(wanted)) as pool:
            made = list(
                pool.map(lambda client, names: patiently(lambda: client.create(*names).disk.path), clients, wanted)
            )
        self.assertEqual([f"/dev/mapper/virtman-vm-{vm}" for vm, _ in wanted], list(map(str, made)))
        self.assertEqual(str(made[7]), host.run(["virtman", "create", *wanted[7]]).strip())
        for path, (_, image) in zip(made, wanted, strict=True):
            self.read(host, str(path), image, SMALL)


class KillCase(StackCase):
    def kill_at(self, machine: Machine, step: str, act: Callable[[], object]) -> None:
        """Have the agent of a guest killed at a step of an act, and start it again."""
        self.addCleanup(machine.run, ["rm", "-rf", str(STEPPING.parent)])
        settings = f"[Service]\nRestart=no\nExecStart=\nExecStart={STEPPING_AGENT} {step}\n"
        machine.run(["sh", "-c", f"mkdir -p {STEPPING.parent} && cat > {STEPPING} && {RESTART}"], stdin=settings)
        self.assertRaises(AgentUnreachable, act)
        self.assertEqual(["signal", "9"], machine.run(["sh", "-c", HOW_IT_ENDED]).split())
        machine.run(["sh", "-c", f"rm {STEPPING} && {RESTART}"])
        self.agent(machine).repair()


class CrashTest(KillCase):
    def assert_nothing_half_made(self, machine: Machine) -> None:
        self.assertEqual([], self.agent(machine).vms())
        self.assertEqual([], self.agent(machine).status().orphans)

    def test_agent_killed_while_it_creates_destroys_and_lets_go_leaves_nothing_half_made(self) -> None:
        self.publish("image", SMALL)
        host = self.hosts[0]
        for step in ("attach:cached", "create:disk"):
            self.kill_at(host, step, lambda: self.create(host, "vm", "image"))
            self.assert_nothing_half_made(host)
        self.read(host, self.create(host, "vm", "image"), "image", SMALL)
        self.kill_at(host, "destroy:deleted", lambda: self.agent(host).destroy("vm"))
        self.assert_nothing_half_made(host)
        self.kill_at(host, "detach:layer", lambda: self.agent(host).gc())
        self.assert_nothing_half_made(host)
        self.read(host, self.create(host, "vm", "image"), "image", SMALL)

    def test_hosts_outlive_their_parent_and_come_back_with_their_vms_while_volt_and_origin_are_down(self) -> None:
        self.publish("image", SIZE)
        host, child = self.hosts[:2]
        path = self.create(host, "vm", "image")
        # Twice: bcache does not keep what it finds no memory for at once, and what is only fetched again for the child,
        # in the last half minute, may be lost (Linux: drivers/md/bcache/request.c, cached_dev_cache_miss, GFP_NOWAIT).
        for _ in range(2):
            self.read(host, path, "image", SIZE)
        host.run(fio(path, WRITE))
        host.run(["sh", "-c", INDEX_IS_WRITTEN])
        known = self.sectors_fetched(host)
        reading = self.begin_reading(child, self.create(child, "reader", "image"), "image", SIZE, seconds=15.0)
        self.wait_until(child, "test -e /run/reader-reads")
        later = self.sectors_fetched(host) - known
        host.cut_power()
        self.done_reading(reading)
        self.origin.cut_power()
        host.start()
        host.wait_up()
        services().start_agent(host)
        self.wait_until(host, f"test -e {path}")
        host.run(fio(path, CHECK))
        self.origin.start()
        self.origin.wait_up()
        services().start_volt()
        services().start_agent(self.origin)
        self.wait_for("Volt answers", lambda: bool(self.agent(host).images()))
        # Not before: what the cache had lost would be waited for, and not counted.
        self.read(host, path, "image", SIZE, start=WRITTEN)
        lost = self.sectors_fetched(host)
        self.assertEqual(0, lost, f"sectors lost with the power; {later} were fetched just before")

    def sectors_fetched(self, host: Machine) -> int:
        return int(host.run(["sh", "-c", SECTORS_FETCHED, "image"]))

    def test_a_host_is_shut_down_while_its_parents_are_gone_and_its_child_reads_on_by_another(self) -> None:
        self.publish("image", SMALL)
        host, child = self.hosts[:2]
        host.run(["mkdir", "-p", JOURNAL])
        self.addCleanup(host.run, ["rm", "-rf", JOURNAL])
        host.run(["sh", "-c", f"journalctl --flush && {NO_TIMEOUT} && systemctl start virtman-disks.service"])
        self.create(host, "vm", "image")
        host.run(["systemctl", "restart", "virtman-agent.service"])
        self.assertTrue(self.agent(host).status().images[0].serving, "the agent alone was restarted")
        # Its lease may have run out meanwhile.
        self.wait_for("in the tree", lambda: host.name in str(self.agent(self.origin).tree("image")))
        path = self.create(child, "reader", "image")
        self.addCleanup(self.origin.run, ["ip", "link", "set", "eth1", "up"])
        self.origin.run(["ip", "link", "set", "eth1", "down"])
        reading = self.begin_reading(child, path, "image", SMALL)
        self.wait_until(host, READ_WAITS)
        host.power_off()
        self.origin.run(["ip", "link", "set", "eth1", "up"])
        self.done_reading(reading)
        host.start()
        host.wait_up()
        said = host.run(["journalctl", "--boot=-1", "--unit=virtman-disks.service", "--no-pager"])
        self.assertIn("virtman-disks.service: Deactivated successfully.", said)
        said = host.run(["journalctl", "--boot=-1", "--unit=virtman-agent.service", "--no-pager"])
        self.assertIn("all images are suspended: image", said)
        services().start_agent(host)
        self.wait_for("the agent answers", lambda: bool(self.agent(host).vms()))


class SnapshotCase(KillCase):
    def virtman(self, *words: str) -> str:
        return self.host.run(["virtman", *words])

    def content(self, path: str) -> str:
        return self.host.run(["sha256sum", path])

    def changed(self, path: str, block: int) -> str:
        """What the disk holds after two blocks were written."""
        where = [f"of={path}", "bs=64K", f"seek={block}", "count=2", "conv=fsync"]
        self.host.run(["dd", "if=/dev/urandom", *where])
        return self.content(path)


class SnapshotTest(SnapshotCase):
    def test_a_disk_grows_and_goes_back_to_what_its_snapshots_keep_also_when_the_agent_is_killed(self) -> None:
        self.publish("image", SMALL)
        path = self.create(self.host, "vm", "image")
        one = self.changed(path, 0)
        self.virtman("snapshot", "create", "vm", "one")
        self.virtman("resize", "vm", "4M")
        two = self.changed(path, SMALL // (64 << 10) - 1)
        self.agent(self.host).take_snapshot("vm", "two")
        self.changed(path, 1)
        self.kill_at(self.host, "revert:reverted", lambda: self.agent(self.host).revert("vm", "one"))
        listed = [line.split()[:2] for line in self.virtman("snapshot", "list", "vm").splitlines()]
        self.assertEqual((["one", "*"], "two", one), (listed[1], listed[2][0], self.content(path)))
        self.virtman("snapshot", "revert", "vm", "two")
        self.assertEqual(two, self.content(path))
        self.virtman("snapshot", "delete", "vm", "one")
        agent = self.agent(self.host)
        self.assertEqual((["two"], two), ([snapshot.name for snapshot in agent.snapshots("vm")], self.content(path)))
        self.assertEqual((4 << 20, []), (agent.vms()[0].disk.size, agent.status().orphans))


class StreamTest(SnapshotCase):
    """VMs go to a host of the chunk store, on the machine that the guests run on, and come back."""

    def setUp(self) -> None:
        super().setUp()
        folder = folder_for(self)
        volt = VoltProcess(folder)
        self.addCleanup(volt.stop)
        volt.start()
        other = HostProcess("other", folder, volt.url)
        self.addCleanup(other.tear_down)
        self.other = other.start()
        self.file = folder / "file"
        self.file.write_bytes(random.Random("image").randbytes(SMALL))
        self.other.publish("same", self.file)
        self.file.unlink()
        self.publish("image", SMALL)
        self.path = self.create(self.host, "vm", "image", 2 * SMALL)

    def sent(self, *options: str) -> bytes:
        return base64.b64decode(self.host.run(["sh", "-c", 'virtman send "$0" "$@" | base64', "vm", *options]))

    def receive(self, stream: bytes) -> None:
        text = base64.b64encode(stream).decode()
        self.host.run(["sh", "-c", "base64 -d | virtman receive vm image"], stdin=text)

    def content_there(self) -> str:
        """The sum of the disk on the other host."""
        self.other.export_vm("vm", self.file)
        try:
            return hashlib.sha256(self.file.read_bytes()).hexdigest()
        finally:
            self.file.unlink()

    def test_to_the_other_stack_and_back(self) -> None:
        one = self.changed(self.path, 0).split()[0]
        self.virtman("snapshot", "create", "vm", "one")
        two = self.changed(self.path, 2 * SMALL // (64 << 10) - 2).split()[0]
        self.virtman("snapshot", "create", "vm", "two")
        self.other.receive("vm", "same", io.BytesIO(self.sent("--with-snapshots")))
        self.assertEqual(two, self.content_there())
        self.other.revert("vm", "one")
        self.assertEqual(one, self.content_there())
        self.other.revert("vm", "two")
        qemu_io(self.other.vm("vm").disk.path, "write -P 7 100k 300k")
        changes = io.BytesIO()
        self.other.send("vm", changes, since="two")
        self.receive(changes.getvalue())
        self.assertEqual(self.content_there(), self.content(self.path).split()[0])
        self.virtman("snapshot", "revert", "vm", "one")
        self.assertEqual(one, self.content(self.path).split()[0])
