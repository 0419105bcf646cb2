"""Routes to parents that die, come back, and change."""

from __future__ import annotations

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from drivers.base import Image, Parent, PathState
from tests.patience import PATIENCE, wait_until
from tests.userspace.drivers.hosts import MIB, Host, HostCase

ACTIVE, STANDBY, LOST = PathState.ACTIVE, PathState.STANDBY, PathState.LOST


class RouteCase(HostCase):
    """Two origins, ``a`` and ``b``, and a host ``h`` without a route."""

    def setUp(self) -> None:
        super().setUp()
        self.image, self.file = self.make_image(2 * MIB)
        self.a, self.b, self.h = self.host("a"), self.host("b"), self.host("h")
        for origin in (self.a, self.b):
            origin.serve_file(self.image, self.file)

    def parents(self, *hosts: Host) -> list[Parent]:
        return [host.parent for host in hosts]

    def route(self) -> Path:
        """The parent's socket that the newest symlink leads to."""
        links = (self.h.place.run / "parent").glob("img.[0-9]*.sock")
        return max(links, key=lambda path: int(path.name.split(".")[1])).readlink()

    def until_states(self, *states: PathState) -> None:
        wait_until(lambda: self.h.states(self.image) == list(states))


class ConnectTest(RouteCase):
    def test_first_parent_that_listens_is_used(self) -> None:
        self.a.export.withdraw("img")
        self.h.attach.connect(self.image, self.parents(self.a, self.b))
        self.assertEqual([LOST, ACTIVE], self.h.states(self.image))
        self.assertEqual(self.b.socket(self.image), self.route())

    def test_parent_that_listens_but_does_not_greet_is_waited_for(self) -> None:
        self.a.export.withdraw("img")
        self.a.export.reserve("img")
        self.h.attach.connect(self.image, self.parents(self.a, self.b))
        self.assertEqual(self.a.socket(self.image), self.route())
        self.a.serve_file(self.image, self.file)
        self.h.join(self.image, [self.a, self.b])
        self.assertEqual([], self.h.lost)

    def test_zeros_of_the_parent_are_not_asked_for_but_read(self) -> None:
        device = self.h.attach.connect(self.image, self.parents(self.a))
        uri = "json:" + json.dumps({"driver": "raw", "file": device.node})
        listing = subprocess.run(["qemu-img", "map", "--output=json", uri], capture_output=True, check=True).stdout
        self.assertEqual([True], [extent["data"] for extent in json.loads(listing)])
        self.assert_same(uri, self.file)

    def test_parent_that_serves_another_size_is_not_read_from(self) -> None:
        other = Image("img", MIB, self.image.digest)
        self.h.attach.connect(other, self.parents(self.a))
        wait_until(lambda: self.h.lost == ["a"])


class UpdateTest(RouteCase):
    def setUp(self) -> None:
        super().setUp()
        self.device = self.h.attach.connect(self.image, self.parents(self.a, self.b))

    def update(self, *hosts: Host) -> bool:
        return self.h.attach.update(self.image, self.parents(*hosts))

    def test_moving_changes_the_device_so_that_the_old_parent_is_dropped(self) -> None:
        self.h.join(self.image, [self.a, self.b])
        before = self.h.daemon(self.image).pid
        self.update(self.b, self.a)
        self.h.join(self.image, [self.b, self.a])
        self.assertNotEqual(before, self.h.daemon(self.image).pid)
        self.a.export.withdraw("img")
        self.assert_same(self.h.uri(self.image), self.file)
        self.assertEqual([], self.h.lost)

    def test_list_with_the_same_first_parent_keeps_the_route(self) -> None:
        self.assertFalse(self.update(self.a))
        self.assertEqual([ACTIVE], self.h.states(self.image))

    def test_dead_first_parent_is_passed_over(self) -> None:
        self.b.export.withdraw("img")
        self.assertFalse(self.update(self.b, self.a))
        self.assertEqual([LOST, ACTIVE], self.h.states(self.image))

    def test_list_of_dead_parents_is_waited_for(self) -> None:
        self.b.export.withdraw("img")
        self.assertTrue(self.update(self.b))
        self.until_states(LOST)
        self.b.serve_file(self.image, self.file)
        self.until_states(ACTIVE)


