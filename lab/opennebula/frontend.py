"""A scratch front end and hosts: folders, mount namespaces and stand-in programs.

A host is a mount namespace: its own folder lies where the datastores are, and what only other hosts have is hidden.
Each call of ``ssh`` makes it anew, so that nothing has to be unmounted, as a user of the agent's group. A host may also
be a guest of the kernel lab. There the stand-in lies over /usr/bin/ssh, because OpenNebula's scripts put the system's
folders first in PATH.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.errors import LabError, Leftovers
from lab.opennebula.exchange import Exchange
from lab.opennebula.users import become
from lab.process import kill_and_wait
from lab.running import Running
from lab.tools import CHECKOUT

log = logging.getLogger(__name__)

HERE = Path(__file__).parent
REMOTES = HERE / "remotes"
PROGRAMS = ("ssh", "onevm", "onedatastore", "oneimage", "onehost")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MARK = "VIRTMAN_LAB_STAND"
"""A variable in the environment of all that the stand starts, by which it finds what is left at its end."""


def one_source() -> Path | None:
    """The tree of OpenNebula's source that ONE_SOURCE names; None: there is none."""
    named = os.environ.get("ONE_SOURCE")
    return Path(named) if named else None


@dataclass(frozen=True)
class Host:
    """A host: where its agent listens, folders that no other host sees, and as whom ssh gets there.

    ``user``: one whom nothing belongs to that the host needs, and who is in no other group than that of his name.
    ``remote``: of a host that is none of this machine's, the words before a command for its shell;
    the first is a path.
    """

    socket: Path | None = None
    private: tuple[Path, ...] = ()
    user: str = "root"
    remote: tuple[str, ...] = ()


