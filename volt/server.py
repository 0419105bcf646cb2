"""`volt serve`: the API under waitress, and the thread that evicts silent hosts."""

from __future__ import annotations

import fcntl
import ipaddress
import logging
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import FrameType

import waitress
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from volt.api import MAX_BODY, create_app
from volt.coordinator import Coordinator
from volt.errors import VoltError
from volt.leases import Leases, Policy
from volt.metrics import Metrics
from volt.store import Store
from volt.tokens import read_token

log = logging.getLogger(__name__)

THREADS = 8
MAX_CONNECTIONS = 20000
"""Each agent keeps one connection open."""


def serve(
    listen: str,
    state: Path,
    database: str | None,
    token_file: Path | None,
    policy: Policy,
    announce: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or SIGINT. ``announce`` gets the URL once connections are taken.

    ``listen``: HOST:PORT. ``database``: an SQLAlchemy URL; by default a file in ``state``.

    Raises VoltError.
    """
    os.umask(0o077)  # the database holds a key
    token = read_token(token_file) if token_file else None
    with _listen(listen, open_to_all=token is None) as listener:
        database = database or _default_database(state)
        with only_volt_on(database), closing(Store(database)) as store:
            _run(listener, Coordinator(store, policy), token, announce)


@contextmanager
def only_volt_on(database: str) -> Iterator[None]:
    """Hold the lock of an SQLite file: two Volts would evict each other's hosts. Other databases have none.

    Raises VoltError.
    """
    try:
        url = make_url(database)
    except ArgumentError as error:
        raise VoltError(f"cannot use this database URL: {error}") from error
    with ExitStack() as held:
        if url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:"):
            path = Path(f"{url.database}.lock")  # not the file itself: SQLite's own locks go when a process closes it
            try:
                lock = held.enter_context(path.open("a"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise VoltError(f"another Volt is running on database {url.database}: stop it first") from error
            except OSError as error:
                raise VoltError(f"cannot use database {url.database}: {path}: {error.strerror}") from error
        yield


def _run(listener: socket.socket, coordinator: Coordinator, token: str | None, announce: Callable[[str], None]) -> None:
    server = waitress.create_server(
        create_app(coordinator, token),
        sockets=[listener],
        threads=THREADS,
        connection_limit=_allow_connections(),
        asyncore_use_poll=True,
        max_request_body_size=2 * MAX_BODY,  # what is above MAX_BODY the application refuses in its own words
        ident="volt",
    )
    stopping = threading.Event()
    args = (coordinator.leases, coordinator.metrics, stopping)
    expiry = threading.Thread(target=expire_leases, args=args, name="leases", daemon=True)
    expiry.start()
    signal.signal(signal.SIGTERM, _stop)
    announce(_url(listener))
    try:
        server.run()  # ends with SystemExit or KeyboardInterrupt, having finished what is being answered
    finally:
        stopping.set()
        expiry.join(timeout=5)
        server.close()


def _stop(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def expire_leases(leases: Leases, metrics: Metrics, stopping: threading.Event) -> None:
    """Evict silent hosts until ``stopping``. After an error the next round tries again; metrics count faults."""
    while not stopping.wait(leases.check_s):
        try:
            leases.expire()
        except SQLAlchemyError as error:
            log.error("cannot evict silent hosts; trying again: %s", error)
        except Exception:
            metrics.deaths.labels("leases").inc()
            log.exception("cannot evict silent hosts; trying again")


def _default_database(state: Path) -> str:
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise VoltError(f"cannot make the state folder: {error}") from error
    return f"sqlite:///{state.absolute() / 'volt.db'}"


def _listen(address: str, open_to_all: bool) -> socket.socket:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise VoltError(f"cannot listen on {address!r}: want HOST:PORT")
    try:
        family, _, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise VoltError(f"cannot listen on {address}: {error}") from error
    if open_to_all and not ipaddress.ip_address(str(target[0]).partition("%")[0]).is_loopback:
        raise VoltError(f"{address} is open to other machines: give a --token-file, or listen on 127.0.0.1")
    try:
        return socket.create_server((str(target[0]), int(target[1])), family=family, backlog=1024)
    except OSError as error:
        raise VoltError(f"cannot listen on {address}: {error}") from error


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _allow_connections() -> int:
    """How many connections there may be. Raises the limit of open files for them; the database needs some as well."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    files = MAX_CONNECTIONS + 100 if hard == resource.RLIM_INFINITY else min(MAX_CONNECTIONS + 100, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return files - 100
