"""The command line: apply, apply --check, apply --revert."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from openstack_nova_patch.tool import find, ours, series
from openstack_nova_patch.tool.errors import Refused, one_line
from openstack_nova_patch.tool.tree import Form, Look, Verdict
from openstack_nova_patch.tool.work import Patch

FAILED, MISUSE = 1, 4
CHECK_FAILED = 4

EPILOG = """examples:
  apply                                        patch the Nova of the python3 in PATH
  apply --python /opt/nova/bin/python          the Nova of this environment
  apply --nova /usr/lib/python3/dist-packages/nova
  apply --check --python /opt/nova/bin/python  change nothing; say how much of the patch is there
  apply --revert                               take it all out: the tree is what it was

Restart Nova's services afterwards. A run that was cut off is ended by the next one, of either kind.

exit codes:
  of apply and apply --revert    0 done, or nothing to do; 1 refused or failed, with one line that says why
  of apply --check               0 applied; 1 not applied; 2 half applied, by a run that was cut off or by
                                 another version; 3 does not fit this Nova; 4 cannot be told
  of all                         4 wrong options"""
RESTART = "restart Nova's services"


class _Parser(argparse.ArgumentParser):
    """Whose exit code for wrong options is not one of a check's answers."""

    def error(self, message: str) -> NoReturn:
        self.exit(MISUSE, f"{self.prog}: {message}; see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    """All options."""
    whole = _Parser(
        prog="apply",
        description="Patch an installed Nova, so that it gives VMs the disks of VirtMan.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = whole.add_mutually_exclusive_group()
    where.add_argument(
        "--python", default="python3", metavar="PYTHON", help="whose Nova is meant (default: %(default)s)"
    )
    where.add_argument("--nova", type=Path, metavar="FOLDER", help="the folder of the package nova")
    what = whole.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="change nothing; say how much of the patch is there")
    what.add_argument("--revert", action="store_true", help="take the patch out")
    return whole


def main(
    argv: Sequence[str] | None = None, *, known: Path = series.HERE, modules: Path = ours.HERE
) -> int:  # fmt: skip
    """Run it. Returns the exit code."""
    chosen = parser().parse_args(argv)
    failed = CHECK_FAILED if chosen.check else FAILED
    try:
        nova = find.by_folder(chosen.nova) if chosen.nova else find.by_python(chosen.python)
        patch = Patch(nova, series.read_all(known), modules)
        if chosen.check:
            return _check(patch.look())
        changed = patch.revert() if chosen.revert else patch.apply()
    except Refused as error:
        return _fail(str(error), failed)
    except OSError as error:
        return _fail(one_line(error), failed)
    except KeyboardInterrupt:
        return _fail("interrupted: run it again to end it", failed)
    print(f"{nova}: {_done(chosen.revert)}; {RESTART}" if changed else f"{nova}: nothing to do")
    return 0


def _done(revert: bool) -> str:
    return "is what it was" if revert else "has the patch"


def _check(found: Look) -> int:
    verdict = found.verdict()
    if verdict is Verdict.UNFIT:
        print(f"{found.nova}: does not fit (patch for Nova {found.series.version}): {'; '.join(found.unfit())}")
    elif verdict is Verdict.HALF_APPLIED:
        count = len(found.are(Form.AFTER))
        print(
            f"{found.nova}: half applied: {count} of {len(found.forms)} files of Nova are changed, {_modules(found)}; "
            "apply and apply --revert go on from there"
        )
    else:
        said = "applied" if verdict is Verdict.APPLIED else "not applied"
        print(f"{found.nova}: {said} (patch for Nova {found.series.version})")
    return verdict.value


def _modules(found: Look) -> str:
    if not found.ours.present():
        return f"{found.ours.folder} is missing"
    if found.ours.stale() or found.ours.superfluous():
        return f"{found.ours.folder} is of another release or not whole"
    return f"{found.ours.folder} is whole"


def _fail(why: str, code: int) -> int:
    print(f"apply: {why}", file=sys.stderr)
    return code