class Frontend(Running):
    """Context manager: a ONE_LOCATION in ``folder`` and hosts with a datastores folder of their own each.

    ``source``: OpenNebula's source tree, whose files then take the place of the stand-ins. At the end all that
    was started on the front end or on a host is gone; Leftovers, if no fault was planned and something was left.
    """

    def __init__(
        self, folder: Path, hosts: Mapping[str, Host], *, name: str = "frontend", source: Path | None = None
    ) -> None:
        self.folder = folder.resolve()
        self.name = name
        self.hosts = dict(hosts)
        self.source = source
        self.location = self.folder / "one"
        self.remotes = self.location / "var" / "remotes"
        self.oned_conf = self.location / "etc" / "oned.conf"
        self.exchange = Exchange()
        self._run: Path | None = None
        self._hosts_file = self.folder / "hosts.json"

    def start(self) -> None:
        """Make the folders and the programs, and answer them."""
        # Short, because a unix socket's path has at most 107 bytes.
        self._run = Path(tempfile.mkdtemp(prefix="vm-", dir="/tmp"))
        self._run.chmod(0o711)
        self.exchange.start(self._run / "exchange")
        self.exchange.socket.chmod(0o666)
        for folder in ("etc", "var/vms", "var/datastores", "lib", "share/gems"):
            (self.location / folder).mkdir(parents=True, exist_ok=True)
        self._make_tree()
        self._make_programs()
        for host in self.hosts:
            self._make_host(host)
        self._write_hosts()

    def stop(self) -> None:
        """End all that was started here. Folders stay, but the socket's."""
        self.exchange.stop()
        killed = self._kill_rest()
        if self._run is not None:
            shutil.rmtree(self._run, ignore_errors=True)
        if killed and not self.exchange.faulty:
            raise Leftovers(f"left on the front end or its hosts: {'; '.join(killed)}")

    def _kill_rest(self) -> list[str]:
        killed = []
        # Once more, because one that was killed may have started another meanwhile.
        while found := self.processes():
            for pid in found:
                kill_and_wait(pid)
            killed += [f"process {pid}: {line[:300]}" for pid, line in found.items()]
        return killed

    def processes(self) -> dict[int, str]:
        """What runs on the front end and the hosts: command line by process id."""
        found = {}
        mark = f"{MARK}={self.folder}".encode()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                if int(entry.name) != os.getpid() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found[int(entry.name)] = line.strip()
        return found

    def datastores(self, host: str | None = None) -> Path:
        """A host's own folder of datastores, as seen from outside; None: that of the front end."""
        own = host in (None, self.name)
        return self.location / "var" / "datastores" if own else self.folder / "hosts" / str(host) / "datastores"

    def seen(self, host: str, path: str | Path) -> Path:
        """Where something below the datastores' folder of a host is found from outside."""
        return self.datastores(host) / Path(path).relative_to(self.datastores())

    def environment(self) -> dict[str, str]:
        """What oned gives to its drivers."""
        measured = {name: value for name, value in os.environ.items() if name.startswith("COVERAGE_")}
        ruby = {"RUBYLIB": str(self.location / "lib" / "ruby")} if self.source else {}
        return (
            measured
            | ruby
            | {
                "ONE_LOCATION": str(self.location),
                "PATH": f"{self.folder / 'bin'}:{SYSTEM_PATH}",
                "HOME": str(self._home(self.name)),
                "LANG": "C.UTF-8",
                **self._marks(self.name),
            }
        )

    def arguments(self, section: str) -> list[str]:
        """The words of ARGUMENTS in a section of oned.conf: TM_MAD or DATASTORE_MAD. Raises LabError."""
        found = re.search(
            rf'^{section}\s*=\s*\[[^]]*?ARGUMENTS\s*=\s*"([^"]*)"', self.oned_conf.read_text(), re.MULTILINE
        )
        if found is None:
            raise LabError(f"{self.oned_conf} has no ARGUMENTS in {section}")
        return found[1].split()

    def on(self, host: str) -> list[str]:
        """The words before a command to run it on a host (or on the front end) and in its namespace."""
        return [str(self.folder / "enter" / host)]

    def _marks(self, host: str) -> dict[str, str]:
        return {MARK: str(self.folder), "VIRTMAN_LAB_HERE": host}

    def _home(self, host: str) -> Path:
        home = self.folder / "hosts" / host / "home"
        home.mkdir(parents=True, exist_ok=True)
        return home

    def _make_tree(self) -> None:
        shutil.copytree(REMOTES, self.remotes, dirs_exist_ok=True)
        for kind in ("kvm", "qemu", "lxc"):
            (self.remotes / "im" / f"{kind}-probes.d" / "host" / "system").mkdir(parents=True, exist_ok=True)
        (self.remotes / "etc" / "tm").mkdir(parents=True, exist_ok=True)
        (self.location / "var" / "config").write_text("SCRIPTS_REMOTE_DIR=/var/tmp/one\n")
        shutil.copy(HERE / "oned.conf", self.oned_conf)
        if self.source is not None:
            put_source(self.source, self.location)
        # OpenNebula's own ``local`` asks oned itself for VMs.
        local = self.remotes / "tm" / "local"
        shutil.rmtree(local, ignore_errors=True)
        shutil.copytree(local.with_name("ssh"), local, symlinks=True)

    def _make_programs(self) -> None:
        for name in PROGRAMS:
            self._program(name)
        if any(name.startswith("COVERAGE_") for name in os.environ):
            # What is measured needs a Python that has the tool for it; else scripts get the machine's.
            script(self.folder / "bin" / "python3", f'exec {quoted([sys.executable])} "$@"')
        self._enterer(self.name, [])

    def _program(self, name: str) -> None:
        words: list[str | Path] = [sys.executable, "-E", "-s", "-S", HERE / "programs" / "standin.py"]
        words += [self.exchange.socket, self._hosts_file, name]
        script(self.folder / "bin" / name, f'exec {quoted(words)} "$@"')

    def _make_host(self, host: str) -> None:
        if self.hosts[host].remote:
            elsewhere: list[str | Path] = [*self._outside(), sys.executable, "-S", HERE / "programs" / "elsewhere.py"]
            elsewhere.append(json.dumps(self.hosts[host].remote))
            script(self.folder / "enter" / host, f'exec {quoted(elsewhere)} "$@"')
            return
        self.datastores(host).mkdir(parents=True, exist_ok=True)
        for folder in (self.datastores(host), self._home(host)):
            shutil.chown(folder, self.hosts[host].user)
        hidden = [path for other, one in self.hosts.items() if other != host for path in one.private]
        (self.folder / "nothing").mkdir(exist_ok=True)
        for path in hidden:
            path.mkdir(parents=True, exist_ok=True)
        mounts = [(self.datastores(host), self.datastores())]
        mounts += [(self.folder / "nothing", path) for path in hidden]
        self._enterer(host, mounts)
        for tool in ("virtman", "volt"):
            script(self.folder / "hosts" / host / "bin" / tool, f'exec {quoted([tool_of_ours(tool)])} "$@"')

    def _enterer(self, host: str, mounts: Sequence[tuple[Path, Path]]) -> None:
        """The program that enters a host: from the namespace of this process, whatever host it is called on."""
        inside = ["mount --bind " + quoted(pair) for pair in [*mounts, *self._ssh_mounts()]]
        user = self.hosts[host].user if host in self.hosts else "root"
        inside += [f"echo {shlex.quote(host)} > /proc/sys/kernel/hostname", f'exec {quoted(become(user))} "$@"']
        inner = self.folder / "enter" / f"{host}.inside"
        script(inner, "\n".join(inside))
        words = [*self._outside(), "unshare", "--mount", "--uts", "--", inner]
        script(self.folder / "enter" / host, f'exec {quoted(words)} "$@"')

    @staticmethod
    def _outside() -> list[str | Path]:
        """The words before a command to run it where this process is."""
        return [*become("root"), "nsenter", "--target", str(os.getpid()), "--mount", "--"]

    def _ssh_mounts(self) -> list[tuple[Path, Path]]:
        # Scripts of OpenNebula put the system's folders first in PATH.
        system = Path("/usr/bin/ssh")
        return [(self.folder / "bin" / "ssh", system)] if system.exists() else []

    def _write_hosts(self) -> None:
        known = {}
        for host in [self.name, *self.hosts]:
            own = f"{self.folder / 'hosts' / host / 'bin'}:{self.folder / 'bin'}"
            environment = self._marks(host) | {"HOME": str(self._home(host)), "PATH": f"{own}:{SYSTEM_PATH}"}
            if host in self.hosts and self.hosts[host].socket is not None:
                environment["VIRTMAN_SOCKET"] = str(self.hosts[host].socket)
            known[host] = {"enter": self.on(host), "environment": environment}
        self._hosts_file.write_text(json.dumps(known))


