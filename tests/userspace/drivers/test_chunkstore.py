"""The chunk store as an image source: real processes, TCP and TLS between them."""

from __future__ import annotations

import mmap
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

from drivers.base import Child, Filled, Image, Limits, Parent, PathState, Range, Taken
from drivers.chunkstore import process, source
from drivers.chunkstore.control import Control, StoreDown, StoreRefused
from drivers.chunkstore.source import ChunkSource
from drivers.errors import BadAddress, BadVolume, DriverError, HostFailed, NbdFailed, NoParents
from drivers.host.space import Room
from drivers.manifest import path_of
from drivers.qemu.nbdclient import Client
from tests.contracts import drivers as contracts
from tests.patience import PATIENCE, wait_until
from tests.programs import qemu_io
from tests.userspace.drivers.chunkhosts import MIB, ChunkHost, ChunkHostCase
from virtman.client import silently
from virtman.imagefile import inspect
from virtman.imagestore import ImageStore
from volt.edgesecrets import serving_key

ACTIVE = PathState.ACTIVE


class ChunkSourceContractTest(ChunkHostCase, contracts.SourceContract):
    """A host ``h`` without anything, an image, and two hosts that serve it."""

    def setUp(self) -> None:
        super().setUp()
        self.image, self.file = self.make_image(MIB)
        ups = [self.host("a"), self.host("b")]
        for up in ups:
            up.serve_file(self.image, self.file, "h")
        self.parents = [up.as_parent(self.image.name, "h") for up in ups]
        self.h = self.host("h")

    def make(self) -> ChunkSource:
        return self.h.restart()


class CopiedCase(ChunkHostCase):
    """Brings images with manifests."""

    def copied(self) -> tuple[ChunkHost, ChunkHost, Image, Path]:
        """A host that has published a copy of a file, a child of that host, the image and the file."""
        _, file = self.make_image()
        top, child = self.host("top"), self.host("child")
        store = ImageStore(top.place.state, Room(top.place.state))
        image = store.add("img", inspect(file), silently)
        top.serve_file(image, store.path(image), "child")
        child.join(image, [top])
        return top, child, image, file


class MovingContractTest(CopiedCase, contracts.MovingContract):
    """The image is a copy of its file."""

    def setUp(self) -> None:
        super().setUp()
        top, child, self.image, self.file = self.copied()
        self.origin, self.child = top.source, child.source