class LossTest(RouteCase):
    def test_reads_go_on_from_the_next_parent(self) -> None:
        self.h.join(self.image, [self.a, self.b])
        self.a.export.withdraw("img")
        wait_until(lambda: self.h.lost == ["a"])
        self.assertEqual([LOST, ACTIVE], self.h.states(self.image))
        self.assert_same(self.h.uri(self.image), self.file)

    def test_parent_whose_agent_restarts_its_daemon_is_not_lost(self) -> None:
        self.h.be_patient()
        self.h.join(self.image, [self.a, self.b])
        self.a.kill_daemon(self.image)
        self.a.serve_file(self.image, self.file)
        self.assert_same(self.h.uri(self.image), self.file)
        self.assertEqual([ACTIVE, STANDBY], self.h.states(self.image))
        self.assertEqual([], self.h.lost)

    def test_parent_that_only_holds_its_socket_is_left_by_a_new_route(self) -> None:
        self.h.join(self.image, [self.a, self.b])
        self.a.kill_daemon(self.image)
        wait_until(lambda: self.h.lost == ["a"])
        self.h.join(self.image, [self.a, self.b])
        self.assert_same(self.h.uri(self.image), self.file)
        self.assertEqual([STANDBY, ACTIVE], self.h.states(self.image))

    def test_loss_of_all_parents_is_waited_out(self) -> None:
        self.h.join(self.image, [self.a, self.b])
        for origin in (self.b, self.a):
            origin.export.withdraw("img")
        wait_until(lambda: self.h.lost == ["a"])
        self.until_states(LOST, LOST)
        self.b.serve_file(self.image, self.file)
        self.assert_same(self.h.uri(self.image), self.file)
        self.assertEqual([LOST, ACTIVE], self.h.states(self.image))

    def test_new_list_ends_the_wait(self) -> None:
        for origin in (self.a, self.b):
            origin.export.withdraw("img")
        self.h.attach.connect(self.image, self.parents(self.a))
        wait_until(lambda: self.h.lost == ["a"])
        self.b.serve_file(self.image, self.file)
        self.assertFalse(self.h.attach.update(self.image, self.parents(self.b)))
        self.until_states(ACTIVE)
        self.assertEqual(self.b.socket(self.image), self.route())

    def test_a_new_list_of_dead_parents_leaves_a_daemon_that_can_be_started(self) -> None:
        self.h.join(self.image, [self.a])
        self.assert_same(self.h.uri(self.image), self.file)  # the cache holds all of it
        for origin in (self.a, self.b):
            origin.export.withdraw("img")
        wait_until(lambda: self.route().suffix == ".wait")
        self.h.attach.update(self.image, self.parents(self.b))
        wait_until(lambda: self.route().suffix == ".wait")
        self.h.kill_daemon(self.image)
        self.h.join(self.image, [self.b])  # returns when a child gets an answer


class OtherContentTest(RouteCase):
    """A name that is published again with other content while hosts still read the old one."""

    def setUp(self) -> None:
        super().setUp()
        self.other = self.root / "other.raw"
        self.other.write_bytes(b"\x55" * self.image.size)
        self.successor = Image("img", self.image.size, "sha256:" + "5" * 64)

    def test_child_of_a_parent_that_serves_other_content_now_waits_for_the_old(self) -> None:
        self.h.join(self.image, [self.a])
        self.read_image(self.h, self.image, 0, MIB)
        self.a.serve_file(self.successor, self.other)
        wait_until(lambda: self.h.lost == ["a"])
        with ThreadPoolExecutor() as pool:
            compared = pool.submit(self.assert_same, self.h.uri(self.image), self.file)
            self.assertFalse(self.h.attach.update(self.image, self.parents(self.a, self.b)))
            compared.result(PATIENCE)
        self.assertEqual([STANDBY, ACTIVE], self.h.states(self.image))

    def test_disk_of_a_vm_refuses_a_host_that_serves_other_content_now(self) -> None:
        node = self.h.export.local(self.image).node
        assert node is not None
        uri = "json:" + json.dumps({"driver": "raw", "file": {**node, "open-timeout": 1}})
        self.h.serve_file(self.image, self.file)
        self.assert_same(uri, self.file)
        self.h.serve_file(self.successor, self.other)
        self.assertRaises(subprocess.CalledProcessError, subprocess.check_output, ["qemu-img", "info", uri])


class RestartTest(RouteCase):
    def test_new_driver_keeps_the_route_in_use(self) -> None:
        self.h.join(self.image, [self.b])
        before = self.h.daemon(self.image).pid
        self.h.restart()
        self.h.join(self.image, [self.a, self.b])
        self.assertEqual(self.b.socket(self.image), self.route())
        self.assertEqual(before, self.h.daemon(self.image).pid)

    def test_new_driver_leaves_a_parent_that_is_not_wanted_any_more(self) -> None:
        self.h.join(self.image, [self.b])
        before = self.h.daemon(self.image).pid
        self.h.restart()
        self.h.join(self.image, [self.a])
        self.assertEqual(self.a.socket(self.image), self.route())
        self.assertNotEqual(before, self.h.daemon(self.image).pid)


class DisconnectTest(RouteCase):
    def test_disconnecting_while_waiting_leaves_nothing(self) -> None:
        for origin in (self.a, self.b):
            origin.export.withdraw("img")
        self.h.attach.connect(self.image, self.parents(self.a, self.b))
        wait_until(lambda: (self.h.place.run / "parent" / "img.wait").exists())
        self.h.attach.disconnect("img")
        self.assertEqual([], list((self.h.place.run / "parent").iterdir()))
