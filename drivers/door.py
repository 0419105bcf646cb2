"""The door of a driver: what all its public calls have in common.

Who calls a driver catches DriverError. A machine without memory, open files or room answers with an OSError wherever a
driver touches it; at the door that becomes a DriverError. And before its first call a driver has the kernel load what
it needs: on a host that somebody just installed nothing of it is there.

A call that returns a context manager is at work when that is entered and left, so the door is there, too.
"""

from __future__ import annotations

import errno
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, TypeVar

from drivers.errors import DiskFull, DriverError, HostFailed
from drivers.needs import Needs, provide

D = TypeVar("D", bound=type)
T = TypeVar("T")

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_NEED_NOTHING = frozenset({"__init__", "close"})


def door(driver: D) -> D:
    """Class decorator for drivers, to be the uppermost one.

    The constructor and public methods, also inherited ones, raise HostFailed or DiskFull instead of an OSError. Before
    the first call of a method but ``close``, what the attribute ``needs`` says of the kernel is provided; the methods
    therefore raise ModuleMissing, too.
    """
    for name, call in inspect.getmembers(driver, inspect.isfunction):
        if name == "__init__" or not name.startswith("_"):
            setattr(driver, name, _guarded(call, needs_kernel=name not in _NEED_NOTHING))
    return driver


def is_guarded(call: Callable[..., Any]) -> bool:
    """Whether a function goes through the door."""
    return hasattr(call, "_behind_door")


def translated(error: OSError) -> DriverError:
    """What a driver raises instead of an OSError."""
    return DiskFull(error) if error.errno in _FULL else HostFailed(error)


def _guarded(call: Callable[..., Any], *, needs_kernel: bool) -> Callable[..., Any]:
    @functools.wraps(call)
    def through_door(self: Any, *arguments: Any, **named: Any) -> Any:
        try:  # no context manager: some calls are made for each image with each heartbeat
            if needs_kernel:
                _provide_once(self)
            answer = call(self, *arguments, **named)
        except OSError as error:
            raise translated(error) from error
        return _GuardedContext(answer) if isinstance(answer, AbstractContextManager) else answer

    through_door._behind_door = True  # type: ignore[attr-defined]
    return through_door


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise translated(error) from error


class _GuardedContext(AbstractContextManager[T]):
    """Who is within it may raise an OSError, which passes."""

    def __init__(self, inner: AbstractContextManager[T]) -> None:
        self._inner = inner

    def __enter__(self) -> T:
        with _translated():
            return self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        with _translated():
            return self._inner.__exit__(kind, error, traceback)


def _provide_once(driver: Any) -> None:
    if "_provided" not in vars(driver):
        provide(getattr(driver, "needs", Needs()))
        driver._provided = True
