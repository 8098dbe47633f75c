"""Bar charts: groups of horizontal bars that start at zero, each with its value, and one line to compare with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sketch import Sketch
from svg import width_of

NAMES, LEFT, LONGEST = 166, 178, 464
BAR, BETWEEN = 18, 14
APART = 6
"""Between the end of a bar, or the line, and a value."""


@dataclass(frozen=True)
class Chart:
    """What a chart shows.

    series   label -> family of its colour, in the order of the bars
    values   group -> label -> value; a label that a group lacks has no bar there
    unit     said after each value
    line     a value with a vertical line and its caption, or None
    """

    title: str
    source: str
    series: Mapping[str, str]
    values: Mapping[str, Mapping[str, float]]
    form: str
    line: tuple[float, str] | None = None


def draw(chart: Chart) -> str:
    """The SVG file."""
    sketch = Sketch(title=chart.title)
    sketch.say(16, 28, chart.title, kind="head1")
    x = 16.0
    for label, family in chart.series.items() if len(chart.series) > 1 else ():
        sketch.cell(x, 42, 14, 14, f"{family}-deep")
        sketch.say(x + 20, 54, label, kind="quiet")
        x += 20 + len(label) * 7.4 + 22
    largest = max(value for group in chart.values.values() for value in group.values())
    scale = LONGEST / max(largest, chart.line[0] if chart.line else 0.0)
    at = 86.0 if chart.line else 72.0
    place = None
    if chart.line:
        place, count = LEFT + chart.line[0] * scale, sum(map(len, chart.values.values()))
        sketch.rule(place, at - 6, place, at + count * BAR + (len(chart.values) - 1) * BETWEEN + 4)
        sketch.say(place, at - 12, chart.line[1], "middle" if place < 560 else "end", "quiet")
    for group, values in chart.values.items():
        bars = [label for label in chart.series if label in values]
        sketch.say(NAMES, at + len(bars) * BAR / 2 + 5, group, "end", "quiet")
        for label in bars:
            length = values[label] * scale
            sketch.cell(LEFT, at, length, BAR - 3, f"{chart.series[label]}-deep")
            value = chart.form.format(values[label])
            sketch.say(_beside(place, LEFT + length + APART, value), at + 12, value, kind="quiet")
            at += BAR
        at += BETWEEN
    sketch.say(16, at + 12, chart.source, kind="quiet")
    return sketch.text(at + 30)


def _beside(line: float | None, x: float, value: str) -> float:
    """Where a value stands that would begin at x: behind the line, if that would run through it."""
    crossed = line is not None and x - APART < line < x + width_of(value, 13) + APART / 2
    return line + APART if line is not None and crossed else x


def by_group(rows: Sequence[tuple[str, str, float]]) -> dict[str, dict[str, float]]:
    """(group, label, value) rows as a chart's values."""
    found: dict[str, dict[str, float]] = {}
    for group, label, value in rows:
        found.setdefault(group, {})[label] = value
    return found
