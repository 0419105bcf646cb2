"""What ``make test`` leaves to ``make test-whole``, which sets the variable WHOLE.

``make test`` shows each promise once, at the lowest level that can show it. Tests with the mark ``long`` belong to
``make test-whole``: sweeps that kill or fail something at every step, misfortunes that are rare, and stories that
repeat on other parts what ``make test`` has shown. In the guests these are all tests but those of the drivers'
contracts (``tests/kernel/inside/conftest.py``); with Nova see ``tests.openstack``.

To run one long test alone: ``WHOLE=1 .venv/bin/python -m pytest FILE -k NAME``. Guests of the kernel lab import this.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

WHOLE = os.environ.get("WHOLE", "") not in ("", "0")


def kills(steps: Sequence[T]) -> Sequence[T]:
    """The steps of an operation at which a test kills: the middle one, and with WHOLE each of them."""
    return steps if WHOLE else steps[len(steps) // 2 :][:1]
