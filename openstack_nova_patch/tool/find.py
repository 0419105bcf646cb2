"""Where the installed Nova is."""

from __future__ import annotations

import subprocess
from pathlib import Path

from openstack_nova_patch.tool.errors import Refused

PATIENCE = 60
"""Seconds that a Python may take to say where Nova is."""
# Neither Nova nor anything of it is imported, and nothing compiled is written.
SEARCH = """
import importlib.util
found = importlib.util.find_spec("nova")
print(found.origin if found and found.origin else "")
"""


def by_python(python: str) -> Path:
    """The folder of the package nova that this Python imports. Raises Refused."""
    argv = [python, "-IB", "-c", SEARCH]
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except OSError as error:
        raise Refused(f"{python} cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise Refused(f"{python} did not end within {PATIENCE} s") from None
    if done.returncode != 0:
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise Refused(f"{python} is not a Python that works: {last}")
    origin = done.stdout.strip()
    if not origin:
        raise Refused(f"{python} has no Nova: name its Python with --python, or Nova's folder with --nova")
    return by_folder(Path(origin).parent)


def by_folder(folder: Path) -> Path:
    """The folder, without links, if it is one of Nova. Raises Refused."""
    found = folder.resolve()
    if not (found / "__init__.py").is_file() or not (found / "version.py").is_file():
        raise Refused(f"{folder} is not the folder of the package nova, such as …/site-packages/nova")
    return found
