"""Put each hand-made defect of tests/defects.json into a copy of the checkout and see whether the unit tests notice it.

    .venv/bin/python -m tests.defects [PART OF A FILE'S NAME]

An entry: ``file``, ``old`` (stands in the file once), ``new``, ``tests`` (what pytest is to run), and for one that no
unit test can notice ``explained``: why. Exit code 1 if another one survives.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import TypedDict

import click

LIST = Path(__file__).with_name("defects.json")
AT_ONCE = 2
PATIENCE = 600
"""Seconds. Tests that take longer hang because of the defect: it was noticed."""


class _Needed(TypedDict):
    file: str
    old: str
    new: str
    tests: list[str]


class Defect(_Needed, total=False):
    """One entry of the list."""

    explained: str


def read(path: Path = LIST) -> list[Defect]:
    """The list. Raises ValueError where an old text does not stand in its file exactly once."""
    defects: list[Defect] = json.loads(path.read_text())
    for defect in defects:
        count = Path(defect["file"]).read_text().count(defect["old"])
        if count != 1:
            raise ValueError(f"{defect['file']}: this stands there {count} times: {defect['old']!r}")
    return defects


def survives(defect: Defect, checkout: Path) -> bool:
    """Whether the tests pass in this copy of the checkout with the defect in it."""
    path = checkout / defect["file"]
    sound = path.read_text()
    path.write_text(sound.replace(defect["old"], defect["new"]) if defect["old"] else sound)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *defect["tests"]]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=checkout, env=environment, capture_output=True, timeout=PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    finally:
        path.write_text(sound)
    if done.returncode not in (0, 1, 2):  # pytest's own: passed, failed, could not even be imported
        raise RuntimeError(done.stdout.decode())
    return done.returncode == 0


def copy_checkout(to: Path) -> Path:
    """Copy what git tracks here."""
    listed = subprocess.run(["git", "ls-files", "-z"], capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if Path(name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(name, to / name)
    return to


def refuse_red(defects: list[Defect], checkout: Path) -> None:
    """Raise RuntimeError if the tests fail without any defect: then they would take all for noticed."""
    tests = sorted({test for defect in defects for test in defect["tests"]})
    if not survives({"file": "README.md", "old": "", "new": "", "tests": tests}, checkout):
        raise RuntimeError("these tests fail without any defect: " + ", ".join(tests))


def main(part: str = "") -> int:
    """Try all whose file's name has this part. Returns the exit code."""
    defects = [defect for defect in read() if part in defect["file"]]
    unexplained = survived = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(AT_ONCE):
            copies.put(copy_checkout(Path(folder) / str(number)))
        sound = copies.get()
        refuse_red(defects, sound)
        copies.put(sound)

        def try_out(defect: Defect) -> bool:
            checkout = copies.get()
            try:
                return survives(defect, checkout)
            finally:
                copies.put(checkout)

        for defect, alive in zip(defects, pool.map(try_out, defects), strict=True):
            survived += alive
            unexplained += alive and "explained" not in defect
            verdict = ("explained" if "explained" in defect else "SURVIVED") if alive else "noticed"
            click.echo(f"{verdict:9} {defect['file']}: {' '.join(defect['new'].split())[:90]}")
    click.echo(f"{len(defects) - survived} of {len(defects)} noticed; {unexplained} of the others without explanation")
    return int(unexplained > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
