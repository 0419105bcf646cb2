"""Where every stand-in program asks what is to happen to it, so that tests can say so, and count and measure the calls.

A program connects to the exchange's socket, says who it is in one line of JSON, and gets its fate in another. It keeps
the connection until what it has started has ended, and then says how it went. Nobody has to look again and again: an
event wakes those who wait.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from lab.errors import NotReady

log = logging.getLogger(__name__)

PATIENCE = 600.0
"""Seconds to wait for what a test expects to happen."""


class Fate(Enum):
    """What happens to a call."""

    RUN = "run"
    FAIL = "fail"
    """It ends with an error before anything is done."""
    HANG = "hang"
    """It does nothing and does not end, until it is killed or the fault is released; then it fails."""
    LATE = "late"
    """It waits until the fault is released; then it runs."""
    CUT = "cut"
    """The connection breaks after some bytes, or when all is done; what runs on the host goes on without it."""
    STALL = "stall"
    """As CUT, but neither side notices: both wait, until ssh is killed or the fault is released; then it breaks."""


@dataclass
class Call:
    """One call of a stand-in program; times in seconds, sizes in bytes."""

    program: str
    source: str
    """The host (or the front end) where it was called."""
    host: str
    """Of ``ssh``: where the command runs."""
    words: tuple[str, ...]
    """The command, or the arguments."""
    fate: Fate = Fate.RUN
    code: int | None = None
    """How it ended; None: it still runs, or was killed."""
    bytes_in: int = 0
    """Standard input of the command."""
    bytes_out: int = 0
    seconds: float = 0.0

    @property
    def line(self) -> str:
        """The command in one line."""
        return " ".join(self.words)


@dataclass
class Fault:
    """What is to happen to the ``nth`` of the calls that match; once."""

    fate: Fate
    program: str
    host: str | None
    matching: str
    after: int | None
    left: int
    happened: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def wait(self, timeout: float = PATIENCE) -> None:
        """Wait until it has happened to a call. Raises NotReady."""
        if not self.happened.wait(timeout):
            raise NotReady(f"no {self.program} came to {self.fate.value} within {timeout:.0f} s")

    def release(self) -> None:
        """Let a call that hangs end, with an error."""
        self.released.set()

    def takes(self, call: Call) -> bool:
        """Whether it happens to this call; counts those that match."""
        if self.left == 0 or self.program != call.program or self.host not in (None, call.host):
            return False
        if self.matching not in call.line:
            return False
        self.left -= 1
        return self.left == 0


class Exchange:
    """Answers the stand-in programs until it is stopped. ``calls`` has all calls, in their order."""

    def __init__(self) -> None:
        self.socket = Path("/nonexistent")
        self.calls: list[Call] = []
        self._faults: list[Fault] = []
        self._down: set[str] = set()
        self._shows: dict[str, Callable[[Sequence[str]], str]] = {}
        self._open = 0
        self._changed = threading.Condition()
        self._server: _Server | None = None

    @property
    def faulty(self) -> bool:
        """Whether any fault was planned, or a host was down."""
        return bool(self._faults or self._down)

    def start(self, path: Path) -> None:
        """Listen there."""
        self.socket = path
        self._server = _Server(self)

    def stop(self) -> None:
        """Let all that hang go, and listen no more."""
        for fault in self._faults:
            fault.release()
        if self._server is not None:
            self._server.stop()
            self._server = None
        self.socket.unlink(missing_ok=True)

    def plan(
        self,
        fate: Fate,
        program: str = "ssh",
        *,
        host: str | None = None,
        matching: str = "",
        nth: int = 1,
        after: int | None = None,
    ) -> Fault:
        """Plan a fault for the ``nth`` next call of ``program``, to ``host`` and with ``matching`` in its command.

        ``after``: of a cut or a stall, the bytes of standard input and output together that pass before; None: all.
        """
        fault = Fault(fate, program, host, matching, after, nth)
        with self._changed:
            self._faults.append(fault)
        return fault

    def forget(self, fault: Fault) -> None:
        """Take back a fault that has not happened."""
        with self._changed:
            self._faults.remove(fault)

    def down(self, host: str) -> None:
        """Let no ssh reach the host, until ``up``."""
        with self._changed:
            self._down.add(host)

    def up(self, host: str) -> None:
        """The host is reached again."""
        with self._changed:
            self._down.discard(host)

    def show(self, program: str, answer: Callable[[Sequence[str]], str]) -> None:
        """What ``program`` prints, by its arguments; KeyError: there is no such thing."""
        self._shows[program] = answer

    def settle(self, timeout: float = PATIENCE) -> None:
        """Wait until all that was called has ended, also on hosts to which the connection was cut. Raises NotReady."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._open == 0, timeout):
                raise NotReady(f"{self._open} calls have not ended within {timeout:.0f} s")

    def to(self, host: str) -> list[Call]:
        """The ssh calls to a host."""
        return [call for call in self.calls if call.program == "ssh" and call.host == host]

    @property
    def bytes(self) -> int:
        """All bytes that went through ssh."""
        return sum(call.bytes_in + call.bytes_out for call in self.calls if call.program == "ssh")

    def _begin(self, call: Call) -> Fault | None:
        with self._changed:
            self.calls.append(call)
            self._open += 1
            # Each fault counts each call that matches it, whatever others say about it.
            fault = next((fault for fault in [f for f in self._faults if f.takes(call)]), None)
            if fault is not None:
                call.fate = fault.fate
            elif call.program == "ssh" and call.host in self._down:
                call.fate = Fate.FAIL
            return fault

    def _end(self) -> None:
        with self._changed:
            self._open -= 1
            self._changed.notify_all()

    def serve(self, request: Mapping[str, Any], lines: _Lines) -> None:
        """One call, from its first line to its end."""
        call = Call(request["program"], request["source"], request["host"], tuple(request["words"]))
        started = time.monotonic()
        fault = self._begin(call)
        try:
            if fault is not None and fault.fate is Fate.LATE:
                fault.happened.set()
                fault.released.wait()
                call.fate = Fate.RUN
            lines.write(self._answer(call, fault))
            if fault is not None and fault.fate is Fate.HANG:
                self._hold(fault, lines)
            for said in iter(lines.read, None):
                if fault is not None and said.get("stalled"):
                    self._hold(fault, lines)
                    continue
                call.code, call.bytes_in, call.bytes_out = said["code"], said["in"], said["out"]
                call.seconds = time.monotonic() - started
                if fault is not None:
                    fault.happened.set()
                lines.write({})
        finally:
            call.seconds = call.seconds or time.monotonic() - started
            self._end()

    def _hold(self, fault: Fault, lines: _Lines) -> None:
        fault.happened.set()
        fault.released.wait()
        lines.write({})

    def _answer(self, call: Call, fault: Fault | None) -> dict[str, Any]:
        answer: dict[str, Any] = {"fate": call.fate.value, "after": fault.after if fault else None}
        if call.program in self._shows and call.fate is Fate.RUN:
            try:
                return answer | {"text": self._shows[call.program](call.words), "code": 0}
            except (KeyError, ValueError):
                return answer | {"text": f"[{call.program}] Error getting {call.line}\n", "code": 255}
        return answer


class _Lines:
    """A connection that carries lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rw")

    def read(self) -> dict[str, Any] | None:
        """The next line; None: there are no more."""
        line = self._file.readline()
        return json.loads(line) if line else None

    def write(self, content: dict[str, Any]) -> None:
        """Send a line."""
        print(json.dumps(content), file=self._file, flush=True)

    def close(self) -> None:
        """Close it, whether the other side is there or not."""
        with contextlib.suppress(OSError):
            self._file.close()


class _Server:
    """Listens, with a thread for each connection."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(exchange.socket))
        self._listener.listen(1024)
        self._thread = threading.Thread(target=self._accept, name="exchange", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Accept no more."""
        # Ends an accept that waits, which closing it would not.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            lines = _Lines(connection)
            # A program that is killed takes its end of the connection with it.
            with contextlib.suppress(ConnectionError):
                request = lines.read()
                if request is not None:
                    self._exchange.serve(request, lines)
            lines.close()
