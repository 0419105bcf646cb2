"""Runs the agent until it is told to stop."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from types import FrameType

import waitress

from drivers.host.watch import Watch
from virtman.agent import Agent
from virtman.api import create_app
from virtman.config import AgentConfig
from virtman.steps import Step, log_step

log = logging.getLogger(__name__)

THREADS = 64
"""Calls at once. A call that waits for an attach holds a thread; the others go on. Those that answer by lines of
progress are fewer (``virtman.api.MOST_LONG``)."""


def serve(config: AgentConfig, step: Step = log_step) -> None:
    """Run the agent of ``config`` until SIGTERM or SIGINT. Raises ConfigError, StateLocked."""
    os.umask(0o077)  # disks, caches and records are nobody else's to read
    agent = Agent(config, step)
    server = waitress.create_server(
        create_app(agent), unix_socket=str(config.socket), unix_socket_perms="600", threads=THREADS
    )
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
