"""The stand-in for ssh: what a command finds on a host, and how a connection breaks."""

from __future__ import annotations

import json
import subprocess
import threading
from pathlib import Path

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

    def test_without_a_command_the_shell_reads_standard_input(self) -> None:
        done = self.ssh("root@host-1", stdin=b"echo one\nexit 7\n")
        self.assertEqual((7, b"one\n"), (done.returncode, done.stdout))

    def test_passes_streams_and_exit_code(self) -> None:
        done = self.ssh("host-1", "cat; echo wrong >&2; exit 3", stdin=b"\0data")
        self.assertEqual((3, b"\0data", b"wrong\n"), (done.returncode, done.stdout, done.stderr))

    def test_without_input_if_told_so(self) -> None:
        self.assertEqual(b"", self.ssh("-n", "host-1", "cat", stdin=b"data").stdout)

    def test_the_environment_is_clean(self) -> None:
        names = {line.partition("=")[0] for line in self.text("host-1", "env").splitlines()}
        self.assertNotIn("ONE_LOCATION", names)
        self.assertNotIn("LANG", names)

    def test_hosts_have_datastores_of_their_own(self) -> None:
        file = f"{self.datastores}/0/file"
        for host in ("host-1", "host-2", "frontend"):
            self.text(host, f"mkdir -p {self.datastores}/0 && echo {host} > {file}")
        for host in ("host-1", "host-2", "frontend"):
            self.assertEqual(f"{host}\n", self.text(host, "cat", file))
            self.assertEqual(f"{host}\n", self.frontend.seen(host, file).read_text())

    def test_from_one_host_to_another_and_back(self) -> None:
        self.text("host-2", f"echo data > {self.datastores}/file")
        script = f"ssh host-2 cat {self.datastores}/file | ssh frontend 'cat > {self.datastores}/copy'; hostname"
        self.assertEqual("host-1\n", self.text("host-1", script))
        self.assertEqual("data\n", (Path(self.datastores) / "copy").read_text())
        self.assertEqual(["frontend", "host-1", "host-1"], [call.source for call in self.frontend.exchange.calls][1:])

    def test_no_host_sees_what_is_private_to_another(self) -> None:
        for host in ("host-1", "host-2"):
            (self.folder / "private" / host / "disk").write_text(host)
        look = f"cat {self.folder}/private/*/disk"
        self.assertEqual("host-1", self.text("host-1", look))
        self.assertEqual("host-2", self.text("host-1", f"ssh host-2 '{look}'"))

    def test_an_unknown_host(self) -> None:
        done = self.ssh("nowhere", "true")
        self.assertEqual(255, done.returncode)
        self.assertIn(b"resolve", done.stderr)

    def test_scripts_that_put_the_systems_folders_first_find_it(self) -> None:
        script = "PATH=/bin:/sbin:/usr/bin; ssh host-2 hostname"
        self.assertEqual("host-2\n", self.text("host-1", f"'{script}'".strip("'")))

    def test_counts_the_bytes(self) -> None:
        self.ssh("host-1", "head -c 3", stdin=b"12345")
        call = self.frontend.exchange.calls[-1]
        self.assertEqual(("head -c 3", 0, 3), (call.line, call.code, call.bytes_out))
        self.ssh("host-1", "wc -c", stdin=b"12345")
        self.assertEqual(5, self.frontend.exchange.calls[-1].bytes_in)

    def test_the_second_call_fails_before_it_runs(self) -> None:
        self.frontend.exchange.plan(Fate.FAIL, host="host-1", nth=2)
        made = [self.ssh(host, f"touch {self.datastores}/ran; echo ran") for host in ("host-1", "host-2", "host-1")]
        self.assertEqual([0, 0, 255], [done.returncode for done in made])
        self.assertEqual(b"", made[-1].stdout)
        self.assertEqual(0, self.ssh("host-1", "true").returncode)

    def test_a_host_that_is_down(self) -> None:
        self.frontend.exchange.down("host-1")
        self.assertEqual(255, self.ssh("host-1", "true").returncode)
        self.frontend.exchange.up("host-1")
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

    def test_hangs_until_it_is_released(self) -> None:
        fault = self.frontend.exchange.plan(Fate.HANG)

        def release() -> None:
            fault.wait()
            fault.release()

        threading.Thread(target=release).start()
        self.assertEqual(255, self.ssh("host-1", "true").returncode)

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

    def test_cut_while_it_sends(self) -> None:
        self.frontend.exchange.plan(Fate.CUT, after=70_000)
        done = self.ssh("host-1", "head -c 1000000 /dev/zero")
        self.assertEqual((255, 70_000), (done.returncode, len(done.stdout)))
        self.frontend.exchange.settle()

    def test_cut_when_all_is_done(self) -> None:
        self.frontend.exchange.plan(Fate.CUT)
        self.assertEqual(255, self.ssh("host-1", f"touch {self.datastores}/ran").returncode)
        self.assertTrue((self.frontend.datastores("host-1") / "ran").exists())

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

    def test_stalls_when_all_is_done(self) -> None:
        fault = self.frontend.exchange.plan(Fate.STALL)
        argv = [*self.frontend.on("frontend"), "ssh", "host-1", f"touch {self.datastores}/ran"]
        with subprocess.Popen(argv, env=self.frontend.environment(), stderr=subprocess.DEVNULL) as process:
            fault.wait()
            self.assertTrue((self.frontend.datastores("host-1") / "ran").exists())
            fault.release()
            self.assertEqual(255, process.wait(PATIENCE))

    def test_many_at_once(self) -> None:
        argv = [*self.frontend.on("frontend"), "sh", "-c", "for i in $(seq 40); do ssh -n host-1 echo $i & done; wait"]
        done = subprocess.run(argv, env=self.frontend.environment(), capture_output=True, check=True, timeout=PATIENCE)
        self.assertEqual(set(range(1, 41)), {int(word) for word in done.stdout.split()})
        self.assertEqual(40, len(self.frontend.exchange.to("host-1")))


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
