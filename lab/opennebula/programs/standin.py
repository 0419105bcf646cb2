"""The stand-ins for ssh, onevm, onedatastore, oneimage and onehost. Standard library only, in one file: it starts fast.

Arguments: the exchange's socket, a file with the hosts and how to get there, the program's name, and what it was called
with. The stand-in for ssh runs a command as sshd would, and breaks the connection where a test says so. As with the
real one the local process ends when the command has ended and nobody holds its outputs any more; it reads ahead of its
standard input; if it is killed, the command goes on until it misses its input or output.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

WITH_VALUE = "BbcDEeFIiJLlmOopQRSWw"
"""Options of ssh that are followed by a value."""
PIECE = 1 << 20
"""Bytes to relay at once."""
BROKEN = 255


class Exchange:
    """A connection to the exchange, for one call."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._lines = self._socket.makefile("rw")

    def fileno(self) -> int:
        """The connection's descriptor. It stays open as long as any process has it."""
        return self._socket.fileno()

    def ask(self, program: str, host: str, words: list[str]) -> dict[str, Any]:
        """Say who calls. Returns the fate; one that hangs is not told before it has ended."""
        source = os.environ.get("VIRTMAN_LAB_HERE", "")
        self.say({"program": program, "source": source, "host": host, "words": words})
        answer = self._hear()
        if answer.get("fate") == "hang":
            self._hear()
        return answer

    def stall(self) -> None:
        """Say that nothing comes through any more, and wait until that is over."""
        self.say({"stalled": True})
        self._hear()

    def say(self, content: dict[str, Any]) -> None:
        """Send a line."""
        print(json.dumps(content), file=self._lines, flush=True)

    def _hear(self) -> dict[str, Any]:
        line = self._lines.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"fate": "fail"}
        return answer

    def end(self, code: int, bytes_in: int = 0, bytes_out: int = 0) -> None:
        """Say how it went, and wait until that is noted: who waits for the program may then read it."""
        self.say({"code": code, "in": bytes_in, "out": bytes_out})
        self._hear()


def fail(message: str, code: int) -> NoReturn:
    """End with a line on standard error."""
    print(message, file=sys.stderr)
    sys.exit(code)


class Request:
    """What ssh was asked to do."""

    def __init__(self, words: list[str]) -> None:
        self.no_input = False
        self.control = ""
        self.host = ""
        rest = self._options(list(words))
        if rest:
            self.host = rest.pop(0).rpartition("@")[2]
            rest = self._options(rest)
        self.command = rest

    def _options(self, words: list[str]) -> list[str]:
        while words and words[0].startswith("-") and words[0] != "-":
            option = words.pop(0)
            if option == "--":
                break
            self._letters(option[1:], words)
        return words

    def _letters(self, letters: str, words: list[str]) -> None:
        for place, letter in enumerate(letters):
            if letter in WITH_VALUE:
                value = letters[place + 1 :] or (words.pop(0) if words else "")
                if letter == "O":
                    self.control = value
                return
            self.no_input = self.no_input or letter == "n"


class Connection:
    """A command that runs on a host, and the bytes that went to it and came from it."""

    def __init__(self, exchange: Exchange, after: int | None, stalls: bool) -> None:
        self._exchange = exchange
        self._stalls = stalls
        self._left = after
        self._lock = threading.Lock()
        self.count = {"in": 0, "out": 0}

    def run(self, argv: list[str], environment: dict[str, str], no_input: bool) -> int:
        """Run it to its end, or to the cut. Returns the exit code."""
        pipe = subprocess.PIPE
        # The command keeps the connection to the exchange open, which so learns when the last of it has ended.
        # It gets a session of its own, as from sshd.
        self._command = subprocess.Popen(
            argv, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, cwd="/", pass_fds=[self._exchange.fileno()],
            start_new_session=True,
        )  # fmt: skip
        assert self._command.stdin and self._command.stdout and self._command.stderr
        self._ends = [stream.fileno() for stream in (self._command.stdin, self._command.stdout, self._command.stderr)]
        source = os.open(os.devnull, os.O_RDONLY) if no_input else 0
        threading.Thread(target=self._relay, args=(source, self._ends[0], "in"), daemon=True).start()
        outputs = [
            threading.Thread(target=self._relay, args=(self._ends[1], 1, "out")),
            threading.Thread(target=self._relay, args=(self._ends[2], 2, "")),
        ]
        for output in outputs:
            output.start()
        for output in outputs:
            output.join()
        return self._command.wait()

    def _relay(self, source: int, target: int, counted: str) -> None:
        """Pass on what ``source`` gives until there is no more; ``counted`` names the counter."""
        while True:
            room = self._room() if counted else PIECE
            if room == 0:
                self._break()
            try:
                piece = os.read(source, room)
                if not piece:
                    break
                _write(target, piece)
            except OSError:
                break
            if counted:
                self._passed(counted, len(piece))
        self._close(target)

    def _room(self) -> int:
        with self._lock:
            return PIECE if self._left is None else min(PIECE, self._left)

    def _passed(self, counter: str, size: int) -> None:
        with self._lock:
            self.count[counter] += size
            if self._left is not None:
                self._left = max(0, self._left - size)

    def _close(self, target: int) -> None:
        """The command sees the end of its input; who reads the outputs waits for the end of ssh."""
        if target == self._ends[0]:
            with contextlib.suppress(OSError):
                os.close(target)

    def _break(self) -> NoReturn:
        """End as ssh does whose connection broke: the command finds its pipes closed, and goes on or not."""
        with self._lock:
            if self._stalls:
                self._exchange.stall()
            for end in self._ends:
                with contextlib.suppress(OSError):
                    os.close(end)
            self.end(BROKEN)
            broken()

    def end(self, code: int) -> None:
        """Tell the exchange how it went."""
        with contextlib.suppress(OSError):
            self._exchange.end(code, self.count["in"], self.count["out"])


