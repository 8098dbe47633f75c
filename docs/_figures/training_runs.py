"""The charts of recipes in training: losses over the steps and their differences from bf16's, held-out gaps by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sketch import Sketch
from speed import record

RUNS = "training-h100-2026-11-26"
FAMILIES = {  # family of a colour: what it stands for, and its recipes, the second of which is dashed
    "tool": ("bf16", ("bf16",)),
    "torch": ("FP8, per tensor", ("fp8-delayed", "fp8-current")),
    "jax": ("FP8, row and block", ("fp8-row", "fp8-block")),
    "native": ("MXFP8", ("mxfp8", "mxfp8-folded")),
    "check": ("MXFP4 weights", ("mxfp4",)),
    "base": ("NVFP4", ("nvfp4",)),
}
LEFT, RIGHT = 64, 690
ROW, MARK = 34, 10
CURVES_RIGHT = 580
LOSSES, AGAINST = (76, 216), (276, 516)
"""Top and bottom of the panels of losses and of their differences."""
TOGETHER = 10
"""Points of a curve in one of a difference: 20 steps each, whose noise is as large as what recipes differ by."""
LINE = 17
NAMES = 150
"""Where the axis of gaps begins: recipes' names stand to the left of it."""


def _source() -> str:
    return f"One {record(RUNS)['machine'].removeprefix('NVIDIA ')}; benchmarks/results/{RUNS}.json"


def _family(recipe: str) -> str:
    return next(family for family, (_, recipes) in FAMILIES.items() if recipe in recipes)


