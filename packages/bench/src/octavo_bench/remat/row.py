"""What `octavo bench remat` leaves: a row per recipe and policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from octavo_bench.harness.goals import Goal
from octavo_bench.harness.results import goal_dicts
from octavo_bench.harness.shapes import Shape
from octavo_bench.harness.timing import Times

PEER = "ragged_dot bf16"
"""The kind of the same block on jax.lax.ragged_dot."""

NOTHING, PLAIN, KEPT, OUTPUTS = "no remat", "remat", "save_quantized", "save_quantized, y"
ROWS = "save_quantized of x, y"
POLICIES = (PLAIN, NOTHING, KEPT, OUTPUTS, ROWS)
"""`jax.checkpoint` without a policy; none; with quantized operands saved; with the products' results saved, too; with
those and the codes of x alone, so that kernels are quantized again."""


@dataclass(frozen=True)
class RematRow:
    """Forward and backward of the block.

    trace_s, compile_s   from Python to StableHLO, and from there to a program, nothing cached
    temporary_bytes      of the program beside its arguments and results; None where XLA does not say
    quantize, fprop      runs per step, counted in the jaxpr
    over_plain           how many times as fast as with plain remat, measured in turns; None for that itself
    """

    section: ClassVar[str] = "rows"

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
    over_plain: float | None = None

    def measures(self, rows: Sequence[RematRow]) -> dict[str, float]:
        """Seconds to compile, and how many times as fast as with plain remat and as on ragged_dot."""
        reached = {"s to compile": self.trace_s + self.compile_s}
        if self.over_plain is not None:
            reached["plain remat"] = self.over_plain
        for row in rows:
            if row.kind == PEER and (row.shape, row.sizes) == (self.shape, self.sizes):
                reached[PEER] = row.times.ms / self.times.ms
        return reached

    def as_dict(self, goals: Sequence[Goal] = ()) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "kind": self.kind,
            "policy": self.policy,
            "shape": list(self.shape.key),
            "sizes": self.sizes,
            "backends": list(self.backends),
            "us": self.times.as_dict(),
            "ms": round(self.times.ms, 4),
            "trace_s": round(self.trace_s, 3),
            "compile_s": round(self.compile_s, 3),
            "temporary_bytes": self.temporary_bytes,
            "runs": {"quantize": self.quantize, "fprop": self.fprop},
            **({} if self.over_plain is None else {"over_plain": round(self.over_plain, 4)}),
            "goals": goal_dicts(goals),
        }
