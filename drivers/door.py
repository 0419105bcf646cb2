"""The door of a driver: what all its public calls have in common.

Who calls a driver catches DriverError. A machine without memory, open files or room answers with an OSError wherever a
driver touches it; at the door that becomes a DriverError. And before its first call a driver has the kernel load what
it needs: on a host that somebody just installed nothing of it is there.
"""

from __future__ import annotations

import errno
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from drivers.errors import DiskFull, DriverError, HostFailed
from drivers.needs import Needs, provide

D = TypeVar("D", bound=type)

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


def told(error: OSError) -> DriverError:
    """What a driver raises instead of an OSError."""
    return DiskFull(error) if error.errno in _FULL else HostFailed(error)


def _guarded(call: Callable[..., Any], *, needs_kernel: bool) -> Callable[..., Any]:
    @functools.wraps(call)
    def through_door(self: Any, *arguments: Any, **named: Any) -> Any:
        try:
            if needs_kernel:
                _provide_once(self)
            return call(self, *arguments, **named)
        except OSError as error:
            raise told(error) from error

    through_door._behind_door = True  # type: ignore[attr-defined]
    return through_door


def _provide_once(driver: Any) -> None:
    if "_provided" not in vars(driver):
        provide(getattr(driver, "needs", Needs()))
        driver._provided = True
