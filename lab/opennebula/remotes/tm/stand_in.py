"""Stands in for OpenNebula's system transfer manager ``ssh``: whole copies by tar over ssh, and its traps.

mv of a disk does nothing: the folder's mv empties the target's and unpacks the source's there. premigrate removes the
target's folder, then calls the premigrate of the other disks' drivers with an argument more, and does not look how they
ended; so does postmigrate. Arguments: the script's folder, its name, and what it was called with.
"""

from __future__ import annotations

import base64
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

DISK = re.compile(r"/disk\.\d+$")


class Failed(Exception):
    """A step failed; the message is for users."""


def place(word: str) -> tuple[str, str]:
    """Host and path of ``host:path``; a bare path is on the front end: no host."""
    host, colon, path = word.partition(":")
    return (host, path.rstrip("/")) if colon else ("", word)


def on(host: str, script: str, what: str) -> str:
    """Run a script on a host, or here; returns its output. Raises Failed."""
    words = ["ssh", host, "/bin/sh -s"] if host else ["/bin/sh", "-s"]
    done = subprocess.run(words, input="set -e\n" + script, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"ERROR: {what}: {done.stderr.strip()}".replace("\n", " "), file=sys.stderr)
        raise Failed(what)
    return done.stdout


def copy(source: str, target: str) -> None:
    """A file or folder from one host to another, or here, under another name."""
    (from_host, from_path), (to_host, to_path) = place(source), place(target)
    old, new = Path(from_path), Path(to_path)
    on(to_host, f"mkdir -p {shlex.quote(str(new.parent))}", f"Error making the folder of {target}")
    change = shlex.quote(f"--transform=flags=r;s|^{re.escape(old.name)}|{new.name}|")
    pack = f"tar -C {shlex.quote(str(old.parent))} {change} -cSf - {shlex.quote(old.name)}"
    unpack = f"tar -C {shlex.quote(str(new.parent))} -xSf -"
    sending = subprocess.Popen(at(from_host, pack), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    received = subprocess.run(at(to_host, unpack), stdin=sending.stdout, check=False)
    assert sending.stdout
    sending.stdout.close()
    if sending.wait() or received.returncode:
        raise Failed(f"Error copying {source} to {target}")


def at(host: str, command: str) -> list[str]:
    """The words that run a command on a host, or here."""
    return ["ssh", host, command] if host else ["/bin/sh", "-c", command]


def show(number: str) -> ET.Element:
    """What onevm says of a VM."""
    done = subprocess.run(["onevm", "show", "-x", number], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"Cannot read VM {number}")
    return ET.fromstring(done.stdout)


def clone(source: str, target: str, vm: str, _store: str) -> None:
    """A whole copy, grown if the VM's disk is larger than the image."""
    copy(source, target)
    number = target.rpartition("disk.")[2]
    disk = show(vm).find(f"TEMPLATE/DISK[DISK_ID='{number}']")
    if disk is not None and int(disk.findtext("SIZE", "0")) > int(disk.findtext("ORIGINAL_SIZE", "0")):
        resize(target, disk.findtext("SIZE", "0"), vm, _store)


def resize(disk: str, size: str, _vm: str, _store: str) -> None:
    """Grow a disk to a size in MiB."""
    host, path = place(disk)
    on(host, f"truncate -s {int(size)}M {shlex.quote(path)}", f"Error resizing {disk}")


def move(source: str, target: str, _vm: str, _store: str) -> None:
    """A VM's folder, with all that lies there."""
    if DISK.search(place(target)[1]) or source == target:
        return
    delete(target)
    copy(source, target)
    delete(source)


def delete(what: str, *_: str) -> None:
    """A disk or a VM's folder."""
    host, path = place(what)
    on(host, f"rm -rf {shlex.quote(path)}", f"Error deleting {path}")


def save(source: str, target: str, *_: str) -> None:
    """A persistent disk back into its image."""
    copy(source, target)


def save_as(source: str, target: str, snapshot: str, *_: str) -> None:
    """A disk, or a snapshot of it, into a new image."""
    copy(source if snapshot == "-1" else f"{source}.snap/{snapshot}", target)


def make_image(size: str, form: str, target: str, *_: str) -> None:
    """An empty disk of a size in MiB."""
    host, path = place(target)
    folder, file = shlex.quote(str(Path(path).parent)), shlex.quote(path)
    on(host, f"mkdir -p {folder}\ntruncate -s {int(size)}M {file}", f"Could not create image {path} ({form})")


def make_swap(size: str, target: str, *_: str) -> None:
    """A swap disk."""
    make_image(size, "swap", target)


def context(*words: str) -> None:
    """The files of a VM's context, packed into one."""
    *files, target, _vm, _store = words
    with tempfile.TemporaryDirectory() as folder:
        for file in files:
            shutil.copy(file, folder)
        packed = Path(folder) / "context.tar"
        subprocess.run(["tar", "-C", folder, "--exclude=context.tar", "-cf", packed, "."], check=True)
        copy(str(packed), target)


class Migration:
    """What is done around a live migration."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name

    def before(self, source: str, target: str, path: str, *rest: str) -> None:
        """premigrate."""
        if source != target:
            delete(f"{target}:{path}")
            self._others(source, target, path, *rest)

    def after(self, source: str, target: str, path: str, vm: str, *rest: str) -> None:
        """postmigrate: the other drivers first, then the folder where the VM was."""
        stays = show(vm).findall("HISTORY_RECORDS/HISTORY/DS_ID")
        store = stays[-2].text if len(stays) > 1 else rest[0]
        old = Path(path).parent.parent / str(store) / vm
        if source == target and str(old) == path:
            return
        self._others(source, target, path, vm, *rest)
        delete(f"{source}:{old}")

    def _others(self, *words: str) -> None:
        told = sys.stdin.read()
        if len(words) > 5:
            return
        root = ET.fromstring(base64.b64decode(told))
        own = self._folder.name
        for driver in dict.fromkeys(element.text or "" for element in root.iterfind("TEMPLATE/DISK/TM_MAD")):
            if driver and driver != own:
                script = self._folder.parent / driver / self._name
                subprocess.run([script, *words, own], input=told, text=True, check=False)


def main(folder: Path, name: str, words: list[str]) -> int:
    """One script. Returns its exit code."""
    migration = Migration(folder, name)
    actions: dict[str, Callable[..., None]] = {
        "clone": clone,
        "ln": clone,
        "mv": move,
        "delete": delete,
        "mvds": save,
        "cpds": save_as,
        "resize": resize,
        "mkimage": make_image,
        "mkswap": make_swap,
        "context": context,
        "premigrate": migration.before,
        "postmigrate": migration.after,
    }
    try:
        actions[name](*words)
    except Failed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
