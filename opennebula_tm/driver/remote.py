"""What is done on hosts: by ssh, with ``host.sh``, each step with a time limit."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import IO

from opennebula_tm.driver.errors import HostFailed, NotThere
from opennebula_tm.driver.settings import Settings

SCRIPT = Path(__file__).with_name("host.sh")
ABSENT = 3
"""The exit code of virtman for a name of what is not there."""
UNREACHABLE = 255
"""ssh(1): the exit code for an error of its own."""
FORWARDED = ("-o", "ForwardAgent=yes", "-o", "ControlMaster=no", "-o", "ControlPath=none")
"""A host may use the front end's keys only on a connection of its own: a shared one was made without."""

_NOISE = re.compile(r"mux_client_|ControlSocket |Warning: Permanently added|sent \d|sending|virtman: warning")
_LONGEST = 400


class Hosts:
    """The hosts, as ssh of this front end reaches them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._script = SCRIPT.read_text()

    def command(self, action: str, *arguments: str) -> str:
        """A step as the shell of a host takes it."""
        wait = str(int(self._settings.lock))
        return shlex.join(["sh", "-c", self._script, "virtman", wait, self._settings.virtman, action, *arguments])

    def run(self, host: str, action: str, *arguments: str) -> str:
        """Do a step on a host. Returns what it printed. Raises HostFailed, NotThere."""
        return self._run(host, self.command(action, *arguments), self._settings.step)

    def transfer(
        self, host: str, action: str, *arguments: str, stdin: IO[bytes] | None = None, stdout: IO[bytes] | None = None,
        forwarded: bool = False,
    ) -> str:  # fmt: skip
        """A step that takes as long as its data. ``forwarded``: it calls another host with the front end's keys."""
        command = self.command(action, *arguments)
        return self._run(host, command, self._settings.transfer, stdin, stdout, FORWARDED if forwarded else ())

    def _run(
        self, host: str, command: str, seconds: float, stdin: IO[bytes] | None = None, stdout: IO[bytes] | None = None,
        options: tuple[str, ...] = (),
    ) -> str:  # fmt: skip
        # ssh takes the first value that it is given of an option.
        argv = [os.environ.get("SSH", "ssh"), *options, *self._settings.ssh_options, host, command]
        try:
            process = subprocess.Popen(
                argv, stdin=stdin or subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise HostFailed(f"cannot run {argv[0]}: {error.strerror}") from error
        out, err = _ended(process, host, seconds, stdout)
        if process.returncode != 0:
            failed = NotThere if process.returncode == ABSENT else HostFailed
            raise failed(f"{host}: {_reason(process.returncode, err.decode(errors='replace'))}")
        return out.decode(errors="replace")


def _ended(
    process: subprocess.Popen[bytes], host: str, seconds: float, target: IO[bytes] | None
) -> tuple[bytes, bytes]:
    with process:
        try:
            return process.communicate(timeout=seconds) if target is None else _relayed(process, seconds, target)
        except subprocess.TimeoutExpired as error:
            raise HostFailed(f"{host}: no answer within {seconds:g} seconds") from error
        finally:
            # Whatever ends this action ends its ssh, and with that, as a rule, what it runs on the host.
            if process.poll() is None:
                _kill(process)


def _relayed(process: subprocess.Popen[bytes], seconds: float, target: IO[bytes]) -> tuple[bytes, bytes]:
    """Write what it prints to a file, here: ssh itself ends well if nothing but its own last write failed.

    Raises OSError, subprocess.TimeoutExpired.
    """
    assert process.stdout and process.stderr  # noqa: S101  they are pipes
    said, late = list[bytes](), threading.Event()

    def end() -> None:
        late.set()
        _kill(process)

    timer = threading.Timer(seconds, end)
    listener = threading.Thread(target=lambda errors=process.stderr: said.append(errors.read()), daemon=True)
    for thread in (timer, listener):
        thread.start()
    try:
        shutil.copyfileobj(process.stdout, target, 1 << 20)
        target.flush()
        listener.join()
        process.wait()
    finally:
        timer.cancel()
    if late.is_set():
        raise subprocess.TimeoutExpired(process.args, seconds)
    return b"", b"".join(said)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _reason(code: int, said: str) -> str:
    """One line for people: the first that says what went wrong. What follows it is often its consequence.

    That nobody takes a stream is one of what its receiver says, perhaps later.
    """
    lines = [line for line in (" ".join(line.split()) for line in said.splitlines()) if line and not _NOISE.match(line)]
    if not lines:
        return "ssh ended without a word" if code == UNREACHABLE else f"exit code {code} without a word"
    line = next((line for line in lines if "Broken pipe" not in line), lines[0]).removeprefix("virtman: ")
    return line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "..."
