"""OpenNebula's own driver processes, run with Ruby from the source tree that ONE_SOURCE names."""

from __future__ import annotations

import base64
import json
import logging
import shutil
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lab.errors import NotReady
from lab.opennebula.driver import AT_ONCE, Answer, Driver, PythonDriver
from lab.opennebula.exchange import PATIENCE
from lab.opennebula.frontend import HERE, Frontend, one_source

log = logging.getLogger(__name__)


def kinds_of_driver() -> list[str]:
    """The drivers that can be had here: ``python``, and ``ruby`` where ONE_SOURCE is set."""
    return ["python", "ruby"] if one_source() else ["python"]


def driver_of(
    frontend: Frontend, kind: str | None = None, *, configured: bool = False, at_once: int = AT_ONCE
) -> Driver:
    """A driver for a front end, by kind; None: OpenNebula's own if the front end has its source.

    ``at_once``: transfers at the same time, whatever oned.conf says.
    """
    kind = kind or ("ruby" if frontend.source else "python")
    made = RubyDriver if kind == "ruby" else PythonDriver
    return made(frontend, configured=configured, at_once=at_once)


class RubyDriver(Driver):
    """The real one_tm and one_datastore. The front end has OpenNebula's ``source``."""

    def __init__(self, frontend: Frontend, *, configured: bool = False, at_once: int = AT_ONCE) -> None:
        super().__init__(frontend, configured=configured)
        mads = frontend.location / "lib" / "mads"
        # Of an option that is given twice the last value counts.
        tm_options = [*self._options("TM_MAD", []), "-t", str(at_once)]
        self._tm = _Process(frontend, "one_tm", mads / "one_tm.rb", tm_options)
        self._datastore = _Process(
            frontend, "one_datastore", mads / "one_datastore.rb", self._options("DATASTORE_MAD", self._all())
        )
        self._steps = _Process(frontend, "steps", HERE / "programs" / "steps.rb", [str(mads)])

    def _options(self, section: str, otherwise: list[str]) -> list[str]:
        return self.frontend.arguments(section) if self.configured else otherwise

    def _all(self) -> list[str]:
        tms = sorted(path.name for path in (self.frontend.remotes / "tm").iterdir() if path.is_dir())
        return ["-t", "15", "-s", ",".join(tms)]

    def start(self) -> None:
        """Start the processes and wait until they answer. Raises NotReady."""
        if shutil.which("ruby") is None:
            raise NotReady("ruby is missing: install it (lab/packages)")
        for process in (self._tm, self._datastore, self._steps):
            process.start()

    def stop(self) -> None:
        """End the processes: their input ends."""
        for process in (self._tm, self._datastore, self._steps):
            process.stop()

    def transfer(self, file: Path) -> Answer:
        """Run the lines of a transfer file, until one fails."""
        return self._tm.ask("TRANSFER", str(file))

    def step(self, words: Sequence[str], stdin: str = "") -> Answer:
        """One line of a transfer, as the hypervisor's driver runs it: with a standard input."""
        request = json.dumps({"words": list(words), "stdin": stdin})
        return self._steps.ask("STEP", base64.b64encode(request.encode()).decode())

    def datastore(self, action: str, data: str, number: int = 0) -> Answer:
        """An action of a datastore on DS_DRIVER_ACTION_DATA; ``number`` 0: one of the driver's own."""
        return self._datastore.ask(action.upper(), base64.b64encode(data.encode()).decode(), number or None)


@dataclass
class _Question:
    answered: threading.Event = field(default_factory=threading.Event)
    words: tuple[str, str] = ("", "")
    log: list[str] = field(default_factory=list)


class _Process:
    """A driver process: lines go in, lines come out, which name the question's number."""

    def __init__(self, frontend: Frontend, name: str, program: Path, options: Sequence[str] = ()) -> None:
        self._frontend = frontend
        self._name = name
        self._argv = ["ruby", str(program), *options]
        self._process: subprocess.Popen[str] | None = None
        self._questions: dict[tuple[str, int], _Question] = {}
        self._last = 1_000_000
        self._lock = threading.Lock()
        self._stray: list[str] = []

    def start(self) -> None:
        words = [*self._frontend.on(self._frontend.name), *self._argv]
        pipe = subprocess.PIPE
        with (self._frontend.folder / f"{self._name}.log").open("ab") as errors:
            self._process = subprocess.Popen(
                words,
                stdin=pipe,
                stdout=pipe,
                stderr=errors,
                text=True,
                env=self._frontend.environment(),
                cwd="/",
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, name=self._name, daemon=True)
        self._reader.start()
        self.ask("INIT", "", number=0)

    def stop(self) -> None:
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise NotReady(f"{self._name} did not end: see {self._frontend.folder / self._name}.log") from None
        self._reader.join(PATIENCE)
        assert process.stdout is not None
        process.stdout.close()
        self._process = None

    def ask(self, action: str, argument: str, number: int | None = None) -> Answer:
        """Send a message and wait for its answer, however long that takes. Raises NotReady if the process ended."""
        process = self._process
        if process is None or process.stdin is None:
            raise NotReady(f"{self._name} was not started")
        question = _Question()
        with self._lock:
            self._last += 1
            number = self._last if number is None else number
            self._questions[action, number] = question
            print(action, *([] if action == "INIT" else [number, argument]), file=process.stdin, flush=True)
        question.answered.wait()
        if question.words[0] not in ("SUCCESS", "FAILURE"):
            raise NotReady(f"{self._name} ended: see {self._frontend.folder / self._name}.log")
        # What follows an answer's first line is read by the same thread before the next answer is.
        with self._lock:
            stray, self._stray = tuple(self._stray), []
        return Answer(question.words[0] == "SUCCESS", question.words[1], stray, tuple(question.log))

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            self._hear(line.rstrip("\n"))
        with self._lock:
            waiting = list(self._questions.values())
        for question in waiting:
            question.answered.set()

    def _hear(self, line: str) -> None:
        action, result, number, info = [*line.split(" ", 3), "", "", "", ""][:4]
        asked = 0 if action == "INIT" else int(number) if number.isdigit() else -1
        with self._lock:
            question = self._questions.get((action, asked))
            if action == "LOG":
                # The line does not say to which of the actions on one thing it belongs.
                for (_, other), one in self._questions.items():
                    if other == asked:
                        one.log.append(f"{result} {info}")
            elif question is None or result not in ("SUCCESS", "FAILURE"):
                self._stray.append(line)
            else:
                del self._questions[action, asked]
                question.words = (result, info or "-")
                question.answered.set()
