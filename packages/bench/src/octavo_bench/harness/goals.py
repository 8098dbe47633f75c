"""The goals that a measured row is held to, as data: a name, what is needed, what was reached.

Ratios to a peer of the same run are judged on every GPU; absolute figures are an H200's and judged there alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo_bench.harness.recipes import GemmCase
from octavo_bench.harness.recorded import DEEPGEMM_TFLOPS, WGRAD_ACCUMULATE_US
from octavo_bench.harness.shapes import Shape

PER_TENSOR_OR_ROW = frozenset({"delayed", "current", "row"})
FP8 = PER_TENSOR_OR_ROW | {"block"}

DENSE_FP8 = {"even": 0.97, "skewed": 0.93}
DENSE_BF16 = 0.98
GROUPED_BF16 = {"fprop": 1.05, "dgrad": 1.05, "wgrad": 1.08}
SKEWED_OF_EVEN = 0.94
BLOCK_OF_DENSE = 1.02
WGRAD_OF_LIMIT = 0.80
MANY_EXPERTS, FEW_ROWS, MANY_EXPERTS_TFLOPS = 128, 512, 1100.0


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal. `most`: `reached` may not be above `needed` (a time); else not below it (a rate, a ratio)."""

    name: str
    needed: float
    reached: float
    most: bool = False

    @property
    def margin(self) -> float:
        """1 or more where it is met."""
        return self.needed / self.reached if self.most else self.reached / self.needed

    @property
    def passed(self) -> bool:
        """Whether it is met."""
        return self.margin >= 1

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "name": self.name,
            "needed": round(self.needed, 4),
            "reached": round(self.reached, 4),
            "margin": round(self.margin, 4),
            "passed": self.passed,
        }


def tightest(goals: Iterable[Goal]) -> Goal | None:
    """The goal that is missed by most, or met by least."""
    return min(goals, key=lambda goal: goal.margin, default=None)


def verdict(goals: Iterable[Goal]) -> str:
    """A table's cell: margin of the tightest goal and its name, or "-"."""
    goal = tightest(goals)
    return "-" if goal is None else f"{goal.margin:.3f} {'pass' if goal.passed else 'MISS'} ({goal.name})"


def rate_text(tflops: float) -> str:
    """TFLOP/s for a table; a CPU's need their digits."""
    return f"{tflops:.0f}" if tflops >= 10 else f"{tflops:.3g}"


@dataclass(frozen=True, slots=True)
class Neighbours:
    """What a row is compared with, TFLOP/s of the same shape in the same run; None and absent: not measured.

    peers         by name
    even          the same case with even groups, for a row with skewed ones
    accumulating  the same wgrad into an fp32 accumulator, for one that stores
    copy_tb_per_s bytes read and written by a device copy
    h200          absolute figures are judged
    """

    peers: Mapping[str, float]
    even: float | None = None
    accumulating: float | None = None
    copy_tb_per_s: float | None = None
    h200: bool = False


def gemm_goals(case: GemmCase, shape: Shape, sizes: str, tflops: float, near: Neighbours) -> tuple[Goal, ...]:
    """The goals of one GEMM that ran at `tflops`."""
    goals: list[Goal] = []

    def at_least(name: str, share: float, base: float | None) -> None:
        if base is not None:
            goals.append(Goal(name, share, tflops / base))

    if case.kind == "bf16" and not case.accumulate:
        at_least(f"{GROUPED_BF16[case.gemm]} of grouped_mm", GROUPED_BF16[case.gemm], near.peers.get("grouped_mm"))
        if case.gemm != "wgrad":
            at_least(f"{DENSE_BF16} of dense", DENSE_BF16, near.peers.get("dense bf16"))
        if sizes == "skewed":
            at_least(f"{SKEWED_OF_EVEN} of even", SKEWED_OF_EVEN, near.even)
    how = "fast" if case.fast else "exact"
    dense = near.peers.get(f"dense fp8 {how}")
    if case.kind in PER_TENSOR_OR_ROW and case.gemm != "wgrad":
        if shape.groups >= MANY_EXPERTS and shape.rows <= FEW_ROWS * shape.groups:
            if near.h200:
                goals.append(Goal(f"{MANY_EXPERTS_TFLOPS:.0f} TFLOP/s", MANY_EXPERTS_TFLOPS, tflops))
        else:
            at_least(f"{DENSE_FP8[sizes]} of dense {how}", DENSE_FP8[sizes], dense)
        at_least("scaled_grouped_mm", 1.0, near.peers.get(f"scaled_grouped_mm {how}"))
    if case.kind == "block" and case.gemm != "wgrad" and shape.key in DEEPGEMM_TFLOPS:
        bars = [] if dense is None else [(BLOCK_OF_DENSE * dense, f"{BLOCK_OF_DENSE} of dense exact")]
        if near.h200:
            bars.append((float(DEEPGEMM_TFLOPS[shape.key].fprop_block), "DeepGEMM, recorded"))
        if bars:
            needed, name = min(bars)
            goals.append(Goal(name, needed, tflops))
    if case.kind in FP8 and case.gemm == "wgrad":
        goals += _wgrad_goals(case, shape, tflops, near)
    return tuple(goals)


def _wgrad_goals(case: GemmCase, shape: Shape, tflops: float, near: Neighbours) -> list[Goal]:
    if not case.accumulate:
        return [] if near.accumulating is None else [Goal("faster than accumulating", 1.0, tflops / near.accumulating)]
    goals = []
    limit = accumulate_limit_us(shape, near.copy_tb_per_s, near.peers.get("dense fp8 exact"))
    us = shape.flops / tflops / 1e6
    if limit is not None:
        goals.append(Goal(f"{WGRAD_OF_LIMIT} of memory's or tensor cores' limit", WGRAD_OF_LIMIT, limit / us))
    if near.h200 and shape.key in WGRAD_ACCUMULATE_US:
        most = WGRAD_ACCUMULATE_US[shape.key]
        goals.append(Goal(f"{most:.0f} us", most, us, most=True))
    return goals


def accumulate_limit_us(shape: Shape, copy_tb_per_s: float | None, dense_tflops: float | None) -> float | None:
    """The time that an FP8 wgrad into fp32 cannot go below: codes read, sums read and written; or the products."""
    if copy_tb_per_s is None or dense_tflops is None:
        return None
    moved = shape.rows * (shape.n + shape.k) + 8 * shape.groups * shape.n * shape.k
    return max(moved / copy_tb_per_s / 1e6, shape.flops / dense_tflops / 1e6)
