"""install host, on the files below a folder, with stand-ins for the programs that change accounts."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from testtools import TestCase
from testtools.matchers import HasLength

from opennebula_tm.installer.cli import main
from opennebula_tm.installer.console import Commands, Console, Done
from opennebula_tm.installer.errors import Refused
from opennebula_tm.installer.host import Access, HostSide
from tests.unit.opennebula_tm.scene import CommandsDouble, CutAt, tree, was_cut, write
from tests.unit.virtman.scene import folder_for

ACCESS = Access("oneadmin", "virtman")
SETTINGS = "# Settings\n#VIRTMAN_GROUP=virtman\n#VIRTMAN_STACK=auto\n"


class AccountsDouble(Commands):
    """groupadd, usermod, gpasswd, groupdel over the file of groups; ``answer``: what the agent says."""

    def __init__(self, root: Path) -> None:
        self._file = root / "etc" / "group"
        self.answer = Done(0)
        self.asked: list[list[str]] = []

    def run(self, argv: Sequence[str]) -> Done:
        """Do what the program would."""
        self.asked.append(list(argv))
        lines = self._file.read_text().splitlines()
        if argv[0] == "groupadd":
            lines.append(f"{argv[-1]}:x:999:")
        elif argv[0] == "usermod":
            lines = [self._with(line, argv[-1]) if line.startswith(f"{argv[-2]}:") else line for line in lines]
        elif argv[0] == "gpasswd":
            lines = [re.sub(rf"\b{argv[-2]}\b,?", "", line) if line.startswith(argv[-1]) else line for line in lines]
        elif argv[0] == "groupdel":
            lines = [line for line in lines if not line.startswith(f"{argv[-1]}:")]
        else:
            return self.answer
        self._file.write_text("".join(f"{line}\n" for line in lines))
        return Done(0)

    def _with(self, line: str, user: str) -> str:
        return f"{line}{user}" if line.endswith(":") else f"{line},{user}"


class HostScene:
    """A host's files."""

    def __init__(self, folder: Path, settings: str | None = SETTINGS) -> None:
        self.root = folder / "root"
        write(self.root / "etc/passwd", "root:x:0:0::/root:/bin/sh\noneadmin:x:9869:9869::/var/lib/one:/bin/sh\n")
        write(self.root / "etc/group", "root:x:0:\noneadmin:x:9869:\n")
        write(self.root / "usr/local/bin/virtman", "#!/bin/sh\n", 0o755)
        (self.root / "etc/default").mkdir()
        (self.root / "var/lib").mkdir(parents=True)
        if settings is not None:
            write(self.root / "etc/default/virtman-agent", settings, 0o640)
        self.commands = AccountsDouble(self.root)
        self.out = io.StringIO()

    def host(self, step: CutAt | None = None) -> HostSide:
        """The installer, to whom all is agreed."""
        return HostSide(self.root, Console(True, out=self.out), self.commands, step or CutAt())

    def run(self, act: str, step: CutAt | None = None) -> None:
        """Install or remove."""
        host = self.host(step)
        host.install(ACCESS) if act == "install" else host.remove()

    def settings(self) -> str:
        """Those of the agent."""
        return (self.root / "etc/default/virtman-agent").read_text()

    def group(self) -> str:
        """The line of the group, or nothing."""
        lines = (self.root / "etc/group").read_text().splitlines()
        return next((line for line in lines if line.startswith("virtman:")), "")


