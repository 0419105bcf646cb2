"""Try again what fails for a while, with pauses that grow up to a bound."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from tenacity import Retrying, retry_if_exception, retry_if_result, stop_after_delay, wait_exponential

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

GROWTH = 1.1
"""By which each pause is longer than the one before: a pause is about a tenth of all the time since the first try."""


def until(done: Callable[[], T], *, limit: float, first: float = 0.02, longest: float = 1.0) -> T:
    """Call ``done`` until it returns something true, for ``limit`` seconds at most. Returns the last answer.

    ``first``, ``longest``: seconds of the first pause, and of any. Raises what ``done`` raises.
    """
    answer: Any = Retrying(
        retry=retry_if_result(lambda answer: not answer),
        wait=wait_exponential(multiplier=first, max=longest),
        stop=stop_after_delay(limit),
        retry_error_callback=lambda state: state.outcome and state.outcome.result(),
        reraise=True,
    )(done)
    last: T = answer
    return last


def again(passes: Callable[[BaseException], bool], *, limit: float, first: float = 0.01) -> Callable[[F], F]:
    """A decorator: make a call again while its error ``passes``, for ``limit`` seconds at most.

    ``first``: seconds of the first pause. Raises what the last call raises.
    """
    retrying = Retrying(
        retry=retry_if_exception(passes),
        wait=wait_exponential(multiplier=first, max=0.5),
        stop=stop_after_delay(limit),
        reraise=True,
    )
    return cast(Callable[[F], F], retrying.wraps)


class Backoff:
    """When to try again, for a caller that does not wait itself."""

    def __init__(self, first: float, longest: float, clock: Callable[[], float] = time.monotonic) -> None:
        """``first``, ``longest``: seconds of the first pause, and of any. ``clock`` in seconds."""
        self._first, self._longest, self._clock = first, longest, clock
        self.reset()

    def reset(self) -> None:
        """Something has changed: try at once, and with short pauses again."""
        self._pause, self.due = self._first, self._clock()

    def note_failure(self) -> None:
        """A try has failed. ``due`` is when, by the clock, to try again."""
        self.due = self._clock() + self._pause
        self._pause = min(self._pause * GROWTH, self._longest)
