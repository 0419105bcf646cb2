"""The datastore's actions with images, each called as OpenNebula's driver calls its scripts.

The request is XML in base64, and the answer one line: what else is printed would be taken for a message of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from opennebula_tm.driver import names, nebula
from opennebula_tm.driver.card import FORMATS, Card, Cards
from opennebula_tm.driver.content import Contents, Origins
from opennebula_tm.driver.deploying import ATTRIBUTE, check_method
from opennebula_tm.driver.errors import DriverError, FrontendFailed, HostFailed, Refused
from opennebula_tm.driver.moving import Streams
from opennebula_tm.driver.nebula import MIB
from opennebula_tm.driver.remote import Hosts
from opennebula_tm.driver.settings import Settings

log = logging.getLogger(__name__)

SAVE_AS = "save_as"
SCHEMES = ("http://", "https://", "s3://")
"""What images may be fetched from, besides files of the front end: web servers and marketplaces."""
ADDING = ".adding-"
"""Begins the names of folders in that of the datastore that have an image while it is added."""
NOT_DISKS = {"KERNEL": "kernels", "RAMDISK": "ramdisks", "CONTEXT": "files"}
TYPES = {"3": "KERNEL", "4": "RAMDISK", "5": "CONTEXT"}
"""OpenNebula's numbers of the types of images that are no disks (Image::ImageType)."""


class Request:
    """What OpenNebula asks of the datastore."""

    def __init__(self, request: bytes) -> None:
        """Raises FrontendFailed."""
        self.xml = nebula.decode(request, "the request to the datastore")

    def image(self, key: str) -> str:
        """Of the image."""
        return self.xml.text(f"IMAGE/{key}") or self.xml.text(f"IMAGE/TEMPLATE/{key}")

    def datastore(self, key: str) -> str:
        """Of the datastore's template."""
        return self.xml.text(f"DATASTORE/TEMPLATE/{key}")

    @property
    def folder(self) -> PurePosixPath:
        """The datastore's folder. Raises Refused."""
        text = self.xml.text("DATASTORE/BASE_PATH")
        if not text.startswith("/") or any(sign.isspace() or sign == ":" for sign in text):
            raise Refused(f"the datastore's folder {text!r} must be absolute and without blanks and colons, at which"
                          " OpenNebula splits what it hands to drivers")  # fmt: skip
        return PurePosixPath(os.path.normpath(text))

    @property
    def origins(self) -> tuple[str, ...]:
        """The hosts that have its images for all others. Raises Refused."""
        hosts = tuple(dict.fromkeys(self.datastore("BRIDGE_LIST").split()))
        if not hosts:
            raise Refused("the datastore needs BRIDGE_LIST: the hosts that are to be the origins of its images")
        return tuple(names.check_host(host) for host in hosts)

    @property
    def format(self) -> str:
        """Of VMs' disks. Raises Refused."""
        found = self.datastore("DRIVER") or "raw"
        if found not in FORMATS:
            raise Refused(f"DRIVER of the datastore is {found!r}: raw where hosts have the kernel stack, else qcow2")
        return found

    def check_method(self) -> None:
        """Check by which method the image is to go to all hosts; its own attribute comes first. Raises Refused."""
        check_method(self.image(ATTRIBUTE) or self.datastore(ATTRIBUTE))

    @property
    def source(self) -> PurePosixPath:
        """The card of the image that it is about. Raises Refused."""
        return self.card_at(self.image("SOURCE"))

    @property
    def vms(self) -> tuple[int, ...]:
        """The VMs that use the image, stopped ones included."""
        return tuple(int(text) for one in self.xml.all("IMAGE/VMS/ID") if (text := one.text(".")).isdigit())

    def card_at(self, text: str) -> PurePosixPath:
        """A card that must be this datastore's. Raises Refused."""
        path = names.path_of(text)
        if path.parent != self.folder:
            raise Refused(f"{text!r} is no image of the datastore in {self.folder}")
        return path


