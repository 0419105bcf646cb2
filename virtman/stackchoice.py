"""Which drivers an agent uses.

The stack ``kernel`` has the whole data path in the kernel. ``chunkstore`` has it in one process, and needs no root and
no kernel modules. What one of them made the other cannot use: the choice is kept in the state folder. With a record of
an image or a VM another choice is refused; else the choice holds until another one is named.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from drivers.errors import UnknownDriver
from drivers.host.durable import write_atomically
from drivers.needs import Finding, Machine, Needs, check
from drivers.registry import load
from virtman.errors import ConfigError
from virtman.stateversion import has_records
from virtman.stateversion import refusal as version_refusal

log = logging.getLogger(__name__)

AUTO = "auto"


@dataclass(frozen=True)
class Drivers:
    """The name of each layer's driver. A ``source`` is attach, cache and export in one, whose names are empty then."""

    attach: str
    cache: str
    export: str
    snapshot: str
    source: str = ""

    @property
    def layers(self) -> dict[str, str]:
        """The layers that have a driver of their own, with its name."""
        return {layer: name for layer, name in asdict(self).items() if name}

    def __str__(self) -> str:
        names = ", ".join(f"{layer} {name}" for layer, name in self.layers.items())
        stack = self.stack
        return f"the {stack} stack ({names})" if stack else f"the drivers {names}"

    @property
    def stack(self) -> str | None:
        """The stack of these, if they are one."""
        return next((stack for stack, drivers in STACKS.items() if drivers == self), None)

    @property
    def options(self) -> str:
        """How to choose these on the agent's command line."""
        if self.stack:
            return f"--stack {self.stack}"
        named = " ".join(f"--{layer} {name}" for layer, name in self.layers.items() if layer != "source")
        return f"--stack chunkstore {named}" if self.source else named


KERNEL = Drivers("iscsi", "bcache", "lio", "dmthin")
CHUNKSTORE = Drivers("", "", "", "qcow2", "chunkstore")
STACKS = {"kernel": KERNEL, "chunkstore": CHUNKSTORE}
LAYERS = frozenset({"attach", "cache", "export"})
"""What a source is in one."""

USERSPACE = Drivers("nbd", "qcow2", "nbd", "qcow2")
"""The stack ``userspace`` of 0.3: the chunk store serves its images to its VMs, and does not use its caches."""


@dataclass(frozen=True)
class DriverReport:
    """What one driver needs of this machine, and what of it is there."""

    layer: str
    driver: str
    findings: tuple[Finding, ...]

    @property
    def there(self) -> list[str]:
        return [finding.need for finding in self.findings if finding.met]

    @property
    def missing(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.met]


def inspect(drivers: Drivers, machine: Machine, address: str) -> list[DriverReport]:
    """Look for all that the drivers need; ``address`` as in ``Place``."""
    return [_inspect(layer, name, machine, address) for layer, name in drivers.layers.items()]


def _inspect(layer: str, name: str, machine: Machine, address: str) -> DriverReport:
    try:
        findings = check(getattr(load(layer, name), "needs", Needs()), machine, address)
    except UnknownDriver:
        findings = [Finding(f"driver {name}", met=False, remedy=f"install a package with the {layer} driver {name}")]
    return DriverReport(layer, name, tuple(findings))


def missing(drivers: Drivers, machine: Machine, address: str) -> list[str]:
    """What the drivers need and this machine has not, each named once."""
    lacking = [finding.need for report in inspect(drivers, machine, address) for finding in report.missing]
    return list(dict.fromkeys(lacking))


def pick(stack: str, overrides: Mapping[str, str | None], state: Path) -> tuple[Drivers, str]:
    """The drivers of ``stack``, which may be ``auto``, and why; ``overrides`` has other ones for some layers.

    ``auto`` keeps what this host had before. Raises ConfigError if the state cannot be read.
    """
    if stack == AUTO and (made := made_with(state)):
        drivers = _replaced(made, overrides)
        return drivers, "this host had them before" if drivers == made else "as was asked for"
    return named(stack, overrides)


def named(stack: str, overrides: Mapping[str, str | None]) -> tuple[Drivers, str]:
    """As ``pick``, for a host without a choice. Raises ConfigError."""
    if stack != AUTO:
        return _replaced(STACKS[stack], overrides), "as was asked for"
    if any(overrides.get(layer) for layer in LAYERS):
        return _replaced(KERNEL, overrides), "drivers of its layers were asked for"
    return _replaced(CHUNKSTORE, overrides), "no other stack was asked for"


