"""In the guests ``make test`` runs the drivers' contracts; all else is long (tests/sweeps.py)."""

from __future__ import annotations

import pytest

from tests.contracts import drivers as contracts

CONTRACTS = (
    contracts.AttachContract,
    contracts.CacheContract,
    contracts.DeviceCacheContract,
    contracts.ExportContract,
    contracts.VmDiskContract,
    contracts.SnapshotContract,
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is not a contract's."""
    for item in items:
        if not (isinstance(item, pytest.Function) and item.cls and issubclass(item.cls, CONTRACTS)):
            item.add_marker(pytest.mark.long)
