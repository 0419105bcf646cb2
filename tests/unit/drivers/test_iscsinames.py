"""What parent and child work out alike."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from testtools import TestCase
from testtools.matchers import MatchesRegex

from drivers.errors import BadAddress, BadName
from drivers.iscsi import names as iscsinames
from drivers.iscsi.names import Side

NAMES = st.from_regex(re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}", re.ASCII), fullmatch=True)
ALLOWED = r"iqn\.[0-9]{4}-[0-9]{2}\.[a-z.]+(:[a-z0-9.-]+)+$"
"""RFC 3722: lower-case letters, digits, '-', '.' and ':'."""


class NamesTest(TestCase):
    @given(NAMES, NAMES)
    def test_target_name_is_an_iscsi_name_that_tells_its_image(self, host: str, image: str) -> None:
        name = iscsinames.target_name(host, image)
        self.assertThat(name, MatchesRegex(ALLOWED))
        self.assertEqual(image, iscsinames.image_of(name))

    @given(st.lists(NAMES, min_size=2, max_size=2, unique=True))
    def test_different_hosts_have_different_names(self, hosts: list[str]) -> None:
        self.assertNotEqual(*(iscsinames.initiator_name(host) for host in hosts))

    def test_names_of_others_have_no_image(self) -> None:
        for name in ("iqn.2003-01.org.linux-iscsi:x:y", iscsinames.initiator_name("host"), "", "eui.0"):
            self.assertIs(None, iscsinames.image_of(name))

    def test_what_is_no_name_is_refused(self) -> None:
        for name in ("", "a:b", "a/b", "ä", "-a"):
            self.assertRaises(BadName, iscsinames.target_name, "host", name)

    def test_longest_names_fit_unless_most_letters_are_capitals(self) -> None:
        self.assertLessEqual(len(iscsinames.target_name("h" * 63, "i" * 63)), 223)
        self.assertRaises(BadAddress, iscsinames.target_name, "H" * 63, "I" * 63)


class AddressTest(TestCase):
    def test_portal_of_an_address(self) -> None:
        for ip in ("10.0.0.1", "fd00::1"):
            self.assertEqual((ip, 3261), iscsinames.portal_of(iscsinames.address_of(ip, 3261)))
        self.assertEqual(("10.0.0.1", 3260), iscsinames.portal_of("iscsi://10.0.0.1"))

    def test_other_addresses_are_refused(self) -> None:
        for address in (
            "unix:///run/x",
            "iscsi://host:3260",
            "iscsi://10.0.0.1:3260/x",
            "10.0.0.1",
            "iscsi://10.0.0.1:x",
        ):
            self.assertRaises(BadAddress, iscsinames.portal_of, address)


class PasswordTest(TestCase):
    def test_the_two_sides_of_an_edge_have_different_passwords_which_do_not_tell_the_secret(self) -> None:
        child, parent = (iscsinames.password("secret", side) for side in (Side.CHILD, Side.PARENT))
        self.assertNotEqual(child, parent)
        self.assertNotIn("secret", child + parent)
        self.assertNotEqual(child, iscsinames.password("another", Side.CHILD))
