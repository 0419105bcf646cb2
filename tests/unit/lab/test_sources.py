"""Which of the machine's package sources the guest is built from."""

from __future__ import annotations

import testtools

from lab.sources import Source, debian, of_release, parse_deb822, parse_list

MIRROR = "http://mirror.example/debian"


class OneLineStyleTest(testtools.TestCase):
    def test_an_entry_is_read_with_its_options(self) -> None:
        [source] = parse_list(f"deb [arch=amd64 signed-by=/k.gpg] {MIRROR} bookworm main contrib # mine\n")
        self.assertEqual(Source(MIRROR, "bookworm", "main contrib", "/k.gpg"), source)


class Deb822StyleTest(testtools.TestCase):
    def test_a_stanza_makes_an_entry_for_each_suite(self) -> None:
        text = f"Types: deb deb-src\nURIs: {MIRROR}\n# a note\nSuites: bookworm bookworm-updates\nComponents: main\n"
        self.assertEqual(["bookworm", "bookworm-updates"], [source.suite for source in parse_deb822(text)])

    def test_a_key_block_is_kept_with_its_lines(self) -> None:
        text = (
            f"Types: deb\nURIs: {MIRROR}\nSuites: sid\nComponents: main\nSigned-By:\n -----BEGIN\n .\n abc\n -----END\n"
        )
        [source] = parse_deb822(text)
        self.assertIn("-----BEGIN\n .\n abc\n -----END", source.signed_by)
        self.assertEqual([source], list(parse_deb822(source.deb822())))


class DebianOnlyTest(testtools.TestCase):
    def test_third_party_entries_of_the_same_suite_are_left_out(self) -> None:
        ours, theirs = Source(f"{MIRROR}/", "bookworm", "main"), Source("http://other.example", "bookworm", "stable")
        self.assertEqual([ours], debian([ours, theirs], "bookworm", {(MIRROR, "bookworm")}))

    def test_updates_and_security_belong_to_the_suite_and_backports_do_not(self) -> None:
        suites = ["bookworm", "bookworm-updates", "bookworm-security", "bookworm-backports", "sid"]
        sources = [Source(MIRROR, suite, "main") for suite in suites]
        found = debian(sources, "bookworm", {(MIRROR, suite) for suite in suites})
        self.assertEqual(suites[:3], [source.suite for source in found])


class OtherReleaseTest(testtools.TestCase):
    def test_another_release_has_its_updates_and_security_where_the_running_one_has_them(self) -> None:
        here = [Source(MIRROR, f"bookworm{kind}", "main", "/k.gpg") for kind in ("", "-updates", "-security")]
        there = [Source(MIRROR, f"trixie{kind}", "main", "/k.gpg") for kind in ("", "-updates", "-security")]
        self.assertEqual(there, of_release(here, "bookworm", "trixie"))
