"""Exports by real storage daemons."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from drivers.base import Device, Opened, Place
from drivers.cache.qcow2 import Qcow2Cache
from drivers.errors import BadAddress, DaemonFailed, DriverError, ProtocolViolated
from drivers.export.nbd import NbdExport
from drivers.nbd.endpoints import socket_of
from drivers.nbd.probe import Client
from drivers.qemu import daemon, uring
from tests.patience import PATIENCE, wait_until
from tests.userspace.drivers.hosts import MIB, HostCase


class PublishTest(HostCase):
    def test_published_image_cannot_be_written(self) -> None:
        image, _, (host,) = self.chain(0)
        with Client(host.socket(image), image.name, timeout=PATIENCE) as client:
            self.assertEqual(image.size, client.size)
        write = ["qemu-io", "-f", "raw", "-c", "write 0 4k", host.uri(image)]
        self.assertNotEqual(0, subprocess.run(write, capture_output=True, check=False).returncode)

    def test_a_client_that_wants_other_content_under_the_same_name_is_refused(self) -> None:
        image, _, (host,) = self.chain(0)
        Client(host.socket(image), image.key, timeout=PATIENCE).close()
        self.assertRaises(ProtocolViolated, Client, host.socket(image), "0" * 64, timeout=PATIENCE)

    def test_an_image_may_be_called_by_a_number(self) -> None:
        image, file = self.make_image(name="2026-11")
        host = self.host("h")
        host.export.publish(image, host.attach.origin(image, file))
        self.assert_same(host.uri(image), file)

    def test_what_is_open_is_served_wherever_its_path_leads(self) -> None:
        image, file = self.make_image()
        host, other = self.host("h"), self.root / "other"
        copy = Path(shutil.copy(file, self.root / "copy"))
        other.write_bytes(bytes(image.size))
        with file.open("rb") as opened:
            other.rename(file)
            host.export.publish(image, host.attach.origin(image, Opened(opened.fileno(), "1f")))
        self.assert_same(host.uri(image), copy)

    def test_the_daemon_stays_as_long_as_it_is_the_same_that_is_open(self) -> None:
        image, file = self.make_image()
        host = self.host("h")
        daemons = []
        for mark in ("1f", "1f", "2e"):
            with file.open("rb") as opened, file.open("rb"):
                host.export.publish(image, host.attach.origin(image, Opened(opened.fileno(), mark)))
            daemons.append(host.daemon(image).pid)
        self.assertEqual((2, daemons[0]), (len(set(daemons)), daemons[1]))

    def test_publishing_with_replace_starts_a_new_daemon_and_clients_go_on(self) -> None:
        image, file, (origin, host) = self.chain(1)
        before = origin.daemon(image).pid
        origin.export.publish(image, origin.attach.origin(image, file), replace=True)
        self.assertNotEqual(before, origin.daemon(image).pid)
        self.assert_same(host.uri(image), file)
        self.assertEqual([], origin.died)

    def test_publishing_again_after_the_socket_was_deleted_serves_again(self) -> None:
        image, file, (host,) = self.chain(0)
        host.socket(image).unlink()
        self.assertFalse(host.export.serving(image.name))
        host.serve_file(image, file)
        self.assert_same(host.uri(image), file)


class AtOnceTest(HostCase):
    def test_publishing_and_withdrawing_one_image_at_once_ends_whole(self) -> None:
        image, file, host = *self.make_image(MIB), self.host("h")
        acts: list[Callable[[], object]] = [
            lambda: host.serve_file(image, file),
            lambda: host.export.withdraw(image.name),
            lambda: host.export.reserve(image.name),
            lambda: (host.export.serving(image.name), host.export.hit_bytes(image.name), host.export.existing()),
        ]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: acts[number % len(acts)](), range(80)))
        host.serve_file(image, file)
        self.assert_same(host.uri(image), file)
        host.export.withdraw(image.name)
        self.assertEqual([], list((host.place.run / "serve").iterdir()))
        self.assertEqual({}, daemon.running(host.place.run / "serve"))
        self.assertEqual([], host.died)


class FailedPublishTest(HostCase):
    def test_failing_daemon_is_reported_with_its_log(self) -> None:
        image, file, host = *self.make_image(), self.host("h")
        device = host.attach.origin(image, file)
        file.unlink()
        error = self.assertRaises(DaemonFailed, host.export.publish, image, device)
        self.assertIn("No such file or directory", str(error))
        self.assertIn("exit code 1", str(error))

    def test_endpoint_stays_reserved_without_a_daemon(self) -> None:
        image, file, host = *self.make_image(), self.host("h")
        broken = Device(image.size, node={"driver": "file", "filename": "/nonexistent/file"})
        self.assertRaises(DaemonFailed, host.export.publish, image, broken)
        self.assertEqual({}, daemon.running(host.place.run / "serve"))
        self.assertFalse(host.export.serving(image.name))
        host.serve_file(image, file)
        self.assert_same(host.uri(image), file)

    def test_daemon_without_a_parent_is_given_up_after_the_timeout(self) -> None:
        image, _, host = *self.make_image(), self.host("h")
        absent = self.host("absent")
        absent.export.reserve(image.name)
        self.assertRaises(DaemonFailed, host.join, image, [absent], timeout=0.3)
        self.assertEqual({}, daemon.running(host.place.run / "serve"))

    def test_long_paths_are_refused(self) -> None:
        host = self.host("h")
        deep = NbdExport(Place(self.root, self.root / ("d" * 100)), died=host.died.append)
        self.addCleanup(deep.close)
        self.assertRaises(DriverError, deep.reserve, "img")

    def test_addresses_of_other_kinds_are_refused(self) -> None:
        for address in ("http://host", "unix://relative", "/run/serve", ""):
            self.assertRaises(BadAddress, socket_of, address, "img")


class WithdrawTest(HostCase):
    def test_daemon_whose_parent_is_gone_is_stopped(self) -> None:
        image, _, (origin, host) = self.chain(1)
        origin.export.withdraw(image.name)
        reader = subprocess.Popen(["qemu-io", "-r", "-f", "raw", "-c", "read 0 4k", host.uri(image)])
        self.addCleanup(reader.wait)
        self.addCleanup(reader.kill)
        host.export.withdraw(image.name)
        self.assertEqual({}, daemon.running(host.place.run / "serve"))


class DeathTest(HostCase):
    def test_death_of_a_daemon_is_told_once_and_leaves_no_zombie(self) -> None:
        image, _, (host,) = self.chain(0)
        pid = host.daemon(image).pid
        host.kill_daemon(image)
        wait_until(lambda: host.died == [image.name] and not Path(f"/proc/{pid}").exists())
        self.assertFalse(host.export.serving(image.name))


class AdoptionTest(HostCase):
    def test_new_driver_finds_the_daemon_and_keeps_it(self) -> None:
        image, file, (host,) = self.chain(0)
        before = host.daemon(image).pid
        host.restart()
        self.assertTrue(host.export.serving(image.name))
        host.export.reserve(image.name)
        host.serve_file(image, file)
        self.assertEqual(before, host.daemon(image).pid)
        self.assert_same(host.uri(image), file)

    def test_new_driver_is_told_of_the_death_of_an_old_daemon(self) -> None:
        image, file, (host,) = self.chain(0)
        host.restart()
        host.kill_daemon(image)
        wait_until(lambda: host.died == [image.name])
        host.serve_file(image, file)
        self.assert_same(host.uri(image), file)

    def test_daemon_of_another_folder_is_not_ours(self) -> None:
        image, _, (host,) = self.chain(0)
        stranger = self.host("other")
        self.assertEqual(frozenset(), stranger.export.existing())
        stranger.export.withdraw(image.name)
        self.assertTrue(host.export.serving(image.name))


class HitsTest(HostCase):
    def test_hits_count_what_was_read_from_the_cache(self) -> None:
        image, file = self.make_image()
        origin, host = self.hosts(2)
        origin.serve_file(image, file)
        host.cache = Qcow2Cache(host.place, io_uring=False)
        host.join(image, [origin])
        self.read_image(host, image, 0, 2 * MIB)
        before = host.export.hit_bytes(image.name)
        self.read_image(host, image, 0, 2 * MIB)
        after = host.export.hit_bytes(image.name)
        assert before is not None and after is not None
        self.assertGreaterEqual(after - before, 2 * MIB)

    def test_hits_are_none_where_nobody_counts_them(self) -> None:
        if not uring.usable():
            self.skipTest("no io_uring here")
        image, _, (_, host) = self.chain(1)
        for _ in range(2):
            self.read_image(host, image, 0, 2 * MIB)
        self.assertIsNone(host.export.hit_bytes(image.name))
