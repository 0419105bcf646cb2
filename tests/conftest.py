"""What holds for all tests. Guests of the kernel lab import it, too: it needs nothing but pytest."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator

import pytest

from tests.sweeps import WHOLE


def pytest_configure(config: pytest.Config) -> None:
    """Make our marks known."""
    config.addinivalue_line("markers", "long: runs with WHOLE set alone, as make test-whole does (tests/sweeps.py)")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the long tests out, unless all is wanted."""
    left_out = [] if WHOLE else [item for item in items if item.get_closest_marker("long")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Save what the tests covered: pytest-xdist kills a worker that needs more than ten seconds for its own end."""
    coverage = sys.modules.get("coverage")
    if coverage is not None and (measuring := coverage.Coverage.current()) is not None:
        measuring.save()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With CI set, a test that is skipped has failed: there, nothing that a test needs may be missing."""
    report = yield
    _refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same of a file that is skipped as a whole."""
    report = yield
    _refuse_skip(report)
    return report


def _refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and os.environ.get("CI"):
        report.outcome = "failed"
        report.longrepr = f"skipped, though CI is set: {report.longrepr}"
