"""What this machine can do for VirtMan, told without an agent and without changing anything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drivers.needs import Finding, Machine
from virtman.accel import Verdict, known_accel
from virtman.errors import HypervisorError
from virtman.machines import connected
from virtman.stackchoice import AUTO, STACKS, DriverReport, Drivers, inspect, pick


@dataclass(frozen=True)
class Examination:
    """``drivers`` are those that the agent would use with this ``stack``; ``reports`` are by stack."""

    stack: str
    drivers: Drivers
    reason: str
    reports: dict[str, list[DriverReport]]
    accel: Verdict | None
    libvirt: str
    libvirt_trouble: str | None

    @property
    def runs(self) -> bool:
        """Whether the agent would find all that it needs."""
        return not any(report.missing for report in self.reports[self.drivers.stack or str(self.drivers)])

    @property
    def missing(self) -> list[Finding]:
        """What is missing for any of the stacks, each need once."""
        found = (finding for reports in self.reports.values() for report in reports for finding in report.missing)
        return list(dict.fromkeys(found))

    @property
    def install(self) -> str | None:
        """One command that installs all missing packages."""
        packages = sorted({finding.package for finding in self.missing if finding.package})
        return f"apt-get install {' '.join(packages)}" if packages else None

    @property
    def remedies(self) -> list[str]:
        """What to do about what no package brings."""
        return list(dict.fromkeys(finding.remedy for finding in self.missing if finding.remedy))

    def as_json(self) -> dict[str, Any]:
        """The whole examination for scripts."""
        return {
            "stack": self.stack,
            "runs": self.runs,
            "drivers": asdict(self.drivers),
            "reason": self.reason,
            "stacks": {stack: [_driver(report) for report in reports] for stack, reports in self.reports.items()},
            "install": self.install,
            "remedies": self.remedies,
            "accel": self.accel and {"use": self.accel.accel, "reason": self.accel.reason},
            "libvirt": {"uri": self.libvirt, "trouble": self.libvirt_trouble},
        }


def _driver(report: DriverReport) -> dict[str, Any]:
    there = [finding.need for finding in report.findings if finding.met]
    lacking = [{k: v for k, v in asdict(finding).items() if k != "met"} for finding in report.missing]
    return {"layer": report.layer, "driver": report.driver, "there": there, "missing": lacking}


def examine(stack: str, state: Path, address: str, libvirt: str, machine: Machine | None = None) -> Examination:
    """Look at this machine as an agent with these settings would. Raises ConfigError if ``state`` cannot be read."""
    machine = machine or Machine()
    drivers, reason = pick(stack, {}, state, address, machine)
    wanted = {drivers.stack or str(drivers): drivers}
    if stack == AUTO:
        wanted = STACKS | wanted
    reports = {name: inspect(four, machine, address) for name, four in wanted.items()}
    accel = known_accel(state / "accel.json")
    return Examination(stack, drivers, reason, reports, accel, libvirt, libvirt_trouble(libvirt))


def libvirt_trouble(uri: str) -> str | None:
    """Why libvirt cannot be reached; None if it can."""
    try:
        with connected(uri):
            return None
    except HypervisorError as error:
        return str(error)


def rows(examination: Examination) -> Iterator[list[str]]:
    """A line for each driver: stack, layer, driver, what is there and what is missing."""
    for stack, reports in examination.reports.items():
        for report in reports:
            there = ", ".join(finding.need for finding in report.findings if finding.met)
            lacking = ", ".join(finding.need for finding in report.missing)
            yield [stack, report.layer, report.driver, there or "-", lacking or "-"]


def advice(examination: Examination) -> Iterator[str]:
    """What the agent would use, and what to do about what is missing."""
    yield f"--stack {examination.stack} takes {examination.drivers}: {examination.reason}"
    if examination.install:
        yield f"to install what is missing: {examination.install}"
    for remedy in examination.remedies:
        yield f"to do: {remedy}"
    accel = examination.accel
    yield f"VMs run with {accel.accel}: {accel.reason}" if accel else "KVM is not proven yet; see: virtman accel"
    yield examination.libvirt_trouble or f"libvirt at {examination.libvirt} answers"
