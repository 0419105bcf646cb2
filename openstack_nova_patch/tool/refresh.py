"""For those who change the patch: records how a changed Nova's tree differs from the original one."""

from __future__ import annotations

import argparse
import filecmp
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from openstack_nova_patch.tool import disk, find, ours, patching, series
from openstack_nova_patch.tool.errors import Refused, one_line
from openstack_nova_patch.tool.series import Change, Series

FAILED = 1
ORDER = ("nova/conf/", "nova/objects/", "nova/volume/", "nova/virt/", "nova/compute/", "nova/")
"""Which files a new patch comes before: those of a folder may use what those of earlier ones have."""
IGNORED = (".pyc", ".orig", ".rej", ".swp", "~", disk.DRAFT)

EPILOG = """example:
  cp -r /opt/nova/lib/python3.11/site-packages/nova /tmp/changed     then edit /tmp/changed
  refresh /opt/nova/lib/python3.11/site-packages/nova /tmp/changed 34.0.0

Each file that differs gets a patch of its own. The order of patches that there are stays, and so does what is written
in a patch above its first "---" line. nova/virtman is not looked at: our modules are openstack_nova_patch/modules."""


def main(argv: Sequence[str] | None = None, known: Path = series.HERE) -> int:
    """Run it. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="refresh",
        description="Rewrite the patch series for a version of Nova.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("original", type=Path, help="the folder of the package nova as it was installed")
    parser.add_argument("changed", type=Path, help="a copy of it with the changes")
    parser.add_argument("version", help="of Nova, such as 34.0.0")
    chosen = parser.parse_args(argv)
    try:
        made = refresh(find.by_folder(chosen.original), find.by_folder(chosen.changed), known / chosen.version)
    except Refused as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(one_line(error))
    for change in made.changes:
        print(f"{change.patch}: {series.changed_lines((made.folder / change.patch).read_bytes())} lines")
    count = made.changed_lines()
    print(f"{count} lines of Nova changed, of {series.LIMIT} that may be")
    return 0 if count <= series.LIMIT else FAILED


def refresh(original: Path, changed: Path, folder: Path) -> Series:
    """Make the series in this folder anew. Raises Refused and OSError; the folder is then as it was."""
    before = series.read(folder).changes if folder.exists() else ()
    heads = {change.file: _head((folder / change.patch).read_bytes()) for change in before}
    folder.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".refresh-") as parent:
        made = Path(parent) / folder.name
        made.mkdir()
        files = _ordered(_differing(original, changed), [change.file for change in before])
        changes = tuple(_record(number, file, heads, original, changed, made) for number, file in enumerate(files, 1))
        series.write(Series(made, changes))
        for change in changes:  # what was recorded leads from the one tree to the other, and back
            old, new = change.place(original).read_bytes(), change.place(changed).read_bytes()
            patching.patched(old, Series(made, changes), change)
            patching.unpatched(new, Series(made, changes), change)
        if folder.exists():
            shutil.rmtree(folder)
        made.rename(folder)
    return series.read(folder)


def _differing(original: Path, changed: Path) -> list[str]:
    """Files of Nova that differ, as the patches name them. Raises Refused for one that only one tree has."""
    files, others = set(_files(original)), set(_files(changed))
    for lone in sorted(files ^ others):
        where = original if lone in files else changed
        raise Refused(f"only {where} has {lone}: new files are our modules, in openstack_nova_patch/modules")
    return [f"nova/{file}" for file in sorted(files) if not filecmp.cmp(original / file, changed / file, shallow=False)]


def _files(nova: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(nova):
        here = Path(parent)
        folders[:] = [name for name in folders if name != ours.COMPILED and here / name != nova / ours.NAME]
        yield from (here.relative_to(nova) / name for name in files if not name.endswith(IGNORED))


def _ordered(files: list[str], before: list[str]) -> list[str]:
    """Those that the series had in its order; new ones after those that they may use."""

    def rank(file: str) -> tuple[int, int, str]:
        place = next(number for number, start in enumerate(ORDER) if file.startswith(start))
        return (0, before.index(file), "") if file in before else (1, place, file)

    return sorted(files, key=rank)


def _record(number: int, file: str, heads: dict[str, bytes], original: Path, changed: Path, folder: Path) -> Change:
    subject = (
        file.removeprefix("nova/").removesuffix(".py").removesuffix("/__init__").replace("/", "-").replace("_", "-")
    )
    change = Change(f"{number:04}-{subject}.patch", file, "", "")
    old, new = change.place(original), change.place(changed)
    argv = ["diff", "-u", f"--label=a/{file}", f"--label=b/{file}", str(old), str(new)]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode != 1 or not done.stdout.startswith(b"---"):
        raise Refused(
            f"{new}: no patch can be made of it: {(done.stdout + done.stderr).decode(errors='replace').strip()}"
        )
    (folder / change.patch).write_bytes(heads.get(file, b"") + done.stdout)
    return Change(change.patch, file, disk.digest(old.read_bytes()), disk.digest(new.read_bytes()))


def _head(patch: bytes) -> bytes:
    """What is written above the diff."""
    return patch[: patch.index(b"--- a/")]


def _fail(why: str) -> int:
    print(f"refresh: {why}", file=sys.stderr)
    return FAILED
