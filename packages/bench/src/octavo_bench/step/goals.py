"""The goals of whole steps: an H200's milliseconds, and what follows from other rows of the same run."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.quantizer import Operand, Scaling
from octavo_bench.harness.goals import Goal
from octavo_bench.harness.recipes import recipe_of
from octavo_bench.harness.recorded import STEP_GOALS
from octavo_bench.harness.shapes import Shape
from octavo_bench.harness.traffic import traffic
from octavo_bench.quantize.case import Case, even
from octavo_bench.step.row import StepRow, ratio

CURRENT_OVER_DELAYED = 1.08
EMULATED_OVER_FLOOR = 1.10
JAX_OVER_TORCH = 1.03
SKEWED_OVER_EVEN = 1.06
_SCALINGS: dict[str, Scaling] = {"mxfp8": "mxfp8", "nvfp4": "nvfp4"}


@dataclass(frozen=True, slots=True)
class StepNeighbours:
    """The other rows of the run, its copy rate, and whether absolute figures are judged."""

    rows: tuple[StepRow, ...]
    copy_tb_per_s: float | None
    h200: bool


def step_goals(row: StepRow, near: StepNeighbours) -> tuple[Goal, ...]:
    """The goals of one step; none for a peer."""
    if not row.backends:
        return ()
    goals = []
    most = absolute_goal(row.shape, row.kind, row.reuse, row.framework)
    if near.h200 and most is not None and row.sizes == "even":
        goals.append(Goal(f"{most:.2f} ms", most, row.ms, most=True))
    if row.over_torch is not None:
        goals.append(Goal(f"{JAX_OVER_TORCH} of torch", JAX_OVER_TORCH, row.over_torch, most=True))
    if row.sizes == "skewed":
        over_even = ratio(row, near.rows, sizes="even")
        if over_even is not None:
            goals.append(Goal(f"{SKEWED_OVER_EVEN} of even", SKEWED_OVER_EVEN, over_even, most=True))
    over_plain = ratio(row, near.rows, kind="bf16", reuse=False)
    if row.kind in _SCALINGS and not row.reuse and over_plain is not None and near.copy_tb_per_s is not None:
        floor = row.ms / over_plain + quantize_ms(row.shape, _SCALINGS[row.kind], near.copy_tb_per_s)
        goals.append(Goal(f"{EMULATED_OVER_FLOOR} of bf16 + bytes", EMULATED_OVER_FLOOR, row.ms / floor, most=True))
    return tuple(goals)


def absolute_goal(shape: Shape, kind: str, reuse: bool, framework: str) -> float | None:
    """Most milliseconds on an H200 with even groups; None where no goal is set."""
    known = STEP_GOALS.get(shape.key)
    if known is None:
        return None
    most = {"block": known.block, "delayed": known.delayed, "current": CURRENT_OVER_DELAYED * known.delayed}.get(kind)
    if most is None:
        return None
    return (most - (known.weights if reuse else 0.0)) * (JAX_OVER_TORCH if framework == "jax" else 1.0)


def quantize_ms(shape: Shape, scaling: Scaling, copy_tb_per_s: float) -> float:
    """x, w and dy quantized in both directions at the copy rate."""
    recipe = recipe_of(scaling)
    moved = 0
    sides: dict[Operand, int] = {"x": shape.k, "w": shape.k, "dy": shape.n}
    for operand, cols in sides.items():
        spec = recipe.quantizer(operand)
        assert spec is not None
        case = Case(
            "weights" if operand == "w" else "quantize",
            scaling,
            "both",
            operand,
            stochastic=spec.stochastic,
            hadamard=spec.hadamard,
            square=spec.square,
        )
        sizes = (shape.n,) * shape.groups if operand == "w" else even(shape.rows, shape.groups).sizes
        moved += traffic(case, sizes, cols).total
    return moved / copy_tb_per_s / 1e9
