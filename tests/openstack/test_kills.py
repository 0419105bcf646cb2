"""kill -9 of Nova's services before and after each call of ours that changes something, and what they repair then."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import testtools

from tests.openstack import victim  # not its test case itself, which would be taken for a test
from tests.openstack.agreement import MARK
from tests.openstack.computes import GLANCE_IMAGE
from tests.openstack.victim import Script, World

KEEP = ("resize", "confirm", "revert", "snapshot", "shelve")
"""Servers, by what was done to them, whose data is on a disk unless they are on the shelf."""
AS_NOVA_LEAVES_THEM = ("shelving", "shelving_image_pending_upload", "shelving_image_uploading", "shelving_offloading")
"""States in which Nova leaves a server whose compute was killed, until its user deletes it or an operator resets it."""


class NovaKilledTest(testtools.TestCase):
    """The agents and Volt are those of all tests here, and go on; each test leaves nothing but the base's origin."""

    world: ClassVar[World]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.world = World()
        cls.addClassCleanup(shutil.rmtree, cls.world.folder, ignore_errors=True)
        cls.addClassCleanup(cls.world.cluster.stop)
        cls.world.cluster.start()
        cls.world.live(nothing)

    def kill_everywhere(self, prepare: Script, act: Script) -> list[str]:
        """Kill Nova at each step of an act; the next process checks what is left, and is killed later.

        Returns all steps: those that the last process took, which was not killed.
        """
        killed: dict[int, str] = {}
        for number in itertools.count(1):

            def script(nova: victim.Nova, step: int = number - 1) -> None:
                check(nova)
                prepare(nova)
                nova.die_at(step)
                act(nova)
                nova.live_on()
                check(nova)

            died_at = self.world.live(script)
            if died_at is None:
                break
            killed[number - 1] = died_at
        steps = self.world.steps()
        self.assertEqual(killed, {step: steps[step] for step in killed})
        return steps

    def assert_killed(self, expected: list[str], steps: list[str]) -> None:
        """There was a step before and after the effect of each of these calls, in this order."""
        self.assertEqual([f"{when} {call}" for call in expected for when in ("before", "after")], steps)

    def test_the_first_server_of_a_base(self) -> None:
        steps = self.kill_everywhere(victim.Nova.detach_base, lambda nova: nova.boot(name="boot"))
        # Both fail: there is no such image yet, and none either once no other thread attaches the base.
        self.assertEqual(["before create"] * 2, steps[:2])
        calls = ["attachment_create", "attachment_complete", "publish_in_place", "create"]
        self.assert_killed(calls, steps[2:])

    def test_delete(self) -> None:
        steps = self.kill_everywhere(server_to("delete"), lambda nova: nova.delete(nova.server))
        self.assert_killed(["destroy"], steps)

    def test_rebuild(self) -> None:
        steps = self.kill_everywhere(server_to("rebuild"), doing({"rebuild": {"imageRef": GLANCE_IMAGE}}, "ACTIVE"))
        self.assert_killed(["destroy"], steps[:2])
        self.assert_killed(["create"], steps[-2:])

    def test_actions_that_change_one_thing_or_two(self) -> None:
        resized = ({"migrate": None}, "VERIFY_RESIZE")
        for name, before, act, calls in (
            ("resize", (), resized, ["send"]),
            ("confirm", (resized,), ({"confirmResize": None}, "ACTIVE"), ["destroy"]),
            # Nova takes these hosts' folders for shared, so that the upkeep alone destroys the disk.
            ("revert", (resized,), ({"revertResize": None}, "ACTIVE"), []),
            (
                "snapshot",
                (({"os-stop": None}, "SHUTOFF"),),
                ({"createImage": {"name": "copy"}}, "SHUTOFF"),
                ["export_vm"],
            ),
            ("shelve", (), ({"shelve": None}, "SHELVED_OFFLOADED"), ["export_vm", "destroy"]),
        ):
            self.assert_killed(calls, self.kill_everywhere(server_to(name, *before), doing(*act)))

    def test_unshelve(self) -> None:
        shelved = server_to("unshelve", ({"shelve": None}, "SHELVED_OFFLOADED"))
        steps = self.kill_everywhere(shelved, doing({"unshelve": None}, "ACTIVE"))
        self.assert_killed(["publish", "create"], steps)

    def test_a_base_of_a_snapshot_that_is_gone(self) -> None:
        """Upkeep withdraws it, lets go of the device, detaches it in Cinder, and deletes the volume."""

        def prepare(nova: victim.Nova) -> None:
            nova.have_base()  # what was killed before has deleted its volume, in the end
            nova.detach_base()
            nova.delete(nova.boot(name="base"))
            nova.lose_the_snapshot()

        def act(nova: victim.Nova) -> None:
            in_a_thread(nova.let_stacks_go)

        steps = self.kill_everywhere(prepare, act)
        self.assert_killed(["unpublish", "attachment_delete", "delete"], steps)


def nothing(_nova: victim.Nova) -> None:
    """Begin and end."""


def server_to(what: str, *before: tuple[dict[str, Any], str]) -> Script:
    """A server that its user has written to, and done this with."""

    def prepare(nova: victim.Nova) -> None:
        nova.server = nova.boot(name=what)
        nova.write(nova.server, MARK)
        for action, state in before:
            nova.act(nova.server, action, state)

    return prepare


def doing(action: dict[str, Any], state: str) -> Script:
    """An action of the API."""
    return lambda nova: nova.act(nova.server, action, state)


def in_a_thread(act: Callable[[], None]) -> None:
    """As a service of Nova does it: what the test's own thread does is not interrupted."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(act).result()


def check(nova: victim.Nova) -> None:
    """After the repair every server is in a state that Nova allows, its user can delete it, and nothing is left."""
    nova.repair()
    for found in nova.api.get_servers():
        server = nova.api.get_server(found["id"])
        assert_whole(nova, server, nova.copies(server))
        nova.delete(server)
    nova.assert_agreement()


def assert_whole(nova: victim.Nova, server: dict[str, Any], copies: dict[str, bytes]) -> None:
    """``copies``: what is on its disks, by node."""
    state, task = server["status"], server["OS-EXT-STS:task_state"]
    said = f"{server['name']} is {state}, {task}, and its disks are {copies}"
    nova.assertIn(task, (None, *AS_NOVA_LEAVES_THEM), said)
    nova.assertIn(state, ("ACTIVE", "SHUTOFF", "VERIFY_RESIZE", "SHELVED", "SHELVED_OFFLOADED", "ERROR"), said)
    if server["name"] in KEEP and not state.startswith("SHELVED"):
        nova.assertIn(MARK, copies.values(), said)
    if task is None and state in ("ACTIVE", "SHUTOFF"):
        nova.assertEqual([nova.node_of(server)], [*copies], said)
    if server["name"] == "resize" and state == "VERIFY_RESIZE":
        nova.assertEqual(set(nova.cluster.names), {*copies}, said)
    if state == "SHELVED_OFFLOADED":
        nova.assertEqual({}, copies, said)
