"""Both drivers, the stand's and OpenNebula's own, call scripts in the same way and return the same answers."""

from __future__ import annotations

import base64
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lab.opennebula import Answer, Host, driver_of
from lab.opennebula.pool import request
from tests.programs import require_root
from tests.unit.virtman.scene import folder_for
from tests.userspace.opennebula.stand import WITH_SOURCE, StandTestCase

pytestmark = pytest.mark.long

SCRIPT = """#!/usr/bin/python3
import json, os, sys
from pathlib import Path
name = Path(sys.argv[0]).name
call = {"line": " ".join([name, *sys.argv[1:]]), "stdin": sys.stdin.read(), "home": os.environ["ONE_LOCATION"]}
with (Path(call["home"]) / "var" / "calls").open("a") as file:
    file.write(json.dumps(call) + "\\n")
answer = Path(sys.argv[0]).with_name("answers") / name
if answer.exists():
    os.execv("/bin/sh", ["/bin/sh", str(answer), *sys.argv[1:]])
"""
SCRIPTS = {"tm": ("clone", "ln", "mv", "delete", "premigrate", "monitor"), "datastore": ("cp", "rm", "monitor")}
LOG_LINES = "ERROR: log only\nfirst line\nINFO: 12 more\n  second line \nWARN: w\nDEBUG: d\nERROR:no blank\n"
WORDS = "# a comment\n\nCLONE probe fe:/a  host-1:/b 'c d'\t$(e) é\n  LN probe x\n"
TRANSFERS = (
    ("exit 0", WORDS, None, ["clone fe:/a host-1:/b 'c d' $(e) é", "ln x"]),
    ("exit 0", "CLONE.ssh probe a b\n", None, ["clone a b"]),
    ("echo words; echo words", "LN probe b\n", None, ["ln b"]),
    ("echo 'it broke' >&2; exit 3", "CLONE probe a\nLN probe b\nDELETE probe c\n", "it broke", ["clone a", "ln b"]),
    (f"cat >&2 <<'E'\n{LOG_LINES}E\nexit 1", "LN probe b\n", "first linesecond lineERROR:no blank", ["ln b"]),
    ("echo '-x is wrong' >&2; exit 1", "LN probe b\n", "", ["ln b"]),
)
"""What the script ln does, the lines of a transfer file, the reason of its failure, and the calls of scripts."""


