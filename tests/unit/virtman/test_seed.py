"""The NoCloud seed, read back."""

from __future__ import annotations

import io
import json

import pycdlib
from hypothesis import given
from hypothesis import strategies as st
from testtools import TestCase
from testtools.matchers import MatchesRegex

from virtman.names import NAME_PATTERN
from virtman.seed import LABEL, NO_USER_DATA, Identity, is_seed_of, seed_image


def read(image: bytes, name: str) -> str:
    """A file of the seed by its Rock Ridge name, which Linux uses."""
    iso = pycdlib.PyCdlib()
    iso.open_fp(io.BytesIO(image))
    out = io.BytesIO()
    iso.get_file_from_iso_fp(out, rr_path=f"/{name}")
    iso.close()
    return out.getvalue().decode()


class SeedTest(TestCase):
    def test_the_label_is_the_one_that_cloud_init_looks_for(self) -> None:
        iso = pycdlib.PyCdlib()
        iso.open_fp(io.BytesIO(seed_image(Identity("web-1", "id"))))
        self.addCleanup(iso.close)
        self.assertEqual(LABEL, iso.pvd.volume_identifier.decode().strip())
        self.assertEqual(LABEL, "cidata")

    def test_meta_data_says_who_the_vm_is(self) -> None:
        keys = ["ssh-ed25519 AAAA alice@example", "ssh-rsa BBBB 'bob'"]
        meta = json.loads(read(seed_image(Identity("Web_1", "uuid-1", keys)), "meta-data"))
        self.assertEqual({"instance-id": "uuid-1", "local-hostname": "web-1", "public-keys": keys}, meta)

    def test_user_data_is_handed_over_as_it_is(self) -> None:
        data = '#!/bin/sh\necho grüße, \\ "quotes" and\ttabs\n' + "x" * 5000
        self.assertEqual(data, read(seed_image(Identity("vm", "id", user_data=data)), "user-data"))

    def test_without_user_data_cloud_init_finds_an_empty_configuration(self) -> None:
        for nothing in (None, ""):
            self.assertEqual(NO_USER_DATA, read(seed_image(Identity("vm", "id", user_data=nothing)), "user-data"))

    @given(st.from_regex(NAME_PATTERN, fullmatch=True).filter(lambda name: not name.endswith("\n")))
    def test_every_name_gives_a_legal_host_name(self, name: str) -> None:
        self.assertThat(Identity(name, "id").hostname, MatchesRegex(r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"))

    def test_a_seed_is_that_of_whom_it_was_made_for(self) -> None:
        seed = seed_image(Identity("vm", "id", ["key"], "#cloud-config\n"))
        self.assertTrue(is_seed_of(seed, Identity("vm", "id", ["key"], "#cloud-config\n")))
        self.assertFalse(is_seed_of(seed, Identity("vm", "id", ["other"], "#cloud-config\n")))
        self.assertFalse(is_seed_of(seed, Identity("vm", "id", ["key"])))
        self.assertFalse(is_seed_of(b"", Identity("vm", "id", ["key"])))
