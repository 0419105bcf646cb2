"""The front end: the drivers in the remotes folder, and their names in oned.conf and vmm_execrc."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from opennebula_tm.driver.deploying import ATTRIBUTE
from opennebula_tm.installer import change, disk, registration, sources
from opennebula_tm.installer.change import Edit, OwnFile, Step, no_step
from opennebula_tm.installer.console import Commands, Console
from opennebula_tm.installer.errors import Refused
from opennebula_tm.installer.record import Book, Record

OWN_FOLDERS = ("tm/virtman", "datastore/virtman", "etc/tm/virtman", "etc/datastore/virtman")
SETTINGS = Path("etc")
"""Below the remotes folder: files that administrators change."""
STAGE = Path("tm/virtman")
STACKS = ("chunkstore", "kernel")


@dataclass(frozen=True)
class Places:
    """Where OpenNebula has its things: its packages' places, or all below ``ONE_LOCATION``."""

    remotes: Path
    etc: Path
    bin: Path | None = None

    @staticmethod
    def of(location: Path | None) -> Places:
        if location is None:
            var, etc = Path("/var/lib/one"), Path("/etc/one")
            return Places(var / "remotes", etc)
        location = location.resolve()  # the record names files by their paths
        return Places(location / "var" / "remotes", location / "etc", location / "bin")

    @property
    def record(self) -> Path:
        """Where nobody but root writes: what is in the record, the next run deletes."""
        return self.etc / ".virtman-install.json"

    @property
    def oned(self) -> Path:
        return self.etc / "oned.conf"

    @property
    def execrc(self) -> Path:
        return self.etc / "vmm_exec" / "vmm_execrc"


