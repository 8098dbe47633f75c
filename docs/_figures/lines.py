"""Line charts over powers of two: each line with its name at its end, the vertical axis from zero."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from sketch import Sketch

LEFT, RIGHT, TOP, BOTTOM = 64, 500, 64, 330


@dataclass(frozen=True)
class Lines:
    """What a chart shows.

    places   values of the horizontal axis, evenly apart
    series   label -> (family of its colour, a value for each place)
    step     between two lines of the grid
    axes     names of the horizontal and of the vertical axis
    """

    title: str
    source: str
    places: Sequence[int]
    series: Mapping[str, tuple[str, Sequence[float]]]
    step: float
    axes: tuple[str, str]


def draw(chart: Lines) -> str:
    """The SVG file; ValueError where two names would lie on one another."""
    sketch = Sketch(title=chart.title)
    sketch.say(16, 28, chart.title, kind="head1")
    largest = max(value for _, values in chart.series.values() for value in values)
    grid = int(largest // chart.step) + 1
    height = (BOTTOM - TOP) / (grid * chart.step)
    for number in range(grid + 1):
        y = BOTTOM - number * chart.step * height
        sketch.rule(LEFT, y, RIGHT, y)
        sketch.say(LEFT - 8, y + 5, f"{number * chart.step:g}", "end", "quiet")
    apart = (RIGHT - LEFT) / (len(chart.places) - 1)
    for number, place in enumerate(chart.places):
        sketch.say(LEFT + number * apart, BOTTOM + 20, f"{place}", "middle", "quiet")
    for family, values in chart.series.values():
        points = [(LEFT + number * apart, BOTTOM - value * height) for number, value in enumerate(values)]
        sketch.line(points, family)
    ends = sorted((values[-1], label) for label, (_, values) in chart.series.items())
    for (lower, one), (upper, other) in pairwise(ends):
        if (upper - lower) * height < 16:
            raise ValueError(f"{one!r} and {other!r} end too close to each other for both names; leave one out")
    for value, label in ends:
        sketch.say(RIGHT + 8, BOTTOM - value * height + 5, label, kind="quiet")
    sketch.say((LEFT + RIGHT) / 2, BOTTOM + 42, chart.axes[0], "middle", "quiet")
    sketch.say(16, TOP - 14, chart.axes[1], kind="quiet")
    sketch.say(16, BOTTOM + 66, chart.source, kind="quiet")
    return sketch.text(BOTTOM + 84)
