"""Drivers by name: entry points of the groups ``virtman.drivers.<layer>``, so that other packages can add theirs."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from drivers.errors import UnknownDriver


def load(layer: str, name: str) -> Any:
    """The driver class called ``name`` of a layer: attach, cache, export, snapshot, or source. Raises UnknownDriver."""
    found = {point.name: point for point in entry_points(group=f"virtman.drivers.{layer}")}
    if name not in found:
        raise UnknownDriver(layer, name, found)
    return found[name].load()


def names(layer: str) -> list[str]:
    """The drivers of a layer that are installed."""
    return sorted({point.name for point in entry_points(group=f"virtman.drivers.{layer}")})
