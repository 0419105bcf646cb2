"""What has failed, said once more when a whole run is over: with environments side by side hundreds of lines follow it.

The variable FAILURES names the file for it; without it nothing is noted.

    python -m tests.failures    print what was noted, and end with 1
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

LONGEST = 700
"""Characters of what is said of a failure: its end, where a message has what was wrong."""


def note(test: str, why: str) -> None:
    """Keep that a test has failed. Several processes may do it at once."""
    if file := os.environ.get("FAILURES"):
        with Path(file).open("a", errors="backslashreplace") as notes:  # names in messages may be no UTF-8
            notes.write(f"\n{test}\n{why.strip()[-LONGEST:]}\n")


def main() -> int:
    """Returns the exit code of a run that has failed."""
    file = Path(os.environ["FAILURES"])
    print(file.read_text() if file.exists() else "no test has noted that it failed: see what was printed above")
    return 1


if __name__ == "__main__":
    sys.exit(main())
