"""Who sends a stream may go silent: what the agent does with the VM meanwhile."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from tests.doubles.volt import digest_of
from tests.patience import wait_until
from tests.unit.virtman.agents import MIB, SOON, SiteCase
from virtman import creating, disks, migration, models, streams
from virtman.client import silently
from virtman.errors import Interrupted, UnknownVm, VirtmanError
from virtman.pipe import Caller
from virtman.records import RECEIVE
from virtman.stream import Header, Section, write

NEW = "1f" * 16


class SilentCallerTest(SiteCase):
    def setUp(self) -> None:
        super().setUp()
        self.site.hold_still(self.agent)
        self.ours, self.theirs = map(self.enterContext, socket.socketpair())
        self.raised: list[VirtmanError] = []

    def in_background(self, act: Callable[[], object]) -> threading.Thread:
        def run() -> None:
            try:
                act()
            except VirtmanError as error:
                self.raised.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def end(self, thread: threading.Thread) -> None:
        """Wait until a thread has ended."""
        thread.join(SOON)
        self.assertFalse(thread.is_alive())

    def receive(self, since: str | None = None) -> threading.Thread:
        """Begin to receive the VM, or what changed since a snapshot, of which nothing but the header comes."""
        section = Section(id=NEW, name="new", parent=since, size=MIB, taken=1.5, state="off")
        header = Header(image=digest_of("debian"), since=since, sections=(section,), total=0)
        self.stream = write(header, [[]])
        self.theirs.sendall(next(self.stream) + next(self.stream))
        thread = self.in_background(
            lambda: streams.receive_from(self.agent.vms, "vm", "debian", Caller(self.ours), silently)
        )
        wait_until(lambda: self.is_received(since))
        return thread

    def is_received(self, since: str | None) -> bool:
        if since is None:
            return "vm" in self.site.host.disks
        return self.agent.vms.record("vm").doing(RECEIVE)

    def finish(self) -> None:
        """Send the rest."""
        self.theirs.sendall(b"".join(self.stream))
        self.theirs.shutdown(socket.SHUT_WR)

    def base(self) -> str:
        """The ID of a snapshot of the VM."""
        creating.create(self.agent.vms, "vm", "debian", None)
        disks.take(self.agent.vms, "vm", "base")
        (snapshot,) = self.agent.vms.record("vm").snapshots
        return snapshot.id

    def check_destroyed(self, receiving: threading.Thread) -> None:
        self.end(self.in_background(lambda: creating.destroy(self.agent.vms, "vm")))
        self.end(receiving)
        (error,) = self.raised
        self.assertIsInstance(error, Interrupted)
        self.assertEqual("vm 'vm' was destroyed while it was received", str(error))
        self.assertRaises(UnknownVm, self.agent.overview.vm, "vm")
        self.assertEqual({}, self.site.host.disks)

    def test_a_new_vm_is_destroyed_at_once(self) -> None:
        self.check_destroyed(self.receive())

    def test_what_has_come_of_a_vm_that_moves_is_given_up_at_once(self) -> None:
        receiving = self.receive(self.base())
        self.assertEqual("another", migration.give_up(self.agent.vms, "vm", ["not-its"]))
        answers: list[str] = []
        self.end(self.in_background(lambda: answers.append(migration.give_up(self.agent.vms, "vm", ["base"]))))
        self.end(receiving)
        self.assertEqual((["given up"], {}), (answers, self.site.host.disks))
        self.assertIn("was given up while it came", str(self.raised[0]))

    def test_a_repair_leaves_it_alone_and_sees_to_all_else(self) -> None:
        receiving = self.receive(self.base())
        self.site.host.daemon_dies("debian")
        repaired: list[models.Repaired] = []
        self.end(self.in_background(lambda: repaired.append(self.agent.repair())))
        self.assertEqual([models.Repaired(vms=[], images=["debian"], orphans=[])], repaired)
        self.assertTrue(self.agent.vms.record("vm").doing(RECEIVE))
        self.finish()
        self.end(receiving)
        self.assertEqual([], self.raised)
        self.assertEqual(["base", "new"], [snapshot.name for snapshot in self.agent.overview.snapshots("vm")])
