"""Private qcow2 disks of VMs and their snapshots: of VMs that run, with crashes at every step, and on a full disk."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from drivers.base import Monitor, Range
from drivers.blocks import open_blocks
from drivers.errors import BadDisk, CommandFailed, DiskInUse, DriverError, MonitorFailed, NoSpace, NotPossible
from drivers.qemu import monitor as monitors
from drivers.qemu.nodes import Nodes
from drivers.qemu.streaming import JOB
from drivers.snapshot import layers, qcow2
from drivers.snapshot.chains import DEEP
from drivers.snapshot.layers import Layers
from drivers.snapshot.layerstore import LayerStore
from drivers.snapshot.qcow2 import Qcow2Disks
from drivers.snapshot.ranges import allocated
from tests.contracts.drivers import path_of
from tests.limits import killed_at_its_end
from tests.patience import PATIENCE, wait_until
from tests.programs import is_running, private_daemons, qemu_io, require, require_root
from tests.userspace.drivers.chunkhosts import MIB, ChunkHostCase
from tests.userspace.drivers.qemus import Vm, stranger

KIB = 1 << 10
BLOCK = 64 * KIB
Content = Mapping[int, int]
"""What a disk holds: the byte that fills the first 4 KiB of a block, by the block's number."""


SNAPSHOTS: Mapping[str, Content] = {"p1": {0: 1, 1: 1}, "p2": {0: 2, 1: 1, 2: 2}, "p3": {0: 3, 1: 1, 2: 2, 3: 3}}
"""What ``with_snapshots`` makes."""


class Cut(BaseException):
    """The agent dies here."""


