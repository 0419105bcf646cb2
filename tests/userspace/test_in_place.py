"""Images that are served from where they are: by a real chunk store, from files and loop devices."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import subprocess
from functools import partial
from pathlib import Path

from tests.others import GROUP
from tests.patience import wait_until
from tests.sweeps import kills
from tests.userspace.hosts import HostProcess, HostsTestCase
from virtman import calls, fdpassing, models
from virtman.client import AgentClient
from virtman.errors import BadImageFile, ImageExists, OriginChanged

MIB = 1 << 20
FIRST_LOOP = 10_000
LOOP_CTL_REMOVE = 0x4C81  # linux/loop.h


class InPlaceTestCase(HostsTestCase):
    volt_options = ("--heartbeat", "0.3", "--lease", "60")

    def setUp(self) -> None:
        super().setUp()
        self.file = self.image_file()
        self.origin = self.host("origin")

    def stack(self, host: HostProcess, name: str = "img") -> models.Stack:
        (found,) = [stack for stack in host.client().status().images if stack.name == name]
        return found

    def in_place(self, host: HostProcess) -> models.InPlace:
        found = self.stack(host).in_place
        assert found is not None
        return found

    def await_trouble(self, host: HostProcess, words: str) -> None:
        """Wait until the host says so of the image, in one sentence, and serves nothing of it."""
        wait_until(lambda: words in (self.in_place(host).trouble or ""), f"{host.name} says: {words}")
        wait_until(lambda: any(words in why for why in host.client().status().troubles.values()), "status says it")
        self.assertEqual((set(), False, False), (host.served(), self.stack(host).serving, self.in_place(host).held))

    def await_served(self, host: HostProcess) -> None:
        wait_until(lambda: self.stack(host).serving, "it is served again")
        wait_until(lambda: not host.client().status().troubles, "there is no trouble")
        self.assertEqual((True, None), (self.in_place(host).held, self.in_place(host).trouble))

    def loop_over(self, file: Path) -> Path:
        """A loop device of a number that nobody else takes, without which the test is skipped."""
        loop = Path(f"/dev/loop{FIRST_LOOP + os.getpid() % FIRST_LOOP}")
        made = subprocess.run(["losetup", loop, file], capture_output=True, text=True, check=False)
        if made.returncode:
            self.skipTest(f"there are no loop devices: {made.stderr}")
        self.addCleanup(self._let_go, loop)
        subprocess.run(
            ["blockdev", "--setrw", str(loop)], check=True
        )  # the number may have been locked for another one
        return loop

    def _let_go(self, loop: Path) -> None:
        for argv in (["blockdev", "--setrw", str(loop)], ["losetup", "--detach", str(loop)]):
            subprocess.run(argv, capture_output=True, check=False)
        with (
            contextlib.suppress(OSError),
            Path("/dev/loop-control").open("rb") as control,
        ):  # somebody still has it open
            fcntl.ioctl(control, LOOP_CTL_REMOVE, int(loop.name.removeprefix("loop")))

    def facts(self, file: Path) -> tuple[bytes, int, int, int]:
        found = file.stat()
        return file.read_bytes(), found.st_mtime_ns, found.st_ctime_ns, found.st_size


def read_only(device: Path) -> bool:
    """Whether the kernel refuses to write to it."""
    return subprocess.run(["blockdev", "--getro", device], capture_output=True, text=True, check=True).stdout == "1\n"


class FileInPlaceTest(InPlaceTestCase):
    def test_children_read_it_nothing_is_copied_and_it_is_left_as_it_was(self) -> None:
        before = self.facts(self.file)
        origin, child = self.origin.start(), self.host("child").start()
        origin.publish_in_place("img", self.file)
        self.assertEqual([], [*(self.origin.state / "images").iterdir()])
        self.assert_same_content(Path(child.create("vm", "img").disk.path), self.file)
        self.assertEqual(str(self.file), self.in_place(self.origin).path)
        child.destroy("vm")
        child.gc()
        answer = origin.unpublish("img")
        self.assertEqual((False, [], set()), (answer.serving, origin.status().images, self.origin.served()))
        origin.gc()
        self.assertEqual(before, self.facts(self.file))

    def test_what_has_changed_is_served_to_nobody(self) -> None:
        origin, child = self.origin.start(), self.host("child").start()
        origin.publish_in_place("img", self.file)
        child.create("vm", "img")
        with self.file.open("r+b") as file:
            file.seek(4 * MIB)
            file.write(b"\x07" * MIB)
        self.await_trouble(self.origin, "has changed since it was published")
        self.assertRaises(OriginChanged, origin.create, "here", "img")
        self.assertRaises(subprocess.TimeoutExpired, self._read_shortly, child)
        log = (self.folder / "origin.log").read_text()
        self.assertEqual(1, log.count("image img: check: "), log)
        self.origin.stop()
        self.origin.start()
        self.await_trouble(self.origin, "has changed since it was published")

    def _read_shortly(self, child: AgentClient) -> None:
        argv = ["qemu-io", "-f", "qcow2", "-c", f"read {4 * MIB} 4k", child.vm("vm").disk.path]
        subprocess.run(argv, capture_output=True, check=True, timeout=2)


class DigestTest(InPlaceTestCase):
    def test_one_that_is_trusted_to_hold_a_published_copy_is_read_first_and_proves_what_children_read(self) -> None:
        first, origin, child = self.host("first").start(), self.origin.start(), self.host("child").start()
        digest = first.publish("img", self.file).digest
        other = self.image_file("other")
        error = self.assertRaises(BadImageFile, origin.publish_in_place, "img", other, digest)
        self.assertIn(f"and not {digest}", str(error))
        origin.publish_in_place("img", self.file, digest)
        self.assertEqual(digest, self.in_place(self.origin).digest)
        first.unpublish("img")
        self.assert_same_content(Path(child.create("vm", "img").disk.path), self.file)

    def test_an_agent_that_was_killed_meanwhile_begins_anew(self) -> None:
        os.truncate(self.file, 1 << 40)  # takes longer than the test
        self.origin.start().publish_in_place("img", self.file, digest=True)
        self.assertTrue(self.in_place(self.origin).computing)
        self.origin.kill()
        self.origin.start()
        self.assertTrue(self.in_place(self.origin).computing)
        self.origin.client().unpublish("img")
        self.assertEqual([], self.opened_by_agent())

    def opened_by_agent(self) -> list[str]:
        """Which of the agent's descriptors lead to the file."""
        folder = Path(f"/proc/{self.origin.client().status().pid}/fd")
        links = []
        for entry in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                links.append(str(entry.readlink()))
        return [link for link in links if link == str(self.file)]


