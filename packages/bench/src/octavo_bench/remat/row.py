"""What `octavo bench remat` leaves: a row a recipe and policy, and its JSON form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo_bench.harness.goals import Goal
from octavo_bench.harness.results import Facts, Failure, failure_dicts, rounded
from octavo_bench.harness.shapes import Shape
from octavo_bench.harness.timing import Times

PEER = "ragged_dot bf16"
"""The kind of the same block on jax.lax.ragged_dot."""

NOTHING, PLAIN, KEPT, OUTPUTS = "no remat", "remat", "save_quantized", "save_quantized, y"
ROWS = "save_quantized of x, y"
POLICIES = (PLAIN, NOTHING, KEPT, OUTPUTS, ROWS)
"""`jax.checkpoint` without a policy; none; with quantized operands saved; with the products' results saved, too; with
those and the codes of x alone, so that kernels are quantized again."""

KEPT_OVER_PLAIN = 1.1
OVER_RAGGED_DOT = 10.0
COMPILE_SECONDS = 20.0


@dataclass(frozen=True)
class RematRow:
    """Forward and backward of the block.

    trace_s, compile_s   from Python to StableHLO, and from there to a program, nothing cached
    temporary_bytes      of the program beside its arguments and results; None where XLA does not say
    quantize, fprop      runs a step, counted in the jaxpr
    over_plain           how many times as fast as with plain remat, measured in turns; None for that itself
    """

    shape: Shape
    sizes: str
    kind: str
    policy: str
    backends: tuple[str, ...]
    times: Times
    trace_s: float
    compile_s: float
    temporary_bytes: int | None
    quantize: int
    fprop: int
    goals: tuple[Goal, ...] = ()
    over_plain: float | None = None

    @property
    def ms(self) -> float:
        """Milliseconds."""
        return self.times.median / 1e3

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "kind": self.kind,
            "policy": self.policy,
            "shape": list(self.shape.key),
            "sizes": self.sizes,
            "backends": list(self.backends),
            "us": rounded(self.times),
            "ms": round(self.ms, 4),
            "trace_s": round(self.trace_s, 3),
            "compile_s": round(self.compile_s, 3),
            "temporary_bytes": self.temporary_bytes,
            "runs": {"quantize": self.quantize, "fprop": self.fprop},
            **({} if self.over_plain is None else {"over_plain": round(self.over_plain, 4)}),
            "goals": [goal.as_dict() for goal in self.goals],
        }


def remat_goals(row: RematRow, rows: Sequence[RematRow], *, timed: bool) -> tuple[Goal, ...]:
    """Compiling with remat; on a GPU (`timed`) saved operands against plain remat, and against ragged_dot."""
    if row.kind == PEER:
        return ()
    goals = []
    if row.policy != NOTHING:
        name = f"{COMPILE_SECONDS:.0f} s to compile"
        goals.append(Goal(name, COMPILE_SECONDS, row.trace_s + row.compile_s, most=True))
    if timed and row.policy in (KEPT, OUTPUTS, ROWS) and row.kind != "bf16":
        here = [one for one in rows if (one.shape, one.sizes) == (row.shape, row.sizes)]
        if row.over_plain is not None:
            goals.append(Goal(f"{KEPT_OVER_PLAIN} of plain remat", KEPT_OVER_PLAIN, row.over_plain))
        theirs = next((one.ms for one in here if one.kind == PEER), None)
        if theirs is not None:
            goals.append(Goal(f"{OVER_RAGGED_DOT:.0f} of {PEER}", OVER_RAGGED_DOT, theirs / row.ms))
    return tuple(goals)


@dataclass(frozen=True, kw_only=True)
class RematResults(Facts):
    """A whole run."""

    layers: int
    unrolled: bool
    groupings: dict[str, list[int]]
    rows: Sequence[RematRow]
    notes: Sequence[str]
    failures: Sequence[Failure]

    def as_dict(self) -> dict[str, Any]:
        """The content of the JSON file."""
        return self.document(
            judged=[goal.passed for row in self.rows for goal in row.goals],
            match={},
            framework="jax",
            layers=self.layers,
            unrolled=self.unrolled,
            groupings=self.groupings,
            failures=failure_dicts(self.failures),
            rows=[row.as_dict() for row in self.rows],
            notes=list(self.notes),
        )
