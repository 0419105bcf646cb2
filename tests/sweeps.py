"""How much a run does of tests that go on at each step of something: that kill an agent there, say, or fail a call.

The long ones are most of the time of a run. ``make test`` goes through them in strides, ``make test-whole`` step by
step. Some of the longest tests, of what shorter ones show by parts, or of what another driver or another step is tested
for, ``make test`` leaves out: they have the mark ``long``, or with Nova, where there is no pytest, the decorator below.
Nothing shorter shows, on whole hosts of the kernel stack, volumes of a storage network, disks that come to a running
VM, and clones, streams and snapshots of disks; nor a live migration that is aborted or taken back. Drivers' and unit
tests show what these are made of. Nor does anything shorter show how rarely a cache volume is emptied that has given
all its numbers away, while that is in vain.

To run one alone: ``WHOLE=1`` and its name. Guests of the kernel lab import this, too.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from typing import TypeVar
from unittest import TestCase

T = TypeVar("T")

WHOLE = os.environ.get("WHOLE", "") not in ("", "0")
STRIDE, FINE = (1, 1) if WHOLE else (7, 3)
"""Of so many steps one is taken; FINE where there are few. Odd, since most are before and after something by turns."""

_long: list[object] = []


def numbers(stride: int = STRIDE) -> Iterator[int]:
    """The numbers of the steps to take, from 1, where it shows only then how many there are."""
    return itertools.count(1, stride)


def some(steps: Sequence[T]) -> list[T]:
    """The steps to take, the first and the last among them."""
    taken = {*range(0, len(steps), STRIDE), len(steps) - 1} if steps else set()
    return [steps[number] for number in sorted(taken)]


def long(test: T) -> T:
    """Mark a test of Nova's environment as long (``tests.openstack.worker``)."""
    _long.append(test)
    return test


def is_left_out(test: TestCase) -> bool:
    """Whether it is a long one, and not all is wanted."""
    return not WHOLE and getattr(type(test), test.id().rpartition(".")[2], None) in _long
