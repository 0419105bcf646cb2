"""Tests below ``inside`` run in the guests, by test_inside."""

from __future__ import annotations

import pytest

from tests.kernel.selection import selected

collect_ignore = ["inside"]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Tell test_inside which files are wanted: it begins with all of them at once."""
    selected.extend(item.name for item in session.items)
