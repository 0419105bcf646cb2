"""Runs our tests with Nova, and Nova's own with the patch in: python -m tests.openstack --help."""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.openstack import nova_tests
from tests.sweeps import WHOLE

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build/openstack"
OURS = Path(__file__).parent
AT_ONCE = 2
"""Processes side by side."""
PATIENCE = 4 * 3600.0
"""Seconds after which a process is taken for one that hangs, as no test of Nova does (oslotest: OS_TEST_TIMEOUT)."""

XML_REFUSES = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd]")
"""What XML cannot hold (XML 1.0, section 2.2), and messages of terminals may have."""

LONGEST_NAME = 100
"""Characters of the name of a file of results: some names are of many modules."""

RESULTS = ROOT / "build/results/openstack.xml"
"""What tests.summary reads."""

EVERY_RUN = ("tests.openstack.test_servers", "tests.openstack.test_apply")
"""Our tests that make test runs: a few servers, and the patch itself."""

LONGEST = ("test_bases", "test_kills", "test_moves", "test_servers")

EPILOG = """examples, with build/openstack/venv/bin/python, which lab/openstack-venv makes:
  python -m tests.openstack                                    what make test runs
  python -m tests.openstack --all                              what make test-whole runs
  python -m tests.openstack tests.openstack.test_apply
  python -m tests.openstack 'nova.tests.unit.virt.libvirt.test_driver:volume|block'
  python -m tests.openstack --pristine nova.tests.unit.conf    the same without the patch: what fails here is known"""

Test = dict[str, Any]
"""What a worker writes of a test: its name, the outcome, seconds, and why."""


def our_names() -> list[str]:
    """The modules of our own tests. Those that take longest come first: a process that is free takes the next one."""
    found = sorted((path.stem for path in OURS.glob("test_*.py")), key=lambda name: (name not in LONGEST, name))
    return [f"tests.openstack.{name}" for name in found]


@contextmanager
def alone() -> Iterator[None]:
    """One run at a time: the copy of Nova has one place. Others wait."""
    with (BUILD / "run.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def copy_nova(patched: bool) -> Path:
    """A copy of the installed Nova. Returns the folder that is to be the first in which Python looks for modules.

    Beside the package is etc/nova, where Nova's tests look for api-paste.ini.
    """
    found = importlib.util.find_spec("nova")
    if found is None or found.origin is None:
        sys.exit("tests.openstack: no Nova: run lab/openstack-venv, and this with build/openstack/venv/bin/python")
    folder = BUILD / ("patched" if patched else "pristine")
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    site = Path(found.origin).parents[1]
    subprocess.run(["cp", "-a", str(site / "nova"), str(site / "etc"), str(folder)], check=True)
    if patched:
        subprocess.run([str(ROOT / "openstack_nova_patch/apply"), "--nova", str(folder / "nova")], check=True)
    return folder


def run(name: str, folder: Path, *options: str) -> list[Test]:
    """Run the tests of this name, or of several between blanks, in a process of their own."""
    plain = re.sub(r"[^\w.]+", "-", name)[:LONGEST_NAME] + "".join(options)
    results, log = (BUILD / "logs" / f"{plain}.{kind}" for kind in ("json", "log"))
    results.unlink(missing_ok=True)
    ours = name.startswith("tests.")
    # Threads, as Nova's services have them from now on: ours start agents, and Nova's own tests run as they come.
    threads = {"OS_NOVA_DISABLE_EVENTLET_PATCHING": "true"} if ours else {}
    measured = ["-m", "coverage", "run", f"--rcfile={OURS / 'coveragerc'}"] if ours else []
    argv = [sys.executable, *measured, "-m", "tests.openstack.worker", str(results), *options, *name.split()]
    environment = os.environ | threads | {
        "PYTHONPATH": f"{folder}:{ROOT}", "COVERAGE_FILE": str(ROOT / ".coverage"),
        "OS_STDOUT_CAPTURE": "1", "OS_STDERR_CAPTURE": "1", "OS_TEST_TIMEOUT": "1200",
    }  # fmt: skip
    began = time.monotonic()
    with log.open("w") as out:
        command = ["timeout", "--kill-after=60", str(PATIENCE), *argv]
        done = subprocess.run(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, check=False
        )
    lines = results.read_text().splitlines() if results.exists() else []
    tests: list[Test] = [json.loads(line) for line in lines]
    if done.returncode != 0 or not tests:
        why = f"ended with {done.returncode} after {len(tests)} tests; see {log}"
        tests.append({"test": name, "outcome": "failed", "seconds": 0, "why": why})
    print(f"{name}: {counts(tests)} in {time.monotonic() - began:.0f} s", flush=True)
    return tests


def counts(tests: list[Test]) -> str:
    """How many tests had which outcome."""
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(Counter(t["outcome"] for t in tests).items()))


def judge(tests: list[Test]) -> int:
    """Say what is wrong. Returns the exit code. Ours are not skipped where CI is set."""
    for test in tests:
        if test["outcome"] == "skipped" and test["test"].startswith("tests.") and os.environ.get("CI"):
            test |= {"outcome": "failed", "why": f"skipped, though CI is set: {test['why']}"}
        if test["outcome"] == "failed" and test["test"] in nova_tests.KNOWN:
            test["outcome"] = "failed as it is known to"
    failed = [test for test in tests if test["outcome"] == "failed"]
    for test in failed:
        print(f"\n{test['test']}\n{test['why']}")
    write_results(tests)
    print(f"\n{counts(tests)}")
    return int(bool(failed))


def write_results(tests: list[Test]) -> None:
    """Write JUnit's XML, as pytest does for the other environments."""
    suite = ET.Element("testsuite", name="openstack")
    for test in tests:
        where, _, name = test["test"].rpartition(".")
        case = ET.SubElement(suite, "testcase", classname=where, name=name, time=str(test["seconds"]))
        if test["outcome"] == "failed":
            ET.SubElement(case, "failure").text = XML_REFUSES.sub("?", test["why"])
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    ET.ElementTree(suite).write(RESULTS, encoding="unicode")


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.openstack", description="Run tests with a patched Nova.", epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--all", action="store_true", help="all of ours, and all of Nova's that come to the patch")
    parser.add_argument("--pristine", action="store_true", help="with a Nova that is not patched; without our tests")
    parser.add_argument("names", nargs="*", help="only these: modules, classes or tests, ours or Nova's")
    chosen = parser.parse_args()
    whole = WHOLE or chosen.all
    ours = () if chosen.pristine else our_names() if whole else EVERY_RUN
    names = chosen.names or [*ours, *(nova_tests.WHOLE if whole else nova_tests.EVERY_RUN)]
    runs: list[tuple[str, ...]] = [(name,) for name in names]
    if whole and not chosen.names and not chosen.pristine:
        runs.append((" ".join(nova_tests.WITH_OPTIONS_ON), "--options-on"))
    (BUILD / "logs").mkdir(parents=True, exist_ok=True)
    with alone(), ThreadPoolExecutor(AT_ONCE) as pool:
        folder = copy_nova(patched=not chosen.pristine)
        return judge([test for tests in pool.map(lambda one: run(one[0], folder, *one[1:]), runs) for test in tests])


if __name__ == "__main__":
    sys.exit(main())
