"""How sizes and names are shown to people."""

from __future__ import annotations

import re

UNITS = "KMGTPE"
"""Powers of 1024, as sizes are typed: 40G."""


def size_text(size: int | None) -> str:
    """A number of bytes, rounded to one place after the point: 40G, 1.5G, 512B; a dash for none."""
    if size is None:
        return "-"
    value, unit = float(size), "B"
    for larger in UNITS:
        if round(value, 1) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f}".removesuffix(".0") + unit


def exact_size(size: int | None) -> str:
    """A number of bytes that is not rounded, in the largest unit that divides it: 40G, 1536M, 1000 bytes."""
    if size is None:
        return "-"
    power = max((power for power in range(len(UNITS) + 1) if size and size % 1024**power == 0), default=0)
    return f"{size // 1024**power}{UNITS[power - 1]}" if power else f"{size} bytes"


def natural_order(name: str) -> tuple[list[str | int], str]:
    """A key that sorts names with numbers in them as people count: worker-2 comes before worker-10."""
    parts: list[str | int] = [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]
    return parts, name
