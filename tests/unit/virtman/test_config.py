"""The agent's settings and folders."""

from __future__ import annotations

import grp
import os
import stat
from dataclasses import replace
from pathlib import Path

from testtools import TestCase

from drivers.base import Limits, Place
from tests.others import GROUP, as_nobody
from tests.unit.virtman.scene import folder_for
from virtman.config import LIBVIRT_GROUP, LONGEST_SOCKET, SOCKET_PATH_MAX, AgentConfig, agent_id, prepare, serve_to
from virtman.errors import ConfigError


class PrepareTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = folder_for(self)

    def config(self, name: str = "here", state: str | Path = "state", run: str | Path = "run") -> AgentConfig:
        return AgentConfig(name=name, state=self.folder / state, run=self.folder / run, volt="http://127.0.0.1:1")

    def prepare(self, config: AgentConfig) -> list[int]:
        locks = prepare(config)
        for lock in locks:
            self.addCleanup(os.close, lock)
        return locks

    def refused(self, config: AgentConfig) -> str:
        """What prepare says, having made nothing."""
        error = self.assertRaises(ConfigError, prepare, config)
        self.assertEqual([], sorted(self.folder.iterdir()))
        return str(error)

    def test_the_folders_are_made_and_may_be_passed_but_not_listed(self) -> None:
        config = self.config()
        self.prepare(config)
        for folder in (config.state, config.run):
            self.assertEqual(0o711, stat.S_IMODE(folder.stat().st_mode))

    def test_a_run_folder_of_somebody_else_is_refused_and_left_as_it_is(self) -> None:
        config = self.config()
        config.run.mkdir()
        config.run.chmod(0o750)
        if os.geteuid() != 0:
            self.skipTest("only root can give a folder away")
        os.chown(config.run, 65534, 65534)
        error = self.assertRaises(ConfigError, prepare, config)
        self.assertIn(f"{config.run} belongs to somebody else", str(error))
        self.assertEqual(0o750, stat.S_IMODE(config.run.stat().st_mode))

    def test_an_agent_keeps_the_id_that_it_drew_at_its_first_start(self) -> None:
        state = self.folder
        known = agent_id(state)
        self.assertEqual((32, known), (len(known), agent_id(state)))
        (state / "agent.id").write_text("\n")
        self.assertIn("delete it", str(self.assertRaises(ConfigError, agent_id, state)))
        (state / "agent.id").unlink()
        self.assertNotEqual(known, agent_id(state))

    def test_drivers_and_clients_are_told_where(self) -> None:
        config = replace(
            self.config(), address="10.0.0.7", path_policy="round-robin", reserve=7, up=1, down=2, connections=3
        )
        told = Place(
            config.state, config.run, "here", "10.0.0.7", "round-robin", reserve=7,
            limits=Limits(up=1, down=2, connections=3),
        )  # fmt: skip
        self.assertEqual(told, config.place)
        self.assertEqual(config.run / "agent.sock", config.socket)

    def test_bad_names_and_folders_are_refused(self) -> None:
        for name in ("", "a.b", "a/b", "..", "a" * 64, "a b"):
            self.assertIn("--name", self.refused(self.config(name=name)))
        for config in (replace(self.config(), state=Path("state")), replace(self.config(), run=Path("run"))):
            self.assertIn("absolute", self.refused(config))
        self.assertIn("both", self.refused(self.config(state="one", run="one")))

    def test_a_run_folder_must_leave_room_for_the_longest_socket(self) -> None:
        room = SOCKET_PATH_MAX - LONGEST_SOCKET
        fits = str(self.folder / "r")
        fits += "r" * (room - len(fits))
        self.assertIn(str(room), self.refused(self.config(run=fits + "r")))
        self.prepare(self.config(run=fits))

    def test_a_place_is_a_site_or_a_site_and_a_rack(self) -> None:
        for location in ("/", "paris/", "paris/r1/u2", "a b", "-", "p" * 64):
            self.assertIn("--place", self.refused(replace(self.config(), location=location)))
        self.prepare(replace(self.config(), location="paris/r1"))

    def test_a_second_agent_on_the_same_folders_is_refused(self) -> None:
        self.prepare(self.config())
        for other, folder in (({"run": "other"}, "state"), ({"state": "other"}, "run")):
            error = self.assertRaises(ConfigError, prepare, self.config(**other))
            self.assertIn(str(self.folder / folder), str(error))

    def test_a_folder_that_cannot_be_used_is_named(self) -> None:
        (self.folder / "file").touch()
        for state, said in (("file/state", "Not a directory"), ("/proc/virtman", "")):
            error = str(self.assertRaises(ConfigError, prepare, self.config(state=state)))
            self.assertIn(state, error)
            self.assertIn(said, error)

    def test_a_lock_is_not_inherited_by_programs_that_the_agent_starts(self) -> None:
        for lock in self.prepare(self.config()):
            self.assertFalse(os.get_inheritable(lock))

    def test_other_drivers_than_those_that_made_the_records_are_refused_and_hold_no_lock(self) -> None:
        config = self.config()
        for lock in prepare(config):
            os.close(lock)
        (config.state / "records" / "vms").mkdir(parents=True)
        (config.state / "records" / "vms" / "web.json").touch()
        error = self.assertRaises(ConfigError, prepare, replace(config, snapshot="other"))
        self.assertIn("--stack chunkstore", str(error))
        self.prepare(config)

    def test_only_the_hypervisor_may_pass_to_the_exports(self) -> None:
        self.prepare(self.config())
        serve = (self.config().run / "serve").stat()
        self.assertEqual(0, serve.st_mode & stat.S_IRWXO)
        try:
            group = grp.getgrnam(LIBVIRT_GROUP).gr_gid
        except KeyError:
            self.skipTest(f"there is no group {LIBVIRT_GROUP}: it comes with Debian's libvirt-daemon-system")
        if os.geteuid() != 0:
            self.skipTest("only root can give a folder to the hypervisor's group")
        self.assertEqual((group, 0o710), (serve.st_gid, stat.S_IMODE(serve.st_mode)))


