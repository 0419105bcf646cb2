"""A host: OpenNebula's user in the group that may ask the agent, and the group in the agent's settings."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from opennebula_tm.installer import change, disk, settings
from opennebula_tm.installer.change import Edit, Step, no_step
from opennebula_tm.installer.console import Commands, Console
from opennebula_tm.installer.errors import Refused
from opennebula_tm.installer.record import Book, Record

ROOT = Path("/")
SETTINGS = disk.Owner(0, 0, 0o644)
BINARIES = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where OpenNebula's scripts look for virtman."""
MADE_GROUP, MADE_MEMBER = "made_group", "made_member"


@dataclass(frozen=True)
class Access:
    """Who is let in, and by which group."""

    user: str
    group: str


class Accounts:
    """Users and groups of this machine, or of the files below another root."""

    def __init__(self, root: Path, commands: Commands) -> None:
        self._root = root
        self._commands = commands

    def has_user(self, name: str) -> bool:
        """Whether there is such a user."""
        if self._root == ROOT:
            return _known(pwd.getpwnam, name)
        return name in self._lines("passwd")

    def members(self, group: str) -> list[str] | None:
        """Who is in the group besides, or None if there is no such group."""
        if self._root == ROOT:
            return grp.getgrnam(group).gr_mem if _known(grp.getgrnam, group) else None
        line = self._lines("group").get(group)
        return None if line is None else [member for member in line[-1].split(",") if member]

    def _lines(self, name: str) -> dict[str, list[str]]:
        content = disk.read(self._root / "etc" / name) or b""
        lines = [line.split(":") for line in disk.as_text(content).splitlines() if ":" in line]
        return {line[0]: line for line in lines}

    def add_group(self, group: str) -> None:
        self._commands.must(["groupadd", *self._elsewhere("--prefix"), "--system", group])

    def add_member(self, access: Access) -> None:
        self._commands.must(["usermod", *self._elsewhere("--prefix"), "-a", "-G", access.group, access.user])

    def drop_member(self, access: Access) -> None:
        self._commands.must(["gpasswd", *self._elsewhere("--root"), "-d", access.user, access.group])

    def drop_group(self, group: str) -> None:
        self._commands.must(["groupdel", *self._elsewhere("--prefix"), group])

    def _elsewhere(self, option: str) -> list[str]:
        return [] if self._root == ROOT else [option, str(self._root)]


def _known(look_up: Callable[[str], object], name: str) -> bool:
    try:
        look_up(name)
    except KeyError:
        return False
    return True


