"""Where an agent keeps its things, root's and an ordinary user's."""

from __future__ import annotations

import os
from pathlib import Path

from testtools import TestCase

from tests.unit.virtman.scene import folder_for
from virtman.places import Places, is_ours, join_session_of, places_of

UID = 1000


class PlacesTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.sessions = folder_for(self)

    def places(self, uid: int = UID, **environment: str) -> Places:
        return places_of(uid, {"HOME": "/home/ada", **environment}, self.sessions)

    def test_roots_are_those_of_the_host_whatever_the_environment_says(self) -> None:
        system = Places(Path("/var/lib/virtman"), Path("/run/virtman"), "qemu:///system", 10809)
        self.assertEqual(system, self.places(0, XDG_STATE_HOME="/x", XDG_RUNTIME_DIR="/y"))

    def test_an_ordinary_users_are_where_its_variables_say(self) -> None:
        found = self.places(XDG_STATE_HOME="/x/state", XDG_RUNTIME_DIR="/run/user/7")
        self.assertEqual(Places(Path("/x/state/virtman"), Path("/run/user/7/virtman"), "qemu:///session"), found)
        self.assertEqual(Path("/run/user/7/virtman/agent.sock"), found.socket)

    def test_without_variables_they_are_in_the_home_and_the_sessions_folder(self) -> None:
        (self.sessions / str(UID)).mkdir()
        found = self.places()
        self.assertEqual(Path("/home/ada/.local/state/virtman"), found.state)
        self.assertEqual(self.sessions / str(UID) / "virtman", found.run)

    def test_without_a_sessions_folder_sockets_are_in_one_of_the_users_own(self) -> None:
        self.assertEqual(Path(f"/tmp/virtman-{UID}"), self.places().run)

    def test_a_session_that_has_no_name_is_named_for_libvirt(self) -> None:
        (self.sessions / str(UID)).mkdir()
        for named, uid, expected in (
            ({}, UID, {"XDG_RUNTIME_DIR": f"{self.sessions}/{UID}"}),
            ({"XDG_RUNTIME_DIR": "/run/7"}, UID, {"XDG_RUNTIME_DIR": "/run/7"}),
            ({}, UID + 1, {}),
            ({}, 0, {}),
        ):
            environment: dict[str, str] = dict(named)
            join_session_of(uid, environment, self.sessions)
            self.assertEqual(expected, environment)

    def test_relative_variables_are_ignored(self) -> None:
        for value in ("", "x", "./x"):
            found = self.places(XDG_STATE_HOME=value, XDG_RUNTIME_DIR=value)
            self.assertEqual(self.places(), found)

    def test_a_folder_of_somebody_else_is_not_ours_nor_a_link_to_one_of_ours(self) -> None:
        link = self.sessions / "link"
        link.symlink_to(self.sessions)
        self.assertTrue(is_ours(self.sessions))
        self.assertFalse(is_ours(link))
        self.assertFalse(is_ours(self.sessions / "nothing"))
        if os.geteuid() != 0:
            self.assertFalse(is_ours(Path("/")))
            self.skipTest("only root can give a folder away")
        os.chown(self.sessions, UID, UID)
        self.assertFalse(is_ours(self.sessions))
