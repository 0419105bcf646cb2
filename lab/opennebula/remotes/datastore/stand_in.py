"""Stands in for OpenNebula's datastore driver ``fs``: images are files in the datastore's folder on the front end.

Arguments: the script's folder, its name, and the request's number. Standard input: DS_DRIVER_ACTION_DATA in base64.
"""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path
from xml.etree import ElementTree as ET

MIB = 1 << 20


def value(data: ET.Element, path: str) -> str:
    """A text of the request."""
    return data.findtext(path, "").strip()


def new_source(data: ET.Element) -> Path:
    """A name for a new image."""
    folder = Path(value(data, "DATASTORE/BASE_PATH"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder / uuid.uuid4().hex


def copy(folder: Path, data: ET.Element) -> str:
    """cp: through the downloader."""
    source = new_source(data)
    words = [str(folder.parent / "downloader.sh"), value(data, "IMAGE/PATH"), str(source)]
    if subprocess.run(words, check=False).returncode:
        source.unlink(missing_ok=True)
        sys.exit(1)
    return f"{source} raw"


def clone(_folder: Path, data: ET.Element) -> str:
    """A copy of another image."""
    source = new_source(data)
    shutil.copyfile(value(data, "IMAGE/PATH"), source)
    return f"{source} raw"


def make(_folder: Path, data: ET.Element) -> str:
    """mkfs: an empty image."""
    source = new_source(data)
    if value(data, "IMAGE/FORMAT") != "save_as":
        source.touch()
        os.truncate(source, int(value(data, "IMAGE/SIZE")) * MIB)
    return f"{source} raw"


def remove(_folder: Path, data: ET.Element) -> str:
    """rm."""
    Path(value(data, "IMAGE/SOURCE")).unlink(missing_ok=True)
    return ""


def size(folder: Path, data: ET.Element) -> str:
    """stat: in MiB, rounded up."""
    path = value(data, "IMAGE/PATH")
    if not path.startswith(("http://", "https://")):
        file = Path(path.removeprefix("file://"))
        if not file.exists():
            sys.exit(f"Cannot determine size for {path}")
        return str(-(-file.stat().st_size // MIB))
    words = [str(folder.parent / "downloader.sh"), "--nodecomp", path, "-"]
    total = 0
    with subprocess.Popen(words, stdout=subprocess.PIPE) as load:
        assert load.stdout
        while piece := load.stdout.read(MIB):
            total += len(piece)
    if load.returncode:
        sys.exit(f"Cannot determine size for {path}")
    return str(-(-total // MIB))


def monitor(_folder: Path, data: ET.Element) -> str:
    """Sizes in MiB."""
    use = shutil.disk_usage(value(data, "DATASTORE/BASE_PATH"))
    return f"USED_MB={use.used // MIB}\nTOTAL_MB={use.total // MIB}\nFREE_MB={use.free // MIB}"


ACTIONS = {"cp": copy, "clone": clone, "mkfs": make, "rm": remove, "stat": size, "monitor": monitor}

if __name__ == "__main__":
    print(ACTIONS[sys.argv[2]](Path(sys.argv[1]), ET.fromstring(base64.b64decode(sys.stdin.read()))))