class HostSide:
    """One host. ``root``: another one than this machine's. ``step`` is told each step before it is done."""

    def __init__(self, root: Path, console: Console, commands: Commands, step: Step = no_step) -> None:
        self._root = root
        self._console = console
        self._commands = commands
        self._accounts = Accounts(root, commands)
        self._step = step
        self._settings = root / "etc" / "default" / "virtman-agent"
        self._book = Book(root / "var" / "lib" / "virtman-opennebula.json")

    def install(self, access: Access) -> None:
        """Make the group, add the user, name the group to the agent. Raises Refused before anything changed."""
        if not self._accounts.has_user(access.user):
            raise Refused(
                f"there is no user {access.user}: install OpenNebula's packages for hosts first, or give --user"
            )
        with disk.alone_in(self._settings.parent):
            before = self._book.read()
            record = before or Record()
            self._refuse_other(record, access)
            edit = self._edit(access, record)
            members = self._accounts.members(access.group)
            if before and not edit.changes and access.user in (members or ()):
                self._console.say("nothing to do")
                return
            change.show(self._console, [edit])
            for line in self._plan(members, access):
                self._console.say(line)
            self._console.agree("Make these changes?")
            self._note(record, access, members)
            self._admit(access, members)
            change.apply([edit], record, self._book, self._step)
            self._book.write(record)
        self._console.say("installed. Left to do, so that the agent and OpenNebula's user take it up:")
        self._console.say("    systemctl restart virtman-agent")
        self._console.say(
            f"    log sessions of {access.user} out, also kept ssh connections: they have the groups of before"
        )

    def remove(self) -> None:
        """Take back what ``install`` did. A group with other members stays."""
        with disk.alone_in(self._settings.parent):
            record = self._book.read()
            if record is None:
                self._console.say("nothing to do")
                return
            access = Access(record.facts["user"], record.facts["group"])
            edit = self._edit_back(access, record)
            change.show(self._console, [edit] if edit else [])
            self._console.agree(f"Take {access.user}'s way to the agent away?")
            change.apply([edit] if edit else [], record, self._book, self._step)
            self._expel(access, record)
            left = change.drop_backups(record)
            self._step("forget the record")
            self._book.forget()
        for name in left:
            self._console.say(f"{name} stays: it has what nothing else has")
        self._console.say("removed. Left to do: systemctl restart virtman-agent")

    def differences(self, access: Access) -> Iterator[str]:
        """One line for each thing that is not as ``install`` would leave it, or keeps the user from the agent."""
        members = self._accounts.members(access.group)
        if members is None:
            yield f"there is no group {access.group}"
        elif access.user not in members:
            yield f"{access.user} is not in the group {access.group}"
        content = disk.read(self._settings)
        try:
            group = settings.group_of(disk.as_text(content or b""))
        except Refused as error:
            raise Refused(f"{self._settings}: {error}") from None
        if group != access.group:
            yield f"{self._settings} does not set {settings.VARIABLE}={access.group}"
        yield from self._trouble_of_agent(access)

    def _trouble_of_agent(self, access: Access) -> Iterator[str]:
        path = ":".join(str(self._root / place.lstrip("/")) for place in BINARIES.split(":"))
        command = shutil.which("virtman", path=path)
        if command is None:
            yield f"virtman is not in {BINARIES}"
            return
        socket = self._root / "run" / "virtman" / "agent.sock"
        argv = [command, "--socket", str(socket), "status"]
        done = self._commands.run(["runuser", "-u", access.user, "--", *argv] if os.geteuid() == 0 else argv)
        if done.code != 0:
            why = (done.error.splitlines() or [f"it ended with {done.code}"])[-1]
            yield f"the agent does not answer {access.user} at {socket}: {why}"

    def _refuse_other(self, record: Record, access: Access) -> None:
        known = (record.facts.get("user", access.user), record.facts.get("group", access.group))
        if known != (access.user, access.group):
            raise Refused(f"it is installed for the user {known[0]} and the group {known[1]}: --remove that first")

    def _edit(self, access: Access, record: Record) -> Edit:
        def edit(text: str) -> str:
            return settings.set_group(text, access.group)

        found = change.read_text(self._settings, edit) or Edit(self._settings, None, edit(""), self._owner(SETTINGS))
        if found.changes:
            record.edits[str(self._settings)] = [access.group]
            record.created += [str(self._settings)] * (found.old is None)
        return found

    def _edit_back(self, access: Access, record: Record) -> Edit | None:
        if str(self._settings) not in record.edits:
            return None
        found = change.read_text(self._settings, lambda text: settings.unset_group(text, access.group))
        if found and not found.new and str(self._settings) in record.created:
            return Edit(found.path, found.old, None, found.owner)
        return found

    def _owner(self, owner: disk.Owner) -> disk.Owner:
        """Root, or below another root whoever has that."""
        base = disk.owner_of(self._root)
        return disk.Owner(base.uid, base.gid, owner.mode)

    def _plan(self, members: list[str] | None, access: Access) -> Iterator[str]:
        if members is None:
            yield f"the group {access.group} is to be made"
        if access.user not in (members or ()):
            yield f"{access.user} is to be a member of {access.group}"

    def _note(self, record: Record, access: Access, members: list[str] | None) -> None:
        """Write down what is going to be ours."""
        record.facts |= {"user": access.user, "group": access.group}
        if members is None:
            record.facts[MADE_GROUP] = "yes"
        if access.user not in (members or ()):
            record.facts[MADE_MEMBER] = "yes"
        self._step("begin the record")
        self._book.write(record)

    def _admit(self, access: Access, members: list[str] | None) -> None:
        if members is None:
            self._step("make the group")
            self._accounts.add_group(access.group)
        if access.user not in (members or ()):
            self._step("add the member")
            self._accounts.add_member(access)

    def _expel(self, access: Access, record: Record) -> None:
        members = self._accounts.members(access.group)
        if members is None:
            return
        if access.user in members and MADE_MEMBER in record.facts:
            self._step("drop the member")
            self._accounts.drop_member(access)
            members = [member for member in members if member != access.user]
        if MADE_GROUP in record.facts:
            if members:
                self._console.say(f"the group {access.group} stays: {', '.join(members)} are in it")
            else:
                self._step("drop the group")
                self._accounts.drop_group(access.group)
