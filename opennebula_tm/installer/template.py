"""The syntax of oned.conf: where each attribute and each value stands, so that a value can be edited in its place.

    NAME = value
    NAME = "value that may go over several lines"
    NAME = [ KEY = value, KEY = "value" ]

Comments go from ``#`` to the end of the line. oned's own scanner is more generous in places (CDATA, a comma too many);
what is not one of these forms is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from opennebula_tm.installer.errors import BadSyntax

SPACE = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
NAME = re.compile(r"[A-Za-z0-9_]+")
EQUALS = re.compile(r"[ \t]*=[ \t]*")
LINE_END = re.compile(r"\r?(?:\n|\Z)")
QUOTED = re.compile(r'"((?:\\"|[^"])*)"')
WORD = re.compile(r"[^=#\s,\[\]\"]+")


@dataclass(frozen=True)
class Value:
    """A value, as it is written between its quotes, and where that begins and ends."""

    text: str
    start: int
    end: int


@dataclass(frozen=True)
class Attribute:
    """``NAME = …`` from ``start`` to ``end``. ``value``: of a simple one. ``pairs``: of one in brackets."""

    name: str
    start: int
    end: int
    line: int
    value: Value | None = None
    pairs: dict[str, Value] = field(default_factory=dict)

    def get(self, key: str) -> str:
        """The value of ``key`` of a bracketed attribute, or nothing."""
        value = self.pairs.get(key)
        return value.text if value else ""


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def fail(self, what: str) -> BadSyntax:
        return BadSyntax(self.text.count("\n", 0, self.at) + 1, what)

    def skip(self) -> None:
        found = SPACE.match(self.text, self.at)
        self.at = found.end() if found else self.at

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self.text, self.at)
        if found:
            self.at = found.end()
        return found

    def name(self) -> str:
        found = self.take(NAME)
        if found is None:
            raise self.fail("here should be the name of an attribute")
        if self.take(EQUALS) is None:
            raise self.fail(f'after "{found[0]}" there should be "="')
        return found[0].upper()

    def plain_value(self) -> Value:
        if self.text.startswith('"', self.at):
            quoted = self.take(QUOTED)
            if quoted is None:
                raise self.fail("this quote is not closed")
            return Value(quoted[1], quoted.start(1), quoted.end(1))
        word = self.take(WORD)
        if word is None:
            raise self.fail("here should be a value")
        return Value(word[0], word.start(), word.end())

    def pairs(self) -> dict[str, Value]:
        pairs: dict[str, Value] = {}
        self.skip()
        if self.take(re.compile(r"\]")):
            return pairs
        while True:
            name = self.name()
            if name in pairs:
                raise self.fail(f"{name} is given twice in these brackets")
            pairs[name] = self.plain_value()
            self.skip()
            mark = self.take(re.compile(r"[,\]]"))
            if mark is None:
                raise self.fail('here should be "," or "]"')
            if mark[0] == "]":
                return pairs
            self.skip()

    def attribute(self) -> Attribute:
        start, line = self.at, self.text.count("\n", 0, self.at) + 1
        name = self.name()
        if "]]>" in self.text[self.at :].partition("\n")[0]:
            raise self.fail("CDATA is not understood")
        if LINE_END.match(self.text, self.at):
            return Attribute(name, start, self.at, line, Value("", self.at, self.at))
        if self.take(re.compile(r"\[")):
            pairs = self.pairs()
            return Attribute(name, start, self.at, line, pairs=pairs)
        value = self.plain_value()
        return Attribute(name, start, self.at, line, value)


def attributes(text: str) -> Iterator[Attribute]:
    """All attributes in their order. Raises BadSyntax."""
    scanner = _Scanner(text)
    scanner.skip()
    while scanner.at < len(text):
        yield scanner.attribute()
        scanner.skip()


def line_end(text: str) -> str:
    """What ends the lines of this text: that of its first line."""
    found = re.search(r"\r?\n", text)
    return found[0] if found else "\n"
