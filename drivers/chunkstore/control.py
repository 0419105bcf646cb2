"""Calls of the agent to virtman-chunkd: a line of JSON each way, over a unix socket (chunkd/src/control.rs)."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from drivers.errors import DriverError, NoSpace

ANSWER = 30.0
"""Seconds: a member of the pool may be on a slow disk."""


class StoreDown(DriverError):
    """The chunk store does not answer."""

    def __init__(self, path: Path, error: OSError | str) -> None:
        super().__init__(f"the chunk store does not answer at {path}: {error or type(error).__name__}")


class StoreRefused(DriverError):
    """The chunk store refuses a call; the message says why."""


class StoreFull(StoreRefused, NoSpace):
    """The pool has no room."""

    def __init__(self, why: str) -> None:
        DriverError.__init__(self, why)


class Control:
    """The socket at ``path``. May be used by any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def call(
        self, call: str, arguments: Mapping[str, object] | None = None, *, file: int | None = None,
        timeout: float = ANSWER,
    ) -> dict[str, Any]:  # fmt: skip
        """The answer to a call. ``file``: a descriptor that the call is about. Raises StoreDown, StoreRefused."""
        try:
            with self._connected(timeout) as sock:
                _send(sock, {"call": call, **(arguments or {})}, file)
                with sock.makefile("rb") as answers:
                    line = answers.readline()
        except OSError as error:
            raise StoreDown(self.path, error) from error
        return self._understood(line)

    def events(self) -> Iterator[dict[str, Any]]:
        """What happens from now on, until the process ends. The first one is empty. Raises StoreDown."""
        try:
            with self._connected(None) as sock:
                _send(sock, {"call": "events"}, None)
                with sock.makefile("rb") as lines:
                    for line in lines:
                        yield self._understood(line)
        except OSError as error:
            raise StoreDown(self.path, error) from error

    def _connected(self, timeout: float | None) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout)
            sock.connect(str(self.path))
        except BaseException:
            sock.close()
            raise
        return sock

    def _understood(self, line: bytes) -> dict[str, Any]:
        if not line.endswith(b"\n"):
            raise StoreDown(self.path, "it hung up")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise (StoreFull if answer.get("full") else StoreRefused)(f"the chunk store: {answer['error']}")
        return answer


def _send(sock: socket.socket, call: Mapping[str, object], file: int | None) -> None:
    line = json.dumps(call).encode() + b"\n"
    sent = 0 if file is None else socket.send_fds(sock, [line], [file])
    sock.sendall(line[sent:])
