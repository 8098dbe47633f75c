"""Graph-safe plans wait for no value of an array (product, promise 3)."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from octavo_conformance.cards import selections
from octavo_conformance.cards.needs import needs
from octavo_conformance.oracles.quantizing import COLUMNS, GROUPS, ROWS, arguments_for, sizes_for
from octavo_conformance.problems.case import Case
from octavo_conformance.problems.inputs import Rng, draw
from octavo_conformance.problems.operands import draw_problem, gemm_call

FORBIDDEN = ("pydantic", "pluggy", "inspect", "os")
CALLS = 3


def _quantize_call(case: Case, rng: Rng, **fields: Any) -> tuple[Any, Any]:
    plan = case.plan("quantize", k=COLUMNS, groups=GROUPS, **fields)
    arguments = arguments_for(case.spec, rng, GROUPS)
    if "scale" in arguments:
        arguments["scale"] = case.array(arguments["scale"])
    x = case.array(draw(rng, (ROWS, COLUMNS), case.dtype))

    def call(x: Any, sizes: Any) -> Any:
        return plan.run(x, sizes, operand=case.spec.role, **arguments)

    return call, x


@needs("quantize", selections.one_per_scaling, sizes="device", graph_safe=True)
def test_quantize_reads_no_value(case: Case, rng: Rng) -> None:
    """A graph-safe quantizer with device sizes never waits for them (fault 36)."""
    call, x = _quantize_call(case, rng)
    reads = case.bridge.host_reads(call, x, case.sizes(sizes_for(rng)))
    assert not reads, f"quantize waits for values: {', '.join(reads)}"


@needs("gemm", selections.gemms, sizes="device", graph_safe=True)
def test_gemm_reads_no_value(case: Case, rng: Rng) -> None:
    """A graph-safe GEMM with device sizes never waits for them (fault 36)."""
    problem = draw_problem(rng, case.dtype)
    run, operands = gemm_call(case, problem)
    reads = case.bridge.host_reads(lambda sizes: run(*operands, sizes), case.sizes(problem.sizes))
    assert not reads, f"{case.gemm} waits for values: {', '.join(reads)}"


def _frames(function: Any) -> set[str]:
    """Top-level packages of every Python frame that `function` enters."""
    seen: set[str] = set()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            seen.add(str(frame.f_globals.get("__name__", "")).partition(".")[0])

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        for _ in range(CALLS):
            function()
    finally:
        sys.setprofile(before)
    return seen


@needs("gemm", selections.gemms)
def test_no_forbidden_frame_in_a_gemm(case: Case, rng: Rng) -> None:
    """A plan's run enters no frame of pydantic, pluggy, inspect or os (architecture: the hot path)."""
    problem = draw_problem(rng, case.dtype)
    run, operands = gemm_call(case, problem)
    sizes = case.sizes(problem.sizes)
    run(*operands, sizes)
    entered = sorted(_frames(lambda: run(*operands, sizes)) & set(FORBIDDEN))
    assert not entered, f"{case.gemm} enters frames of {', '.join(entered)} on every call"


@needs("quantize", selections.one_per_scaling)
def test_no_forbidden_frame_in_quantize(case: Case, rng: Rng) -> None:
    """The same for the quantizer's run."""
    call, x = _quantize_call(case, rng)
    sizes = case.sizes(sizes_for(rng))
    call(x, sizes)
    entered = sorted(_frames(lambda: call(x, sizes)) & set(FORBIDDEN))
    assert not entered, f"quantize enters frames of {', '.join(entered)} on every call"
