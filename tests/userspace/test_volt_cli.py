"""`volt tree`, `volt hosts`, `volt images` against a real Volt."""

from __future__ import annotations

from tests.userspace.volt_process import VoltCase, run_volt


class CommandLine(VoltCase):
    """Of an image that three hosts have."""

    def setUp(self) -> None:
        """Publish and join."""
        super().setUp()
        self.publish()
        self.join("h1", "h2", "h3")

    def run_ok(self, *arguments: str) -> str:
        result = run_volt(*arguments, "--url", self.url)
        self.assertEqual((0, ""), (result.returncode, result.stderr))
        return result.stdout

    def test_what_there_is_is_shown(self) -> None:
        drawn = self.run_ok("tree", "image").splitlines()
        self.assertIn("image 1K, fanout 2", drawn[0])
        self.assertIn("origin origin joining", drawn[1])
        self.assertIn("h3 joining depth 2 slot 3, 0B", drawn[3])
        self.assertIn("h1      alive", self.run_ok("hosts"))
        self.assertIn('"address": "unix:///run/h1"', self.run_ok("hosts", "--json"))
        self.assertIn("image  1K    3      origin", self.run_ok("images"))
        self.assertIn('"nodes": 3', self.run_ok("images", "--json"))

    def test_hosts_are_removed_and_an_image_once_nobody_uses_it(self) -> None:
        refused = run_volt("images", "--url", self.url, "remove", "image")
        self.assertEqual(1, refused.returncode)
        self.assertIn("h1, h2, h3", refused.stderr)
        for what, name in (("hosts", "h1"), ("hosts", "h2"), ("hosts", "h3"), ("images", "image")):
            removed = run_volt(what, "--url", self.url, "remove", name)
            self.assertEqual((0, "", ""), (removed.returncode, removed.stdout, removed.stderr))
        self.assertEqual((["origin"], []), ([host.name for host in self.volt.hosts()], self.volt.images()))

    def test_errors_are_one_line_and_exit_code_one(self) -> None:
        for said, *arguments in (
            ("no image nothing", "tree", "nothing", "--url", self.url),
            ("not a name", "tree", "a/b", "--url", self.url),
            ("cannot read token file", "hosts", "--token-file", "/no/such/file"),
            ("refused", "images", "--url", "http://127.0.0.1:1"),
        ):
            result = run_volt(*arguments)
            self.assertEqual((1, ""), (result.returncode, result.stdout))
            self.assertIn(said, result.stderr)
            self.assertEqual(1, len(result.stderr.splitlines()), result.stderr)