class DriverContract:
    """What holds for both; a mixin of tests."""

    class Test(StandTestCase):
        def setUp(self) -> None:
            super().setUp()
            require_root(self, "hosts are mount namespaces")
            folder = folder_for(self)
            hosts = {name: Host(private=(folder / "private" / name,)) for name in ("host-1", "host-2")}
            self.start_stand(folder, hosts)
            self.store = self.one.image_datastore(100, "probe", "probe")
            for kind, names in SCRIPTS.items():
                folder = self.frontend.remotes / kind / "probe"
                (folder / "answers").mkdir(parents=True)
                for name in names:
                    (folder / name).write_text(SCRIPT)
                    (folder / name).chmod(0o755)

        def answers(self, script: str, body: str) -> None:
            """Let the scripts of a name run a body for the shell."""
            for kind in SCRIPTS:
                (self.frontend.remotes / kind / "probe" / "answers" / script).write_text(body)

        def calls(self) -> list[dict[str, Any]]:
            """The calls of scripts since the last time."""
            notes = self.frontend.location / "var" / "calls"
            lines = notes.read_text().splitlines() if notes.exists() else []
            notes.unlink(missing_ok=True)
            return [json.loads(line) for line in lines]

        def lines(self) -> list[str]:
            return [call["line"] for call in self.calls()]

        def file(self, name: str, text: str) -> Path:
            path = self.folder / name
            path.write_text(text)
            return path

        def transfer(self, text: str) -> Answer:
            return self.driver.transfer(self.file("transfer", text))

        def test_a_transfer_file_runs_scripts_line_by_line_until_one_fails(self) -> None:
            for does, text, reason, calls in TRANSFERS:
                self.answers("ln", does)
                answer = self.transfer(text)
                self.assertEqual((reason is None, reason or ""), (answer.ok, answer.reason), text)
                self.assertEqual(calls, self.lines())
            self.answers("ln", "kill -9 $$")
            self.assertFalse(self.transfer("LN probe b\n").ok)

        def test_scripts_know_where_they_are_and_only_a_step_has_an_input(self) -> None:
            self.transfer("DELETE probe host-1:/b 0 0\n")
            self.assertTrue(self.driver.step(["PREMIGRATE", "probe", "a", "b c"], "told").ok)
            home = str(self.frontend.location)
            expected = [("delete host-1:/b 0 0", "", home), ("premigrate a b c", "told", home)]
            self.assertEqual(expected, [tuple(call.values()) for call in self.calls()])

        def test_a_mode_of_transfer_may_have_a_script_of_its_own(self) -> None:
            (self.frontend.remotes / "tm" / "probe" / "clone.ssh").symlink_to("clone")
            self.transfer("CLONE.ssh probe a b\n")
            self.assertEqual(["clone.ssh a b"], self.lines())

        def test_unknown_drivers_scripts_and_files(self) -> None:
            for line in ("CLONE nosuch a b", "NOSUCH probe a", "NOSUCH.ssh probe a"):
                self.assertRegex(self.transfer(line + "\n").reason, "not available|exists")
            self.assertIn("does not exist", self.driver.transfer(self.folder / "none").reason)
            self.store.ds_mad = "nosuch"
            self.assertIn("not available", self.driver.datastore("cp", request(self.store), 7).reason)

        def test_a_script_of_a_datastore_gets_a_number_and_its_request(self) -> None:
            self.answers("cp", "echo /path raw")
            data = request(self.store)
            self.assertEqual(Answer(True, "/path raw"), self.driver.datastore("cp", data, 7))
            [call] = self.calls()
            self.assertEqual(("cp 7", data), (call["line"], base64.b64decode(call["stdin"]).decode()))
            self.answers("rm", "echo it is in use >&2; exit 1")
            answer = self.driver.datastore("rm", data, 7)
            self.assertEqual((False, "it is in use"), (answer.ok, answer.reason))

        def test_monitoring_has_lines_and_that_of_a_system_datastore_is_its_transfer_drivers(self) -> None:
            self.answers("monitor", "echo USED_MB=$#; echo TOTAL_MB=3; echo FREE_MB=2; pwd >&2")
            for store in (self.store, self.one.system_datastore(5, "probe")):
                self.assertEqual({"USED_MB": 1, "TOTAL_MB": 3, "FREE_MB": 2}, self.one.monitor(store))
            self.assertEqual("monitor 100", self.lines()[0])

        def test_drivers_that_are_not_listed_are_not_there(self) -> None:
            conf = self.frontend.oned_conf.read_text()
            for listed in (False, True):
                with driver_of(self.frontend, self.kind, configured=True) as driver:
                    transferred = driver.transfer(self.file("transfer", "CLONE probe a b\n"))
                    for answer in (transferred, driver.datastore("rm", request(self.store))):
                        self.assertEqual((listed, not listed), (answer.ok, "not available" in answer.reason))
                self.frontend.oned_conf.write_text(conf.replace("-d dummy,", "-d probe,dummy,"))

        def test_actions_run_side_by_side(self) -> None:
            os.mkfifo(self.folder / "pipe")
            self.answers("ln", f"cat {self.folder}/pipe")  # each of the two waits for the other
            self.answers("mv", f"echo now > {self.folder}/pipe")
            files = [self.file(name, f"{name} probe x\n") for name in ("LN", "MV")]
            with ThreadPoolExecutor(2) as pool:
                self.assertEqual([True, True], [answer.ok for answer in pool.map(self.driver.transfer, files)])


class PythonTest(DriverContract.Test):
    pass


if WITH_SOURCE:

    class RubyTest(DriverContract.Test):
        kind = "ruby"