class ChunkSourceTest(CopiedCase):
    def test_a_chain_of_hosts_reads_all_of_an_image(self) -> None:
        image, file = self.make_image()
        top, middle, leaf = self.host("top"), self.host("middle"), self.host("leaf")
        top.serve_file(image, file, "middle")
        middle.join(image, [top], "leaf")
        leaf.join(image, [middle])  # with another parent it would leave one that is slow
        self.assert_same(leaf.uri(image), file)
        for host in (middle, leaf):
            host.wait_held(image, image.size)  # nothing proves that a chunk of such an image is one of zeros
        wait_until(lambda: leaf.states(image)[0] is ACTIVE)

    def test_the_manifest_of_a_copy_proves_what_a_host_reads_and_zeros_are_not_kept(self) -> None:
        top, child, image, file = self.copied()
        self.assert_same(child.uri(image), file)
        child.wait_held(image, 6 * MIB)
        published, fetched = (path_of(host.place.state, image.key).read_bytes() for host in (top, child))
        self.assertEqual(published, fetched)

    def test_what_came_another_way_is_kept_as_far_as_it_is_of_the_image(self) -> None:
        _, child, image, file = self.copied()
        first, second = child.source.lacking(image)
        self.assertEqual((Range(0, 3 * MIB), Range(4 * MIB, 3 * MIB)), (first, second))
        reader, writer = os.pipe()
        with os.fdopen(reader), os.fdopen(writer, "wb") as pipe, ThreadPoolExecutor(1) as pool:
            taken = pool.submit(child.source.put, image, [first], reader)
            pipe.write(file.read_bytes()[: 3 * MIB])
            pipe.flush()
            self.assertEqual(Taken(3 * MIB), taken.result())
        bad = self.root / "bad"
        bad.write_bytes(bytes(MIB) + file.read_bytes()[5 * MIB : 7 * MIB])
        with bad.open("rb") as content:
            expected = Taken(2 * MIB, (Range(4 * MIB, MIB),))
            self.assertEqual(expected, child.source.put(image, [second], content.fileno()))
            self.assertRaises(
                StoreRefused, child.source.put, image, [second], content.fileno()
            )  # the file is at its end
        self.assertEqual([Range(4 * MIB, MIB)], child.source.lacking(image))
        self.assert_same(child.uri(image), file)
        self.assertEqual(MIB, child.source._known()[image.name]["fetched"])

    def test_nothing_is_taken_of_an_image_whose_chunks_nothing_proves(self) -> None:
        image, file = self.make_image(MIB)
        top, child = self.host("top"), self.host("child")
        top.serve_file(image, file, "child")
        child.join(image, [top])
        with file.open("rb") as content:
            put = (child.source.put, image, [Range(0, MIB)], content.fileno())
            self.assertIn("nothing proves", str(self.assertRaises(StoreRefused, *put)))
        self.assertEqual([Range(0, MIB)], child.source.lacking(image))

    def test_a_host_that_is_no_child_reads_nothing_and_one_that_is_named_later_does(self) -> None:
        image, file = self.make_image(MIB)
        top, child = self.host("top"), self.host("child")
        top.serve_file(image, file, "other")
        child.join(image, [top])
        wait_until(lambda: child.lost == [(image.name, "top")])
        top.admit(image.name, ["child"], revision=2)
        self.assert_same(child.uri(image), file)

    def test_a_process_that_dies_is_started_again_with_what_it_kept_and_its_images_are_told(self) -> None:
        image, file = self.make_image()
        top, child = self.host("top"), self.host("child")
        top.serve_file(image, file, "child")
        child.join(image, [top])
        self.assert_same(child.uri(image), file)
        child.wait_held(image, image.size)
        child.kill()
        wait_until(lambda: child.died == [image.name])
        self.assertFalse(child.source.serving(image.name))
        top.remove()
        child.join(image, [top])
        self.assert_same(child.uri(image), file)

    def test_what_is_pinned_is_told_and_a_process_that_starts_again_has_no_pins(self) -> None:
        image, file = self.make_image(MIB)
        top, child = self.host("top"), self.host("child")
        top.serve_file(image, file, "child")
        child.join(image, [top])
        child.source.pin(image, 1 << 40)
        self.assertEqual(1 << 40, child.source.filled(image.name).pinned)
        child.kill()
        wait_until(lambda: child.died)
        child.join(image, [top])
        self.assertEqual(0, child.source.filled(image.name).pinned)

    def test_a_volume_that_cannot_be_used_keeps_nobody_from_reading_and_is_not_made_elsewhere(self) -> None:
        image, file = self.make_image(MIB)
        top, child = self.host("top"), self.host("child")
        top.serve_file(image, file, "child")
        mounted, away = self.root / "mount", self.root / "away"
        mounted.mkdir()
        child.source.reserve(image.name)
        child.source.group.add_volume(mounted / "pool")
        mounted.rename(away)
        mounted.mkdir()  # as a disk that is not mounted
        child.kill()
        wait_until(lambda: child.died)
        child.join(image, [top])
        self.assert_same(child.uri(image), file)
        found = {volume.path: (volume.state, bool(volume.trouble)) for volume in child.source.group.volumes()}
        self.assertEqual(("missing", True), found[str(mounted / "pool")])
        self.assertEqual([], [*mounted.iterdir()])
        self.assertRaises(BadVolume, child.source.group.tend_volume, mounted / "pool")
        mounted.rmdir()
        away.rename(mounted)
        child.source.group.tend_volume(mounted / "pool")
        self.assertEqual({"running"}, {volume.state for volume in child.source.group.volumes()})

    def test_nobody_waits_for_a_process_that_does_not_run(self) -> None:
        image, _ = self.make_image(MIB)
        source = self.host("host").source
        self.assertIn("does not run", str(self.assertRaises(StoreDown, source.held, image)))
        self.assertEqual(([], Filled()), (source.paths(image.name), source.filled(image.name)))

    def test_a_port_that_is_in_use_for_a_while_is_taken_later(self) -> None:
        image, file = self.make_image(MIB)
        top = self.host("top")
        process = top.source._process
        process._release()
        with mock.patch.object(process, "_tcp", side_effect=HostFailed(OSError(98, "in use"))):
            self.assertRaises(HostFailed, top.source.reserve, image.name)
        top.serve_file(image, file)
        self.assert_same(top.uri(image), file)

    def test_a_source_that_was_stopped_starts_no_process_again(self) -> None:
        host = self.host("h")
        host.source.reserve("img")
        host.source.stop()
        for call in (lambda: host.source.reserve("img"), host.source.kept):
            self.assertRaisesRegex(StoreDown, "start the agent again", call)
        self.assertEqual([], [path for path in host.place.run.rglob("*") if path.is_socket() and not path.is_symlink()])
        host.restart().reserve("img")

    def test_one_of_another_version_is_started_again(self) -> None:
        host = self.host("h")
        host.source.reserve("img")
        before = host.pid
        with mock.patch.object(process, "version", return_value="0"):
            host.restart().reserve("img")
        self.assertNotEqual(before, host.pid)

    def test_a_closed_image_is_opened_by_a_new_list_and_by_no_old_one(self) -> None:
        image, file = self.make_image()
        top, child = self.host("top"), self.host("child")
        top.serve_file(image, file, "child")
        child.join(image, [top])
        top.source.close(image.name)
        keys = serving_key(top.key, image.name, top.name)
        top.source.admit(image.name, 1, [Child("child")], serving_key=keys, new=False)
        program = socket.socket(socket.AF_UNIX)
        program.connect(str(child.place.run / "serve" / f"{image.name}.sock"))
        with Client(program, image.key, timeout=PATIENCE) as client:
            program.settimeout(0.5)
            self.assertRaises(NbdFailed, client.read, 0, 512)
        top.admit(image.name, ["child"])
        self.assert_same(child.uri(image), file)

    def test_a_boot_set_is_told_as_ranges(self) -> None:
        host = self.host("h")
        with mock.patch.object(host.source, "_call", return_value={"ranges": [[131072, 196608]]}):
            self.assertEqual([Range(131072, 65536)], host.source.boot_set("img"))

    def test_a_new_address_holds_from_the_next_agent_on(self) -> None:
        image, file = self.make_image(MIB)
        top, child = self.host("top"), self.host("child")
        top.serve_file(image, file, "child")
        top.place = replace(top.place, address="127.0.0.2")
        top.restart()
        top.serve_file(image, file, "child")
        child.join(image, [top])
        self.assert_same(child.uri(image), file)
        [parent] = child.source.paths(image.name)
        self.assertIn("//127.0.0.2:", parent.parent.address)

    def test_a_process_that_does_not_answer_serves_what_it_served(self) -> None:
        image, file = self.make_image(MIB)
        top = self.host("top")
        top.serve_file(image, file)
        self.assertTrue(top.source.serving(image.name))
        os.kill(top.pid, signal.SIGSTOP)
        self.addCleanup(os.kill, top.pid, signal.SIGCONT)
        self.patch(source, "FRESH", 0.0)
        self.patch(source, "_QUICK", 0.1)
        self.assertTrue(top.source.serving(image.name))

    def test_what_an_origin_cannot_read_is_an_error_to_programs_of_its_host(self) -> None:
        image, file = self.make_image()
        top = self.host("top")
        top.serve_file(image, file)
        os.truncate(file, 7 * MIB + MIB // 2)
        for read in ("read 7864320 65536", "read 7340032 1048576"):
            failed = self.assertRaises(AssertionError, qemu_io, top.uri(image), read, options=["-r", "-f", "raw"])
            self.assertIn("Input/output error", str(failed))

    def test_a_chunk_that_a_power_cut_tore_is_found_before_all_is_said_to_be_here(self) -> None:
        image, file = self.make_image()
        top, child = self.host("top"), self.host("child")
        top.serve_file(image, file, "child")
        child.join(image, [top])
        self.fill(child, image)
        child.kill()
        pool = child.place.state / "chunkstore/pool"
        with pool.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as torn:
            at = torn.find(file.read_bytes()[:4096])
            self.assertGreater(at, 0)
            torn[at] ^= 1
        child.join(image, [top])
        self.assertFalse(child.source.filled(image.name).whole)
        self.fill(child, image)
        top.remove()
        self.assert_same(child.uri(image), file)

    def fill(self, host: ChunkHost, image: Image) -> None:
        """Have all of an image there."""
        host.source.fill(image, [Range(0, image.size)])
        wait_until(lambda: host.source.filled(image.name).whole)

    def test_one_that_the_agent_before_has_started_goes_on(self) -> None:
        image, file = self.make_image(MIB)
        top, child = self.host("top"), self.host("child")
        top.serve_file(image, file, "child")
        child.join(image, [top])
        before = child.pid
        child.restart()
        self.assertTrue(child.source.serving(image.name))
        child.join(image, [top])
        self.assertEqual(before, child.pid)
        self.assert_same(child.uri(image), file)

    def test_a_process_without_an_agent_that_died_is_found_dead(self) -> None:
        image, file = self.make_image(MIB)
        top = self.host("top")
        top.serve_file(image, file)
        address = top.source.address
        top.source.shut()
        top.kill()
        top.source = top.new_source()
        self.assertFalse(top.source.serving(image.name))
        top.serve_file(image, file)
        self.assertEqual(address, top.source.address)
        self.assert_same(top.uri(image), file)

    def test_what_cannot_be_reached_is_refused(self) -> None:
        image, _ = self.make_image(MIB)
        child = self.host("child")
        for parent, error in (
            (Parent("old", "unix:///run/virtman/serve", ticket="5e" * 32), BadAddress),
            (Parent("old", "nbds://127.0.0.1:1"), NoParents),
            (Parent("odd", "nbds://127.0.0.1:1", ticket="odd"), DriverError),
        ):
            self.assertRaises(error, child.source.ensure, image, [parent])

    def test_the_process_is_told_of_limits_also_one_that_runs_already(self) -> None:
        host = self.host("host")
        for limits in (Limits(up=1 << 20, connections=7), Limits(down=5)):
            host.place = replace(host.place, limits=limits)
            host.restart().reserve("img")
            told = Control(host.place.run / "chunkd.sock").call("status")["limits"]
            self.assertEqual({**asdict(limits), "connections": limits.connections or 4096}, told)

    def test_secrets_are_in_no_command_line_and_the_control_socket_is_the_agents_alone(self) -> None:
        image, file = self.make_image(MIB)
        top, child = self.host("top"), self.host("child")
        top.serve_file(image, file, "child")
        child.join(image, [top])
        secret = top.as_parent(image.name, "child").ticket
        said = [path.read_bytes() for path in child.place.run.glob("*.log")]
        pid = child.pid
        for text in (*said, *(Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))):
            self.assertNotIn(secret.encode(), text)
        self.assertEqual(0o600, (child.place.run / "chunkd.sock").stat().st_mode & 0o777)
