"""`volt serve` as a process: life, death, restart, leases, load."""

from __future__ import annotations

import signal
import socket
import stat
import threading
from concurrent.futures import ThreadPoolExecutor

from testtools import TestCase

from tests.patience import PATIENCE
from tests.unit.virtman.scene import folder_for
from tests.userspace.volt_process import VoltCase, run_volt
from volt.errors import Unauthorized, VoltUnreachable


class Life(VoltCase):
    """Start, stop, start again."""

    def test_sigterm_stops_it_cleanly(self) -> None:
        self.volt.hosts()
        self.server.process.send_signal(signal.SIGTERM)
        self.assertEqual(0, self.server.process.wait(timeout=PATIENCE))
        self.assertNotIn("Traceback", self.log())
        self.assertRaises(VoltUnreachable, self.volt.hosts)

    def test_kill_minus_nine_and_a_restart_lose_nothing(self) -> None:
        self.publish()
        self.join(*(f"h{number}" for number in range(1, 8)))
        self.volt.leave("image", "h2")
        secrets = [parent.secret for parent in self.volt.join("image", "h7").parents]
        before = (self.volt.hosts(), self.volt.images(), self.volt.tree("image"))
        self.kill()
        self.start()
        self.assertEqual(before, (self.volt.hosts(), self.volt.images(), self.volt.tree("image")))
        self.assertEqual(secrets, [parent.secret for parent in self.volt.join("image", "h7").parents])

    def test_what_it_keeps_is_private(self) -> None:
        kept = [path for path in self.folder.iterdir() if path.name.startswith("volt.db")]
        self.assertTrue(kept)
        self.assertEqual({0o600}, {stat.S_IMODE(path.stat().st_mode) for path in kept})

    def test_a_body_that_is_too_large_is_refused_while_it_comes(self) -> None:
        for size in (5, 9):  # of MiB: the application refuses the first, the server the second
            self.assertEqual(413, self.http().post("/v1/images", content=b"x" * (size << 20)).status_code)

    def test_a_hundred_hosts_join_at_once_and_get_a_slot_each(self) -> None:
        self.publish()
        hosts = [f"h{number}" for number in range(100)]
        start = threading.Barrier(len(hosts))

        def join(host: str) -> int:
            start.wait(timeout=PATIENCE)
            self.volt.register(host, f"unix:///run/{host}")
            return self.volt.join("image", host).slot

        with ThreadPoolExecutor(len(hosts)) as pool:
            slots = sorted(pool.map(join, hosts))
        self.assertEqual(list(range(1, 101)), slots)
        self.assertEqual(100, self.volt.image("image").nodes)

    def test_metrics_count_what_happens(self) -> None:
        self.publish()
        self.join("h1", "h2", "h3")
        self.volt.heartbeat("h1", [])
        self.volt.report_dead("image", "h3", "h1")
        self.volt.leave("image", "h1")
        text = self.http().get("/metrics").text
        for line in (
            'volt_hosts{state="alive"} 4.0',
            'volt_hosts{state="lost"} 0.0',
            'volt_nodes{image="image",state="moving"} 1.0',
            'volt_tree_depth{image="image"} 1.0',
            "volt_heartbeats_total 1.0",
            "volt_reports_total 1.0",
            "volt_moves_total 1.0",
            'volt_request_seconds_count{endpoint="/v1/hosts/<host>",method="PUT",status="200"} 4.0',
        ):
            self.assertIn(line, text)


class Token(VoltCase):
    """With a token file."""

    def setUp(self) -> None:
        """A token, and Volt started with it."""
        self.token_file = folder_for(self) / "token"
        self.token_file.write_text("open-sesame\n")
        self.token_file.chmod(0o600)
        self.options = ("--token-file", str(self.token_file))
        super().setUp()

    def test_calls_need_it_and_the_log_never_shows_it(self) -> None:
        self.assertRaises(Unauthorized, self.volt.hosts)
        self.assertEqual([], self.client(self.token_file).hosts())
        self.assertNotIn("sesam", self.log())


class Refusals(TestCase):
    """`volt serve` that cannot start: one line, exit code 1."""

    def setUp(self) -> None:
        """A folder."""
        super().setUp()
        self.folder = folder_for(self)

    def assert_refused(self, message: str, *arguments: str) -> None:
        listen = () if "--listen" in arguments else ("--listen", "127.0.0.1:0")
        result = run_volt("serve", *listen, "--state", str(self.folder / "state"), *arguments)
        self.assertEqual((1, ""), (result.returncode, result.stdout), result.stderr)
        self.assertIn(message, result.stderr)
        self.assertEqual(1, len(result.stderr.splitlines()), result.stderr)

    def test_where_it_is_to_listen(self) -> None:
        taken = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(taken.close)
        self.assert_refused("in use", "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
        self.assert_refused("--token-file", "--listen", "0.0.0.0:0")
        for address in ("127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000", ":8700", "no.such.host.invalid:0"):
            self.assert_refused("cannot listen", "--listen", address)

    def test_what_it_is_to_read(self) -> None:
        file = self.folder / "file"
        file.write_text("this is not a database, but long enough to look at " * 100)
        for message, *arguments in (
            ("cannot read token file", "--token-file", str(self.folder / "none")),
            ("No such file or directory", "--database", f"sqlite:///{self.folder}/no/such/folder/volt.db"),
            ("not a database", "--database", f"sqlite:///{file}"),
            ("database URL", "--database", "nonsense"),
            ("state folder", "--state", str(file)),
        ):
            self.assert_refused(message, *arguments)

    def test_a_usage_error_has_exit_code_two(self) -> None:
        for options in (["--no-such-option"], ["--fanout", "0"], ["--fanout", "1025"], ["--lease", "0"]):
            self.assertEqual(2, run_volt("serve", *options).returncode)


class Ipv6(VoltCase):
    """On the other loopback address."""

    options = ("--listen", "[::1]:0")

    def setUp(self) -> None:
        """Volt, if there is such an address."""
        if not _has_ipv6():
            self.skipTest("this machine has no IPv6 loopback address")
        super().setUp()

    def test_it_listens_there(self) -> None:
        self.assertEqual([], self.volt.hosts())


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False