class MembersTest(InPlaceTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder.chmod(0o711)
        self.origin.group = GROUP
        self.origin.start().vms()
        self.place = self.folder / "place"
        self.place.mkdir(mode=0o777)
        self.place.chmod(0o777)

    def publish(self, file: Path) -> str:
        """What a member's call comes to."""
        return self.member(self.origin, lambda client: client.publish_in_place("img", file).digest)

    def test_a_member_cannot_lead_the_agent_to_another_file(self) -> None:
        secret = self.image_file("secret")
        secret.chmod(0o600)
        link = self.place / "link"
        link.symlink_to(self.file)
        self.assertIn("id:", self.publish(link))
        link.unlink()
        link.symlink_to(secret)
        self.await_trouble(self.origin, "is another file now")

    def test_a_device_is_locked_for_who_may_write_to_it_and_for_no_other(self) -> None:
        for mode, locked in ((0o604, False), (0o606, True)):
            loop = self.loop_over(self.file)
            loop.chmod(mode)
            self.assertIn("id:", self.publish(loop))
            self.assertIs(locked, read_only(loop))
            self.origin.client().unpublish("img")
            self._let_go(loop)

    def test_what_is_in_folders_of_others_is_not_told(self) -> None:
        folder = self.folder / "private"
        folder.mkdir(mode=0o700)
        (folder / "there").write_bytes(bytes(512))
        said = {self.publish_as(folder / name) for name in ("there", "missing")}
        self.assertEqual(1, len({text.replace("missing", "there") for text in said}), str(said))

    def publish_as(self, path: Path) -> str:
        """What a member is told who passes his own file, and says another path."""

        def act(client: AgentClient) -> object:
            with fdpassing.opened(self.file) as fd:
                body = {"file": str(path), "passed": True}
                passing = partial(fdpassing.pass_to, fd=fd)
                return client._follow(calls.PUBLISH_IN_PLACE, body, on_pipe=passing, image="img")

        return self.member(self.origin, act)


class KilledInPlaceTest(InPlaceTestCase):
    """kill -9 of the agent at its steps; then a start finishes it, and nothing is lost of what is served."""

    def setUp(self) -> None:
        super().setUp()
        self.loop = self.loop_over(self.file)

    def publish(self, client: AgentClient) -> None:
        client.publish_in_place("img", self.loop)

    def unpublish(self, client: AgentClient) -> None:
        client.unpublish("img")

    def test_publish_and_unpublish(self) -> None:
        self.origin.start()
        publish = self.origin.steps_of(self.publish)
        unpublish = self.origin.steps_of(self.unpublish)
        self.assertTrue({"publish:recorded", "in-place:recorded", "in-place:locked"} <= set(publish), publish)
        self.assertTrue({"detach:recorded", "in-place:unlocked", "detach:removed"} <= set(unpublish), unpublish)
        for step in kills(publish):
            client = self.killed(self.origin, step, self.publish)
            self.publish(client)
            self.await_served(self.origin)
            self.assertTrue(read_only(self.loop), step)
            self.unpublish(client)
            self.assert_let_go(client, step)
        for step in kills(unpublish):
            self.publish(self.origin.client())
            client = self.killed(self.origin, step, self.unpublish)
            if client.status().images:
                self.await_served(self.origin)
                self.unpublish(client)
            self.assert_let_go(client, step)

    def assert_let_go(self, client: AgentClient, step: str) -> None:
        found = (client.status().images, client.images(), self.origin.served(), read_only(self.loop))
        self.assertEqual(([], [], set(), False), found, step)
        self.assertEqual([], [file for file in self.origin.files() if "img" in file], step)


class DeviceInPlaceTest(InPlaceTestCase):
    def test_what_was_written_is_on_the_device_though_somebody_has_it_open(self) -> None:
        """A map over it, as the kernel stack makes one, reads past what waits in memory."""
        loop, origin = self.loop_over(self.file), self.origin.start()
        with loop.open("rb"):
            with loop.open("r+b", buffering=0) as writer:
                writer.write(b"written last")
            origin.publish_in_place("img", loop)
            self.assertEqual(b"written last", self.file.read_bytes()[:12])

    def test_one_that_somebody_has_claimed_is_refused(self) -> None:
        loop = self.loop_over(self.file)
        origin = self.origin.start()
        claimed = os.open(loop, os.O_RDONLY | os.O_EXCL)  # as a mount does
        error = self.assertRaises(BadImageFile, origin.publish_in_place, "img", loop)
        os.close(claimed)
        self.assertIn("is in use", str(error))
        self.assertFalse(read_only(loop))

    def test_one_over_a_file_of_the_agents_own_is_refused(self) -> None:
        origin = self.origin.start()
        own = self.origin.state / "own.raw"
        own.write_bytes(bytes(MIB))
        error = self.assertRaises(BadImageFile, origin.publish_in_place, "img", self.loop_over(own))
        self.assertIn("the agent's own", str(error))

    def test_it_has_one_name_and_one_that_was_read_only_stays_so(self) -> None:
        loop = self.loop_over(self.file)
        subprocess.run(["blockdev", "--setro", str(loop)], check=True)
        origin = self.origin.start()
        published = origin.publish_in_place("img", loop)
        error = self.assertRaises(ImageExists, origin.publish_in_place, "other", loop)
        self.assertIn("as image 'img'", str(error))
        self.assertEqual(published, origin.publish_in_place("img", self.another_node(loop)))
        self.assertEqual(str(self.folder / "node"), self.in_place(self.origin).path)
        origin.unpublish("img")
        self.assertTrue(read_only(loop))

    def another_node(self, loop: Path) -> Path:
        """The device by another name."""
        node = self.folder / "node"
        os.mknod(node, 0o644 | stat.S_IFBLK, loop.stat().st_rdev)
        return node

    def test_another_device_of_the_number_is_not_served(self) -> None:
        loop, other = self.loop_over(self.file), self.image_file("other")
        origin, child = self.origin.start(), self.host("child").start()
        origin.publish_in_place("img", loop)
        child.create("vm", "img")
        self.origin.kill()
        self.origin.kill_daemons()
        wait_until(lambda: not self.origin.daemons(), "nobody has it open any more")
        subprocess.run(["losetup", "--detach", loop], check=True)
        take = [
            "losetup",
            str(loop),
            str(other),
        ]  # a process that ends has no command line a moment before it closes its files
        wait_until(lambda: subprocess.run(take, stderr=subprocess.DEVNULL, check=False).returncode == 0, "it is free")
        self.origin.start()
        self.await_trouble(self.origin, "is another device now")
        self.assertFalse(read_only(loop), "the kernel keeps that with the number")