def put_source(source: Path, location: Path) -> None:
    """Lay OpenNebula's own files out as its installer does, as far as its storage drivers need them."""
    remotes, lib = location / "var" / "remotes", location / "lib"
    for origin, target in (
        ("src/tm_mad", remotes / "tm"),
        ("src/datastore_mad/remotes", remotes / "datastore"),
        ("src/im_mad/remotes", remotes / "im"),
        ("src/vmm_mad/remotes/lib", remotes / "vmm" / "lib"),
        ("src/mad/ruby", lib / "ruby"),
        ("src/mad/sh", lib / "sh"),
    ):
        replace_tree(source / origin, target)
    for origin, target in (
        ("src/datastore_mad/remotes/datastore.conf", remotes / "etc/datastore/datastore.conf"),
        ("src/datastore_mad/remotes/fs/fs.conf", remotes / "etc/datastore/fs/fs.conf"),
        ("src/tm_mad/ssh/sshrc", remotes / "etc/tm/ssh/sshrc"),
        ("src/vmm_mad/remotes/kvm/kvmrc", remotes / "etc/vmm/kvm/kvmrc"),
        ("src/tm_mad/one_tm.rb", lib / "mads" / "one_tm.rb"),
        ("src/datastore_mad/one_datastore.rb", lib / "mads" / "one_datastore.rb"),
    ):
        if (source / origin).exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / origin, target)
    # In an installation this file finds Ruby libraries that OpenNebula ships; here they are the system's.
    (lib / "ruby" / "load_opennebula_paths.rb").write_text("# The system's own libraries are used.\n")


def replace_tree(source: Path, target: Path) -> None:
    """Copy a tree, links as links, over files of the same name."""
    for path in sorted(source.rglob("*")):
        there = target / path.relative_to(source)
        if path.is_dir() and not path.is_symlink():
            there.mkdir(parents=True, exist_ok=True)
            continue
        if there.is_dir() and not there.is_symlink():
            # A link to a folder, which an installation makes a folder of its own.
            shutil.copytree(path, there, dirs_exist_ok=True, ignore_dangling_symlinks=True)
            continue
        there.parent.mkdir(parents=True, exist_ok=True)
        there.unlink(missing_ok=True)
        shutil.copy(path, there, follow_symlinks=False)


def script(path: Path, body: str) -> None:
    """Write a program for the shell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\nset -e\n{body}\n")
    path.chmod(0o755)


def quoted(words: Sequence[str | Path]) -> str:
    """Words for the shell."""
    return shlex.join(str(word) for word in words)


def tool_of_ours(name: str) -> Path:
    """A command of the project, from the same environment as this Python."""
    found = Path(sys.executable).parent / name
    return found if found.exists() else CHECKOUT / ".venv" / "bin" / name
