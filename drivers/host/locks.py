"""One lock per name, so that different VMs and images proceed in parallel and the same one is serialised."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class NamedLocks:
    """Locks that exist while somebody holds or awaits them. Not re-entrant.

    ``released`` is called with the name of a lock after the lock was released.
    """

    def __init__(self, released: Callable[[str], None] = lambda _name: None) -> None:
        self._released = released
        self._guard = threading.Lock()
        self._locks: dict[str, tuple[threading.Lock, int]] = {}

    @contextmanager
    def hold(self, name: str) -> Iterator[None]:
        with self._guard:
            lock, users = self._locks.get(name, (threading.Lock(), 0))
            self._locks[name] = (lock, users + 1)
        try:
            with lock:
                yield
        finally:
            self._release(name)

    @contextmanager
    def hold_if_free(self, name: str) -> Iterator[bool]:
        """Hold the lock of ``name`` if nobody holds or awaits it; do not wait. Yields whether it is held."""
        lock, free = threading.Lock(), False
        try:
            with lock:
                with self._guard:
                    free = name not in self._locks
                    if free:
                        self._locks[name] = (lock, 1)
                yield free
        finally:
            if free:
                self._release(name)

    def _release(self, name: str) -> None:
        with self._guard:
            lock, users = self._locks.pop(name)
            if users > 1:
                self._locks[name] = (lock, users - 1)
        self._released(name)

    def taken(self, name: str) -> bool:
        """Whether anybody holds or awaits the lock of a name."""
        with self._guard:
            return name in self._locks

    def held(self, but: str = "") -> bool:
        """Whether anybody holds or awaits any of the locks but one."""
        with self._guard:
            return any(name != but for name in self._locks)
