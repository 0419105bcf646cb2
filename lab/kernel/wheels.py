"""What ``pip install .`` and the kernel stack need, as wheels for the Python of guests, which reach no package index.

They are made once for each root, and kept with it.
"""

from __future__ import annotations

import shutil
import sys
import tomllib
from pathlib import Path

from lab import guest
from lab.kernel.root import Root, requirements
from lab.tools import BUILD, CHECKOUT, run

_PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")
_COMPILED = "libvirt-python"
_VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"
_COMPILE = f"""
import subprocess, sys, venv
venv.create("venv", with_pip=True)
wheel = ["wheel", "--quiet", "--no-index", "--find-links", "made", "--wheel-dir", "made", "--no-deps", "--no-cache-dir"]
subprocess.run(["venv/bin/pip", *wheel, "{_COMPILED}"], check=True)
"""


def built_for(root: Root, folder: Path) -> list[str]:
    """Options by which pip takes wheels for a root's Python. ``folder``: an empty one. Raises CommandFailed."""
    return ["--python-version", run([*root.python(folder), "-c", _VERSION]).strip(), "--only-binary=:all:"]


def wheels(root: Root, cache: Path = BUILD / "wheels") -> Path:
    """The folder of the wheels, made now if it is not in the cache. Raises CommandFailed."""

    def build(work: Path, made: Path) -> None:
        folder = work / "folder"
        folder.mkdir()
        python = built_for(root, folder)
        system = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["build-system"]["requires"]
        run([sys.executable, *_PIP, "download", "--dest", made, *python, *requirements(), *system, "wheel"])
        # These have sources only.
        run([sys.executable, *_PIP, "wheel", "--wheel-dir", made, "rtslib-fb"])
        run([sys.executable, *_PIP, "download", "--no-deps", "--no-binary=:all:", "--dest", made, _COMPILED])
        shutil.copytree(made, folder / "made")
        run([*root.python(folder), "-c", _COMPILE])
        for compiled in (folder / "made").glob(f"{_COMPILED.replace('-', '_')}*.whl"):
            shutil.copy(compiled, made)

    return guest.kept(cache, root.image.parent.name, "wheels for guests", build)