class FrontEnd:
    """One front end. ``step`` is told each step before it is done."""

    def __init__(
        self, places: Places, console: Console, commands: Commands,
        package: Path = sources.PACKAGE, step: Step = no_step,
    ) -> None:  # fmt: skip
        self._places = places
        self._console = console
        self._commands = commands
        self._package = package
        self._step = step
        self._book = Book(places.record)

    def install(self, stack: str | None) -> None:
        """Copy and register. Raises Refused, before anything changed, if something is in the way."""
        with disk.alone_in(self._places.remotes):
            before = self._book.read()
            record = before or Record()
            stack = stack or record.facts.get("stack", STACKS[0])
            files = self._files()
            change.refuse_foreign(files, record)
            edits = list(self._edits(stack, record))
            waiting = [file for file in files if change.stale(file, record)]
            old = self._obsolete(files, record)
            if not (waiting or old or any(edit.changes for edit in edits)) and before is not None and _settled(before):
                self._console.say("nothing to do")
                return
            change.show(self._console, edits)
            self._console.say(f"{len(waiting)} files to write below {self._places.remotes}, {len(old)} to remove")
            self._console.agree("Make these changes?")
            record.facts["stack"] = stack
            self._note(files, record)
            self._copy(waiting, record)
            self._delete(old)
            change.apply(edits, record, self._book, self._step)
            record.files = {str(f.path): self._digests(f, record) for f in files}
            self._step("finish the record")
            self._book.write(record)
        self._console.say("installed. Left to do, so that OpenNebula and its hosts take it up:")
        self._console.say("    systemctl restart opennebula")
        self._console.say(f"    onehost sync -f    # as {self._user()}; on each host: install host")

    def remove(self, force: bool) -> None:
        """Take back what ``install`` did, and nothing else. Raises Refused while a datastore uses the drivers."""
        with disk.alone_in(self._places.remotes):
            record = self._book.read()
            if record is None:
                self._console.say("nothing to do")
                return
            if not force:
                self._refuse_used()
            edits = list(self._edits_back(record))
            change.show(self._console, edits)
            self._console.say(f"{len(record.files)} files to remove below {self._places.remotes}")
            self._console.agree("Make these changes?")
            change.apply(edits, record, self._book, self._step)
            self._take_away(record)
            left = change.drop_backups(record)
            self._step("forget the record")
            self._book.forget()
        for name in left:
            self._console.say(f"{name} stays: it has what nothing else has")
        self._console.say("removed. Left to do: systemctl restart opennebula, and onehost sync -f")

    def differences(self, stack: str | None) -> list[str]:
        """One line for each thing that is not as ``install`` would leave it. Raises Refused."""
        record = self._book.read() or Record()
        stack = stack or record.facts.get("stack", STACKS[0])
        files = self._files()
        lines = [line for file in files for line in self._compare(file, record)]
        lines += [f"{path} is of another version" for path in self._obsolete(files, record)]
        oned = disk.read(self._places.oned)
        if oned is None:
            return [*lines, f"there is no {self._places.oned}"]
        try:
            found = registration.differences(disk.as_text(oned), stack)
            lines += [f"{self._places.oned}: {line}" for line in found]
        except Refused as error:
            raise Refused(f"{self._places.oned}: {error}") from None
        live = change.read_text(self._places.execrc, lambda text: registration.enable_live(text)[0])
        if live is not None and live.changes:
            lines.append(f"{live.path}: {registration.LIVE} has not {' and '.join(registration.LIVE_PAIRS)}")
        return lines

    def set_method(self, method: str) -> None:
        """Have our datastores of images say how their images go to all hosts. Raises Refused."""
        lines = self.other_methods(method)
        for line in lines.values():
            self._console.say(line)
        if not lines:
            self._console.say(f"nothing to do for {ATTRIBUTE}: all datastores of images with the drivers have it")
            return
        self._console.agree(f"Set {ATTRIBUTE} to {method} there?")
        with tempfile.NamedTemporaryFile("w") as file:
            file.write(f'{ATTRIBUTE} = "{method}"\n')
            file.flush()
            Path(file.name).chmod(0o644)  # OpenNebula's user reads it
            for number in lines:
                self._commands.must(self._onedatastore("update", number, file.name, "--append"))

    def other_methods(self, method: str) -> dict[str, str]:
        """A line for each of our datastores of images that does not say so, by its number. Raises Refused."""
        done = self._commands.run(self._onedatastore("list", "-x"))
        if done.code != 0:
            raise Refused(f"OpenNebula cannot be asked for its datastores: {done.error}")
        images = [one for one in ours(done.out) if one.findtext("DS_MAD") == registration.DRIVER]
        said = {one: one.findtext(f"TEMPLATE/{ATTRIBUTE}") or "" for one in images}
        return {
            one.findtext("ID") or "": f'datastore {_title(one)}: {ATTRIBUTE} is "{now}"'
            for one, now in said.items()
            if now != method
        }

    def _compare(self, file: OwnFile, record: Record) -> Iterator[str]:
        present = disk.read(file.path)
        if present is None:
            yield f"{file.path} is missing"
        elif present != file.content and not (file.setting and not record.knows(file.path, present)):
            yield f"{file.path} differs from this version"
        elif disk.owner_of(file.path) != file.owner:
            yield f"{file.path} has another owner or other permissions"

    def _files(self) -> list[OwnFile]:
        """Each file once, also where one folder is a link to another."""
        remotes = self._places.remotes.resolve()
        base = disk.owner_of(remotes)
        found: dict[Path, OwnFile] = {}
        for source, below in sources.files(self._package):
            content = source.read_bytes()
            path = (self._places.remotes / below).parent.resolve() / below.name
            if not path.is_relative_to(remotes):
                raise Refused(
                    f"{(self._places.remotes / below).parent} leads out of {remotes}: no file is written there"
                )
            mode = 0o755 if content.startswith(b"#!") else 0o644
            owner = disk.Owner(base.uid, base.gid, mode & (base.mode | 0o600))
            found.setdefault(path, OwnFile(path, content, owner, below.is_relative_to(SETTINGS)))
        return list(found.values())

    def _edits(self, stack: str, record: Record) -> Iterator[Edit]:
        """What is added is told to the record, which is written before the edits."""
        oned, execrc = self._places.oned, self._places.execrc
        edit = change.read_text(oned, lambda text: self._noting(oned, registration.register(text, stack), record))
        if edit is None:
            raise Refused(f"there is no {oned}")
        yield edit
        live = change.read_text(execrc, lambda text: self._noting(execrc, registration.enable_live(text), record))
        if live is not None:
            yield live

    def _noting(self, path: Path, result: tuple[str, list[str]], record: Record) -> str:
        text, added = result
        known = record.edits.setdefault(str(path), [])
        known += [key for key in added if key not in known]
        return text

    def _edits_back(self, record: Record) -> Iterator[Edit]:
        for path, undo in (
            (self._places.oned, registration.unregister),
            (self._places.execrc, registration.disable_live),
        ):
            added = record.edits.get(str(path), [])
            edit = change.read_text(path, lambda text, undo=undo, added=added: undo(text, added))  # type: ignore[misc]
            if edit is not None and added:
                yield edit

    def _note(self, files: list[OwnFile], record: Record) -> None:
        """Write down what is going to be ours."""
        for file in files:
            if file.setting and not change.stale(file, record) and not record.knows(file.path, file.content):
                continue
            known = record.files.setdefault(str(file.path), [])
            known += [new for new in [disk.digest(file.content)] if new not in known]
        for folder in self._folders(files):
            if not folder.exists() and str(folder) not in record.folders:
                record.folders.append(str(folder))
        self._step("begin the record")
        self._book.write(record)

    def _folders(self, files: list[OwnFile]) -> list[Path]:
        """The folders of our files, parents first."""
        remotes = self._places.remotes.resolve()
        folders = {remotes / STAGE}
        for file in files:
            folders |= {folder for folder in file.path.parents if folder.is_relative_to(remotes)}
        for folder in list(folders):
            folders |= {parent for parent in folder.parents if parent.is_relative_to(remotes)}
        return sorted(folders - {remotes})

    def _copy(self, files: list[OwnFile], record: Record) -> None:
        base = disk.owner_of(self._places.remotes)
        for folder in map(Path, record.folders):
            self._step(f"make {folder}")
            disk.make_folder(folder, disk.Owner(base.uid, base.gid, base.mode & ~0o022))
        stage = self._places.remotes.resolve() / STAGE
        for file in files:
            self._step(f"write {file.path}")
            disk.write(file.path, file.content, file.owner, stage)
        self._drop_compiled()

    def _drop_compiled(self) -> None:
        """What Python made of our modules: of older ones, or when they go."""
        remotes = self._places.remotes.resolve()
        for folder in (remotes / name for name in OWN_FOLDERS):
            if folder.resolve() == folder:  # no link that leads to what others have
                for compiled in sorted(folder.rglob("__pycache__")):
                    shutil.rmtree(compiled)

    def _obsolete(self, files: list[OwnFile], record: Record) -> list[Path]:
        """Files of an earlier version that nobody changed."""
        wanted = {str(file.path) for file in files}
        paths = [Path(name) for name in record.files if name not in wanted]
        contents = [(path, disk.read(path)) for path in paths]
        return [path for path, content in contents if content is not None and record.knows(path, content)]

    def _delete(self, paths: list[Path]) -> None:
        for path in paths:
            self._step(f"remove {path}")
            path.unlink(missing_ok=True)

    def _digests(self, file: OwnFile, record: Record) -> list[str]:
        """What is ours of a file when all is done: of a setting that was changed, what we wrote last."""
        present = disk.read(file.path)
        if file.setting and present != file.content:
            return record.files.get(str(file.path), [])[-1:]
        return [disk.digest(file.content)]

    def _take_away(self, record: Record) -> None:
        for path in map(Path, sorted(record.files)):
            content = disk.read(path)
            if content is not None and not record.knows(path, content):
                self._console.say(f"{path} stays: it was changed since it was installed")
            elif content is not None:
                self._delete([path])
        self._drop_compiled()
        for draft in (self._places.remotes / STAGE).glob(f".*{disk.DRAFT}"):
            draft.unlink()
        own = [str(self._places.remotes.resolve() / folder) for folder in OWN_FOLDERS]
        for name in sorted({*record.folders, *own}, reverse=True):
            self._step(f"remove {name}")
            disk.remove_empty(Path(name))

    def _refuse_used(self) -> None:
        """Raise Refused if a datastore has our drivers; say so if OpenNebula cannot be asked."""
        done = self._commands.run(self._onedatastore("list", "-x"))
        if done.code != 0:
            self._console.say(f"OpenNebula cannot be asked whether a datastore uses the drivers: {done.error}")
            return
        used = users(done.out)
        if used:
            raise Refused(f"these datastores use the drivers: {', '.join(used)}; delete them first, or give --force")

    def _onedatastore(self, *arguments: str) -> list[str]:
        """OpenNebula's command, as its user."""
        command = str(self._places.bin / "onedatastore") if self._places.bin else "onedatastore"
        if os.geteuid() == 0 and self._places.remotes.stat().st_uid:
            return ["runuser", "-u", self._user(), "--", command, *arguments]
        return [command, *arguments]

    def _user(self) -> str:
        uid = self._places.remotes.stat().st_uid
        try:
            return pwd.getpwuid(uid).pw_name
        except KeyError:
            return str(uid)


def users(pool: str) -> list[str]:
    """The names of the datastores with our drivers, with their numbers. Raises Refused."""
    return [_title(datastore) for datastore in ours(pool)]


def _title(datastore: ElementTree.Element) -> str:
    return f"{datastore.findtext('NAME')} ({datastore.findtext('ID')})"


def ours(pool: str) -> list[ElementTree.Element]:
    """The datastores with our drivers in what ``onedatastore list -x`` prints. Raises Refused."""
    if re.search(r"<!(?:DOCTYPE|ENTITY)", pool):
        raise Refused("onedatastore printed XML with declarations of its own")
    try:
        root = ElementTree.fromstring(pool)  # noqa: S314 -- OpenNebula's own answer, without declarations
    except ElementTree.ParseError as error:
        raise Refused(f"onedatastore printed no XML: {error}") from None
    return [
        datastore
        for datastore in root.iter("DATASTORE")
        if registration.DRIVER in (datastore.findtext("DS_MAD"), datastore.findtext("TM_MAD"))
    ]


def _settled(record: Record) -> bool:
    """Whether the run that wrote it came to its end."""
    return all(len(digests) <= 1 for digests in record.files.values())
