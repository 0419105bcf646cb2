"""The table of the chunk store's benchmark: its lines, and where the documentation has them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

BEGIN, END = "<!-- benchmarks.chunkstore: begin -->", "<!-- benchmarks.chunkstore: end -->"
"""The benchmark replaces what is between them."""

COLUMNS = ("what", "bar", "measured", "")


@dataclass(frozen=True)
class Line:
    """One line of the table. ``met``: whether the bar is reached; None if there is no bar, or no measurement."""

    what: str
    bar: str
    measured: str
    met: bool | None = None

    def cells(self) -> list[str]:
        """As the table shows it."""
        return [self.what, self.bar, self.measured, {True: "met", False: "missed", None: ""}[self.met]]


def at_least(what: str, bar: float, found: float, more: str = "") -> Line:
    """A ratio that has to reach its bar. ``more``: the figures that it is made of."""
    return Line(what, f"at least {bar:g}", _with(f"{found:.2f}", more), found >= bar)


def at_most(what: str, bar: float, found: float, more: str = "") -> Line:
    """A ratio that must not exceed its bar. ``more``: the figures that it is made of."""
    return Line(what, f"at most {bar:g}", _with(f"{found:.3f}", more), found <= bar)


def not_measured(what: str, bar: str, why: object) -> Line:
    """What cannot be measured on this machine."""
    return Line(what, bar, f"not measured here: {' '.join(str(why).split())}")


def _with(found: str, more: str) -> str:
    return f"{found} ({more})" if more else found


def markdown(lines: Iterable[Line]) -> str:
    """The table for the documentation."""
    rows = [list(COLUMNS), ["---"] * len(COLUMNS), *(line.cells() for line in lines)]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows)


def put_between_marks(page: Path, text: str) -> None:
    """Replace what the page has between BEGIN and END. Raises ValueError if it has not both."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no place for the table: {BEGIN} and {END}")
    fresh = page.with_suffix(".new")
    fresh.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
    fresh.rename(page)