@contextlib.contextmanager
def cut_at(number: int) -> Iterator[list[str]]:
    """Raise Cut at the ``number``-th step: before or after a change of files, or a command that changes a QEMU."""
    steps: list[str] = []

    def step(name: str) -> None:
        steps.append(name)
        if len(steps) == number:
            raise Cut(name)

    def around(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def stepping(*arguments: Any, **named: Any) -> Any:
            told = f"{name} {arguments[1]}" if name == "execute" else name
            if "query" in told:
                return call(*arguments, **named)
            step(f"before {told}")
            result = call(*arguments, **named)
            step(f"after {told}")
            return result

        return stepping

    with contextlib.ExitStack() as stack:
        for owner, name in (
            (monitors.Client, "execute"),
            (layers, "run"),
            (Path, "rename"),
            (Path, "symlink_to"),
            (Path, "unlink"),
            (os, "fsync"),
        ):
            stack.enter_context(mock.patch.object(owner, name, around(getattr(owner, name), name)))
        yield steps


class SnapshotCase(ChunkHostCase):
    """A host ``h`` that serves an image, and VMs with disks of 4 MiB over it."""

    def setUp(self) -> None:
        super().setUp()
        require(self, "qemu-storage-daemon", "qemu-io")
        self.image, self.file = self.make_image(MIB)
        self.h = self.host("h")
        self.h.serve_file(self.image, self.file, "below")
        self.origin = self.h.source.device(self.image)
        self.folder = self.h.place.state / "snapshots"
        self.store = LayerStore(self.folder)
        self.names = (f"vm{number}" for number in itertools.count())

    def small_file_system(self, folder: Path, size: int, files: int = 1000) -> None:
        """Mount a file system with room for ``size`` bytes, and for ``files`` files and folders, on a folder."""
        require_root(self, "a small file system is mounted")
        require(self, "mount")
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.check_call(["mount", "-t", "tmpfs", "-o", f"size={size},nr_inodes={files + 1}", "none", str(folder)])
        self.addCleanup(subprocess.check_call, ["umount", str(folder)])

    def make(self) -> Qcow2Disks:
        """A driver object of an agent that just started."""
        return Qcow2Disks(self.h.place)

    def create(self) -> str:
        vm = next(self.names)
        self.make().create(vm, self.origin, 4 * MIB)
        return vm

    def created(self, vm: str = "vm1", size: int | None = None) -> Path:
        return path_of(self.make().create(vm, self.origin, size or self.image.size))

    def start(self, vm: str, *, running: bool = False) -> Vm:
        started = Vm(self.make().open(vm), running=running)
        self.addCleanup(started.kill)
        return started

    def left(self) -> list[Path]:
        """All that there is of disks."""
        store = self.store.folder
        return [*(path for path in self.folder.iterdir() if path != store), *store.iterdir()]

    def layers(self, vm: str) -> Layers:
        return Layers(self.store, vm)

    def write(self, path: Path | None, at: int, pattern: int) -> None:
        qemu_io(str(path), f"write -P {pattern} {at * BLOCK} 4k")

    def assert_holds(self, path: Path | None, content: Content) -> None:
        reads = [f"read -P {pattern} {at * BLOCK} 4k" for at, pattern in content.items()]
        qemu_io(str(path), *reads, options=["-r", "-U", "-f", "qcow2"])

    def assert_vm_holds(self, vm: Vm, content: Content) -> None:
        for at, pattern in content.items():
            self.assertTrue(vm.holds(at * BLOCK, pattern), f"block {at} is not {pattern}")

    def assert_snapshots(self, vm: str, snapshots: Mapping[str, Content]) -> None:
        layers = self.layers(vm)
        self.assertEqual(set(snapshots), self.make().snapshots(vm))
        for name, number in layers.snapshots().items():
            self.assert_holds(layers.file(number), snapshots[name])

    def assert_tidy(self, vm: str) -> None:
        """No layer that nobody needs, nothing half made, no process."""
        layers = self.layers(vm)
        self.assertIsNone(layers.next_unneeded(fold=False))
        needed = {
            layer.path.name
            for number in layers.snapshots().values()
            for layer in layers.down_from(layers.layer(number))
        }
        needed |= {layer.path.name for layer in layers.chain()}
        needed |= {"disk.qcow2", "snapshots.json"}
        self.assertEqual(needed, {path.name for path in layers.folder.iterdir()} | {"snapshots.json"})
        self.assertEqual([], private_daemons(os.getpid()))

    def with_snapshots(self, vm: str, count: int, running: Vm | None = None) -> dict[str, Content]:
        """Snapshots p1, p2, … of a disk, and what each holds; each overwrites block 0 and writes a block of its own."""
        snapshots: dict[str, Content] = {}
        content: dict[int, int] = {}
        driver = self.make()
        for number in range(1, count + 1):
            for at in (0, number):
                content[at] = number
                if running is None:
                    self.write(driver.open(vm).path, at, number)
                else:
                    running.write(at * BLOCK, number)
            driver.take(vm, f"p{number}", running)
            snapshots[f"p{number}"] = dict(content)
        return snapshots


class CreateTest(SnapshotCase):
    def test_writes_stay_in_the_disk(self) -> None:
        one, two = self.created("vm1"), self.created("vm2")
        qemu_io(one, "write -P 0x77 512k 64k", "read -P 0x77 512k 64k", options=())  # by nothing but its path
        compare = ["qemu-img", "compare", "-f", "qcow2", "-F", "raw", str(two), str(self.file)]
        self.assertEqual(0, subprocess.run(compare, check=False, stdout=subprocess.DEVNULL).returncode)
        self.assert_same(self.h.uri(self.image), self.file)

    def test_small_write_fetches_nothing(self) -> None:
        below = self.host("below")
        below.join(self.image, [self.h])
        disk = Qcow2Disks(below.place).create("vm", below.source.device(self.image), self.image.size)
        qemu_io(path_of(disk), "write 512k 4k")
        self.assertEqual(0, below.source.held(self.image).held_bytes)

    def test_a_disk_for_which_there_is_no_room_leaves_nothing(self) -> None:
        for size, files in ((MIB // 2, 1000), (8 * MIB, 0)):
            self.small_file_system(self.store.folder, size, files)
            self.assertRaises(NoSpace, self.created)
            self.assertEqual(([], frozenset()), (self.left(), self.make().existing()))

    def test_disk_that_was_not_made_to_the_end_leaves_nothing(self) -> None:
        with killed_at_its_end("qemu-img"):
            self.assertRaises(CommandFailed, self.created)
        self.assertEqual([], self.left())

    def test_a_file_system_that_runs_full_below_disks_is_told_of(self) -> None:
        self.small_file_system(self.folder, 8 * MIB)
        self.store.folder.mkdir()
        self.assertEqual("", self.make().trouble())
        self.created()
        driver = Qcow2Disks(replace(self.h.place, reserve=4 * MIB))
        self.assertEqual("", driver.trouble())
        (self.store.folder / "large").write_bytes(bytes(4 * MIB))
        self.assertIn(f"{self.store.folder} has 3 MiB free", driver.trouble())

    def test_half_made_disk_is_made_anew(self) -> None:
        layers = self.folder / "vm1"
        layers.mkdir(parents=True)
        for half in (layers / "0.new", layers / "0.qcow2", layers / "3.qcow2"):
            half.write_bytes(b"half")
        self.created()
        there = sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*"))
        self.assertEqual([".layers", ".layers/0.qcow2", "vm1", "vm1/0.qcow2", "vm1/disk.qcow2"], there)


class OpenTest(SnapshotCase):
    def test_file_of_something_else_is_refused(self) -> None:
        path = self.created()
        path.write_bytes(b"x" * 1000)
        self.assertRaises(BadDisk, self.make().open, "vm1")
        path.unlink()
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", str(path), "1M"], check=True)
        self.assertRaises(BadDisk, self.make().open, "vm1")
        path.write_bytes(b"QFI\xfb")
        self.assertRaises(BadDisk, self.make().open, "vm1")


class VirtualMachineTest(SnapshotCase):
    def test_vm_given_only_the_path_outlives_the_chunk_store_behind_it(self) -> None:
        require(self, "qemu-system-x86_64")
        drive = f"file={self.created()},format=qcow2,if=none,id=disk"
        argv = ["qemu-system-x86_64", "-machine", "none", "-nodefaults", "-display", "none", "-monitor", "stdio"]
        vm = subprocess.Popen(
            [*argv, "-drive", drive], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.addCleanup(vm.wait)
        self.addCleanup(vm.kill)
        assert vm.stdin is not None
        vm.stdin.write(b'qemu-io disk "read 0 512k"\n')
        vm.stdin.flush()
        self.h.kill()
        wait_until(lambda: self.h.died == [self.image.name])
        vm.stdin.write(b'qemu-io disk "read 512k 512k"\n')
        vm.stdin.flush()
        self.h.serve_file(self.image, self.file)
        said, _ = vm.communicate(b"quit\n", timeout=PATIENCE)
        self.assertEqual(2, said.count(b"512 KiB, 1 ops"), said.decode(errors="replace"))


class RunningTest(SnapshotCase):
    def setUp(self) -> None:
        super().setUp()
        require(self, "qemu-system-x86_64")

    def test_one_that_was_not_switched_to_the_new_layer_is_by_the_next_call(self) -> None:
        calls: tuple[Callable[[Qcow2Disks, str, Vm], object], ...] = (
            lambda driver, vm, running: driver.drop(vm, "p1", running),
            lambda driver, vm, running: driver.resize(vm, 8 * MIB, running),
        )
        for call in calls:
            vm = self.create()
            running = self.start(vm)
            snapshots = self.with_snapshots(vm, 1, running)
            with mock.patch.object(qcow2, "switch", side_effect=Cut):
                self.assertRaises(Cut, self.make().take, vm, "cut", running)
            running.write(5 * BLOCK, 5)
            call(self.make(), vm, running)
            running.write(6 * BLOCK, 6)
            self.assertIn(f"{self.layers(vm).path.resolve().name} False", running.files())
            self.assert_vm_holds(running, {**snapshots["p1"], 5: 5, 6: 6})
            running.kill()
            self.assert_holds(self.make().open(vm).path, {**snapshots["p1"], 5: 5, 6: 6})

    def test_nothing_is_merged_while_a_guest_may_be_held_still(self) -> None:
        vm = self.create()
        running = self.start(vm)
        snapshots = self.with_snapshots(vm, 2, running)
        self.layers(vm).write_snapshots({"p2": 1})  # as a drop leaves it that finds no room
        self.make().take(vm, "p3", running)
        self.assertIsNotNone(self.layers(vm).next_unneeded(fold=False))
        self.make().drop(vm, "none", running)
        self.assert_tidy(vm)
        self.assert_snapshots(vm, {"p2": snapshots["p2"], "p3": snapshots["p2"]})

    def test_what_it_discards_is_free_on_the_host_whatever_became_of_its_layers(self) -> None:
        vm = self.create()
        running = self.start(vm)
        for change in (
            lambda: None,
            lambda: self.make().take(vm, "snapshot", running),
            lambda: self.make().drop(vm, "snapshot", running),
        ):
            change()
            running.io("write -P 7 0 3M")
            running.io("discard 0 3M")
            running.io("flush")
            active = self.layers(vm).chain()[0].path
            self.assertLess(active.stat().st_blocks * 512, MIB)
            self.assert_vm_holds(running, {0: 0})

    def test_snapshots_are_dropped_first_last_and_between(self) -> None:
        for gone in itertools.permutations(("p1", "p2", "p3")):
            vm = self.create()
            running = self.start(vm)
            snapshots = self.with_snapshots(vm, 3, running)
            running.write(0, 9)
            for name in gone:
                self.make().drop(vm, name, running)
                del snapshots[name]
                self.assert_snapshots(vm, snapshots)
                self.assert_tidy(vm)
                self.assertEqual(len(snapshots) + 1, len(running.files()))
                self.assertEqual(1, sum("False" in file for file in running.files()))
                self.assert_vm_holds(running, {0: 9, 1: 1, 2: 2, 3: 3})
            running.kill()  # what was copied is not only in its memory
            self.assert_holds(self.make().open(vm).path, {0: 9, 1: 1, 2: 2, 3: 3})
            self.assert_same_image_below(vm)

    def assert_same_image_below(self, vm: str) -> None:
        """What was never written is the image's still: 8 KiB at the end of block 1."""
        target = self.root / "read"
        argv = ["qemu-img", "convert", "-f", "qcow2", "-O", "raw", str(self.make().open(vm).path), str(target)]
        subprocess.run(argv, check=True)
        at = 2 * BLOCK - 8 * KIB
        self.assertEqual(self.file.read_bytes()[at : at + 8 * KIB], target.read_bytes()[at : at + 8 * KIB])

    def test_branches_beside_a_running_vm_are_merged(self) -> None:
        vm = self.create()
        driver = self.make()
        snapshots = self.with_snapshots(vm, 3)
        driver.revert(vm, "p1")
        running = self.start(vm)
        running.write(0, 7)
        before = running.files()
        for name in ("p2", "p3"):
            driver.drop(vm, name, running)
            del snapshots[name]
            self.assert_snapshots(vm, snapshots)
            self.assert_tidy(vm)
        self.assertEqual(before, running.files())
        driver.drop(vm, "p1", running)
        self.assert_vm_holds(running, {0: 7, 1: 1})
        self.assertEqual(1, len(running.files()))
        self.assert_tidy(vm)

    def test_a_running_vm_sees_its_disk_grow(self) -> None:
        vm = self.create()
        running = self.start(vm)
        self.make().take(vm, "small", running)
        for _ in range(2):
            self.assertEqual(8 * MIB, self.make().resize(vm, 8 * MIB, running).size)
        self.assertIn("8 MiB", running.io("length"))
        self.assertTrue(running.holds(8 * MIB - 4 * KIB, 0))
        running.write(8 * MIB - 4 * KIB, 8)
        self.make().drop(vm, "small", running)
        self.assertTrue(running.holds(8 * MIB - 4 * KIB, 8))
        self.assertTrue(running.holds(5 * MIB, 0))

    def test_a_vm_whose_device_is_at_work_in_its_thread(self) -> None:
        vm = self.create()
        running = self.start(vm, running=True)
        snapshots = self.with_snapshots(vm, 4, running)
        self.make().resize(vm, 8 * MIB, running)
        for name in ("p2", "p4", "p1"):
            self.make().drop(vm, name, running)
            del snapshots[name]
            self.assert_snapshots(vm, snapshots)
        self.assertEqual("running", running.execute("query-status")["status"])
        running.kill()
        self.assert_holds(self.make().open(vm).path, {0: 4, 1: 1, 2: 2, 3: 3, 4: 4})

    def test_what_a_dead_agent_left_running_is_ended(self) -> None:
        vm = self.create()
        running = self.start(vm)
        snapshots = self.with_snapshots(vm, 3, running)
        with mock.patch("drivers.qemu.streaming._await", side_effect=Cut), mock.patch("drivers.qemu.streaming.settle"):
            self.assertRaises(Cut, self.make().drop, vm, "p2", running)
        self.assertEqual([JOB], [job["id"] for job in running.execute("query-jobs")])
        self.make().drop(vm, "p2", running)
        self.assertEqual([], running.execute("query-jobs"))
        del snapshots["p2"]
        self.assert_snapshots(vm, snapshots)
        self.assert_tidy(vm)

    def test_a_layer_that_qemu_left_open_for_writing_is_read_by_others(self) -> None:
        vm = self.create()
        running = self.start(vm)
        self.with_snapshots(vm, 3, running)
        execute = running.execute

        def leave_open() -> None:
            node = Nodes(running).demand(self.layers(vm).file(2))
            execute("human-monitor-command", {"command-line": f'qemu-io {node} "reopen -w"'})

        def as_qemu_10(command: str, arguments: Mapping[str, Any] | None = None) -> Any:
            result = execute(command, arguments)
            if command == "job-dismiss":
                leave_open()
            return result

        with mock.patch.object(running, "execute", as_qemu_10):
            self.make().drop(vm, "p2", running)
        self.assertEqual(["0.qcow2 True", "2.qcow2 True", "3.qcow2 False"], running.files())
        leave_open()  # by a job that failed
        self.make().take(vm, "p4", running)
        self.assertEqual(["0.qcow2 True", "2.qcow2 True", "3.qcow2 True", "4.qcow2 False"], running.files())

    def test_a_monitor_of_another_vm_is_refused(self) -> None:
        vm, other = self.create(), self.create()
        self.assertRaises(MonitorFailed, self.make().take, vm, "p", self.start(other))
        self.assertEqual(frozenset(), self.make().snapshots(vm))


@pytest.mark.long
class CrashTest(SnapshotCase):
    """An agent that dies at any step; what is written then is kept, and the call is repeated by the next one."""

    def cuts(
        self, call: Callable[[str, Monitor | None], object], *, runs: bool = False, clone: str | None = None
    ) -> Iterator[tuple[str, Vm | None]]:
        """Disks with snapshots p1 to p3 whose call was cut off, at one step after the other; the VM runs on, if it
        did. ``clone``: what a clone of p2 is called that was made before.
        """
        for number in itertools.count(1):
            vm = self.create()
            running = self.start(vm) if runs else None
            self.with_snapshots(vm, 3, running)
            if clone is not None:
                self.make().clone(vm, "p2", clone)
            with cut_at(number) as steps, contextlib.suppress(Cut):
                call(vm, running)
            self.assertEqual([], private_daemons(os.getpid()))
            yield vm, running
            if running is not None:
                running.kill()
            self.make().delete(vm)
            self.assertEqual([], self.left())
            if len(steps) < number:
                break

    def check(
        self,
        call: Callable[[Qcow2Disks, str, Monitor | None], object],
        snapshots: Mapping[str, Content],
        *,
        runs: bool,
        restarts: bool = False,
    ) -> None:
        """Write to a disk after the call was cut off, and see what it holds after the next agent has repeated that.

        ``restarts``: the VM ended meanwhile and was started again.
        """
        for vm, before in self.cuts(lambda vm, monitor: call(self.make(), vm, monitor), runs=runs):
            running = before
            content = {0: 3, 1: 1, 2: 2, 3: 3, 5: 5}
            if running is None:
                self.write(self.layers(vm).path, 5, 5)
            else:
                running.write(5 * BLOCK, 5)
                if restarts:
                    running.kill()
                    running = self.start(vm)
            call(self.make(), vm, running)
            if running is not None:
                self.assert_vm_holds(running, content)
                running.write(6 * BLOCK, 6)
                content[6] = 6
                running.kill()
            self.make().drop(vm, "none", None)
            self.assert_holds(self.make().open(vm).path, content)
            self.assert_snapshots(vm, snapshots)
            self.assert_tidy(vm)

    def test_taking_a_snapshot(self) -> None:
        for runs, restarts in ((True, False), (True, True), (False, False)):
            self.check(
                lambda driver, vm, monitor: driver.take(vm, "p4", monitor),
                {**SNAPSHOTS, "p4": SNAPSHOTS["p3"]},
                runs=runs,
                restarts=restarts,
            )

    def test_dropping_a_snapshot(self) -> None:
        for name, (runs, restarts) in itertools.product(("p2", "p3"), ((True, False), (True, True), (False, False))):
            self.check(
                lambda driver, vm, monitor, name=name: driver.drop(vm, name, monitor),  # type: ignore[misc]
                {other: held for other, held in SNAPSHOTS.items() if other != name},
                runs=runs,
                restarts=restarts,
            )

    def test_reverting(self) -> None:
        for vm, _ in self.cuts(lambda vm, _monitor: self.make().revert(vm, "p1")):
            self.assertEqual(4 * MIB, self.make().open(vm).size)
            self.make().revert(vm, "p1")
            self.assert_holds(self.make().open(vm).path, SNAPSHOTS["p1"])
            self.assert_tidy(vm)
            self.assert_snapshots(vm, SNAPSHOTS)

    def test_cloning(self) -> None:
        for vm, _ in self.cuts(lambda vm, _monitor: self.make().clone(vm, "p2", "new")):
            self.assertIn(self.make().existing(), ({vm}, {vm, "new"}))
            self.make().clone(vm, "p2", "new")
            self.write(self.layers("new").path, 7, 7)
            self.assert_holds(self.make().open("new").path, {**SNAPSHOTS["p2"], 7: 7})
            self.assert_snapshots(vm, SNAPSHOTS)
            self.make().delete(vm)
            self.assert_holds(self.make().open("new").path, {**SNAPSHOTS["p2"], 7: 7})
            self.make().delete("new")

    def test_deleting_what_others_share(self) -> None:
        for vm, _ in self.cuts(lambda vm, _monitor: self.make().delete(vm), clone="new"):
            self.make().take("new", "own", None)
            self.make().drop("new", "own", None)
            self.assert_holds(self.make().open("new").path, SNAPSHOTS["p2"])
            self.make().delete(vm)
            self.assert_holds(self.make().open("new").path, SNAPSHOTS["p2"])
            self.make().delete("new")

    def test_a_private_daemon_is_killed_while_it_merges(self) -> None:
        """Also just before its end, when it has named another backing in the file."""
        for command in ("block-stream", "blockdev-reopen", "job-finalize", "job-dismiss", "quit"):
            vm = self.create()
            snapshots = self.with_snapshots(vm, 3)
            del snapshots["p2"]
            with killed_before(command), contextlib.suppress(DriverError):
                self.make().drop(vm, "p2", None)
            self.assertEqual([], private_daemons(os.getpid()))
            self.assert_snapshots(vm, snapshots)
            self.make().drop(vm, "p2", None)
            self.assert_snapshots(vm, snapshots)
            self.assert_holds(self.make().open(vm).path, {0: 3, 1: 1, 2: 2, 3: 3})
            self.assert_tidy(vm)

    def test_a_private_daemon_does_not_outlive_a_killed_agent(self) -> None:
        agent = os.fork()
        if agent == 0:
            with monitors.private_daemon() as client:
                client.execute("blockdev-add", {"driver": "null-co", "node-name": "n"})
                [daemon] = private_daemons(os.getpid())
                (self.root / "pid").write_text(str(daemon))
                (self.root / "pid").rename(self.root / "ready")
                signal.pause()
        wait_until((self.root / "ready").exists)
        daemon = int((self.root / "ready").read_text())
        self.assertTrue(is_running(daemon))
        os.kill(agent, signal.SIGKILL)
        os.waitpid(agent, 0)
        wait_until(lambda: not is_running(daemon))


def waits_for_a_lock() -> bool:
    """Whether a thread of this process waits for a lock of a file (proc(5), /proc/locks)."""
    waiting = (line.split() for line in Path("/proc/locks").read_text().splitlines() if "->" in line)
    return any(words[words.index("->") + 4] == str(os.getpid()) for words in waiting)


@contextlib.contextmanager
def killed_before(command: str) -> Iterator[None]:
    """Kill the private daemon that has a job before it gets a command; no block is left before, if it is to quit."""
    execute, streamed = monitors.Client.execute, []

    def killing(self: monitors.Client, name: str, arguments: Mapping[str, Any] | None = None) -> Any:
        if name == "block-stream":
            streamed.append(name)
        if name == command and streamed:
            for pid in private_daemons(os.getpid()):
                os.kill(pid, signal.SIGKILL)
        return execute(self, name, arguments)

    with mock.patch.object(monitors.Client, "execute", killing):
        yield


class FullTest(SnapshotCase):
    """A file system that has no more room."""

    def setUp(self) -> None:
        super().setUp()
        self.filler = self.store.folder / "filler"
        self.small_file_system(self.filler.parent, 24 * MIB)

    def fill(self, left: int) -> None:
        self.filler.write_bytes(bytes(max(0, shutil.disk_usage(self.filler.parent).free - left)))

    def test_taking_reverting_and_cloning(self) -> None:
        vm = self.create()
        snapshots = self.with_snapshots(vm, 2)
        self.write(self.make().open(vm).path, 3, 3)
        for left in (0, 200 * KIB):
            self.fill(left)
            for _ in range(2):
                self.assertRaises(NoSpace, self.make().take, vm, "more", None)
                self.assertRaises(NoSpace, self.make().revert, vm, "p1")
                self.assertRaises(NoSpace, self.make().clone, vm, "p2", "new")
            self.assertEqual({vm}, self.make().existing())
            self.assert_snapshots(vm, snapshots)
            self.assert_holds(self.make().open(vm).path, {0: 2, 1: 1, 2: 2, 3: 3})
            self.filler.unlink()
        self.make().take(vm, "more", None)
        self.make().revert(vm, "p1")
        self.assert_holds(self.make().open(vm).path, snapshots["p1"])
        self.assert_tidy(vm)

    def test_merging(self) -> None:
        for runs_on in (False, True):
            vm = self.create()
            running = self.start(vm) if runs_on else None
            snapshots = self.with_snapshots(vm, 1, running)
            self.large_write(vm, running)
            snapshots["p2"] = {**snapshots["p1"], 20: 0x55}
            self.make().take(vm, "p2", running)
            self.fill(512 * KIB)
            for _ in range(2):
                self.assertRaises(NoSpace, self.make().drop, vm, "p2", running)
            self.assertEqual({"p1"}, self.make().snapshots(vm))
            self.assert_holds(self.make().open(vm).path, snapshots["p2"])
            self.filler.unlink()
            self.make().drop(vm, "p2", running)
            self.assert_snapshots(vm, {"p1": snapshots["p1"]})
            self.assert_holds(self.make().open(vm).path, snapshots["p2"])
            self.assert_tidy(vm)
            if running is not None:
                running.kill()
            self.make().delete(vm)

    def large_write(self, vm: str, running: Vm | None) -> None:
        if running is not None:
            running.io("write -P 0x55 1M 3M")
            running.io("flush")
        else:
            qemu_io(str(self.make().open(vm).path), "write -P 0x55 1M 3M")


class StoppedTest(SnapshotCase):
    def test_one_whose_new_name_a_disk_had_that_was_not_made_to_the_end(self) -> None:
        vm = self.create()
        self.write(self.make().open(vm).path, 0, 1)
        left = self.layers("new")
        left.add(self.store.fresh())
        self.assertFalse(left.exist())
        self.assert_holds(self.make().rename(vm, "new").path, {0: 1})
        self.assert_tidy("new")

    def test_nothing_needs_the_image_but_copying(self) -> None:
        vm = self.create()
        self.write(self.make().open(vm).path, 0, 1)
        self.h.source.drop(self.image.name, None)
        self.make().take(vm, "p", None)
        self.make().resize(vm, 8 * MIB, None)
        self.make().revert(vm, "p")
        self.assertEqual(4 * MIB, self.make().open(vm).size)

    def test_zeros_that_were_written_differ_as_zeros(self) -> None:
        vm = self.create()
        device = self.make().open(vm)
        with open_blocks(vm, device, write=True) as blocks:
            blocks.write(0, b"x" * BLOCK)
            blocks.zero(BLOCK, 2 * BLOCK)
            blocks.write(3 * BLOCK, b"x" * 2 * BLOCK)
        expected = [Range(0, BLOCK), Range(BLOCK, 2 * BLOCK, zeros=True), Range(3 * BLOCK, 2 * BLOCK)]
        self.assertEqual(expected, self.make().changes(vm, None, None))

    def test_a_layer_belongs_to_whom_the_one_below_belongs(self) -> None:
        require_root(self, "a disk is given to another user")
        vm = self.create()
        os.chown(self.make().open(vm).path or "", 65534, 65533)
        self.layers(vm).file(0).chmod(0o600)
        self.make().take(vm, "p", None)
        stat = self.layers(vm).file(1).stat()
        self.assertEqual((65534, 65533, 0o100600), (stat.st_uid, stat.st_gid, stat.st_mode))

    def test_a_snapshot_of_a_disk_that_nobody_wrote_to_since_the_last_adds_no_layer(self) -> None:
        vm = self.create()
        snapshots = self.with_snapshots(vm, 1)
        self.make().take(vm, "same", None)
        self.assertEqual(2, len(self.layers(vm).chain()))
        self.write(self.make().open(vm).path, 0, 9)
        self.assert_snapshots(vm, {**snapshots, "same": snapshots["p1"]})
        self.make().drop(vm, "p1", None)
        self.assert_snapshots(vm, {"same": snapshots["p1"]})
        self.make().revert(vm, "same")
        self.assert_holds(self.make().open(vm).path, snapshots["p1"])
        self.assert_tidy(vm)

    def test_a_disk_that_cannot_be_folded_gets_no_more_layers_than_qemu_copes_with(self) -> None:
        vm = self.create()
        with mock.patch.object(qcow2, "DEEPEST", 3):
            snapshots = self.with_snapshots(vm, 2)
            self.write(self.make().open(vm).path, 3, 3)
            error = self.assertRaises(NotPossible, self.make().take, vm, "more", None)
            self.assertIn("3 layers", str(error))
            self.assert_snapshots(vm, snapshots)
            self.make().drop(vm, "p1", None)
            self.make().take(vm, "more", None)
        self.assert_snapshots(vm, {"p2": snapshots["p2"], "more": {**snapshots["p2"], 3: 3}})

    def test_from_a_snapshot_that_a_disk_did_not_go_on_from_no_changes_are_told(self) -> None:
        vm = self.create()
        self.with_snapshots(vm, 2)
        self.make().revert(vm, "p1")
        self.assertRaises(NotPossible, self.make().changes, vm, None, "p2")

    def test_snapshots_that_the_hypervisor_took_inside_the_file_are_not_lost(self) -> None:
        vm = self.create()
        snapshots = self.with_snapshots(vm, 2)
        path = str(self.make().open(vm).path)
        subprocess.run(["qemu-img", "snapshot", "-c", "inside", path], check=True)
        for call in (self.make().take, self.make().drop):
            error = self.assertRaises(NotPossible, call, vm, "p3" if call.__name__ == "take" else "p1", None)
            self.assertIn("delete inside first", str(error))
        self.assertRaises(NotPossible, self.make().revert, vm, "p1")
        self.assert_snapshots(vm, snapshots)
        subprocess.run(["qemu-img", "snapshot", "-d", "inside", path], check=True)
        self.make().drop(vm, "p1", None)

    def test_a_stranger_at_a_branch_keeps_it_from_being_merged(self) -> None:
        vm = self.create()
        snapshots = self.with_snapshots(vm, 3)
        self.make().revert(vm, "p1")
        with stranger(self.layers(vm).file(self.layers(vm).snapshots()["p3"])):
            self.assertRaises(DiskInUse, self.make().drop, vm, "p2", None)
            del snapshots["p2"]
            self.assert_snapshots(vm, snapshots)
            self.make().take(vm, "p4", None)
        self.make().drop(vm, "p2", None)
        self.assert_snapshots(vm, {**snapshots, "p4": snapshots["p1"]})
        self.assert_tidy(vm)


class CloneTest(SnapshotCase):
    """Disks that have layers in common."""

    def source(self) -> str:
        vm = self.create()
        self.with_snapshots(vm, 3)
        return vm

    def test_what_a_source_that_runs_shares_stays_as_it_is(self) -> None:
        vm, new = self.create(), next(self.names)
        running = self.start(vm)
        self.with_snapshots(vm, 3, running)
        self.make().clone(vm, "p3", new)
        shared = {number: self.layers(new).file(number).read_bytes() for number in range(3)}
        for name in ("p2", "p1", "p3"):
            self.make().drop(vm, name, running)
            running.write(4 * BLOCK, 4)
        self.assertEqual(shared, {number: self.layers(new).file(number).read_bytes() for number in range(3)})
        self.assert_holds(self.make().open(new).path, SNAPSHOTS["p3"])
        self.make().delete(new)
        self.make().drop(vm, "p1", running)  # when it is alone with its layers again
        self.assert_vm_holds(running, {**SNAPSHOTS["p3"], 4: 4})
        self.assert_tidy(vm)
        self.assertEqual(1, len(self.layers(vm).all()))

    @pytest.mark.long
    def test_a_disk_that_is_cloned_again_and_again_is_folded(self) -> None:
        vm = self.create()
        running = self.start(vm)
        calls = DEEP + 2
        for number in range(calls):
            running.write(number * BLOCK, number + 1)
            self.make().take(vm, "moment", running)
            self.make().clone(vm, "moment", f"clone{number}")
            self.make().drop(vm, "moment", running)
            self.assertLessEqual(len(self.layers(vm).chain()), DEEP + 1)
        self.assertLess(len(self.layers(vm).chain()), 5)
        held = {number: number + 1 for number in range(calls)}
        self.assert_vm_holds(running, held)
        running.write(0, 99)
        running.kill()
        self.make().delete(vm)
        for last in (0, DEEP - 1, calls - 1):
            self.assert_holds(self.make().open(f"clone{last}").path, {at: held[at] for at in range(last + 1)})

    def test_a_link_in_any_folder_opens_it(self) -> None:
        """As OpenNebula's link in a VM's folder, which QEMU and libvirt are given instead of our path."""
        link = self.root / "disk.0"
        for count in (0, 1, 3):
            vm, new = self.create(), next(self.names)
            snapshots = self.with_snapshots(vm, count)
            last = snapshots.get(f"p{count}", {})
            disks = [self.make().rename(vm, vm := next(self.names))]
            if snapshots:
                disks.append(self.make().clone(vm, f"p{count}", new))
            for disk in disks:
                link.unlink(missing_ok=True)
                link.symlink_to(disk.path or "")
                self.assert_holds(link, last)
                with stranger(link):
                    self.assertRaises(DiskInUse, self.make().resize, (disk.path or link).parent.name, 8 * MIB, None)
                self.write(link, 7, 7)
            self.make().delete(vm)
            if snapshots:
                self.assert_holds(link, {**last, 7: 7})

    def while_merging(self, command: str, act: Callable[[str], None]) -> None:
        """Begin something with a VM's disk when its QEMU gets a command while p2 is dropped, and await its end.

        The drop goes on when it waits for a lock.
        """
        vm, ended = self.create(), threading.Event()
        running = self.start(vm)
        self.with_snapshots(vm, 3, running)
        execute = running.execute

        def at_once() -> None:
            act(vm)
            ended.set()

        acting = threading.Thread(target=at_once, daemon=True)

        def hooked(name: str, arguments: Mapping[str, Any] | None = None) -> Any:
            if name == command:
                acting.start()
                wait_until(lambda: not acting.is_alive() or waits_for_a_lock())
            return execute(name, arguments)

        with mock.patch.object(running, "execute", hooked):
            self.make().drop(vm, "p2", running)
        acting.join(PATIENCE)
        self.assertTrue(ended.is_set())
        running.kill()

    def test_one_that_is_made_while_layers_are_merged_opens_at_once(self) -> None:
        def clone(vm: str) -> None:
            new = next(self.names)
            self.make().clone(vm, "p3", new)
            self.write(self.layers(new).path, 5, 5)
            self.assert_holds(self.layers(new).path, {**SNAPSHOTS["p3"], 5: 5})
            self.assertEqual(3, len(self.layers(vm).chain()))

        for command in ("job-finalize", "block-stream"):
            self.while_merging(command, clone)

    def test_what_is_read_stays_from_before_it_is_opened_whatever_becomes_of_the_disk(self) -> None:
        for runs_on in (False, True):
            vm, driver = self.create(), self.make()
            running = self.start(vm) if runs_on else None
            snapshots = self.with_snapshots(vm, 3, running)
            with driver.reading(vm, "p2") as device:
                for name in ("p2", "p1", "p3", "p3"):
                    self.assertRaises(DiskInUse, driver.drop, vm, name, running)
                self.assertEqual({vm}, driver.existing())
                self.assert_holds(device.path, snapshots["p2"])
                if running is None:
                    driver.delete(vm)
                    self.assert_holds(device.path, snapshots["p2"])
            if running is not None:
                driver.drop(vm, "p1", running)
                self.assert_vm_holds(running, snapshots["p3"])
                self.assert_tidy(vm)
                running.kill()
                driver.delete(vm)
            self.assertEqual([], self.left())

    def test_nobody_is_kept_from_dropping_by_who_reads_another_disk(self) -> None:
        vm, other, driver = self.source(), self.source(), self.make()
        driver.clone(vm, "p3", next(self.names))
        with driver.reading(other, "p3"):
            driver.drop(vm, "p2", None)

    def test_a_reader_gets_layers_that_can_be_opened(self) -> None:
        driver = self.make()

        def read(vm: str) -> None:
            with driver.reading(vm, "p3") as device, open_blocks(vm, device):
                changes = driver.changes(vm, "p3", "p1")
            self.assertEqual([0, 2 * BLOCK, 3 * BLOCK], [changed.offset for changed in changes])

        for command in ("job-finalize", "block-stream"):
            self.while_merging(command, read)

    def test_snapshots_come_and_go_while_layers_are_looked_through(self) -> None:
        for runs_on in (False, True):
            vm, driver = self.create(), self.make()
            running = self.start(vm) if runs_on else None
            snapshots = self.with_snapshots(vm, 3, running)
            before = driver.changes(vm, "p3", "p1")

            def meanwhile(
                *arguments: Any, vm: str = vm, driver: Qcow2Disks = driver, running: Vm | None = running
            ) -> Any:
                self.assertRaises(DiskInUse, driver.drop, vm, "p2", running)
                driver.take(vm, "p4", running)
                return allocated(*arguments)

            with mock.patch.object(qcow2, "allocated", meanwhile):
                self.assertEqual(before, driver.changes(vm, "p3", "p1"))
            driver.drop(vm, "p2", running)
            self.assert_snapshots(vm, {"p1": snapshots["p1"], "p3": snapshots["p3"], "p4": snapshots["p3"]})
            self.assert_tidy(vm)

    def test_links_of_a_killed_agent_go_with_the_next_one(self) -> None:
        vm = self.source()
        killed = self.make().reading(vm, "p3")
        killed.__enter__()
        self.make().drop(vm, "p2", None)
        self.assert_tidy(vm)
        self.assertEqual([vm], [path.name for path in self.folder.glob("[!.r]*")])
