"""An agent of an ordinary user, with the command lines as such a user types them."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

from tests.patience import PATIENCE, wait_until
from tests.programs import require_root
from tests.sockets import listens
from tests.userspace.hosts import HostsTestCase

USER = 20000 + os.getpid() % 40000
"""Root is this user for a while, whom nobody else is."""
BECOME = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
READ_ALL = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]


class OrdinaryUserTest(HostsTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.home, self.run_folder = self.folder / "home", self.folder / "r"  # sockets have short paths
        for folder in (self.home, self.run_folder):
            folder.mkdir(mode=0o700)
        self.become: list[str] = []
        self.user = os.geteuid()
        if os.geteuid() == 0:
            self.folder.chmod(0o711)
            for folder in (self.home, self.run_folder):
                os.chown(folder, USER, USER)
            self.become, self.user = BECOME, USER
            if self.python("-c", "import virtman.cli").returncode:  # the checkout is in a folder of root's
                self.become = BECOME + READ_ALL

    def argv(self, *words: str, session: bool = True) -> list[str]:
        runtime = [f"XDG_RUNTIME_DIR={self.run_folder}"] if session else []
        environment = [f"HOME={self.home}", f"PATH={os.environ['PATH']}", f"VIRTMAN_VOLT={self.volt.url}", *runtime]
        return [*self.become, "env", "-i", *environment, sys.executable, *words]

    def python(self, *words: str, session: bool = True) -> subprocess.CompletedProcess[str]:
        argv = self.argv(*words, session=session)
        return subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE, check=False)

    def virtman(self, *words: str) -> str:
        """What a command prints."""
        done = self.python("-m", "virtman.cli", *words)
        self.assertEqual(0, done.returncode, done.stderr)
        return done.stdout

    def start_agent(self) -> None:
        log = self.folder / "log"
        with log.open("ab") as file:
            argv = self.argv("-m", "virtman.cli", "agent", "--name", "mine", "--accel", "tcg")
            agent = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        self.addCleanup(agent.wait, PATIENCE)
        self.addCleanup(agent.terminate)
        self.addCleanup(self.python, "-m", "virtman.cli", "suspend", "--force")
        wait_until(lambda: agent.poll() is not None or listens(self.run_folder / "virtman" / "agent.sock"), "the agent")
        self.assertIsNone(agent.poll(), log.read_text())

    def test_an_agent_without_options_is_found_without_options_and_keeps_all_in_the_users_folders(self) -> None:
        self.start_agent()
        image = self.image_file(size=1 << 20)
        image.chmod(0o644)
        wait_until(lambda: json.loads(self.virtman("status", "--json"))["volt"]["connected"], "Volt is there")
        self.virtman("publish", "img", str(image))
        disk = Path(self.virtman("create", "vm", "img").strip())
        self.assert_same_content(disk, image)
        state = self.home / ".local" / "state" / "virtman"
        self.assertEqual(state / "snapshots" / "vm" / "disk.qcow2", disk)
        for folder in (state, self.run_folder / "virtman"):
            self.assertEqual((self.user, 0o700), (folder.stat().st_uid, stat.S_IMODE(folder.stat().st_mode)))
        self.assertEqual("qemu:///session", json.loads(self.virtman("console", "vm", "--json"))["libvirt"])
        self.virtman("destroy", "vm")

    def test_without_a_session_the_sockets_folder_has_to_be_the_users_own(self) -> None:
        require_root(self, "a folder is another user's")
        strange = Path(f"/tmp/virtman-{USER}")
        strange.mkdir(mode=0o700)
        self.addCleanup(strange.rmdir)
        for command in (["status"], ["agent", "--name", "mine", "--accel", "tcg"]):
            done = self.python("-m", "virtman.cli", *command, session=False)
            self.assertEqual(1, done.returncode, done.stderr)
            self.assertIn(f"{strange} belongs to somebody else", done.stderr.splitlines()[-1])