class Datastore:
    """Carries actions out, and prints their answers."""

    def __init__(self, settings: Settings, remotes: Path, show_vm: Callable[[int], nebula.Vm] = nebula.show_vm) -> None:
        self._remotes = remotes
        self._show_vm = show_vm
        self._settings = settings
        self._hosts = Hosts(settings)
        self._streams = Streams(self._hosts)
        self._cards = Cards()

    def run(self, action: str, request: bytes) -> None:
        """Carry one out. Raises DriverError."""
        if action == "stat":
            self._stat(request)
            return
        actions = {
            "cp": self.cp, "mkfs": self.mkfs, "clone": self.clone, "rm": self.rm, "monitor": self.monitor,
            "export": self.export, "snap_delete": self.snap_delete, "snap_revert": self.snap_revert,
            "snap_flatten": self.snap_flatten,
        }  # fmt: skip
        if action not in actions:
            raise Refused(f"the datastore has no action {action}")
        sys.stdout.write(actions[action](Request(request)))

    def cp(self, request: Request) -> str:
        """Add an image: from a path of the front end, an URL, or a marketplace."""
        self._refuse_no_disk(request)
        source = request.image("PATH")
        if not source:
            raise Refused("the image has no PATH")
        with self._staging(request) as folder:
            file = folder / "disk"
            self._download(request, source, file)
            return self._add(request, file)

    def mkfs(self, request: Request) -> str:
        """A new image: empty, with a file system, or one that a VM's disk is saved as."""
        self._refuse_no_disk(request)
        if request.image("FORMAT") == SAVE_AS:
            path, card = self._new(request)
            self._cards.write(path, card)
            return f"{path} {card.format}\n"
        mib = names.number("the size", request.image("SIZE") or "0")
        with self._staging(request) as folder:
            file = folder / "disk"
            _make(file, mib, request.image("FS"), request.image("FORMAT") == "swap")
            return self._add(request, file)

    def clone(self, request: Request) -> str:
        """A new image that holds what another one of this driver holds now."""
        source = names.path_of(request.image("PATH") or request.image("SOURCE"))
        theirs = Contents(self._cards, source, self._origins(source.parent)).settled()
        path, card = self._new(request)
        over, copy = theirs.published, f"{card.name}-t"
        origins = self._origins(path.parent)
        card = origins.publish(card, card.name, lambda host: origins.from_disk(host, card.name, copy, over))
        self._cards.write(path, card)
        for host in card.origins:
            origins.try_sweep(host, card)
        return f"{path} {card.format}\n"

    def rm(self, request: Request) -> str:
        """Delete an image. While VMs have disks of it, also stopped ones, it stays for these until a later ``monitor``.

        OpenNebula deletes an image that VMs use, if an administrator has it do so by force.
        """
        self._remove(request.source, request.vms)
        return ""

    def _remove(self, path: PurePosixPath, vms: Sequence[int]) -> None:
        """Remove an image, or note for which of these VMs it stays. Raises DriverError."""
        users = [vm for vm in vms if self._may_use(vm, path)]
        with self._cards.locked(path):
            if self._cards.exists(path):
                if users:
                    self._contents(path).leave_to(users)
                    return
                self._contents(path).remove()
        self._cards.remove(path)

    def _may_use(self, vm: int, path: PurePosixPath) -> bool:
        """Whether a VM has a disk of the image, as far as OpenNebula can tell."""
        try:
            known = self._show_vm(vm)
        except FrontendFailed as error:
            log.warning("image %s stays for VM %d: %s", path.name, vm, error)
            return True
        return not known.done and any(names.path_of(disk.source) == path for disk in known.disks)

    def _remove_deleted(self, folder: PurePosixPath) -> None:
        """Remove the deleted images that no VM uses any more; what fails is tried again by the next call."""
        for path in self._cards.paths(folder):
            try:
                if users := self._cards.read(path).left_to:
                    self._remove(path, users)
            except DriverError as error:
                log.warning("what image %s has stays: %s", path.name, error)

    def monitor(self, request: Request) -> str:
        """The room for images: that of the origin that has least, since all have each image. MiB.

        OpenNebula asks for it every few minutes, so this also removes the deleted images that no VM uses any more.
        """
        self._remove_deleted(request.folder)
        rooms, failed = list[tuple[int, int]](), list[str]()
        origins = self._origins(request.folder)
        for host in request.origins:
            try:
                rooms.append(origins.room(host))
            except HostFailed as error:
                failed.append(str(error))
        if not rooms:
            raise HostFailed("; ".join(failed))
        total, free = min(rooms, key=lambda room: room[1])
        return f"USED_MB={(total - free) // MIB}\nFREE_MB={free // MIB}\nTOTAL_MB={total // MIB}\n"

    def export(self, request: Request) -> str:
        """Hand an image to a marketplace, as a file of the front end that is removed afterwards."""
        path = request.source
        card = self._contents(path).settled()
        target = Path(path.parent) / f".{card.name}-{secrets.token_hex(4)}.export"
        origins = self._origins(path.parent)
        try:
            self._first(card.origins, lambda host: origins.export(host, card.published, target, image=True))
            digest = _md5(target)
        except BaseException:
            target.unlink(missing_ok=True)
            raise
        return (
            f"<IMPORT_INFO><IMPORT_SOURCE><![CDATA[{target}]]></IMPORT_SOURCE><MD5><![CDATA[{digest}]]></MD5>"
            f"<SIZE><![CDATA[{request.image('SIZE')}]]></SIZE><FORMAT><![CDATA[qcow2]]></FORMAT><DISPOSE>YES</DISPOSE>"
            f"<DISPOSE_CMD><![CDATA[rm -f {target}]]></DISPOSE_CMD></IMPORT_INFO>\n"
        )

    def snap_delete(self, request: Request) -> str:
        """Forget a snapshot of a persistent image that no VM has."""
        path = request.source
        number = self._snapshot(request)
        with self._cards.locked(path):
            if (kept := self._contents(path).card.kept) is not None:
                origins = self._origins(path.parent)
                for host in kept.at:
                    origins.forget_snapshot(host, kept.disk, number)
        return ""

    def snap_revert(self, request: Request) -> str:
        """Let a persistent image that no VM has hold what it held then."""
        path = request.source
        number = self._snapshot(request)
        with self._cards.locked(path):
            self._contents(path).revert(number)
        return ""

    def snap_flatten(self, request: Request) -> str:
        """Let a persistent image that no VM has hold what it held then, and forget all of its snapshots."""
        answer = self.snap_revert(request)
        self._contents(request.source).settled()
        return answer

    def _stat(self, request: bytes) -> None:
        """The size of what is to be added, in MiB: OpenNebula's own script knows how to ask any source for it."""
        parsed = Request(request)
        self._refuse_no_disk(parsed)
        parsed.check_method()
        self._refuse_restricted(parsed, parsed.image("PATH"))
        script = self._remotes / "datastore" / "fs" / "stat"
        try:
            done = subprocess.run([str(script), "0"], input=request, check=False)
        except OSError as error:
            raise FrontendFailed(f"cannot run {script}: {error.strerror}") from error
        if done.returncode != 0:
            raise SystemExit(1)

    def _new(self, request: Request) -> tuple[PurePosixPath, Card]:
        """Where its card will be, in a folder that is there, and the card. Raises Refused, FrontendFailed."""
        number = names.number("the image", request.image("ID"))
        request.check_method()
        try:
            Path(request.folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FrontendFailed(f"cannot make {request.folder}: {error.strerror}") from error
        name = f"one-{number}-{secrets.token_hex(4)}"
        return request.folder / name, Card(name, request.format, request.origins)

    def _add(self, request: Request, file: Path) -> str:
        path, card = self._new(request)
        archive = file.with_suffix(".tar")
        _pack(file, archive)
        self._cards.write(PurePosixPath(file.parent) / card.name, card)  # for who cleans up if this call is killed
        origins = self._origins(path.parent)
        card = origins.publish(card, card.name, lambda host: origins.upload(host, card.name, archive))
        self._cards.write(path, card)
        return f"{path} {card.format}\n"

    @staticmethod
    def _first(hosts: tuple[str, ...], act: Callable[[str], None]) -> None:
        """Ask one host after the other until one has done it. Raises HostFailed with what each of them said."""
        failed = list[str]()
        for host in hosts:
            try:
                act(host)
            except HostFailed as error:
                failed.append(str(error))
            else:
                return
        raise HostFailed("; ".join(failed))

    @contextmanager
    def _staging(self, request: Request) -> Iterator[Path]:
        """A folder of this call's own in that of the datastore. Raises FrontendFailed."""
        folder = Path(request.folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._remove_left(folder)
            with tempfile.TemporaryDirectory(dir=folder, prefix=ADDING) as name, _held(Path(name)):
                yield Path(name)
        except OSError as error:
            raise FrontendFailed(f"cannot keep the image in {folder} meanwhile: {error.strerror or error}") from error

    def _remove_left(self, folder: Path) -> None:
        """Remove what calls left that were killed, here and at origins. Raises OSError."""
        for left in folder.glob(f"{ADDING}*"):
            with contextlib.suppress(BlockingIOError, FileNotFoundError), _held(left):
                notes = list(left.glob("one-*"))
                for file in set(left.iterdir()) - set(notes):
                    file.unlink()
                # An origin that is down is asked by the next call.
                if all(self._forgotten(PurePosixPath(note)) for note in notes):
                    shutil.rmtree(left)

    def _forgotten(self, note: PurePosixPath) -> bool:
        """Remove what origins have of an image that was not added: its card is not there. Returns whether all did."""
        path, card = note.parent.parent / note.name, self._cards.read(note)
        if self._cards.exists(path):
            return True
        log.info("removing what is left of %s, which was not added", card.name)
        origins = self._origins(path.parent)
        done = [origins.try_sweep(host, card) for host in card.origins]
        return all(done)

    def _download(self, request: Request, source: str, file: Path) -> None:
        """Have OpenNebula's downloader fetch and unpack it, and check its hash. Raises DriverError."""
        self._refuse_restricted(request, source)
        argv = [str(self._remotes / "datastore" / "downloader.sh")]
        for option, value in (
            ("--md5", request.image("MD5")), ("--sha1", request.image("SHA1")),
            ("--limit", request.datastore("LIMIT_TRANSFER_BW")),
        ):  # fmt: skip
            argv += [option, value] if value else []
        if request.datastore("NO_DECOMPRESS").lower() == "yes":
            argv.append("--nodecomp")
        try:
            done = subprocess.run(
                [*argv, source, str(file)], stdin=subprocess.DEVNULL, capture_output=True, check=False,
                timeout=self._settings.transfer,
            )  # fmt: skip
        except OSError as error:
            raise FrontendFailed(f"cannot run {argv[0]}: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise FrontendFailed(f"{source} was not fetched within {self._settings.transfer:g} seconds") from error
        if done.returncode != 0 or not file.is_file():
            said = " ".join(done.stderr.decode(errors="replace").split())
            raise FrontendFailed(f"cannot fetch {source}: {said or f'exit code {done.returncode}'}")

    def _refuse_restricted(self, request: Request, source: str) -> None:
        """Refuse files of the front end that the datastore's attributes keep users from, as OpenNebula's drivers do."""
        if source.startswith(SCHEMES):
            return
        if not source.startswith("/"):
            # OpenNebula's downloader would take it for a file, from where oned was started.
            raise Refused(f"PATH {source!r} is neither absolute nor begins with one of {', '.join(SCHEMES)}")
        real = os.path.realpath(source)
        safe = request.datastore("SAFE_DIRS").split()
        own = [str(self._remotes.parent), os.environ.get("HOME", ""), str(_etc())]
        for folder in (*request.datastore("RESTRICTED_DIRS").split(), *own):
            if folder and _within(real, folder) and not any(_within(real, one) for one in safe):
                raise Refused(f"PATH {source!r} is in {folder}, where images must not come from (RESTRICTED_DIRS)")

    @staticmethod
    def _refuse_no_disk(request: Request) -> None:
        kind = TYPES.get(request.image("TYPE"), request.image("TYPE").upper())
        if kind in NOT_DISKS:
            raise Refused(f"a VirtMan datastore is for disks: put {NOT_DISKS[kind]} into a datastore of type FILE")

    @staticmethod
    def _snapshot(request: Request) -> int:
        return names.number("the snapshot", request.image("TARGET_SNAPSHOT"))

    def _origins(self, folder: PurePosixPath) -> Origins:
        return Origins(self._hosts, self._streams, folder)

    def _contents(self, path: PurePosixPath) -> Contents:
        return Contents(self._cards, path, self._origins(path.parent))


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Let others see that the folder is in use, for as long as this process lives. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _within(path: str, folder: str) -> bool:
    return os.path.commonpath([path, os.path.realpath(folder)]) == os.path.realpath(folder)


def _etc() -> Path:
    location = os.environ.get("ONE_LOCATION")
    return Path(location) / "etc" if location else Path("/etc/one")


def _make(file: Path, mib: int, file_system: str, swap: bool) -> None:
    """An empty disk. Raises DriverError."""
    if mib <= 0:
        raise Refused(f"the size {mib} MiB is not possible")
    with file.open("wb") as target:
        target.truncate(mib * MIB)
    if file_system and not file_system.isalnum():
        raise Refused(f"FS {file_system!r} is no name of a file system")
    tool = "mkswap" if swap else f"mkfs.{file_system}" if file_system else ""
    if not tool:
        return
    force = {"mkfs.xfs": ["-f"], "mkfs.btrfs": ["-f"], "mkswap": ["-L", "swap"]}.get(tool, ["-F"])
    found = shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if found is None:
        raise Refused(f"the front end has no {tool}, which FS or FORMAT of the image needs")
    done = subprocess.run([found, *force, str(file)], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode != 0:
        raise FrontendFailed(f"{tool} failed: {' '.join(done.stderr.decode(errors='replace').split())}")


def _pack(file: Path, archive: Path) -> None:
    """Put the disk into a tar, where holes take no room. Raises FrontendFailed."""
    done = subprocess.run(
        ["tar", "-cSf", str(archive), "-C", str(file.parent), file.name], capture_output=True, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode != 0:
        raise FrontendFailed(f"cannot pack the image: {' '.join(done.stderr.decode(errors='replace').split())}")


def _md5(file: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with file.open("rb") as source:
        while chunk := source.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
