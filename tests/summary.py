"""Say at the end of a run how long each environment and its longest tests took, and what failed.

    python -m tests.summary FOLDER    FOLDER: where the run has left its results, as below

Reads ``tox.json`` (tox --result-json) and JUnit's XML (pytest --junit-xml): ``ENV.xml``, and ``ENV.PART.xml`` for parts
of an environment that run elsewhere, in guests say. Writes ``build/durations.json``. The exit code is 1 if an
environment failed or did not run.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

DURATIONS = Path(__file__).parents[1] / "build/durations.json"
LONGEST = 10
"""How many of an environment's longest tests are named."""
SHOWN = 1500
"""Characters of what is said of a failure: its end, where a message has what was wrong."""


@dataclass(frozen=True)
class Test:
    """A test that ran. ``failure``: why it failed; None if it passed."""

    name: str
    seconds: float
    failure: str | None


@dataclass(frozen=True)
class Environment:
    """An environment of tox that ran."""

    name: str
    seconds: float
    ok: bool
    tests: list[Test]

    def longest(self) -> list[Test]:
        """The longest tests, longest first."""
        return sorted(self.tests, key=lambda test: -test.seconds)[:LONGEST]


def environments(folder: Path) -> list[Environment]:
    """What ran, in tox's order. Raises FileNotFoundError if tox has left no result."""
    told = json.loads((folder / "tox.json").read_text())["testenvs"]
    return [
        Environment(name, one["result"]["duration"], one["result"]["success"], tests_of(folder, name))
        for name, one in told.items()
        if "result" in one and not one["result"].get("skipped")
    ]


def tests_of(folder: Path, environment: str) -> list[Test]:
    """The tests of an environment, of all its files."""
    files = [folder / f"{environment}.xml", *sorted(folder.glob(f"{environment}.*.xml"))]
    # The files are our own; what tests print in them is escaped.
    return [_test(case) for file in files if file.exists() for case in ET.parse(file).iter("testcase")]


def _test(case: ET.Element) -> Test:
    faults = [*case.iter("failure"), *case.iter("error")]
    failure = "\n".join((fault.text or fault.get("message") or "").strip() for fault in faults) if faults else None
    return Test(f"{case.get('classname')}.{case.get('name')}", float(case.get("time") or 0), failure)


def text(ran: list[Environment]) -> str:
    """Durations first, and failures last, where a reader looks first."""
    lines = []
    for one in ran:
        lines.append(f"{one.name}: {one.seconds:.0f} s, {len(one.tests)} tests{'' if one.ok else ', FAILED'}")
        lines += [f"    {test.seconds:6.1f} s  {test.name}" for test in one.longest()]
    for one in ran:
        for test in one.tests:
            if test.failure is not None:
                lines.append(f"\n{one.name}: FAILED {test.name}\n{test.failure[-SHOWN:]}")
    failed = [one.name for one in ran if not one.ok]
    lines.append(f"\nfailed: {', '.join(failed)}" if failed else "\nall environments passed")
    return "\n".join(lines)


def as_json(ran: list[Environment]) -> str:
    """Seconds, by environment and by test."""
    told = {
        one.name: {"seconds": one.seconds, "ok": one.ok, "longest": {test.name: test.seconds for test in one.longest()}}
        for one in ran
    }
    return json.dumps(told, indent=1)


def main(folder: Path, durations: Path = DURATIONS) -> int:
    """Returns the exit code."""
    try:
        ran = environments(folder)
    except FileNotFoundError:
        print("tox has left no result: see what was printed above")
        return 1
    durations.write_text(as_json(ran) + "\n")
    print(text(ran))
    return int(not ran or not all(one.ok for one in ran))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
