"""Which devices LVM looks at by its ``devices/global_filter`` (lvm.conf(5); LVM2: lib/filters/filter-regex.c).

The first pattern that fits one name of a device decides for that name. A device is looked at if one of its names is
accepted, and if none is rejected: that all of ours have a name that is rejected is not enough.
"""

from __future__ import annotations

import re

_BRACKETS = {"(": ")", "[": "]", "{": "}"}

OURS = (
    ("/dev/mapper/virtman-image-x", "/dev/dm-987"),
    ("/dev/virtman/loop987", "/dev/loop987"),
    ("/dev/virtman/bcache987", "/dev/bcache987"),
    ("/dev/virtman/sdzzz", "/dev/sdzzz"),
)
"""One of each kind of our devices, by its names (deploy/udev)."""


def leaves_ours_alone(lvm_filter: str) -> bool:
    """Whether LVM reads none of our devices by this filter, as lvmconfig(8) prints it."""
    patterns = re.findall('"([^"]*)"', lvm_filter)
    try:
        return all(_rejected(names, patterns) for names in OURS)
    except re.error:  # LVM takes what Python does not
        return False


def _rejected(names: tuple[str, ...], patterns: list[str]) -> bool:
    verdicts = [_verdict(name, patterns) for name in names]
    return "a" not in verdicts and "r" in verdicts


def _verdict(name: str, patterns: list[str]) -> str:
    """What the filter says of a name: "a", "r", or nothing."""
    for pattern in patterns:
        what, begin, rest = pattern[:1], pattern[1:2], pattern[2:]
        if re.search(rest[: rest.rfind(_BRACKETS.get(begin, begin))], name):
            return what
    return ""