def mean_losses(rows: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Each recipe's losses in training, mean over the seeds that all recipes have."""
    recipes = sorted({row["recipe"] for row in rows})
    runs = {(row["recipe"], row["seed"]): row["train_loss"] for row in rows}
    seeds = [seed for seed in {seed for _, seed in runs} if all((recipe, seed) in runs for recipe in recipes)]
    return {
        recipe: [statistics.fmean(values) for values in zip(*(runs[recipe, seed] for seed in seeds), strict=True)]
        for recipe in recipes
    }


def differences(losses: Mapping[str, Sequence[float]], together: int) -> dict[str, list[float]]:
    """By how many per cent of bf16's loss each recipe's differs: the means of `together` points of both at a time."""
    base = losses["bf16"]
    return {
        recipe: [
            100 * statistics.fmean(value / other - 1 for value, other in zip(*both, strict=True))
            for both in zip(_parts(values, together), _parts(base, together), strict=True)
        ]
        for recipe, values in losses.items()
        if recipe != "bf16"
    }


def _parts(values: Sequence[float], size: int) -> list[Sequence[float]]:
    return [values[first : first + size] for first in range(0, len(values), size)]


def curves() -> str:
    """Two panels over the steps: bf16's loss, and by how much those of the other recipes differ from it."""
    runs = record(RUNS)
    config, losses = runs["config"], mean_losses(runs["runs"])
    apart = (CURVES_RIGHT - LEFT) / config["steps"]
    sketch = Sketch(title=f"Loss of a MoE model with {config['experts']} experts in training, by recipe")
    sketch.say(16, 28, sketch.title, kind="head1")
    window = config["loss_window"]
    sketch.say(16, 58, f"nats per byte in bf16, mean of {window} steps", kind="quiet")
    _panel(sketch, LOSSES, {"bf16": losses["bf16"]}, window * apart, 1.0, "{:.1f}")
    against = differences(losses, TOGETHER)
    said = f"per cent of bf16's loss by which others differ, mean of {window * TOGETHER} steps"
    sketch.say(16, AGAINST[0] - 20, said, kind="quiet")
    _panel(sketch, AGAINST, against, window * TOGETHER * apart, 0.25, "{:+.2f}")
    bottom = AGAINST[1]
    for step in range(0, config["steps"] + 1, config["steps"] // 4):
        sketch.say(LEFT + step * apart, bottom + 20, f"{step}", "middle", "quiet")
    sketch.say((LEFT + CURVES_RIGHT) / 2, bottom + 42, "steps; means of the seeds that all have", "middle", "quiet")
    sketch.say(16, bottom + 66, _source(), kind="quiet")
    return sketch.text(bottom + 84)


def _panel(
    sketch: Sketch,
    ends: tuple[float, float],
    series: Mapping[str, Sequence[float]],
    wide: float,
    step: float,
    form: str,
) -> None:
    """Curves between two heights of the sheet, a point in the middle of each `wide`; their names at their ends."""
    top, bottom = ends
    low = math.floor(min(map(min, series.values())) / step) * step
    high = math.ceil(max(map(max, series.values())) / step) * step
    height = (bottom - top) / (high - low)
    for number in range(round((high - low) / step) + 1):
        value = low + number * step
        y = bottom - (value - low) * height
        sketch.rule(LEFT, y, CURVES_RIGHT, y)
        sketch.say(LEFT - 8, y + 5, form.format(value) if value else "0", "end", "quiet")
    last = {}
    for recipe, values in series.items():
        points = [
            (LEFT + (number + 0.5) * wide, bottom - (value - low) * height) for number, value in enumerate(values)
        ]
        sketch.line(points, _family(recipe), dashed=_is_second(recipe))
        last[recipe] = points[-1]
    for recipe, y in _spread({recipe: y for recipe, (_, y) in last.items()}).items():
        x = CURVES_RIGHT + 12
        sketch.rule(last[recipe][0] + 2, last[recipe][1], x, y)
        sketch.say(x + 6, y + 5, recipe, kind="quiet")


def _is_second(recipe: str) -> bool:
    """Whether it is drawn in dashes, because another recipe has its colour."""
    return any(recipe in recipes[1:] for _, recipes in FAMILIES.values())


def _spread(places: Mapping[str, float]) -> dict[str, float]:
    """Heights of names at least a line apart, in the order of those that are given and moved no more than needed."""
    order = sorted(places, key=places.__getitem__)
    runs: list[list[str]] = []  # of names that stand a line apart; two that would overlap become one
    for name in order:
        runs.append([name])
        while len(runs) > 1 and _first(runs[-1], places) - _first(runs[-2], places) < LINE * len(runs[-2]):
            later = runs.pop()
            runs[-1] += later
    return {name: _first(run, places) + LINE * number for run in runs for number, name in enumerate(run)}


def _first(run: Sequence[str], places: Mapping[str, float]) -> float:
    """Height of the first of names a line apart whose mean is that of their own heights."""
    return statistics.fmean(places[name] for name in run) - LINE * (len(run) - 1) / 2


def gaps() -> str:
    """A row for each recipe: the gap of every seed, and the mean with one standard deviation."""
    found = record(RUNS)["gaps"]
    reach = max(abs(value) for gap in found for value in (*gap["per_seed_percent"], *_band(gap)))
    step = next(each for each in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0) if reach <= 4 * each)
    first = -step * math.ceil(max(0.0, -min(min(gap["per_seed_percent"] + _band(gap)) for gap in found)) / step)
    last = step * math.ceil(max(max(gap["per_seed_percent"] + _band(gap)) for gap in found) / step)
    top = 52
    bottom = top + ROW * len(found)
    sketch = Sketch(title="Held-out loss against bf16's, from the same parameters on the same batches")
    sketch.say(16, 28, sketch.title, kind="head1")
    wide = (RIGHT - NAMES) / (last - first)

    def at(percent: float) -> float:
        return NAMES + (percent - first) * wide

    for number in range(round((last - first) / step) + 1):
        percent = first + number * step
        sketch.rule(at(percent), top, at(percent), bottom)
        sketch.say(at(percent), bottom + 20, f"{percent:+.1f}" if abs(percent) > 1e-9 else "0", "middle", "quiet")
    for number, gap in enumerate(found):
        y, family = top + (number + 0.5) * ROW, _family(gap["recipe"])
        sketch.say(NAMES - 12, y + 5, gap["recipe"], "end", "quiet")
        low, high = _band(gap)
        sketch.line([(at(low), y), (at(high), y)], family)
        sketch.line([(at(gap["percent"]), y - MARK), (at(gap["percent"]), y + MARK)], family)
        for percent in gap["per_seed_percent"]:
            sketch.cell(at(percent) - MARK / 2, y - MARK / 2, MARK, MARK, f"{family}-deep")
    axes = "per cent of bf16's loss; squares: seeds, lines: mean and one standard deviation"
    sketch.say((NAMES + RIGHT) / 2, bottom + 42, axes, "middle", "quiet")
    sketch.say(16, bottom + 66, _source(), kind="quiet")
    return sketch.text(bottom + 84)


def _band(gap: dict[str, Any]) -> list[float]:
    return [gap["percent"] - gap["spread_percent"], gap["percent"] + gap["spread_percent"]]


CHARTS: dict[str, Callable[[], str]] = {"training-curves": curves, "training-gaps": gaps}
