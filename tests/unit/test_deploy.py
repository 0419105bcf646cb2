"""The systemd units and their settings."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import click
from testtools import TestCase

from tests.patience import PATIENCE
from tests.unit.virtman.scene import folder_for
from virtman.cli import main as virtman
from volt.cli import main as volt

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = DEPLOY / "systemd"
WAITS = ("active", "activating", "reloading", "deactivating")
"""States of the agent's unit in which that of the data paths goes on waiting."""


class UnitTest(TestCase):
    def test_systemd_finds_nothing_wrong(self) -> None:
        if shutil.which("systemd-analyze") is None:
            self.skipTest("systemd-analyze is missing: it is in Debian's package systemd")
        folder = folder_for(self)
        for unit in sorted(UNITS.iterdir()):
            # Where the units expect our commands, there are none on this machine.
            text = re.sub(r"/usr/local/bin/\w+", "/bin/true", unit.read_text())
            copy = folder / unit.name
            copy.write_text(text)
            argv = ["systemd-analyze", "verify", "--man=no", str(copy)]
            done = subprocess.run(argv, capture_output=True, text=True, check=False)
            self.assertEqual((0, "", ""), (done.returncode, done.stdout, done.stderr), unit.name)

    def test_units_run_commands_that_there_are(self) -> None:
        for unit in UNITS.iterdir():
            commands = re.findall(r"(?m)^Exec\w+=.*/usr/local/bin/(\w+) (?:--socket \S+ )?(\w+)", unit.read_text())
            self.assertNotEqual([], commands)
            for program, command in commands:
                group = {"virtman": virtman, "volt": volt}[program]
                assert isinstance(group, click.Group)
                self.assertIn(command, group.list_commands(click.Context(group)))

    def test_data_paths_go_with_the_machine_and_not_with_the_agent(self) -> None:
        lines = (UNITS / "virtman-disks.service").read_text().splitlines()
        bound = [line for line in lines if line.startswith(("PartOf=", "BindsTo=", "Requires=", "StopPropagatedFrom="))]
        self.assertEqual(([], True), (bound, "RefuseManualStop=yes" in lines))

    def test_caches_are_closed_after_vms_have_stopped_and_not_before(self) -> None:
        lines = (UNITS / "virtman-disks.service").read_text().splitlines()
        wanted = {"RemainAfterExit=yes", "Before=libvirt-guests.service"}
        [stop] = [line for line in lines if line.startswith("ExecStopPost=")]
        self.assertEqual((wanted, True), (wanted & set(lines), stop.endswith(" suspend --force")))

    def test_what_waits_for_the_agent_goes_on_as_long_as_somebody_starts_it(self) -> None:
        text = (UNITS / "virtman-disks.service").read_text()
        [line] = re.findall(r"(?m)^ExecStart=-timeout 120 sh -c '(.*)'$", text)
        folder = folder_for(self)
        programs = {"virtman": "exit 1", "systemctl": "echo $STATE", "sleep": "echo waits; kill $PPID"}
        for name, does in programs.items():
            (folder / name).write_text(f"#!/bin/sh\n{does}\n")
            (folder / name).chmod(0o755)
        script = line.replace("$$", "$").replace("/usr/local/bin/virtman", "virtman")
        for state in (*WAITS, "inactive", "failed"):
            wait = state in WAITS
            environment = {"PATH": f"{folder}:{os.environ['PATH']}", "STATE": state}
            ended = subprocess.run(
                ["sh", "-c", script], env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
            )
            self.assertEqual((wait, -signal.SIGTERM if wait else 1), ("waits" in ended.stdout, ended.returncode), state)


class SettingsTest(TestCase):
    """The samples name every variable of their command, but for those that the unit sets."""

    def variables(self, command: click.Command) -> set[str]:
        return {str(option.envvar) for option in command.params if option.envvar}

    def sample(self, name: str) -> set[str]:
        return set(re.findall(r"(?m)^#(\w+)=", (DEPLOY / "default" / name).read_text()))

    def test_of_the_agent(self) -> None:
        command = virtman.get_command(click.Context(virtman), "agent")
        assert command is not None
        self.assertEqual(self.variables(command), self.sample("virtman-agent"))

    def test_of_volt(self) -> None:
        set_by_unit = {"VOLT_STATE", "VOLT_TOKEN_FILE"}
        self.assertEqual(self.variables(volt.commands["serve"]) - set_by_unit, self.sample("volt"))
