"""What this machine can do for VirtMan, told without an agent and without changing anything."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drivers.needs import Finding, Machine
from virtman import lvmfilter
from virtman.accel import known_accel
from virtman.errors import ConfigError, HostTrouble, HypervisorError
from virtman.libvirthost import connected
from virtman.models import Accel
from virtman.stackchoice import AUTO, STACKS, DriverReport, Drivers, inspect, named, old_caches, pick, refusal
from virtman.transferring import LAYER, found

LINUX, LIBVIRT = "Linux", "libvirt"
NEWER = (
    (LINUX, (6, 12), "bcache may fetch each page by itself; Debian 13's kernel fetches up to 64 KiB at once"),
    (LIBVIRT, (9, 1), "no disk of it takes a reconnect delay: give disks to VMs of your own as block nodes"),
)
"""What an older version lacks, and since when it is there for certain: docs/operations.md, Debian 12 and 13."""


@dataclass(frozen=True)
class Examination:
    """``drivers`` are those that the agent would use with this ``stack``; ``reports`` are by stack.

    ``refusal``: why the agent would not start with these drivers, even if nothing is missing; ``unknown``: why this
    user cannot learn that, nor with ``auto`` the drivers. ``versions``: of the kernel and of libvirt, as far as they
    are known. ``lvm``: the devices that LVM scans. ``old_caches``: see ``stackchoice.old_caches``. ``methods``: for
    ``virtman deploy``; no stack needs them.
    """

    stack: str
    drivers: Drivers
    reason: str
    refusal: str | None
    unknown: str | None
    reports: dict[str, list[DriverReport]]
    accel: Accel | None
    libvirt: str
    libvirt_trouble: str | None
    versions: dict[str, str]
    lvm: str | None
    old_caches: str
    methods: tuple[DriverReport, ...] = ()

    @property
    def lvm_trouble(self) -> str | None:
        """What is wrong with LVM's settings, where drivers of the kernel run; ``lvm`` is None without LVM."""
        if self.drivers.source or self.lvm is None or not (wrong := lvmfilter.trouble(self.lvm)):
            return None
        return (
            "LVM looks at VirtMan's devices and hangs with them: deploy/lvm/lvmlocal.conf has what global_filter needs;"
            f" {wrong}"
        )

    @property
    def outdated(self) -> list[str]:
        """What newer versions would do better."""
        return [
            f"{name} {self.versions[name]} is older than {'.'.join(map(str, since))}: {lacks}"
            for name, since, lacks in NEWER
            if name in self.versions and _numbers(self.versions[name]) < since
        ]

    @property
    def runs(self) -> bool | None:
        """Whether the agent would start, and find all that it needs; None if this user cannot learn that."""
        if self.unknown and self.stack == AUTO:
            return None
        if self.refusal or self.missing:
            return False
        return None if self.unknown else True

    @property
    def missing(self) -> list[Finding]:
        """What is missing for the drivers that the agent would use, each need once."""
        return list(dict.fromkeys(finding for report in self._used for finding in report.missing))

    @property
    def _used(self) -> list[DriverReport]:
        return self.reports[self.drivers.stack or str(self.drivers)]

    @property
    def install(self) -> str | None:
        """One command that installs all missing packages."""
        packages = sorted({finding.package for finding in self.missing if finding.package})
        return f"apt-get install {' '.join(packages)}" if packages else None

    @property
    def remedies(self) -> list[str]:
        """What to do about missing things that no package brings."""
        return list(dict.fromkeys(finding.remedy for finding in self.missing if finding.remedy))

    def as_json(self) -> dict[str, Any]:
        return {
            "stack": self.stack,
            "runs": self.runs,
            "drivers": asdict(self.drivers),
            "reason": self.reason,
            "refusal": self.refusal,
            "unknown": self.unknown,
            "stacks": {stack: [_driver(report) for report in reports] for stack, reports in self.reports.items()},
            "methods": [_driver(report) for report in self.methods],
            "install": self.install,
            "remedies": self.remedies,
            "accel": self.accel and self.accel.model_dump(),
            "libvirt": {"uri": self.libvirt, "trouble": self.libvirt_trouble},
            "versions": self.versions,
            "outdated": self.outdated,
            "lvm": {"trouble": self.lvm_trouble},
            "old_caches": self.old_caches or None,
        }


def _driver(report: DriverReport) -> dict[str, Any]:
    lacking = [{k: v for k, v in asdict(finding).items() if k != "met"} for finding in report.missing]
    return {"layer": report.layer, "driver": report.driver, "there": report.there, "missing": lacking}


