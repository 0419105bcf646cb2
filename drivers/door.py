"""The door of a driver: what all its public calls have in common.

Callers of a driver catch DriverError. A machine without memory, open files or room raises an OSError anywhere in a
driver; at the door that becomes a DriverError. Before its first call a driver has the kernel load the modules that the
driver needs: a fresh host has loaded none of them.

A call that returns a context manager is at work when that is entered and left, so the door is there, too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from drivers.errors import FULL, DiskFull, DriverError, HostFailed
from drivers.needs import Needs, provide

D = TypeVar("D", bound=type)
T = TypeVar("T")

_NEED_NOTHING = frozenset({"__init__", "close"})


def door(driver: D) -> D:
    """Class decorator for drivers, to be the uppermost one.

    The constructor and public methods, also inherited ones, raise HostFailed or DiskFull instead of an OSError. Before
    the first call of a method but ``close``, what the attribute ``needs`` says of the kernel is provided; else the
    method raises a DriverError that names the module.
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
    return DiskFull(error) if error.errno in FULL else HostFailed(error)


def _guarded(call: Callable[..., Any], *, needs_kernel: bool) -> Callable[..., Any]:
    @functools.wraps(call)
    def through_door(self: Any, *arguments: Any, **named: Any) -> Any:
        try:  # no context manager: some calls are made for each image with each heartbeat
            if needs_kernel:
                _provide_once(self)
            answer = call(self, *arguments, **named)
        except OSError as error:
            raise translated(error) from error
        return _guarded_context(answer) if isinstance(answer, AbstractContextManager) else answer

    through_door._behind_door = True  # type: ignore[attr-defined]
    return through_door


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise translated(error) from error


@contextmanager
def _guarded_context(inner: AbstractContextManager[T]) -> Iterator[T]:
    """As ``inner``. An OSError that is raised within it passes."""
    with _translated():
        entered = inner.__enter__()
    try:
        yield entered
    except BaseException as error:
        with _translated():
            handled = inner.__exit__(type(error), error, error.__traceback__)
        if not handled:
            raise
    else:
        with _translated():
            inner.__exit__(None, None, None)


def _provide_once(driver: Any) -> None:
    if "_provided" not in vars(driver):
        provide(getattr(driver, "needs", Needs()))
        driver._provided = True
