"""install frontend, on a small front end; and on OpenNebula's own files where ONE_SOURCE names its source tree."""

from __future__ import annotations

import fcntl
import io
import itertools
import os
import shutil
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path

from testtools import TestCase

from opennebula_tm.installer import disk, sources
from opennebula_tm.installer.cli import main
from opennebula_tm.installer.console import Console, Done
from opennebula_tm.installer.errors import Refused
from opennebula_tm.installer.frontend import Places
from tests.unit.opennebula_tm.scene import ONED, PROBE, CommandsDouble, Scene, Terminal, tree, was_cut, write
from tests.unit.opennebula_tm.test_registration import FORMS
from tests.unit.virtman.scene import folder_for

USED = (
    "<DATASTORE_POOL><DATASTORE><ID>104</ID><NAME>fast</NAME><DS_MAD>{}</DS_MAD><TM_MAD>{}</TM_MAD>"
    "</DATASTORE></DATASTORE_POOL>"
)


class LifeTest(TestCase):
    def test_all_is_as_it_was_after_the_removal(self) -> None:
        for name, oned in FORMS.items():
            scene = Scene(folder_for(self), disk.as_bytes(oned))
            before = scene.tree()
            scene.run("install")
            self.assertEqual([], scene.front().differences(None), name)
            installed = scene.tree()
            for act, tree_then in (("install", installed), ("remove", before), ("remove", before)):
                scene.run(act)
                self.assertEqual(tree_then, scene.tree(), name)
                if tree_then is installed:
                    self.assertTrue(scene.out.getvalue().endswith("nothing to do\n"), name)
            self.assertTrue(scene.out.getvalue().endswith("nothing to do\n"), name)

    def test_where_each_file_goes_and_to_whom_it_belongs(self) -> None:
        scene = Scene(folder_for(self))
        remotes = scene.places.remotes
        uid, gid = (12345, 54321) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
        os.chown(remotes, uid, gid)  # only root gives files away
        scene.front().install(None)
        for name, mode in (
            ("tm/virtman", 0o750), ("tm/virtman/clone", 0o750), ("tm/virtman/run.py", 0o640),
            ("tm/virtman/opennebula_tm/__init__.py", 0o640), ("tm/virtman/opennebula_tm/driver/main.py", 0o640),
            ("datastore/virtman/cp", 0o750), ("etc/tm/virtman/virtman.conf", 0o640), (PROBE, 0o750),
            (PROBE.replace("kvm", "qemu"), 0o750),
        ):  # fmt: skip
            found = (remotes / name).stat()
            self.assertEqual((mode, uid, gid), (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid), name)
        self.assertFalse((remotes / "tm/virtman/opennebula_tm/driver/__pycache__").exists())
        self.assertFalse((remotes / "tm/virtman/opennebula_tm/installer").exists())
        self.assertEqual(0o640, stat.S_IMODE(scene.places.oned.stat().st_mode))
        self.assertEqual({os.geteuid()}, {path.stat().st_uid for path in (scene.places.oned, scene.places.record)})
        scene.front().remove(force=False)
        if os.geteuid() == 0:
            self.assertEqual(["runuser", "-u", "12345"], scene.commands.asked[0][:3])  # whom OpenNebula knows

    def test_the_scripts_of_this_project_run_where_they_are_put(self) -> None:
        scene = Scene(folder_for(self))
        scene.package = sources.PACKAGE
        before = scene.tree()
        scene.front().install(None)
        for script in ("tm/virtman/clone", "datastore/virtman/stat"):
            argv = [scene.places.remotes / script]
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
            self.assertNotEqual(0, done.returncode)
            self.assertNotIn("Error", done.stderr.splitlines()[-1])  # such as ModuleNotFoundError
        scene.front().remove(force=False)
        self.assertEqual(before, scene.tree())

    def test_a_new_version_replaces_ours_and_removes_what_it_has_no_more(self) -> None:
        scene = Scene(folder_for(self))
        before = scene.tree()
        scene.front().install("chunkstore")
        write(scene.package / "driver/main.py", "def main() -> int: ...\n")
        (scene.package / "remotes/tm/virtman/ln").unlink()
        lines = scene.front().differences(None)
        self.assertEqual({"differs", "is"}, {line.split()[1] for line in lines})
        self.assertEqual(2, len(lines))
        scene.front().install(None)
        self.assertEqual([], scene.front().differences("chunkstore"))
        self.assertFalse((scene.places.remotes / "tm/virtman/ln").exists())
        scene.front().remove(force=False)
        self.assertEqual(before, scene.tree())

    def test_what_an_administrator_changed_meanwhile_stays_and_so_do_backups(self) -> None:
        scene = Scene(folder_for(self))
        scene.front().install(None)
        scene.edit_oned("PORT = 2633", "PORT = 2634")
        conf, clone = scene.places.remotes / "etc/tm/virtman/virtman.conf", scene.places.remotes / "tm/virtman/clone"
        conf.write_text("SOCKET=/mine\n")
        self.assertEqual([], scene.front().differences(None))
        write(scene.package / "remotes/etc/tm/virtman/virtman.conf", "# new\n")
        write(scene.package / "driver/main.py", "# new\n")
        scene.front().install(None)
        clone.write_text("mine")
        self.assertRaisesRegex(Refused, "clone was changed since it was installed", scene.front().install, None)
        scene.front().remove(force=False)
        self.assertEqual(("SOCKET=/mine\n", "mine"), (conf.read_text(), clone.read_text()))
        self.assertEqual([clone], list((scene.places.remotes / "tm/virtman").rglob("*")))
        self.assertEqual(ONED.replace("PORT = 2633", "PORT = 2634"), scene.oned())
        backups = sorted(scene.places.etc.glob("oned.conf.virtman-*"))
        self.assertEqual(2, len(backups))
        self.assertIn(ONED.encode(), [backup.read_bytes() for backup in backups])
        self.assertEqual({0o640}, {stat.S_IMODE(backup.stat().st_mode) for backup in backups})


