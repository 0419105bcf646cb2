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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.openstack import nova_tests
from tests.sweeps import WHOLE

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build/openstack"
OURS = Path(__file__).parent
PATIENCE = 1800.0
"""Seconds in which no test has ended, after which a process is taken for one that hangs. Nova's tests end sooner, and
say where they wait (oslotest: OS_TEST_TIMEOUT)."""
AGAIN = 1.0
"""Seconds between looks at what has ended."""

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


@dataclass
class Outcome:
    """What became of the tests of one name. ``failed``, ``skipped``: why, by test. ``took``: seconds, by test."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    failed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    took: dict[str, float] = field(default_factory=dict)
    seconds: float = 0

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.counts.items())) or "none"
        return f"{self.name}: {counts} in {self.seconds:.0f} s"


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


def run(name: str, folder: Path, defaults: Sequence[str]) -> Outcome:
    """Run the tests of this name, or of several between blanks, in a process of their own."""
    logs = BUILD / "logs"
    plain = re.sub(r"[^\w.]+", "-", name)[:LONGEST_NAME] + "-set" * bool(defaults)
    results, log = logs / f"{plain}.json", logs / f"{plain}.log"
    results.unlink(missing_ok=True)
    ours = name.startswith("tests.")
    # Threads, as Nova's services have them from now on: ours start agents, and Nova's own tests run as they come.
    threads = {"OS_NOVA_DISABLE_EVENTLET_PATCHING": "true"} if ours else {}
    measured = ["-m", "coverage", "run", f"--rcfile={OURS / 'coveragerc'}"] if ours else []
    options = [f"--default={default}" for default in defaults]
    argv = [sys.executable, *measured, "-m", "tests.openstack.worker", str(results), *options, *name.split()]
    environment = os.environ | threads | {
        "PYTHONPATH": f"{folder}:{ROOT}", "COVERAGE_FILE": str(ROOT / ".coverage"),
        "OS_STDOUT_CAPTURE": "1", "OS_STDERR_CAPTURE": "1", "OS_TEST_TIMEOUT": "1200",
    }  # fmt: skip
    began = time.monotonic()
    with (
        log.open("w") as out,
        subprocess.Popen(
            argv, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
        ) as process,
    ):
        try:
            code = end_of(process, results)
        finally:
            process.kill()  # one that has ended gets nothing
    outcome = _read(name, results)
    outcome.seconds = time.monotonic() - began
    if code != 0 or not outcome.counts:
        outcome.failed[name] = f"ended with {code} after {sum(outcome.counts.values())} tests; see {log}"
    return outcome


def end_of(
    process: subprocess.Popen[bytes],
    results: Path,
    patience: float = PATIENCE,
    again: float = AGAIN,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Wait for tests to end. Returns their exit code, or that of a process that was killed since it hangs."""
    seen, since = 0, clock()
    while True:
        try:
            return process.wait(again)
        except subprocess.TimeoutExpired:
            found = results.stat().st_size if results.exists() else 0
            if found != seen:
                seen, since = found, clock()
            elif clock() - since > patience:
                process.kill()


def _read(name: str, results: Path) -> Outcome:
    outcome = Outcome(name)
    for line in results.read_text().splitlines() if results.exists() else ():
        test = json.loads(line)
        outcome.counts[test["outcome"]] += 1
        outcome.took[test["test"]] = test["seconds"]
        if test["outcome"] != "passed":
            (outcome.failed if test["outcome"] == "failed" else outcome.skipped)[test["test"]] = test["why"]
    return outcome


def judge(outcomes: Sequence[Outcome]) -> int:
    """Say what is wrong. Returns the exit code. Ours are not skipped where CI is set."""
    failed = {test: why for outcome in outcomes for test, why in outcome.failed.items()}
    ours = {test: why for outcome in outcomes for test, why in outcome.skipped.items() if test.startswith("tests.")}
    if os.environ.get("CI"):
        failed |= {test: f"skipped, though CI is set: {why}" for test, why in ours.items()}
    new = {test: why for test, why in failed.items() if test not in nova_tests.KNOWN}
    for test, why in new.items():
        print(f"\n{test}\n{why}")
    write_results(outcomes, new)
    total = sum((outcome.counts for outcome in outcomes), Counter())
    known = len(failed) - len(new)
    print(
        f"\n{total['passed']} passed, {total['skipped']} skipped, {known} failed that are known to, {len(new)} failed"
    )
    return int(bool(new))


def write_results(outcomes: Sequence[Outcome], failed: Mapping[str, str]) -> None:
    """Write JUnit's XML, as pytest does for the other environments."""
    suite = ET.Element("testsuite", name="openstack")
    took = {test: seconds for outcome in outcomes for test, seconds in outcome.took.items()}
    for test in {**took, **failed}:
        where, _, name = test.rpartition(".")
        case = ET.SubElement(suite, "testcase", classname=where, name=name, time=str(took.get(test, 0)))
        if test in failed:
            ET.SubElement(case, "failure").text = XML_REFUSES.sub("?", failed[test])
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    ET.ElementTree(suite).write(RESULTS, encoding="unicode")


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.openstack", description="Run tests with a patched Nova.", epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--all", action="store_true", help="all of ours, and all of Nova's that come to the patch")
    parser.add_argument(
        "--pristine", action="store_true", help="with a Nova that is not patched, and without our tests"
    )
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="processes (default: %(default)s)")
    parser.add_argument(
        "--default", action="append", default=[], metavar="GROUP.OPTION=VALUE", help="an option of Nova"
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="only these: modules, classes or tests, ours or Nova's"
    )
    chosen = parser.parse_args()
    whole = WHOLE or chosen.all
    ours = () if chosen.pristine else our_names() if whole else EVERY_RUN
    names = chosen.names or [*ours, *(nova_tests.WHOLE if whole else nova_tests.EVERY_RUN)]
    (BUILD / "logs").mkdir(parents=True, exist_ok=True)
    outcomes, runs = [], [(name, chosen.default) for name in names]
    if whole and not chosen.names and not chosen.pristine:
        runs.append((" ".join(nova_tests.SET), [*chosen.default, *nova_tests.SETTINGS]))
    with alone(), ThreadPoolExecutor(chosen.at_once) as pool:
        folder = copy_nova(patched=not chosen.pristine)
        for outcome in pool.map(lambda one: run(one[0], folder, one[1]), runs):
            print(outcome, flush=True)
            outcomes.append(outcome)
    return judge(outcomes)


if __name__ == "__main__":
    sys.exit(main())
