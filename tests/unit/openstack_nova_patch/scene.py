"""A Nova that is small enough to compare byte by byte, a patch series for it, and modules of ours."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from openstack_nova_patch.tool import disk, series
from openstack_nova_patch.tool.cli import main
from openstack_nova_patch.tool.refresh import refresh
from openstack_nova_patch.tool.work import Patch
from tests.unit.opennebula_tm.scene import tree, write

VERSION = "34.0.0"
LINES = "".join(f"line {number}\n" for number in range(40))
FILES = {
    "__init__.py": b"",
    "version.py": b"version = 1\n",
    "compute/__init__.py": b"",
    "compute/api.py": LINES.encode(),
    "compute/manager.py": LINES.encode() + b"# \xe9\xff, and no end of the line",
    "conf/compute.py": LINES.replace("\n", "\r\n").encode(),
    "conf/__pycache__/compute.cpython-311.pyc": b"\0compiled",
    "virt/driver.py": LINES.encode(),
}
CHANGED = ("conf/compute.py", "compute/api.py", "compute/manager.py")
"""What the series changes, in its order."""


def nova(folder: Path) -> Path:
    """Nova, as it is installed below this folder."""
    for name, content in FILES.items():
        write(folder / "nova" / name, content)
    (folder / "nova/compute/manager.py").chmod(0o755)
    (folder / "nova/compute").chmod(0o750)
    return folder / "nova"


def change(tree_of_nova: Path, text: str = "ours") -> None:
    """What our patch does to it."""
    for name in CHANGED:
        path = tree_of_nova / name
        path.write_bytes(
            path.read_bytes().replace(b"line 20", f"{text}\nline 20".encode()).replace(b"no end", b"the end")
        )


def modules(folder: Path) -> Path:
    """Our modules."""
    write(folder / "modules/__init__.py", '"""Ours."""\n')
    write(folder / "modules/volume.py", "import nova\n")
    write(folder / "modules/parts/__init__.py", "")
    write(folder / "modules/__pycache__/volume.cpython-311.pyc", b"\0")
    return folder / "modules"


class Scene:
    """A Nova in a folder whose name has blanks, a series that fits it, and another one that does not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nova = nova(folder / "site packages")
        self.modules = modules(folder)
        self.known = folder / "series"
        for version, text in (("33.0.0", "older"), (VERSION, "ours")):
            original, changed = nova(folder / "original" / version), nova(folder / "changed" / version)
            if version != VERSION:
                for path in (original, changed):
                    write(path / "compute/api.py", LINES.replace("line 30\n", ""))
            change(changed, text)
            refresh(original, changed, self.known / version)

    @property
    def series(self) -> Path:
        """The folder of the series that fits."""
        return self.known / VERSION

    def patch(self, step: disk.Step = disk.no_step) -> Patch:
        """The tool for this Nova."""
        return Patch(self.nova.resolve(), series.read_all(self.known), self.modules, step)

    def tree(self) -> dict[str, tuple[int, bytes | str]]:
        """All of Nova: permissions and content."""
        return tree(self.nova)

    def run(self, *options: str) -> tuple[int, str, str]:
        """The command line for this Nova: exit code, what it said, and what it complained about."""
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = main(["--nova", str(self.nova), *options], known=self.known, modules=self.modules)
        return code, out.getvalue(), err.getvalue()

    def edit(self, name: str, old: str, new: str) -> None:
        """Somebody changes a file."""
        path = self.nova / name
        path.write_bytes(path.read_bytes().replace(old.encode(), new.encode()))
