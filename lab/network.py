"""A network for the lab's hosts: each in a network namespace of its own, linked to one switch.

The switch is a bridge in one more namespace. No interface, route or firewall of the machine is touched, so the
addresses cannot collide with its own. Unix sockets ignore network namespaces: the lab calls agents as ever.
"""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lab import wire
from lab.errors import CommandFailed, LabError, Leftovers, NoNetwork
from lab.process import kill_and_wait
from lab.running import Running
from lab.tools import run

log = logging.getLogger(__name__)

GIGABIT = 1_000_000_000
ADDRESSES = ipaddress.ip_network("10.213.0.0/16")
NAMED = Path("/run/netns")
"""Where ip-netns(8) keeps namespaces."""
PREFIX = "virtman-lab-"
SWITCH, LINK, UPLINK = "switch", "eth0", "uplink"

BURST = 128 << 10
"""Bytes that a link may send at once: more than the largest packet that the kernel hands down, 64 KiB."""
QUEUE = 0.01
"""Seconds of a link's rate that wait for it, as in a small switch. What comes then is lost."""
CLONE_NEWNET = 0x40000000  # sched.h


class Network(Running):
    """Context manager: the hosts ``names``, and a link for each.

    Inside, the calling thread is at the switch, and so is all that it starts: clients reach the hosts by ``address``.
    Enter and leave it in the same thread. At the end processes of the hosts that still run are killed.
    """

    def __init__(
        self, names: Sequence[str], *, rate: int = GIGABIT, round_trip: float = 0.0, loss: float = 0.0,
        rates: Mapping[str, int] | None = None, racks: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Nothing is made yet. ``rate``: bits a second of each link, each way; ``rates``: other ones of some hosts.

        ``round_trip``: seconds that the links add from one host to another and back. ``loss``: the part of the packets
        to each host that is lost, which needs nftables. ``racks``: by host, the switch of its own that it is linked to,
        for hosts that are not at the first one. Multicast stays within a rack.
        """
        self._addresses = {name: str(ADDRESSES[number]) for number, name in enumerate(names, start=2)}
        self._rate, self._round_trip, self._loss = rate, round_trip, loss
        self._rates, self._racks = rates or {}, racks or {}
        self._outside: int | None = None
        """The namespace in which the calling thread was."""
        self._ends: list[int] = []
        self._wires: subprocess.Popen[bytes] | None = None

    def __str__(self) -> str:
        """What it is, for people."""
        delay = f", {self._round_trip * 1000:g} ms there and back" if self._round_trip else ""
        return f"a network namespace for each host, links of {self._rate / 1e9:g} Gbit/s each way{delay}"

    def address(self, name: str) -> str:
        """The IP address of a host."""
        return self._addresses[name]

    def inside(self, name: str) -> list[str]:
        """What to put before a command to run it on a host.

        Not ``ip netns exec``, which hides the control groups: it mounts another /sys.
        """
        return ["nsenter", f"--net={NAMED / _namespace(name)}"]

    def sent_bytes(self, name: str) -> int:
        """What a host has sent over its link so far: all headers included."""
        [link] = json.loads(run(["ip", "-n", _namespace(name), "-j", "-s", "link", "show", "dev", LINK]))
        return int(link["stats64"]["tx"]["bytes"])

    def uplink_bytes(self, rack: str) -> tuple[int, int]:
        """What has gone into a rack so far, and out of it: all headers included."""
        [link] = json.loads(run(["ip", "-n", _namespace(rack), "-j", "-s", "link", "show", "dev", UPLINK]))
        return int(link["stats64"]["rx"]["bytes"]), int(link["stats64"]["tx"]["bytes"])

    def start(self) -> None:
        """Make all of it, having removed what killed labs left. Raises NoNetwork if this machine does not allow it."""
        remove_abandoned()
        try:
            self._make_switch(SWITCH)
            for rack in dict.fromkeys(self._racks.values()):
                self._make_rack(rack)
            for number, name in enumerate(self._addresses):
                self._make_host(name, f"port{number}")
            if self._round_trip:
                self._start_wires()
            self._outside = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            with (NAMED / _namespace(SWITCH)).open("rb") as switch:
                _move_thread(switch.fileno())
        except CommandFailed as error:
            raise NoNetwork(error.output.strip().rpartition("\n")[2] or str(error)) from error
        except OSError as error:
            raise NoNetwork(str(error)) from error

    def _make_switch(self, name: str) -> None:
        namespace = _add_namespace(name)
        _ip(namespace, "link", "add", SWITCH, "type", "bridge")
        if name == SWITCH:
            _ip(namespace, "address", "add", f"{ADDRESSES[1]}/{ADDRESSES.prefixlen}", "dev", SWITCH)
        _ip(namespace, "link", "set", SWITCH, "up")

    def _make_rack(self, rack: str) -> None:
        self._make_switch(rack)
        switch, namespace = _namespace(SWITCH), _namespace(rack)
        port = f"rack{len(list(NAMED.glob(_namespace('*'))))}"
        _ip(switch, "link", "add", port, "type", "veth", "peer", "name", UPLINK, "netns", namespace)
        for where, device in ((switch, port), (namespace, UPLINK)):
            _ip(where, "link", "set", device, "master", SWITCH, "up")
            run(["bridge", "-n", where, "link", "set", "dev", device, "mcast_flood", "off"])

    def _make_host(self, name: str, port: str) -> None:
        switch, namespace = _namespace(self._racks.get(name, SWITCH)), _add_namespace(name)
        if self._round_trip:
            self._ends += [_open_end(switch, port), _open_end(namespace, LINK)]
        else:
            _ip(switch, "link", "add", port, "type", "veth", "peer", "name", LINK, "netns", namespace)
        _ip(switch, "link", "set", port, "master", SWITCH, "up")
        _ip(namespace, "address", "add", f"{self.address(name)}/{ADDRESSES.prefixlen}", "dev", LINK)
        _ip(namespace, "link", "set", LINK, "up")
        rate = self._rates.get(name, self._rate)
        self._shape(namespace, LINK, rate)
        self._shape(switch, port, rate)
        if self._loss:
            for where, device in ((namespace, LINK), (switch, port)):
                _ip(where, "link", "set", device, "gso_max_segs", "1")  # packets of 64 KiB would be lost as a whole
            lost = f"meta protocol ip numgen random mod 10000 < {round(self._loss * 10000)}"
            hook = f'type filter hook ingress device "{LINK}" priority 0'
            run([*self.inside(name), "nft", f"table netdev loss {{ chain in {{ {hook}; {lost} drop; }}; }}"])

    def _start_wires(self) -> None:
        """From host to host and back a packet passes four wires."""
        pairs = [f"{first}:{second}" for first, second in zip(self._ends[::2], self._ends[1::2], strict=True)]
        argv = [sys.executable, wire.__file__, str(self._round_trip / 4), *pairs]
        self._wires = subprocess.Popen(argv, stdin=subprocess.PIPE, pass_fds=self._ends)

    def _shape(self, namespace: str, device: str, bits: int) -> None:
        """Limit what a device sends."""
        rate = ["tbf", "rate", f"{bits}bit", "burst", str(BURST), "latency", f"{QUEUE * 1000:g}ms"]
        run(["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *rate])

    def stop(self) -> None:
        """Bring the calling thread back and remove all. Raises Leftovers."""
        if self._outside is not None:
            _move_thread(self._outside)
            os.close(self._outside)
            self._outside = None
        if self._wires is not None:
            self._wires.communicate()
            self._wires = None
        while self._ends:
            os.close(self._ends.pop())
        remove_namespaces(sorted(NAMED.glob(_namespace("*"))))


def remove_abandoned() -> None:
    """Remove the namespaces of labs that were killed, with the processes in them. Raises Leftovers."""
    if not NAMED.exists():
        return
    folder = os.open(NAMED, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # another lab may be at it
        pids = {path: path.name.removeprefix(PREFIX).partition("-")[0] for path in NAMED.glob(f"{PREFIX}*")}
        remove_namespaces(sorted(path for path, pid in pids.items() if not Path("/proc", pid).exists()))
    finally:
        os.close(folder)


def remove_namespaces(paths: Sequence[Path]) -> None:
    """Kill what runs in namespaces, and remove them with their links; go on after errors. Raises Leftovers."""
    errors = []
    for path in paths:
        try:
            for pid in map(int, run(["ip", "netns", "pids", path.name]).split()):
                log.warning("process %d still runs in %s", pid, path.name)
                kill_and_wait(pid)
            run(["ip", "netns", "delete", path.name])
        except LabError as error:
            log.error("removing %s: %s", path.name, error)
            errors.append(str(error))
    if errors:
        raise Leftovers("; ".join(errors))


def _namespace(name: str) -> str:
    """The name says whose it is, should this process be killed."""
    return f"{PREFIX}{os.getpid()}-{name}"


def _add_namespace(name: str) -> str:
    namespace = _namespace(name)
    run(["ip", "netns", "add", namespace])
    _ip(namespace, "link", "set", "lo", "up")
    return namespace


def _ip(namespace: str, *words: str) -> None:
    run(["ip", "-n", namespace, *words])


def _open_end(namespace: str, device: str) -> int:
    """An end of a wire in a namespace. Raises OSError."""
    with (NAMED / namespace).open("rb") as there, Path("/proc/thread-self/ns/net").open("rb") as here:
        _move_thread(there.fileno())
        try:
            return wire.open_end(device)
        finally:
            _move_thread(here.fileno())


def _move_thread(namespace: int) -> None:
    """Move the calling thread to an open network namespace: setns(2), which Python has from 3.12 on. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