def choose(
    stack: str, overrides: Mapping[str, str | None], state: Path, address: str, machine: Machine | None = None
) -> Drivers:
    """The drivers that ``pick`` takes. Raises ConfigError, which names what is missing; as ``settle``."""
    machine = machine or Machine()
    drivers, reason = pick(stack, overrides, state)
    _check_state(state, drivers)
    lacking = missing(drivers, machine, address)
    if lacking:
        raise ConfigError(
            f"cannot run {drivers} ({reason}), missing here: {', '.join(lacking)}; "
            f"see: virtman doctor {drivers.options}"
        )
    log.info("using %s: %s", drivers, reason)
    return drivers


def _replaced(drivers: Drivers, overrides: Mapping[str, str | None]) -> Drivers:
    """The drivers with other ones for some layers. Raises ConfigError if a source has these layers in it."""
    other = {layer: name for layer, name in overrides.items() if name}
    if drivers.source and (wrong := sorted(other.keys() & LAYERS)):
        options = ", ".join(f"--{layer}" for layer in wrong)
        raise ConfigError(
            f"{drivers.source} does what attach, cache and export do: leave out {options}, or say --stack kernel"
        )
    return replace(drivers, **other)


def settle(state: Path, drivers: Drivers) -> None:
    """Keep the choice in the state folder, which this process has locked.

    Raises ConfigError if another version or other drivers made what is in the folder.
    """
    _check_state(state, drivers)
    if made_with(state) != drivers:
        write_atomically(_file(state), json.dumps(asdict(drivers)).encode())


def keep_address(state: Path, address: str) -> None:
    """Keep what other hosts reach this one by, for a start while it cannot be told. A full disk keeps no agent away."""
    if address and last_address(state) != address:
        try:
            write_atomically(_address(state), f"{address}\n".encode())
        except OSError as error:
            log.warning("the address of this host cannot be kept for the next start: %s", error)


def known_address(volt: str, state: Path) -> str:
    """The address from which this host reaches Volt; if that cannot be told now, the one of the start before.

    Empty if other hosts cannot use it.
    """
    try:
        address = _route_to(volt)
    except (OSError, ValueError) as error:
        address = last_address(state)
        log.warning(
            "no route to Volt at %s: %s; this host takes the address it had: %s", volt, error, address or "none"
        )
        return address
    return "" if ipaddress.ip_address(address).is_loopback else address


def old_caches(state: Path) -> str:
    """What to do about the caches of an old userspace stack in the state folder; empty if none can be seen there."""
    caches = state / "cache"
    try:
        if not any(caches.glob("*.qcow2")):
            return ""
    except PermissionError:
        return ""
    return f"the caches of the userspace stack of 0.3 in {caches} are not taken over: delete its *.qcow2 files"


def last_address(state: Path) -> str:
    """The address of the start before, if this host still has it; else empty.

    After a power cut of a whole site hosts come back before the name of their Volt means anything, and bring their
    stacks back without it.
    """
    try:
        address = _address(state).read_text().strip()
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except (OSError, ValueError):
        return ""
    return address


def _address(state: Path) -> Path:
    return state / "address"


def refusal(state: Path, drivers: Drivers) -> str | None:
    """Why an agent with these drivers does not open the state folder. Raises ConfigError, HostTrouble."""
    if why := version_refusal(state):
        return why
    made = made_with(state)
    if made in (None, drivers) or not has_records(state):
        return None
    return (
        f"the images and VMs in {state} were made with {made}, and {drivers} cannot use them: "
        f"start the agent with {made.options}"
    )


def _check_state(state: Path, drivers: Drivers) -> None:
    if why := refusal(state, drivers):
        raise ConfigError(why)


def made_with(state: Path) -> Drivers | None:
    """The choice in the state folder. Raises ConfigError if it cannot be read."""
    try:
        made = Drivers(**json.loads(_file(state).read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"cannot read the choice of drivers in {_file(state)}: {error}") from error
    return CHUNKSTORE if made == USERSPACE else made


def _file(state: Path) -> Path:
    return state / "drivers.json"


def _route_to(volt: str) -> str:
    """The address of this host on its way to Volt. Raises OSError, ValueError."""
    parts = urlsplit(volt)
    if not parts.hostname:
        raise ValueError("it names no host")
    family, kind, _, _, target = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing: the kernel only picks a route
        return str(probe.getsockname()[0])