def examine(
    stack: str, others: Mapping[str, str | None], state: Path, address: str, libvirt: str,
    machine: Machine | None = None,
) -> Examination:  # fmt: skip
    """Look at this machine as an agent with these settings would. ``others``: drivers, by layer, in place of some.

    Raises ConfigError, HostTrouble if ``state`` cannot be read.
    """
    machine = machine or Machine()
    drivers, reason, refused, unknown = _chosen(stack, others, state)
    wanted = {drivers.stack or str(drivers): drivers}
    if stack == AUTO:
        wanted = STACKS | wanted
    reports = {name: inspect(four, machine, address) for name, four in wanted.items()}
    version, trouble = ask_libvirt(libvirt)
    versions = {LINUX: machine.kernel} | ({LIBVIRT: version} if version else {})
    return Examination(
        stack, drivers, reason, refused, unknown, reports, known_accel(state / "accel.json"), libvirt, trouble,
        versions, machine.lvm_filter, old_caches(state), _methods(machine, address) if drivers.source else (),
    )  # fmt: skip


def _methods(machine: Machine, address: str) -> tuple[DriverReport, ...]:
    return tuple(DriverReport(LAYER, name, findings) for name, findings in found(machine, address).items())


def _chosen(stack: str, others: Mapping[str, str | None], state: Path) -> tuple[Drivers, str, str | None, str | None]:
    """The drivers, and why; why the agent would refuse them; why this user, who may not read the state, cannot know.

    Raises ConfigError, HostTrouble.
    """
    try:
        drivers, reason = pick(stack, others, state)
    except (ConfigError, HostTrouble) as error:
        unknown = _forbidden(error)
        drivers, reason = named(stack, others)
        return drivers, f"a guess, without what the host has: {reason}", None, unknown
    try:
        return drivers, reason, refusal(state, drivers), None
    except (ConfigError, HostTrouble) as error:
        return drivers, reason, None, _forbidden(error)


def _forbidden(error: ConfigError | HostTrouble) -> str:
    """What this user may not read. Raises the error if it is about something else."""
    if not isinstance(error.__cause__, PermissionError):
        raise error
    return str(error)


def ask_libvirt(uri: str) -> tuple[str | None, str | None]:
    """The version of libvirt, or why it cannot be reached."""
    try:
        with connected(uri) as connection:
            number = connection.getLibVersion()
    except HypervisorError as error:
        return None, str(error)
    # 1,000,000 * major + 1,000 * minor + release (libvirt: virConnectGetLibVersion).
    return f"{number // 1_000_000}.{number // 1000 % 1000}.{number % 1000}", None


def _numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def rows(examination: Examination) -> Iterator[list[str]]:
    """A line for each driver: stack, or what it is for, layer, driver, what is there and what is missing."""
    for stack, reports in (*examination.reports.items(), ("deploy", examination.methods)):
        for report in reports:
            lacking = ", ".join(finding.need for finding in report.missing)
            yield [stack, report.layer, report.driver, ", ".join(report.there) or "-", lacking or "-"]


def advice(examination: Examination) -> Iterator[str]:
    """What the agent would use, and what to do about what is missing."""
    yield f"--stack {examination.stack} takes {examination.drivers}: {examination.reason}"
    if examination.refusal:
        yield f"the agent does not start: {examination.refusal}"
    if examination.unknown:
        yield (
            "whether the images and VMs of this host were made with these cannot be told: "
            f"{examination.unknown}; ask as who runs the agent"
        )
    if examination.install:
        yield f"to install what is missing: {examination.install}"
    for remedy in examination.remedies:
        yield f"to do: {remedy}"
    for report in examination.methods:
        packages = sorted({finding.package for finding in report.missing if finding.package})
        install = [f"apt-get install {' '.join(packages)}"] if packages else []
        for todo in (*install, *(finding.remedy for finding in report.missing if finding.remedy)):
            yield f"for virtman deploy --method {report.driver}: {todo}"
    if examination.lvm_trouble:
        yield f"to do: {examination.lvm_trouble}"
    if examination.old_caches:
        yield f"to do: {examination.old_caches}"
    yield from examination.outdated
    accel = examination.accel
    yield f"VMs run with {accel.use}: {accel.reason}" if accel else "KVM is not proven yet; see: virtman accel"
    yield examination.libvirt_trouble or f"libvirt at {examination.libvirt} answers"
