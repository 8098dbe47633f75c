"""The charts of recipes in training: loss over the steps, and held-out gaps to bf16 seed by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from sketch import Sketch
from speed import record
from svg import width_of

RUNS = "training-h100-2026-11-26"
FAMILIES = {  # family of a colour: what it stands for, and its recipes
    "tool": ("bf16", ("bf16",)),
    "torch": ("FP8, per tensor", ("fp8-delayed", "fp8-current")),
    "jax": ("FP8, row and block", ("fp8-row", "fp8-block")),
    "native": ("MXFP8", ("mxfp8", "mxfp8-folded")),
    "check": ("MXFP4 weights", ("mxfp4",)),
    "base": ("NVFP4", ("nvfp4",)),
}
LEFT, RIGHT, TOP = 64, 690, 84
CURVES_BOTTOM, ROW, MARK = 340, 34, 10
NAMES = 150
"""Where the axis of gaps begins: recipes' names stand to the left of it."""


def _source() -> str:
    return f"One {record(RUNS)['machine'].removeprefix('NVIDIA ')}; benchmarks/results/{RUNS}.json"


def _family(recipe: str) -> str:
    return next(family for family, (_, recipes) in FAMILIES.items() if recipe in recipes)


def _legend(sketch: Sketch) -> None:
    x = 16.0
    drawn = {row["recipe"] for row in record(RUNS)["runs"]}
    for family, (label, recipes) in FAMILIES.items():
        if drawn.isdisjoint(recipes):
            continue
        sketch.cell(x, 42, 14, 14, f"{family}-deep")
        sketch.say(x + 20, 54, label, kind="quiet")
        x += 20 + width_of(label, 13) + 16


def mean_losses(rows: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Each recipe's losses in training, mean over the seeds that all recipes have; bf16 last, so that it is on top."""
    recipes = sorted({row["recipe"] for row in rows}, key=lambda name: (name == "bf16", name))
    runs = {(row["recipe"], row["seed"]): row["train_loss"] for row in rows}
    seeds = [seed for seed in {seed for _, seed in runs} if all((recipe, seed) in runs for recipe in recipes)]
    return {
        recipe: [statistics.fmean(values) for values in zip(*(runs[recipe, seed] for seed in seeds), strict=True)]
        for recipe in recipes
    }


def curves() -> str:
    """Loss over the steps of every recipe; the axis begins below the smallest loss, not at zero."""
    runs = record(RUNS)
    config, losses = runs["config"], mean_losses(runs["runs"])
    low = math.floor(2 * min(min(values) for values in losses.values())) / 2
    high = math.ceil(2 * max(values[0] for values in losses.values())) / 2
    sketch = Sketch(title=f"Loss of a MoE model with {config['experts']} experts in training, by recipe")
    sketch.say(16, 28, sketch.title, kind="head1")
    _legend(sketch)
    height = (CURVES_BOTTOM - TOP) / (high - low)
    for number in range(round(2 * (high - low)) + 1):
        loss = low + number / 2
        y = CURVES_BOTTOM - (loss - low) * height
        sketch.rule(LEFT, y, RIGHT, y)
        sketch.say(LEFT - 8, y + 5, f"{loss:.1f}", "end", "quiet")
    apart, window = (RIGHT - LEFT) / config["steps"], config["loss_window"]
    for step in range(0, config["steps"] + 1, config["steps"] // 4):
        sketch.say(LEFT + step * apart, CURVES_BOTTOM + 20, f"{step}", "middle", "quiet")
    for recipe, values in losses.items():
        points = [
            (LEFT + (number + 0.5) * window * apart, CURVES_BOTTOM - (value - low) * height)
            for number, value in enumerate(values)
        ]
        sketch.line(points, _family(recipe))
    axes = "steps; nats per byte, mean of 20 steps and of the seeds that all have"
    sketch.say((LEFT + RIGHT) / 2, CURVES_BOTTOM + 42, axes, "middle", "quiet")
    sketch.say(16, CURVES_BOTTOM + 66, _source(), kind="quiet")
    return sketch.text(CURVES_BOTTOM + 84)


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
