"""The stand-in for ssh: what a command finds on a host, and how a connection breaks."""

from __future__ import annotations

import json
import subprocess

import pytest

from lab.errors import Leftovers
from lab.opennebula import Fate
from tests.patience import PATIENCE
from tests.userspace.opennebula.stand import StandTestCase

pytestmark = pytest.mark.long


class SshTest(StandTestCase):
    def ssh(self, *words: str, stdin: bytes = b"", source: str = "") -> subprocess.CompletedProcess[bytes]:
        """Call it on the front end, or on a host."""
        argv = [*self.frontend.on(source or self.frontend.name), "ssh", *words]
        return subprocess.run(
            argv, input=stdin, capture_output=True, check=False, timeout=PATIENCE, env=self.frontend.environment()
        )

    def text(self, *words: str, **how: str) -> str:
        done = self.ssh(*words, **how)  # type: ignore[arg-type]
        self.assertEqual((0, b""), (done.returncode, done.stderr))
        return done.stdout.decode()

    def test_joins_its_words_for_the_shell(self) -> None:
        self.assertEqual(
            "a b\nhost-1\n", self.text("-o", "BatchMode=yes", "-A", "host-1", "echo", "a   b;", "hostname")
        )

    def test_passes_streams_and_exit_code(self) -> None:
        done = self.ssh("host-1", "cat; echo wrong >&2; exit 3", stdin=b"\0data")
        self.assertEqual((3, b"\0data", b"wrong\n"), (done.returncode, done.stdout, done.stderr))

    def test_hosts_have_datastores_of_their_own(self) -> None:
        file = f"{self.datastores}/0/file"
        for host in ("host-1", "host-2", "frontend"):
            self.text(host, f"mkdir -p {self.datastores}/0 && echo {host} > {file}")
        for host in ("host-1", "host-2", "frontend"):
            self.assertEqual(f"{host}\n", self.text(host, "cat", file))
            self.assertEqual(f"{host}\n", self.frontend.seen(host, file).read_text())

    def test_no_host_sees_what_is_private_to_another(self) -> None:
        for host in ("host-1", "host-2"):
            (self.folder / "private" / host / "disk").write_text(host)
        look = f"cat {self.folder}/private/*/disk"
        self.assertEqual("host-1", self.text("host-1", look))
        self.assertEqual("host-2", self.text("host-1", f"ssh host-2 '{look}'"))

    def test_the_second_call_fails_before_it_runs(self) -> None:
        self.frontend.exchange.plan(Fate.FAIL, host="host-1", nth=2)
        made = [self.ssh(host, f"touch {self.datastores}/ran; echo ran") for host in ("host-1", "host-2", "host-1")]
        self.assertEqual([0, 0, 255], [done.returncode for done in made])
        self.assertEqual(b"", made[-1].stdout)
        self.assertEqual(0, self.ssh("host-1", "true").returncode)

    def test_hangs_until_it_is_killed(self) -> None:
        fault = self.frontend.exchange.plan(Fate.HANG, matching="touch")
        argv = [*self.frontend.on("frontend"), "ssh", "host-1", "touch", f"{self.datastores}/ran"]
        with subprocess.Popen(argv, env=self.frontend.environment(), stderr=subprocess.DEVNULL) as process:
            fault.wait()
            self.assertIsNone(process.poll())
            process.kill()
        fault.release()
        self.frontend.exchange.settle()
        self.assertFalse((self.frontend.datastores("host-1") / "ran").exists())

    def test_cut_after_some_bytes(self) -> None:
        self.frontend.exchange.plan(Fate.CUT, after=70_000)
        done = self.ssh(
            "host-1", f"cat > {self.datastores}/part; echo end > {self.datastores}/end", stdin=bytes(1 << 20)
        )
        self.assertEqual(255, done.returncode)
        self.frontend.exchange.settle()
        folder = self.frontend.datastores("host-1")
        self.assertEqual(70_000, (folder / "part").stat().st_size)
        self.assertEqual("end\n", (folder / "end").read_text())

    def test_stalls_after_some_bytes(self) -> None:
        fault = self.frontend.exchange.plan(Fate.STALL, after=70_000)
        argv = [*self.frontend.on("frontend"), "ssh", "host-1", f"cat > {self.datastores}/part"]
        pipe = subprocess.PIPE
        with subprocess.Popen(argv, stdin=pipe, env=self.frontend.environment(), stderr=subprocess.DEVNULL) as process:
            assert process.stdin is not None
            process.stdin.write(bytes(100_000))
            process.stdin.flush()
            fault.wait()
            self.assertIsNone(process.poll())
            process.kill()
        fault.release()
        self.frontend.exchange.settle()
        self.assertEqual(70_000, (self.frontend.datastores("host-1") / "part").stat().st_size)


class EndTest(StandTestCase):
    def test_what_nobody_expects_to_be_left_is_said(self) -> None:
        argv = [*self.frontend.on("frontend"), "ssh", "host-1", "sleep 1000 >/dev/null 2>&1 </dev/null & echo begun"]
        subprocess.run(argv, env=self.frontend.environment(), stdout=subprocess.DEVNULL, check=True, timeout=PATIENCE)
        self.assertIn("sleep 1000", str(self.assertRaises(Leftovers, self.frontend.stop)))
        self.assertEqual({}, self.frontend.processes())

    def test_what_runs_on_a_host_ends_with_the_stand(self) -> None:
        self.frontend.exchange.plan(Fate.CUT, after=6)
        argv = [*self.frontend.on("frontend"), "ssh", "host-1", "sleep 1000 >/dev/null 2>&1 & echo begun"]
        done = subprocess.run(argv, env=self.frontend.environment(), capture_output=True, check=False, timeout=PATIENCE)
        self.assertEqual(255, done.returncode)
        self.assertIn("sleep 1000", json.dumps(list(self.frontend.processes().values())))
        self.frontend.stop()
        self.assertEqual({}, self.frontend.processes())
