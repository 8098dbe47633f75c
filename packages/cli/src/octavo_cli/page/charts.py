"""Line and dot charts as inline SVG with HTML labels; `script` lets a reader hover, zoom and hide series.

The drawing is an SVG that is stretched to its box, whose strokes do not scale; tick labels are HTML, so that text keeps
its size on every screen. Without JavaScript, and on paper, a chart is complete.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

COLOURS = 7
"""Series colours of `style`; further series begin again."""

_DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "1 2", "12 4")
_SIDE = 1000.0
"""The drawing's width and height in its own units."""


@dataclass(frozen=True, slots=True)
class Series:
    """Named points (x, y) in the order of x; y None or not finite: there is none.

    colour, dash   numbers of a style, so that related series share one
    dots           points without a line between them
    faint          a thin line behind the others
    """

    name: str
    points: Sequence[tuple[float, float | None]]
    colour: int = 0
    dash: int = 0
    dots: bool = False
    faint: bool = False

    def present(self) -> list[tuple[float, float]]:
        """The points that are there."""
        return [(x, y) for x, y in self.points if y is not None and math.isfinite(y)]


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure. `summary` is its text for people who do not see it.

    log     y is drawn by its logarithm; points that are not positive are left out
    lines   horizontal lines with a label, at a y
    whole   x is a number of something: no tick stands between two of them
    """

    title: str
    summary: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    note: str = ""
    log: bool = False
    lines: Sequence[tuple[str, float]] = field(default=())
    whole: bool = True


def draw(chart: Chart) -> str:
    """The chart as an HTML figure; one sentence where no series has a point."""
    shown = [(series, _usable(chart, series)) for series in chart.series]
    points = [point for _, own in shown for point in own]
    heading = f"<h3>{escape(chart.title)}</h3>"
    if not points:
        return f'<figure class="chart">{heading}<p class="muted">Nothing to draw: {escape(chart.summary)}</p></figure>'
    xs = _range([x for x, _ in points])
    ys = _range([_y(chart, y) for _, y in points] + [_y(chart, y) for _, y in chart.lines], margin=0.06)
    paths = "".join(_path(series, own, chart, xs, ys) for series, own in shown if own)
    rules = "".join(_rule(_y(chart, y), ys) for _, y in chart.lines)
    y_ticks = _log_ticks(*ys) if chart.log else with_text(ticks(*ys))
    grid = "".join(f'<path class="grid" d="M0 {_down(value, ys):.1f}H{_SIDE:.0f}"/>' for value, _ in y_ticks)
    data = {
        "x": xs,
        "whole": chart.whole,
        "xLabel": chart.x_label,
        "series": [{"name": series.name, "points": [[x, y] for x, y in own]} for series, own in shown],
    }
    keys = "".join(_key(number, series) for number, (series, _) in enumerate(shown))
    on_y = "".join(_y_tick(value, text, ys) for value, text in y_ticks)
    scale = "<span> (logarithmic)</span>" if chart.log else ""
    note = f"<figcaption>{escape(chart.note)}</figcaption>" if chart.note else ""
    content = json.dumps(data).replace("<", "\\u003c")
    labels = "".join(
        f'<span class="rule" style="top:{_down(_y(chart, y), ys) / 10:.2f}%">{escape(name)}</span>'
        for name, y in chart.lines
    )
    return (
        f'<figure class="chart" aria-label="{escape(chart.summary)}">{heading}'
        f'<p class="axis">{escape(chart.y_label)}{scale}</p>'
        f'<div class="plot"><div class="yticks" aria-hidden="true">{on_y}'
        f'</div><div class="box" tabindex="0" role="img" aria-label="{escape(chart.summary)}">'
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true">{grid}{rules}{paths}</svg>{labels}'
        f'<div class="cursor" hidden></div><div class="tip" hidden></div></div>'
        f'<div class="xticks" aria-hidden="true">{x_tick_labels(xs, chart.whole)}</div></div>'
        f'<p class="axis x">{escape(chart.x_label)}</p><div class="keys">{keys}'
        f'<button type="button" class="reset" hidden>show all</button></div>'
        f'{note}<script type="application/json">{content}</script></figure>'
    )


def grid_of(charts: Sequence[Chart]) -> str:
    """Charts side by side where there is room."""
    return f'<div class="charts">{"".join(map(draw, charts))}</div>'


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, at most `most` + 1."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def with_text(values: Sequence[float]) -> list[tuple[float, str]]:
    """Ticks with short texts that tell each from the next."""
    step = min((after - before for before, after in pairwise(values)), default=0.0)
    digits = 3
    if step:
        digits = max(digits, 1 + math.ceil(math.log10(max(map(abs, values)) / step)))
    return [(value, tick_text(value, digits)) for value in values]


def tick_text(value: float, digits: int = 3) -> str:
    """A short text of a tick."""
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:.{digits}g}"
    return f"{value:.{digits - 2}e}".replace(".0e", "e").replace("e-0", "e-").replace("e+0", "e")


def x_tick_labels(xs: tuple[float, float], whole: bool) -> str:
    """The labels below a chart."""
    at = with_text([tick for tick in ticks(*xs) if not whole or abs(tick - round(tick)) < 1e-9])
    span = xs[1] - xs[0] or 1.0
    return "".join(f'<span style="left:{100 * (tick - xs[0]) / span:.2f}%">{text}</span>' for tick, text in at)


def _usable(chart: Chart, series: Series) -> list[tuple[float, float]]:
    return [(x, y) for x, y in series.present() if not chart.log or y > 0]


def _y(chart: Chart, value: float) -> float:
    return math.log10(value) if chart.log else value


def _range(values: Sequence[float], margin: float = 0.0) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low == high:
        pad = abs(low) * 0.1 or 1.0
        return low - pad, high + pad
    return low - margin * (high - low), high + margin * (high - low)


def _down(value: float, ys: tuple[float, float]) -> float:
    return _SIDE * (ys[1] - value) / (ys[1] - ys[0])


def _path(
    series: Series, points: list[tuple[float, float]], chart: Chart, xs: tuple[float, float], ys: tuple[float, float]
) -> str:
    place = [(_SIDE * (x - xs[0]) / (xs[1] - xs[0]), _down(_y(chart, y), ys)) for x, y in points]
    number = list(chart.series).index(series)
    kinds = [f"s{series.colour % COLOURS}", *(["faint"] if series.faint else []), *(["dots"] if series.dots else [])]
    start = f'<g data-series="{number}" class="{" ".join(kinds)}">'  # the script finds it by its number
    line = ""
    if not series.dots:
        dash = _DASHES[series.dash % len(_DASHES)]
        steps = "L".join(f"{x:.1f} {y:.1f}" for x, y in place)
        line = f'<path class="line" d="M{steps}"{_dashed(dash)}/>'
    few = not series.faint and (series.dots or len(place) <= 40)
    marks = f'<path class="marks" d="{"".join(f"M{x:.1f} {y:.1f}h0" for x, y in place)}"/>' if few else ""
    return f"{start}{line}{marks}</g>"


def _rule(value: float, ys: tuple[float, float]) -> str:
    return f'<path class="limit" d="M0 {_down(value, ys):.1f}H{_SIDE:.0f}"/>'


def _log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    step = max(1, math.ceil((high - low) / 6))
    whole = [power for power in range(math.ceil(low), math.floor(high) + 1) if power % step == 0]
    if len(whole) >= 2:
        return [(power, tick_text(10.0**power)) for power in whole]
    return [(math.log10(value), text) for value, text in with_text(ticks(10**low, 10**high)) if value > 0]


def _y_tick(value: float, text: str, ys: tuple[float, float]) -> str:
    return f'<span style="top:{_down(value, ys) / 10:.2f}%">{text}</span>'


def _dashed(dash: str) -> str:
    return f' stroke-dasharray="{dash}"' if dash else ""


def _key(number: int, series: Series) -> str:
    dash = "" if series.dots else _DASHES[series.dash % len(_DASHES)]
    shape = "M9 5h0" if series.dots else "M1 5h20"
    kind = f"s{series.colour % COLOURS} {'dots' if series.dots else ''} {'faint' if series.faint else ''}"
    mark = f'<path class="{"marks" if series.dots else "line"}" d="{shape}"{_dashed(dash)}/>'
    return (
        f'<button type="button" data-series="{number}" aria-pressed="true"><svg viewBox="0 0 22 10" aria-hidden="true">'
        f'<g class="{kind.strip()}">{mark}</g></svg>{escape(series.name)}</button>'
    )
