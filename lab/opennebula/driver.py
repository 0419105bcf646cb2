"""What OpenNebula's driver processes do with a transfer file or a datastore's request, in Python."""

from __future__ import annotations

import base64
import logging
import re
import subprocess
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree as ET

from lab.errors import LabError
from lab.opennebula.frontend import Frontend
from lab.running import Running

log = logging.getLogger(__name__)

AT_ONCE = 15
"""Actions that a driver process does at once: its option -t."""
LOG_LINE = re.compile(r"^(ERROR|INFO|WARN|DEBUG):\s+(\d+)?\s*(.*)$")


class TransferFailed(LabError):
    """A driver answered that an action failed; the message is the reason that users are shown."""


@dataclass(frozen=True)
class Answer:
    """What a driver process answers on its standard output."""

    ok: bool
    info: str = "-"
    """As on the wire: one line."""
    stray: tuple[str, ...] = ()
    """Lines that the answer runs into: oned takes each for a message of its own."""
    log: tuple[str, ...] = field(default=(), compare=False)
    """Lines for logs, with their severity's letter."""

    @property
    def reason(self) -> str:
        """What users see of an error: oned drops a text that starts with a dash."""
        return "" if self.info.startswith("-") else self.info

    def check(self) -> Answer:
        """Itself, if all went well. Raises TransferFailed."""
        if not self.ok:
            raise TransferFailed(self.reason)
        return self


class Driver(Running):
    """OpenNebula's transfer and datastore driver processes. May be called by many threads at once."""

    def __init__(self, frontend: Frontend, *, configured: bool = False) -> None:
        """``configured``: with the options in oned.conf, which list the drivers that there are; else all are there."""
        self.frontend = frontend
        self.configured = configured

    @abstractmethod
    def transfer(self, file: Path) -> Answer:
        """Run the lines of a transfer file, until one fails."""

    @abstractmethod
    def step(self, words: Sequence[str], stdin: str = "") -> Answer:
        """One line of a transfer, as the hypervisor's driver runs it: with a standard input."""

    @abstractmethod
    def datastore(self, action: str, data: str, number: int = 0) -> Answer:
        """An action of a datastore (``cp``, ``stat``, …) on DS_DRIVER_ACTION_DATA; ``number`` is the request's."""


class PythonDriver(Driver):
    """Does what one_tm and one_datastore do."""

    def __init__(self, frontend: Frontend, *, configured: bool = False, at_once: int = AT_ONCE) -> None:
        super().__init__(frontend, configured=configured)
        self._transfers = threading.Semaphore(at_once)
        self._datastores = threading.Semaphore(at_once)

    def start(self) -> None:
        """There is nothing to start."""

    def stop(self) -> None:
        """There is nothing to stop."""

    def transfer(self, file: Path) -> Answer:
        """Run the lines of a transfer file, until one fails."""
        if not file.exists():
            return Answer(False, f"Transfer file '{file}' does not exist")
        said: list[str] = []
        with self._transfers:
            for line in file.read_text().splitlines():
                if not line.strip() or line.lstrip().startswith("#"):
                    continue
                answer = self._line(line.split())
                said += answer.log
                if not answer.ok:
                    return Answer(False, answer.info, answer.stray, tuple(said))
        return Answer(True, log=tuple(said))

    def step(self, words: Sequence[str], stdin: str = "") -> Answer:
        """One line of a transfer, as the hypervisor's driver runs it: with a standard input."""
        return self._step(words, stdin)

    def _line(self, words: Sequence[str]) -> Answer:
        if len(words) > 1 and not self._listed("TM_MAD", "-d", words[1]):
            return Answer(False, f"Transfer Driver '{words[1]}' not available")
        return self._step(words, "")

    def _listed(self, section: str, option: str, name: str) -> bool:
        """Whether the option names the driver; always, if all are there."""
        if not self.configured:
            return True
        words = self.frontend.arguments(section)
        return name in words[words.index(option) + 1].split(",")

    def _step(self, words: Sequence[str], stdin: str) -> Answer:
        command, manager = words[0].lower(), words[1] if len(words) > 1 else ""
        folder = self.frontend.remotes / "tm" / manager
        if not manager or not folder.is_dir():
            return Answer(False, f"Transfer Driver '{manager}' not available")
        path = folder / command
        if not path.exists():
            shorter = folder / command.rpartition(".")[0]
            if "." not in command:
                return Answer(False, f"Driver path '{path}' does not exists")
            if not shorter.exists():
                return Answer(False, f"Driver path '{path}' nor '{shorter}' exists")
            path = shorter
        return run_script(self.frontend, [path, *words[2:]], stdin)

    def datastore(self, action: str, data: str, number: int = 0) -> Answer:
        """An action of a datastore on DS_DRIVER_ACTION_DATA."""
        kind, name = driver_in(data)
        system = kind == "system" and action == "monitor"
        folder = self.frontend.remotes / ("tm" if system else "datastore") / name
        listed = self._listed("DATASTORE_MAD", "-s" if system else "-d", name)
        if not name or not folder.is_dir() or not listed:
            return Answer(False, f"{'System datastore' if system else 'Datastore'} driver '{name}' not available")
        with self._datastores:
            answer = run_script(self.frontend, [folder / action, str(number)], base64.b64encode(data.encode()).decode())
        if action == "monitor":
            # Only this answer goes encoded over the wire, so that it may have lines.
            whole = "\n".join([answer.info, *answer.stray])
            return Answer(answer.ok, base64.b64encode(whole.encode()).decode(), (), answer.log)
        return answer


def run_script(frontend: Frontend, argv: Sequence[str | Path], stdin: str) -> Answer:
    """A script on the front end; without a time limit, as there."""
    words = [*frontend.on(frontend.name), *(str(word) for word in argv)]
    done = subprocess.run(
        words,
        input=stdin.encode(),
        capture_output=True,
        check=False,
        start_new_session=True,
        env=frontend.environment(),
        cwd="/",
    )
    return answer_of(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


def answer_of(code: int, stdout: str, stderr: str) -> Answer:
    """What is made of a script's end: lines for logs are taken out of its errors, the others are joined."""
    said, reason = [], ""
    for line in stderr.split("\n"):
        found = LOG_LINE.match(line.strip())
        if found:
            said.append(f"{found[1][0]} {found[3].strip()}")
        else:
            reason += line.strip()
    if code != 0:
        return Answer(False, reason or "-", (), tuple(said))
    first, *stray = stdout.rstrip("\n").split("\n")
    return Answer(True, first if stdout else "-", tuple(stray), tuple(said))


def driver_in(data: str) -> tuple[str, str]:
    """Whether DS_DRIVER_ACTION_DATA is of a ``system`` or an ``image`` datastore, and its driver's name."""
    root = ET.fromstring(data)
    if root.findtext("DATASTORE/TYPE") == "1" and root.findtext("DATASTORE/TM_MAD"):
        return "system", root.findtext("DATASTORE/TM_MAD", "")
    return "image", root.findtext("DATASTORE/DS_MAD", "")


Opener = Callable[[Frontend], Driver]
