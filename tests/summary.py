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
from pathlib import Path
from typing import Any

DURATIONS = Path(__file__).parents[1] / "build/durations.json"
LONGEST = 10
"""How many of an environment's longest tests are named."""
SHOWN = 1500
"""Characters of what is said of a failure: its end, where a message has what was wrong."""


def tests_of(folder: Path, environment: str) -> list[tuple[float, str, str | None]]:
    """Return seconds, name, and the reason of the failure, if it failed, of each test; the longest test comes first."""
    files = [folder / f"{environment}.xml", *folder.glob(f"{environment}.*.xml")]
    found = []
    # The files are our own; what tests print in them is escaped.
    for case in (case for file in files if file.exists() for case in ET.parse(file).iter("testcase")):
        faults = [*case.iter("failure"), *case.iter("error")]
        why = "\n".join((fault.text or fault.get("message") or "").strip() for fault in faults) if faults else None
        found.append((float(case.get("time") or 0), f"{case.get('classname')}.{case.get('name')}", why))
    return sorted(found, key=lambda test: -test[0])


def main(folder: Path, durations: Path = DURATIONS) -> int:
    """Print durations first, and failures last, where a reader looks first. Return the exit code."""
    told: dict[str, Any] = {}
    if (folder / "tox.json").exists():
        told = json.loads((folder / "tox.json").read_text())["testenvs"]
    results = {
        name: one["result"] for name, one in told.items() if "result" in one and not one["result"].get("skipped")
    }
    summary, failures = {}, []
    for name, result in results.items():
        seconds, ok, tests = result["duration"], result["success"], tests_of(folder, name)
        longest = {test: took for took, test, _ in tests[:LONGEST]}
        summary[name] = {"seconds": seconds, "ok": ok, "longest": longest}
        print(f"{name}: {seconds:.0f} s, {len(tests)} tests{'' if ok else ', FAILED'}")
        print("\n".join(f"    {took:6.1f} s  {test}" for test, took in longest.items()))
        failures += [f"\n{name}: FAILED {test}\n{why[-SHOWN:]}" for _, test, why in tests if why is not None]
    print("\n".join(failures))
    failed = [name for name, result in results.items() if not result["success"]]
    print(
        f"failed: {', '.join(failed) or 'nothing'}" if results else "tox has left no result: see what was printed above"
    )
    durations.write_text(json.dumps(summary, indent=1) + "\n")
    return int(bool(failed) or not results)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
