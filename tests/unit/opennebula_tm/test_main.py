"""Scripts as OpenNebula runs them: one line of reason, and an exit code."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import testtools

from tests.patience import PATIENCE
from tests.unit.opennebula_tm.scene import write
from tests.unit.virtman.scene import folder_for

ROOT = Path(__file__).parents[3] / "opennebula_tm"
TM = ROOT / "remotes" / "tm" / "virtman"
DATASTORE = ROOT / "remotes" / "datastore" / "virtman"
RUN = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from pathlib import Path;"
    "from opennebula_tm.driver.main import main; sys.exit(main(sys.argv[2:], Path(sys.argv[1])))"
)


RELATIVE = (".one/one_auth", "../../etc/shadow", "file:///etc/shadow", "ssh://host:x", "-x", "~/x")
"""No names of files of the front end."""


def requested(path: str) -> bytes:
    """A request about an image at a path."""
    text = f"<X><IMAGE><PATH>{path}</PATH></IMAGE><DATASTORE><BASE_PATH>/d</BASE_PATH></DATASTORE></X>"
    return base64.b64encode(text.encode())


def command(*argv: str, remotes: Path = Path("/nonexistent")) -> list[str]:
    """A script's action."""
    return [sys.executable, "-I", "-c", RUN, str(ROOT.parent), str(remotes), *argv]


def run(*argv: str, stdin: bytes = b"", remotes: Path = Path("/nonexistent")) -> subprocess.CompletedProcess[bytes]:
    """Run it to its end."""
    return subprocess.run(command(*argv, remotes=remotes), input=stdin, capture_output=True, check=False)


class MainTest(testtools.TestCase):
    def test_what_cannot_be_done_is_refused_in_one_line(self) -> None:
        blank = "clone takes 4 arguments and got 5: a name with a blank cannot be handed over"
        for line, stdin, reason in (
            ("tm clone fe:/a b h:/ds/0/1/disk.0 1 2", b"", blank),
            *((f"tm {action}", b"", "arguments and got 0") for action in ("delete", "resize", "mv")),
            ("tm clone fe:/ds/1/one-1-00000000 h:/ds/0/1/kernel 1 2", b"", "datastores of type FILE"),
            ("tm mvds h:/ds/0/1/disk.0 /ds/1/0a1b2c 1 2", b"", "no image of a VirtMan datastore"),
            ("datastore monitor", b"eA==", "is no XML"),
            ("datastore stat", requested(".one/one_auth"), "is neither absolute nor"),
            *(("datastore cp", requested(path), "is neither absolute nor") for path in RELATIVE),
        ):
            done = run(*line.split(), stdin=stdin)
            self.assertEqual((1, b""), (done.returncode, done.stdout))
            [said] = done.stderr.decode().splitlines()
            self.assertIn(reason, said)


class SystemsTest(testtools.TestCase):
    """With scripts of OpenNebula's ssh driver."""

    def setUp(self) -> None:
        super().setUp()
        self.folder = folder_for(self)
        for action in ("mv", "delete", "resize", "mkimage"):
            write(self.folder / "tm/ssh" / action, "#!/bin/sh\necho $(basename $0) $(umask) $*; exit 3\n", 0o755)

    def test_what_is_the_system_datastores_is_done_by_opennebulas_scripts(self) -> None:
        for line in (
            "mkimage 5 raw h:/ds/0/42/disk.1 42 0", "mv h:/ds/0/42/disk.1 g:/ds/0/42/disk.1 42 0",
            "delete h:/ds/0/42 42 0", "delete h:/ds/0/42/disk.1 42 0", "resize h:/ds/0/42/disk.1 9 42 0",
        ):  # fmt: skip
            action, *arguments = line.split()
            done = run("tm", action, *arguments, remotes=self.folder)
            self.assertEqual((3, ""), (done.returncode, done.stderr.decode()))
            self.assertEqual(f"{action} 0007 {' '.join(arguments)}\n", done.stdout.decode())


SSH = """#!/bin/sh
cd "$(dirname "$0")" || exit
exec 3>alive 4<held
# More than a pipe holds: this ends when the driver reads what ssh says.
head -c 1000000 /dev/zero >&2
echo begun >&3
cat <&4
echo went on >&3
"""


class EndTest(testtools.TestCase):
    def test_a_script_that_is_ended_ends_its_ssh(self) -> None:
        folder = folder_for(self)
        for name in ("alive", "held"):
            os.mkfifo(folder / name)
        write(folder / "ssh", SSH, 0o755)
        argv = command("tm", "snap_delete", "h:/ds/0/42/disk.0", "0", "42", "100")
        environment = {**os.environ, "SSH": str(folder / "ssh")}
        with subprocess.Popen(argv, env=environment) as process, (folder / "alive").open() as alive:
            held = os.open(folder / "held", os.O_RDWR)
            self.assertEqual("begun\n", alive.readline())
            process.terminate()
            code = process.wait(PATIENCE)
            os.close(held)
            self.assertEqual((1, ""), (code, alive.read()))


class ScriptsTest(testtools.TestCase):
    ACTIONS: ClassVar[dict[Path, str]] = {
        TM: "clone ln mvds cpds delete mv resize snap_create snap_create_live snap_revert snap_delete premigrate"
        " postmigrate failmigrate prebackup prebackup_live postbackup postbackup_live restore context mkimage mkswap"
        " monitor monitor_ds clone.ssh clone.local ln.ssh ln.local",
        DATASTORE: "clone cp export mkfs monitor rm snap_delete snap_flatten snap_revert stat",
    }

    def test_there_is_a_script_for_each_action_and_no_other(self) -> None:
        for folder, names in self.ACTIONS.items():
            found = {path.name for path in folder.iterdir() if path.suffix != ".py"}
            self.assertEqual(set(names.split()), found)
