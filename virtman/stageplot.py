"""A plot of staged timings, as SVG: a bar for each VM or host, made of its stages."""

from __future__ import annotations

from math import floor, log10
from xml.etree import ElementTree as ET

from virtman.staging import STAGES, Result, Run

COLOURS = ("#999999", "#0072b2", "#e69f00", "#cc79a7", "#56b4e9", "#009e73")
"""Of the stages in their order: the palette of Okabe and Ito, which all eyes tell apart, on light and dark."""
STYLE = """
text { font: 12px sans-serif; fill: #222 } .back { fill: #fff } .grid { stroke: #ccc }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .back { fill: #1b1b1b } .grid { stroke: #444 } }
"""
WIDTH, RIGHT, TOP, BOTTOM = 960, 60, 64, 30
LONGEST_NAME, LETTER = 40, 7
"""Characters of a name that are shown, and pixels that one takes."""
ROW, SMALL, LEGIBLE, MANY = 18, 4, 11, 150
"""Pixels of a bar with its gap; the same with more than ``MANY`` bars; below ``LEGIBLE`` bars have no names."""
TICKS = 8


def plot(result: Result) -> str:
    """The SVG. Bars of rounds follow each other, below the label of their round."""
    rows = sum(len(each.runs) for each in result.rounds)
    height = ROW if rows <= MANY else SMALL
    names = [_shown(run.name) for each in result.rounds for run in each.runs]
    left = LETTER * max(map(len, names), default=0) + 20
    bottom = TOP + ROW * len(result.rounds) + height * rows
    svg = ET.Element("svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH} {bottom + BOTTOM}", role="img")
    ET.SubElement(svg, "style").text = STYLE
    _rect(svg, 0, 0, WIDTH, bottom + BOTTOM, **{"class": "back"})
    _text(svg, 10, 20, f"{result.kind} of {result.image}: seconds by stage")
    _legend(svg, result.kind)
    longest = max((run.total for each in result.rounds for run in each.runs), default=0.0) or 1.0
    scale = (WIDTH - left - RIGHT) / longest
    _axis(svg, left, bottom, longest, scale)
    y = TOP
    for each in result.rounds:
        _text(svg, 10, y + 13, f"{each.label}: all after {each.seconds:.1f} s")
        y += ROW
        for run in each.runs:
            _bar(ET.SubElement(svg, "g"), result.kind, run, left, y, height, scale)
            y += height
    ET.indent(svg)
    return ET.tostring(svg, encoding="unicode") + "\n"


def _bar(group: ET.Element, kind: str, run: Run, left: int, y: int, height: int, scale: float) -> None:
    if height >= LEGIBLE:
        _text(group, left - 8, y + 12, _shown(run.name), **{"text-anchor": "end"})
    x = float(left)
    for stage, colour in zip(STAGES[kind], COLOURS, strict=False):
        seconds = run.seconds.get(stage.name, 0.0)
        rect = _rect(group, x, y + 1, seconds * scale, height - 2, fill=colour)
        ET.SubElement(rect, "title").text = f"{_shown(run.name)}: {stage.name} {seconds:.2f} s"
        x += seconds * scale
    if run.error and height >= LEGIBLE:
        _text(group, x + 4, y + 12, "failed")


def _legend(svg: ET.Element, kind: str) -> None:
    x = 10
    for stage, colour in zip(STAGES[kind], COLOURS, strict=False):
        _rect(svg, x, 32, 12, 12, fill=colour)
        _text(svg, x + 17, 42, stage.name)
        x += 40 + LETTER * len(stage.name)


def _axis(svg: ET.Element, left: int, bottom: int, longest: float, scale: float) -> None:
    step = _step(longest)
    for number in range(int(longest / step) + 1):
        x = f"{left + number * step * scale:.1f}"
        ET.SubElement(svg, "line", {"class": "grid", "x1": x, "x2": x, "y1": str(TOP), "y2": str(bottom)})
        _text(svg, float(x), bottom + 18, f"{number * step:g} s", **{"text-anchor": "middle"})


def _step(longest: float) -> float:
    """Seconds between two lines of the axis: 1, 2 or 5 times a power of ten."""
    power = 10.0 ** floor(log10(longest / TICKS))
    return next(step for step in (power, 2 * power, 5 * power, 10 * power) if longest / step <= TICKS)


def _rect(parent: ET.Element, x: float, y: float, width: float, height: float, **more: str) -> ET.Element:
    sides = {"x": f"{x:.1f}", "y": f"{y:.1f}", "width": f"{width:.1f}", "height": f"{height:.1f}"}
    return ET.SubElement(parent, "rect", sides | more)


def _text(parent: ET.Element, x: float, y: float, text: str, **more: str) -> None:
    ET.SubElement(parent, "text", {"x": f"{x:.1f}", "y": f"{y:.1f}"} | more).text = _printable(text)


def _shown(name: str) -> str:
    name = _printable(name)
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"


def _printable(text: str) -> str:
    """Without what no XML can hold: a result may come from a file."""
    return "".join(letter for letter in text if letter.isprintable())