def _write(target: int, piece: bytes) -> None:
    view = memoryview(piece)
    while view:
        view = view[os.write(target, view) :]


def broken() -> NoReturn:
    with contextlib.suppress(OSError):
        os.write(2, b"client_loop: send disconnect: Broken pipe\r\n")
    os._exit(BROKEN)


def environment_of(host: dict[str, Any]) -> dict[str, str]:
    """What sshd gives to a command, and what makes the host one of the stand."""
    home = {"HOME": "/root", "USER": "root", "LOGNAME": "root", "SHELL": "/bin/sh"}
    return home | {name: str(value) for name, value in host["environment"].items()}


def command_of(request: Request) -> list[str]:
    """sshd hands the words to the user's shell, joined by blanks; without words the shell reads standard input."""
    return ["/bin/sh", "-c", " ".join(request.command)] if request.command else ["/bin/sh"]


def ssh(path: str, hosts_file: str, words: list[str]) -> int:
    """One call of ssh. Returns the exit code."""
    request = Request(words)
    if not request.host:
        fail("usage: ssh [options] destination [command [argument ...]]", BROKEN)
    hosts = json.loads(Path(hosts_file).read_text())
    if request.host not in hosts:
        fail(f"ssh: Could not resolve hostname {request.host}: Name or service not known", BROKEN)
    if request.control:
        fail("Control socket connect(none): No such file or directory", BROKEN)
    exchange = Exchange(path)
    answer = exchange.ask("ssh", request.host, request.command)
    if answer["fate"] in ("fail", "hang"):
        exchange.end(BROKEN)
        fail(f"ssh: connect to host {request.host} port 22: Connection refused", BROKEN)
    return _carry_out(request, hosts[request.host], exchange, answer)


def _carry_out(request: Request, host: dict[str, Any], exchange: Exchange, answer: dict[str, Any]) -> int:
    cut = answer["fate"] in ("cut", "stall")
    connection = Connection(exchange, answer["after"] if cut else None, answer["fate"] == "stall")
    code = connection.run([*host["enter"], *command_of(request)], environment_of(host), request.no_input)
    if cut or code < 0:
        code = BROKEN
    if answer["fate"] == "stall":
        exchange.stall()
    connection.end(code)
    if cut:
        broken()
    return code


def show(path: str, program: str, words: list[str]) -> int:
    """One call of another program: prints what the model in the test's process says. Returns the exit code."""
    exchange = Exchange(path)
    answer = exchange.ask(program, "", words)
    if answer["fate"] != "run" or "text" not in answer:
        exchange.end(255)
        fail("Failed to open TCP connection to localhost:2633 (Connection refused)", 255)
    code: int = answer["code"]
    print(answer["text"], end="", file=sys.stderr if code else sys.stdout)
    exchange.end(code)
    return code


if __name__ == "__main__":
    exchange_path, hosts_path, called, *given = sys.argv[1:]
    ended = ssh(exchange_path, hosts_path, given) if called == "ssh" else show(exchange_path, called, given)
    sys.stdout.flush()
    # The thread that reads standard input may wait for more of it for ever.
    os._exit(ended)
