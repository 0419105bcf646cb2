"""Which of the machine's package sources the guests are built from."""

from __future__ import annotations

from testtools import TestCase

from lab import guest
from lab.kernel import root
from lab.sources import Source, debian, of_release, parse_deb822, parse_list

MIRROR = "http://mirror.example/debian"
DEB822 = f"""\
Types: deb deb-src
URIs: {MIRROR}
# a note
Suites: sid sid-updates
Components: main
Signed-By:
 -----BEGIN
 .
 abc
 -----END
"""


class SourcesTest(TestCase):
    def test_both_styles_are_read(self) -> None:
        [source] = parse_list(f"deb [arch=amd64 signed-by=/k.gpg] {MIRROR} bookworm main contrib # mine\n")
        self.assertEqual(Source(MIRROR, "bookworm", "main contrib", "/k.gpg"), source)
        sources = list(parse_deb822(DEB822))
        self.assertEqual(["sid", "sid-updates"], [source.suite for source in sources])
        self.assertIn("-----BEGIN\n .\n abc\n -----END", sources[0].signed_by)
        self.assertEqual(sources[:1], list(parse_deb822(sources[0].deb822())))

    def test_debians_own_with_updates_and_security_are_taken_and_no_others(self) -> None:
        suites = ["bookworm", "bookworm-updates", "bookworm-security", "bookworm-backports", "sid"]
        sources = [Source(f"{MIRROR}/", suite, "main") for suite in suites]
        theirs = Source("http://other.example", "bookworm", "stable")
        self.assertEqual(sources[:3], debian([*sources, theirs], "bookworm", {(MIRROR, suite) for suite in suites}))

    def test_another_release_comes_from_the_same_place_and_makes_another_guest(self) -> None:
        here, there = (
            [Source(MIRROR, f"{release}{kind}", "main", "/k.gpg") for kind in ("", "-updates", "-security")]
            for release in ("bookworm", "trixie")
        )
        self.assertEqual(there, of_release(here, "bookworm", "trixie"))
        for recipe_hash in (guest.recipe_hash, root.recipe_hash):
            self.assertNotEqual(recipe_hash("bookworm"), recipe_hash("trixie"))