if "ONE_SOURCE" in os.environ or "CI" not in os.environ:  # which has no such tree, and takes a skip for a failure

    class OfOpenNebulaTest(TestCase):
        def test_all_is_as_it_was_after_the_removal(self) -> None:
            if "ONE_SOURCE" not in os.environ:
                self.skipTest("ONE_SOURCE does not name a source tree of OpenNebula")
            source = Path(os.environ["ONE_SOURCE"])
            scene = Scene(folder_for(self), (source / "share/etc/oned.conf").read_bytes())
            shutil.copy(source / "src/vmm_mad/exec/vmm_execrc", scene.places.execrc)
            shutil.rmtree(scene.places.remotes / "im")
            shutil.copytree(source / "src/im_mad/remotes", scene.places.remotes / "im", symlinks=True)
            before = scene.tree()
            scene.front().install("chunkstore")
            self.assertEqual([], scene.front().differences(None))
            self.assertIn("netapp,purefa,virtman", scene.oned())
            scene.front().remove(force=False)
            self.assertEqual(before, scene.tree())


class RefusalTest(TestCase):
    def assert_untouched(self, scene: Scene, why: str) -> None:
        before = scene.tree()
        self.assertRaisesRegex(Refused, why, scene.front().install, None)
        self.assertEqual(before, scene.tree())

    def test_files_of_others(self) -> None:
        scene = Scene(folder_for(self))
        write(scene.places.remotes / "datastore/virtman/cp", "theirs")
        self.assert_untouched(scene, "cp is not of this installer")

    def test_links_in_the_place_of_our_files_and_folders(self) -> None:
        scene = Scene(folder_for(self))
        (scene.places.remotes / PROBE).symlink_to("name.sh")
        self.assert_untouched(scene, "virtman.sh is not a file of this installer")
        scene = Scene(folder_for(self))
        (scene.places.remotes / "tm/virtman").symlink_to(folder_for(self))
        self.assert_untouched(scene, "leads out of")

    def test_another_installer_at_work(self) -> None:
        scene = Scene(folder_for(self))
        descriptor = os.open(scene.places.remotes, os.O_RDONLY)
        self.addCleanup(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # not even one that lets others in
        self.assert_untouched(scene, "another installer is at work")

    def test_drivers_in_use(self) -> None:
        for ds, tm in (("virtman", "ssh"), ("fs", "virtman")):
            scene = Scene(folder_for(self))
            scene.front().install(None)
            installed = scene.tree()
            scene.commands.answers = [Done(0, USED.format(ds, tm))]
            self.assertRaisesRegex(Refused, r"fast \(104\)", scene.front().remove, force=False)
            self.assertEqual(installed, scene.tree())
            self.assertEqual(["list", "-x"], scene.commands.asked[0][-2:])
            scene.front().remove(force=True)
            self.assertEqual(ONED, scene.oned())


class CutOffTest(TestCase):
    """Killed before each step in turn; the next run ends what was begun."""

    def test_wherever_it_is_killed_the_next_run_goes_on(self) -> None:
        whole = Scene(folder_for(self))
        whole.front().install(None)
        for act, then in (("install", "install"), ("install", "remove"), ("remove", "remove")):
            for number in itertools.count():
                scene = Scene(folder_for(self))
                before = scene.tree()
                if act == "remove":
                    scene.run("install")
                if not was_cut(number, scene.run, act):
                    break
                scene.run(then)
                if then == "install":
                    self.assertEqual([], scene.front().differences(None))
                    self.assertEqual(set(names(whole)), set(names(scene)), str(number))
                    self.assertEqual(1, len(list(scene.places.etc.glob("oned.conf.*"))), str(number))
                    scene.run("remove")
                self.assertEqual(before, scene.tree(), f"{act} {number}")
            self.assertGreater(number, 15)


class DiskTest(TestCase):
    def test_a_link_to_the_settings_stays_one(self) -> None:
        folder = folder_for(self)
        write(folder / "real", "old", 0o600)
        (folder / "link").symlink_to("real")
        disk.write(folder / "link", b"new", disk.owner_of(folder / "link"))
        self.assertEqual("new", (folder / "real").read_text())
        self.assertTrue((folder / "link").is_symlink())
        self.assertEqual(0o600, stat.S_IMODE((folder / "real").stat().st_mode))


class DatastoresDouble(CommandsDouble):
    """Datastores of OpenNebula: number, DS_MAD and VIRTMAN_METHOD of each. ``updates``: what was appended to which."""

    def __init__(self, stores: Sequence[tuple[str, str, str]]) -> None:
        content = "".join(
            f"<DATASTORE><ID>{number}</ID><NAME>s-{number}</NAME><DS_MAD>{ds_mad}</DS_MAD><TM_MAD>virtman</TM_MAD>"
            f"<TEMPLATE><VIRTMAN_METHOD>{method}</VIRTMAN_METHOD></TEMPLATE></DATASTORE>"
            for number, ds_mad, method in stores
        )
        super().__init__(Done(0, f"<DATASTORE_POOL>{content}</DATASTORE_POOL>"))
        self.updates: dict[str, str] = {}

    def run(self, argv: Sequence[str]) -> Done:
        """Note an update; a list else."""
        if "update" not in argv:
            return super().run(argv)
        *_, number, file, append = argv
        self.updates[number] = Path(file).read_text()
        return Done(0 if append == "--append" and Path(file).stat().st_mode & 0o004 else 1)


class CommandLineTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.scene = Scene(folder_for(self))
        self.location = ["--one-location", str(self.scene.location)]

    def run_it(
        self, *options: str, console: Console | None = None, commands: CommandsDouble | None = None
    ) -> tuple[int, str]:  # fmt: skip
        out = io.StringIO()
        code = main(
            ["frontend", *self.location, *options], console=console or Console("--yes" in options, io.StringIO(), out),
            commands=commands or CommandsDouble(), package=self.scene.package,
        )  # fmt: skip
        return code, out.getvalue()

    def test_check_tells_each_thing_that_is_not_as_it_should_be(self) -> None:
        code, said = self.run_it("--check")
        self.assertEqual(1, code)
        self.assertEqual(18, len(said.splitlines()), said)
        self.assertEqual(0, self.run_it("--yes")[0])
        self.assertEqual((0, ""), self.run_it("--check"))
        (self.scene.places.remotes / PROBE).chmod(0o777)
        self.assertEqual(1, self.run_it("--check")[0])
        self.assertEqual(0, self.run_it("--yes")[0])
        self.assertEqual((0, ""), self.run_it("--check"))

    def test_the_method_is_set_for_our_datastores_of_images(self) -> None:
        stores = (("100", "virtman", ""), ("101", "virtman", "lazy"), ("102", "virtman", "tree"), ("103", "-", ""))
        commands = DatastoresDouble(stores)
        self.run_it("--yes")
        code, said = self.run_it("--check", "--method", "tree", commands=commands)
        lines = [
            f'datastore s-{number} ({number}): VIRTMAN_METHOD is "{now}"'
            for number, now in (("100", ""), ("101", "lazy"))
        ]
        self.assertEqual((1, lines), (code, said.splitlines()))
        self.assertEqual({}, commands.updates)
        self.assertEqual(0, self.run_it("--yes", "--method", "tree", commands=commands)[0])
        self.assertEqual(dict.fromkeys(("100", "101"), 'VIRTMAN_METHOD = "tree"\n'), commands.updates)
        code, said = self.run_it("--yes", "--method", "lazy", commands=DatastoresDouble((("100", "virtman", "lazy"),)))
        self.assertEqual(0, code)
        self.assertIn("nothing to do for VIRTMAN_METHOD", said)
        self.assertEqual(1, self.run_it("--yes", "--method", "tree")[0], "OpenNebula does not answer")

    def test_the_diff_is_shown_and_nothing_is_done_unless_it_is_agreed(self) -> None:
        before = self.scene.tree()
        for answer, code in ((None, 1), ("", 1), ("no\n", 1), ("y\n", 0)):
            self.assertEqual(before, self.scene.tree())
            out = io.StringIO()
            console = Console(False, io.StringIO() if answer is None else Terminal(answer), out)
            self.assertEqual(code, self.run_it(console=console)[0])
            said = out.getvalue()
            self.assertIn('+    ARGUMENTS = "-t 15 -d dummy,shared,ssh,local,virtman"', said)
            if answer is not None:
                self.assertLess(said.index('+    NAME = "virtman"'), said.index("[y/N]"))
        self.assertIn("onehost sync -f", said)
        self.assertIn("systemctl restart opennebula", said)

    def test_whatever_fails_is_told_in_one_line(self) -> None:
        self.scene.places.oned.unlink()
        self.scene.places.oned.mkdir()
        program = str(Path(__file__).parents[3] / "opennebula_tm" / "install")
        for why in ("oned.conf: Is a directory", "there is no folder"):
            argv = [program, "frontend", *self.location]
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
            self.assertEqual((1, ""), (done.returncode, done.stdout))
            self.assertRegex(done.stderr, rf"^install: .*{why}.*\n$")
            shutil.rmtree(self.scene.places.remotes, ignore_errors=True)

    def test_front_ends_of_packages(self) -> None:
        places = Places.of(None)
        self.assertEqual(Path("/var/lib/one/remotes"), places.remotes)
        self.assertEqual(Path("/etc/one/oned.conf"), places.oned)
        self.assertEqual(Path("/etc/one/vmm_exec/vmm_execrc"), places.execrc)

    def test_tuning_shows_present_values(self) -> None:
        code, said = self.run_it("--tuning")
        self.assertEqual(0, code)
        lines = said.splitlines()
        for part in (
            "MAX_ACTIONS_PER_HOST is 4; for a wave 20", "MAX_ACTIONS_PER_CLUSTER is 30", "SCHED_MAX_WND_TIME is 10",
            "-t of VM_MAD lxc is 7", "-t of TM_MAD is 15", "-t of DATASTORE_MAD is 15",
            "MaxSessions is", "MaxStartups is",
        ):  # fmt: skip
            self.assertEqual(1, sum(part in line for line in lines), part)

    def test_the_program_itself(self) -> None:
        program = Path(__file__).parents[3] / "opennebula_tm" / "install"
        self.assertTrue(os.access(program, os.X_OK))
        for command in ("frontend", "host"):
            done = subprocess.run([program, command, "--help"], capture_output=True, text=True, check=True)
            self.assertIn(f"install {command} --check", done.stdout)


def names(scene: Scene) -> list[str]:
    """All files, but for the moment that is in the names of backups."""
    return [name.partition(".virtman-2")[0] for name in tree(scene.location)]
