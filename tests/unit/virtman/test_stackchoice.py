"""Which drivers an agent uses."""

from __future__ import annotations

import json
import socket
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from testtools import TestCase

from tests.doubles.machine import MachineDouble
from tests.doubles.plugin import install_doubles
from tests.unit.virtman.scene import folder_for
from virtman.errors import ConfigError
from virtman.stackchoice import (
    CHUNKSTORE,
    KERNEL,
    Drivers,
    choose,
    keep_address,
    known_address,
    last_address,
    made_with,
    settle,
)
from virtman.stateversion import mark

DOUBLES = {"attach": "double", "export": "double"}
"""Drivers that are there whether or not those of the kernel stack are, and need nothing."""
KERNEL_LIKE = replace(KERNEL, **DOUBLES)


class Scene(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.state = folder_for(self)
        mark(self.state)
        install_doubles(self, self.state / "packages")

    def record(self, name: str = "vms/web.json") -> None:
        """Something that depends on the drivers."""
        path = self.state / "records" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")

    def choose(
        self, stack: str = "auto", drivers: Mapping[str, str] = MappingProxyType({}), without: Collection[str] = ()
    ) -> Drivers:
        return choose(stack, drivers, self.state, "10.0.0.1", MachineDouble(without=without))

    def refused(self, *arguments: Any, **named: Any) -> str:
        return str(self.assertRaises(ConfigError, self.choose, *arguments, **named))


class ChooseTest(Scene):
    def test_auto_is_the_chunk_store_on_any_machine(self) -> None:
        for lacking in ((), ("root", "make-bcache", "dm_thin_pool", "bcache")):
            self.assertEqual(CHUNKSTORE, self.choose(without=lacking))
        self.assertIn("virtman doctor", self.refused(without=["qemu-storage-daemon"]))

    def test_auto_is_the_kernel_stack_where_drivers_of_its_layers_are_named(self) -> None:
        self.assertEqual(KERNEL_LIKE, self.choose(drivers=DOUBLES))

    def test_a_stack_that_was_asked_for_is_taken(self) -> None:
        self.assertEqual(CHUNKSTORE, self.choose("chunkstore"))
        self.assertEqual(KERNEL_LIKE, self.choose("kernel", DOUBLES))

    def test_a_layer_may_have_another_driver_but_not_one_that_is_in_a_source(self) -> None:
        self.assertEqual(replace(CHUNKSTORE, snapshot="double"), self.choose("chunkstore", {"snapshot": "double"}))
        self.assertIn("leave out --cache", self.refused("chunkstore", {"cache": "double"}))

    def test_all_that_a_stack_lacks_is_named(self) -> None:
        line = self.refused("kernel", DOUBLES, without=("root", "make-bcache", "dm_thin_pool"))
        for lacking in ("root", "make-bcache", "module dm_thin_pool", "virtman doctor"):
            self.assertIn(lacking, line)
        self.assertNotIn("\n", line)
        self.assertIn("qemu-storage-daemon", self.refused("chunkstore", without=("qemu-storage-daemon",)))
        self.assertIn("driver imaginary", self.refused("kernel", {**DOUBLES, "cache": "imaginary"}))


class RecordedChoiceTest(Scene):
    def test_without_records_the_new_choice_is_taken_and_with_some_the_first_is_kept(self) -> None:
        for drivers in (CHUNKSTORE, KERNEL):
            settle(self.state, drivers)
            self.assertEqual(drivers, made_with(self.state))
        for name in ("vms/web.json", "images/debian.json"):
            self.record(name)
            settle(self.state, KERNEL)
            line = str(self.assertRaises(ConfigError, settle, self.state, CHUNKSTORE))
            self.assertIn("made with the kernel stack", line)
            self.assertIn("--stack kernel", line)
            self.assertEqual(KERNEL, made_with(self.state))
            (self.state / "records" / name).unlink()

    def test_auto_keeps_what_the_host_had_also_without_records(self) -> None:
        settle(self.state, KERNEL_LIKE)
        self.assertEqual(KERNEL_LIKE, self.choose())
        self.record()
        self.assertEqual(KERNEL_LIKE, self.choose())

    def test_the_chunk_store_goes_on_with_the_userspace_stack_of_a_release_before(self) -> None:
        old = {"attach": "nbd", "cache": "qcow2", "export": "nbd", "snapshot": "qcow2"}
        (self.state / "drivers.json").write_text(json.dumps(old))
        self.record()
        self.assertEqual(CHUNKSTORE, self.choose())

    def test_auto_does_not_leave_drivers_whose_needs_are_gone(self) -> None:
        settle(self.state, KERNEL_LIKE)
        self.record()
        self.assertEqual(KERNEL_LIKE, self.choose())
        line = self.refused(without=["make-bcache"])
        self.assertIn("attach double, cache bcache, export double, snapshot dmthin", line)
        self.assertIn("missing here: make-bcache", line)

    def test_a_choice_that_cannot_be_read_is_named(self) -> None:
        for content in ("", "{", "[]", '{"attach": "nbd"}'):
            (self.state / "drivers.json").write_text(content)
            self.assertIn("drivers.json", str(self.assertRaises(ConfigError, made_with, self.state)))


def _has_ipv6() -> bool:
    known = Path("/proc/net/if_inet6")  # proc_net(5)
    return known.exists() and known.read_text() != ""


IPV6 = ("::1",) if _has_ipv6() else ()
"""The loopback address of a machine that has IPv6: some containers have none."""


class AddressTest(Scene):
    def test_one_that_this_host_still_has_is_known_again(self) -> None:
        for address in (*IPV6, "127.0.0.1", "127.0.0.2"):
            keep_address(self.state, address)
            self.assertEqual(address, last_address(self.state))
        keep_address(self.state, "")
        self.assertEqual("127.0.0.2", last_address(self.state), "it was not known at that start")

    def test_what_is_not_this_hosts_is_none(self) -> None:
        self.assertEqual("", last_address(self.state), "it was never started")
        for address in ("192.0.2.77", "nonsense", "2001:db8::1"):
            (self.state / "address").write_text(f"{address}\n")
            self.assertEqual("", last_address(self.state))

    def test_it_is_taken_where_there_is_no_route_to_volt_and_nowhere_else(self) -> None:
        keep_address(self.state, "127.0.0.2")
        for url in ("", "http://", "http://:0", "http://x.invalid:1", "http://10.0.0.1:99999999", "nonsense"):
            self.assertEqual("127.0.0.2", known_address(url, self.state), url)
        # A loopback address leads no other host here.
        for host in ("127.0.0.1", "localhost", *(f"[{address}]" for address in IPV6)):
            self.assertEqual("", known_address(f"http://{host}:8700", self.state), host)

    def test_the_address_is_this_hosts(self) -> None:
        address = known_address("http://192.0.2.1:8700", self.state)
        if not address:
            self.skipTest("this machine has no route to other networks")
        with socket.socket(type=socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))  # works only with an address of our own
