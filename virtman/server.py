"""Runs the agent until it is told to stop."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from flask import Flask
from waitress import create_server
from waitress.channel import HTTPChannel
from waitress.server import BaseWSGIServer
from waitress.task import WSGITask

from drivers.host.watch import Watch
from virtman.agent import Agent
from virtman.api import PEER, create_app
from virtman.config import AgentConfig, share
from virtman.peer import Peer, peer_of
from virtman.steps import Step, log_step

log = logging.getLogger(__name__)

THREADS = 64
"""Calls at once. A call that waits for an attach holds a thread; the others go on. Those that answer by lines of
progress are fewer (``virtman.api.MOST_LONG``)."""


def serve(config: AgentConfig, step: Step = log_step) -> None:
    """Run the agent of ``config`` until SIGTERM or SIGINT. Raises ConfigError."""
    os.umask(0o077)  # no other user may read disks, caches and records
    agent = Agent(config, step)
    server = listen(create_app(agent), config.socket, THREADS, config.gid)
    agent.start()
    done = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        done.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    Watch("api", server.run, done).start()
    log.info("agent %s is ready on %s", config.name, config.socket)
    tell_ready(os.environ.pop("NOTIFY_SOCKET", ""))
    done.wait()
    log.info("stopping; stacks and VMs go on")
    server.close()
    config.socket.unlink(missing_ok=True)
    agent.stop()


class PeerTask(WSGITask):  # type: ignore[misc]
    """A request with its caller in the environment."""

    def get_environment(self) -> dict[str, Any]:
        """The environment. Headers of a request cannot forge the caller: their keys begin with HTTP_."""
        environment: dict[str, Any] = super().get_environment()
        environment[PEER] = self.channel.peer
        return environment


class PeerChannel(HTTPChannel):  # type: ignore[misc]
    """A connection and its caller."""

    task_class = PeerTask

    def __init__(self, server: BaseWSGIServer, sock: socket.socket, *more: Any, **settings: Any) -> None:
        self.peer: Peer | None = None
        try:
            self.peer = peer_of(sock)
        except OSError as error:  # an unknown caller may do nothing
            log.warning("a caller is not known: %s", error)
        super().__init__(server, sock, *more, **settings)


def listen(app: Flask, path: Path, threads: int, gid: int | None = None) -> BaseWSGIServer:
    """A server at a unix socket, which is for this user, and for the members of a group. Raises ConfigError."""
    # Waitress takes all of it before the application sees who calls, and refuses without a problem document.
    body = 2 * app.config["MAX_CONTENT_LENGTH"]
    server = create_server(
        app,
        unix_socket=str(path),
        unix_socket_perms="600",
        threads=threads,
        max_request_body_size=body,
        asyncore_use_poll=True,  # select(2) takes no file beyond the first 1024
        channel_request_lookahead=1,  # else it notices only when it writes that a caller has hung up (api.HUNG_UP)
    )
    server.channel_class = PeerChannel
    if gid is not None:
        share(path, gid, 0o660)
    return server


def tell_ready(notify_socket: str) -> None:
    """Tell systemd, which waits at this socket if it started us, that calls are answered (sd_notify(3))."""
    if not notify_socket:
        return
    address = "\0" + notify_socket[1:] if notify_socket.startswith("@") else notify_socket
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"READY=1", address)
    except OSError as error:
        log.warning("cannot tell systemd at %s that the agent is ready: %s", notify_socket, error)