class GroupTest(TestCase):
    """Who passes to a socket in the folder of exports."""

    def setUp(self) -> None:
        super().setUp()
        self.folder = folder_for(self)
        self.folder.chmod(0o711)
        self.serve = self.folder / "serve"
        self.gid = grp.getgrnam(GROUP).gr_gid

    def passes(self, *groups: int) -> bool:
        """Whether a member of these groups alone gets to what is in the folder; nobody lists it."""
        (self.serve / "image.sock").touch(mode=0o666)
        (self.serve / "image.sock").chmod(0o666)
        self.assertIn("PermissionError", as_nobody(self, lambda: [*os.scandir(self.serve)], groups))
        return as_nobody(self, (self.serve / "image.sock").read_bytes, groups) == "b''"

    def test_a_group_that_is_not_there_is_told_before_anything_is_made(self) -> None:
        config = AgentConfig("here", self.folder / "state", self.folder / "run", "", group="no-such-group")
        error = self.assertRaises(ConfigError, prepare, config)
        self.assertEqual("there is no group 'no-such-group' on this host; make it, or say another --group", str(error))
        self.assertEqual([], [*self.folder.iterdir()])

    def test_members_of_both_groups_pass_and_nobody_else(self) -> None:
        try:
            hypervisor = grp.getgrnam(LIBVIRT_GROUP).gr_gid
        except KeyError:
            self.skipTest("libvirt is not installed")
        serve_to(self.serve, self.gid)
        self.assertEqual([True, True, False], [self.passes(self.gid), self.passes(hypervisor), self.passes()])
        serve_to(self.serve, None)
        self.assertEqual([False, True], [self.passes(self.gid), self.passes(hypervisor)])
        serve_to(self.serve, self.gid)
        self.assertEqual([True, True, False], [self.passes(self.gid), self.passes(hypervisor), self.passes()])

    def test_drivers_are_told_of_it(self) -> None:
        config = AgentConfig("here", self.folder / "state", self.folder / "run", "", group=GROUP)
        self.assertEqual(self.gid, config.place.group)