class HostTest(TestCase):
    def test_all_is_as_it_was_after_the_removal(self) -> None:
        for settings in (SETTINGS, None, "", "A=1"):
            scene = HostScene(folder_for(self), settings)
            before = tree(scene.root)
            scene.host().install(ACCESS)
            self.assertEqual([], list(scene.host().differences(ACCESS)))
            self.assertEqual("virtman:x:999:oneadmin", scene.group())
            self.assertIn("VIRTMAN_GROUP=virtman\n", scene.settings() + "\n")
            installed = tree(scene.root)
            scene.host().install(ACCESS)
            self.assertEqual(installed, tree(scene.root))
            scene.host().remove()
            self.assertEqual(before, tree(scene.root), str(settings))
            scene.host().remove()
            self.assertTrue(scene.out.getvalue().endswith("nothing to do\n"))

    def test_what_an_administrator_changed_meanwhile_stays(self) -> None:
        scene = HostScene(folder_for(self))
        scene.host().install(ACCESS)
        write(scene.root / "etc/group", f"{scene.group()},monitor\n")
        write(scene.root / "etc/default/virtman-agent", scene.settings() + "VIRTMAN_NAME=a\n")
        scene.host().remove()
        self.assertEqual("virtman:x:999:monitor", scene.group())
        self.assertIn("the group virtman stays: monitor", scene.out.getvalue())
        self.assertEqual(SETTINGS + "VIRTMAN_NAME=a\n", scene.settings())

    def test_what_was_there_before_stays(self) -> None:
        scene = HostScene(folder_for(self), "VIRTMAN_GROUP=virtman\n")
        write(scene.root / "etc/group", "virtman:x:12:oneadmin\n")
        before = tree(scene.root)
        scene.host().install(ACCESS)
        scene.host().remove()
        self.assertEqual(before, tree(scene.root))

    def test_wherever_it_is_cut_off_the_next_run_goes_on(self) -> None:
        watcher = CutAt()
        HostScene(folder_for(self)).host(watcher).install(ACCESS)
        begun = ["begin the record", "make the group", "add the member"]
        self.assertEqual(begun, watcher.seen[:3])
        self.assertThat(watcher.seen[3:], HasLength(2))  # the backup of the settings, and what is written
        for act, again in (("install", True), ("install", False), ("remove", False)):
            for number in itertools.count():
                scene = HostScene(folder_for(self))
                before = tree(scene.root)
                if act == "remove":
                    scene.run("install")
                if not was_cut(number, scene.run, act):
                    break
                if again:
                    scene.run("install")
                    self.assertEqual([], list(scene.host().differences(ACCESS)))
                scene.run("remove")
                self.assertEqual(before, tree(scene.root), f"{act} {number}")
            self.assertGreater(number, 2)


class RefusalTest(TestCase):
    def assert_untouched(self, scene: HostScene, access: Access, why: str) -> None:
        before = tree(scene.root)
        scene.commands.asked.clear()
        self.assertRaisesRegex(Refused, f".*{why}", scene.host().install, access)
        self.assertEqual(before, tree(scene.root))
        self.assertEqual([], scene.commands.asked)

    def test_what_is_in_the_way(self) -> None:
        self.assert_untouched(HostScene(folder_for(self)), Access("nobody", "virtman"), "no user nobody")
        self.assert_untouched(HostScene(folder_for(self), "VIRTMAN_GROUP=kvm\n"), ACCESS, 'is "kvm"')
        scene = HostScene(folder_for(self))
        scene.host().install(ACCESS)
        self.assert_untouched(scene, Access("root", "virtman"), "--remove that first")

    def test_a_program_that_fails_is_named(self) -> None:
        scene = HostScene(folder_for(self))
        failing = HostSide(scene.root, Console(True, out=scene.out), CommandsDouble(Done(10, error="locked")))
        self.assertRaisesRegex(Refused, "groupadd .*: locked", failing.install, ACCESS)


class CheckTest(TestCase):
    def test_one_line_for_each_thing(self) -> None:
        scene = HostScene(folder_for(self))
        out = io.StringIO()
        options = ["host", "--root", str(scene.root), "--check"]
        scene.commands.answer = Done(1, error="Traceback\nvirtman: permission denied")
        self.assertEqual(1, main(options, console=Console(out=out), commands=scene.commands))
        lines = out.getvalue().splitlines()
        for line, part in zip(lines, ("no group", "does not set", "permission denied"), strict=True):
            self.assertIn(part, line)
        for option in ([], ["--remove"], []):
            argv = ["host", "--root", str(scene.root), *option]
            console = Console(True, out=out)
            self.assertEqual(0, main(argv, console=console, commands=scene.commands))
        scene.commands.answer = Done(0)
        self.assertEqual(0, main(options, console=Console(out=out), commands=scene.commands))
