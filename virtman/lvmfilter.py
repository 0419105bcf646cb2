"""Which devices LVM looks at by its ``devices/global_filter`` (lvm.conf(5); LVM2: lib/filters/filter-regex.c).

The first pattern that fits one name of a device decides for that name. A device is looked at if one of its names is
accepted, and if none is rejected: that all of ours have a name that is rejected is not enough.
"""

from __future__ import annotations

import itertools
import re
from string import ascii_lowercase

_BRACKETS = {"(": ")", "[": "]", "{": "}"}

_NUMBERS = range(9, 1000, 10)
_DISKS = [
    f"sd{''.join(letters)}z" for length in range(3) for letters in itertools.product(ascii_lowercase, repeat=length)
]

OURS = (
    *(("/dev/mapper/virtman-image-x", f"/dev/dm-{number}") for number in _NUMBERS),
    *((f"/dev/virtman/loop{number}", f"/dev/loop{number}") for number in _NUMBERS),
    *((f"/dev/virtman/bcache{number}", f"/dev/bcache{number}") for number in _NUMBERS),
    *((f"/dev/virtman/{disk}", f"/dev/{disk}") for disk in _DISKS),
)
"""Devices as ours may be, of each kind, by their names (drivers/kernel/udevrules.py): the last ones of those that begin
alike. The first ones an administrator may name, as the host's own; but what names ``sda`` and says nothing of the end
accepts ``sdaz``."""


def trouble(lvm_filter: str) -> str:
    """Why LVM reads devices of ours by a filter, as lvmconfig(8) prints it; nothing if it does not."""
    patterns = re.findall('"([^"]*)"', lvm_filter)
    try:
        return next(filter(None, (_trouble(names, patterns) for names in OURS)), "")
    except re.error as error:  # LVM takes what Python does not
        return f"what it says of our devices cannot be told: {error}"


def _trouble(names: tuple[str, ...], patterns: list[str]) -> str:
    deciding = {name: next((pattern for pattern in patterns if _fits(pattern, name)), "") for name in names}
    for name, pattern in deciding.items():
        if pattern.startswith("a"):
            return f'its "{pattern}" accepts {name}, a name that ours may have'
    rejected = any(pattern.startswith("r") for pattern in deciding.values())
    return "" if rejected else f"none of its patterns rejects {' or '.join(names)}"


def _fits(pattern: str, name: str) -> bool:
    begin, rest = pattern[1:2], pattern[2:]
    return re.search(rest[: rest.rfind(_BRACKETS.get(begin, begin))], name) is not None
