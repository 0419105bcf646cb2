"""Warnings that tests cannot be without where rtslib is used."""

from __future__ import annotations

import pytest

IGNORED = pytest.mark.filterwarnings(
    # rtslib 2.1.75 leaves its lock file open, and calls what pyudev 0.24 no longer recommends.
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore:Will be removed in 1.0:DeprecationWarning",
)
