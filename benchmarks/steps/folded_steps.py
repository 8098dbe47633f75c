"""Steps of a grouped linear layer in MXFP8, exact and folded, beside block FP8 and bf16, in turns on a CUDA device.

python benchmarks/steps/folded_steps.py OUTPUT COMMIT [--turns N]

A step is forward and backward of `octavo_torch.grouped_linear`, x, w and dy quantized in every step, y, dx and dw in
bf16, even groups. The recipes of a shape take turns in one process, in every order, so that clocks, temperature and
neighbours are shared; "reused" has its weights quantized before. Folded results are compared with block's bit for bit,
and with exact ones by norm.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import octavo
import octavo_torch as ot

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from layers import LINEAR
from turns import arguments_of, draw, timed, write

KINDS = ("bf16", "fp8-block", "mxfp8", "mxfp8-folded")
REUSED = "mxfp8-folded, reused"


def step_of(kind: str, x: Tensor, w: Tensor, dy: Tensor, sizes: Tensor) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
    """y, dx and dw of one step."""
    recipe = octavo.recipe(kind.partition(",")[0])
    weight: Any = ot.quantize_weight(w, recipe) if kind == REUSED else w

    def step() -> tuple[Tensor, Tensor, Tensor]:
        y = ot.grouped_linear(x, weight, sizes, recipe=recipe)
        dx, dw = torch.autograd.grad(y, (x, w), dy)
        return y.detach(), dx, dw

    return step


def differences(steps: dict[str, Callable[[], tuple[Tensor, Tensor, Tensor]]]) -> dict[str, Any]:
    """What folding changes in y, dx and dw."""
    folded = steps["mxfp8-folded"]()
    same = all(torch.equal(ours, theirs) for ours, theirs in zip(folded, steps["fp8-block"](), strict=True))
    exact = steps["mxfp8"]()
    norms = {
        name: float((ours.float() - theirs.float()).norm() / theirs.float().norm())
        for name, ours, theirs in zip(("y", "dx", "dw"), folded, exact, strict=True)
    }
    return {"bits_of_block": same, "from_exact": norms}


def row(name: str, shape: tuple[int, int, int, int], turns: int) -> dict[str, Any]:
    """One shape."""
    operands = draw(*shape)
    steps = {kind: step_of(kind, *operands) for kind in (*KINDS, REUSED)}
    found = differences(steps)
    times = timed(steps, turns)
    median = {kind: statistics.median(each) for kind, each in times.items()}
    over = {
        f"folded_over_{kind}": statistics.median(
            ours / theirs for ours, theirs in zip(times["mxfp8-folded"], times[kind], strict=True)
        )
        for kind in times
        if kind != "mxfp8-folded"
    }
    over["reused_over_bf16"] = statistics.median(
        ours / theirs for ours, theirs in zip(times[REUSED], times["bf16"], strict=True)
    )
    return {"name": name, "shape": list(shape), "ms": median, "turns": turns, **over, **found, "all_ms": times}


def main() -> None:
    """Write the file."""
    arguments = arguments_of(__doc__, turns=40)
    rows = []
    for name, shape in LINEAR.items():
        rows.append(row(name, shape, arguments.turns))
        print(json.dumps({key: value for key, value in rows[-1].items() if key != "all_ms"}), flush=True)
        torch.cuda.empty_cache()
    write(arguments.output, Path(__file__).name, arguments.commit, rows)


if __name__ == "__main__":
    main()
