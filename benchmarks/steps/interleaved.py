"""Weights whose gate and up columns or rows take turns: quantized where they lie, and gradients written so.

python benchmarks/steps/interleaved.py OUTPUT COMMIT [--turns N]

Each beside the same of two halves, the kernel that takes apart or joins, and a copy; in turns in one process, on a CUDA
device. Codes and gradients are compared bit by bit first.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from turns import arguments_of, timed, write

import octavo
import octavo_registry as registry
from octavo_registry.contract import GemmRequest, Weight

SHAPES = {"gpt-oss": (32, 2880, 2880, 32768), "128 small experts": (128, 2048, 768, 65536)}
"""Groups, hidden size, width of the activation, rows in equal groups."""
RECIPES = {"block": octavo.BlockScaling(), "current": octavo.CurrentScaling(), "delayed": octavo.DelayedScaling()}
PLANES = ("rowwise", "rowwise_scale", "columnwise", "columnwise_scale")
ORDERS: tuple[Weight, ...] = ("kn", "nk")
CALLS = 6  # in a row, within a turn


def measure(name: str, order: Weight, turns: int) -> dict[str, dict[str, float]]:
    """Microseconds of the quantizers of every recipe, and of the gradients of those with scales of their own."""
    groups, hidden, width, rows = SHAPES[name]
    shape = (groups, hidden, 2 * width) if order == "kn" else (groups, 2 * width, hidden)
    matrices = (groups * hidden, 2 * width, 1) if order == "kn" else (groups, 2 * width, hidden)
    found = {}
    for kind, recipe in RECIPES.items():
        plan = registry.plan_layer(
            GemmRequest(
                op="fprop", framework="torch", device="cuda", in_dtype="bfloat16", out_dtype="bfloat16", recipe=recipe,
                arch=torch.cuda.get_device_capability(), k=hidden, n=2 * width, groups=groups, sizes="device",
                weight=order,
            ),
            backend="torch-native",
        )  # fmt: skip
        assert plan.quantize_w is not None
        assert plan.wgrad is not None
        exchange = plan.fprop.bound.interleave_halves
        assert exchange is not None
        assert plan.quantize_w.bound.interleaved is not None
        scale: dict[str, Any] = {"scale": torch.ones(groups, device="cuda")} if recipe.stateful else {}
        w = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        quantize, in_turns = plan.quantize_w.run, plan.quantize_w.bound.interleaved(1, order)
        assert in_turns is not None

        def apart(w: Tensor = w, run: Any = exchange) -> Tensor:
            return run(w.view(matrices), 1, False).view(shape)

        ours, theirs = in_turns.run(w, None, **scale), quantize(apart(), None, **scale)
        for plane in PLANES:
            assert torch.equal(getattr(ours, plane).view(torch.uint8), getattr(theirs, plane).view(torch.uint8)), plane
        del ours, theirs
        found[f"quantize {kind}"] = microseconds(
            {
                "turns": lambda w=w, run=in_turns.run, how=scale: run(w, None, **how),
                "halves": lambda w=w, run=quantize, how=scale: run(w, None, **how),
                "taken apart": apart,
                "copy": lambda w=w: torch.empty_like(w).copy_(w),
            },
            turns,
        )
        if kind != "delayed":
            found[f"wgrad {kind}"] = _gradients(plan, shape, matrices, rows, turns)
    return found


def _gradients(plan: Any, shape: tuple[int, ...], matrices: tuple[int, ...], rows: int, turns: int) -> dict[str, float]:
    groups, hidden, width = shape[0], plan.wgrad.request.k, plan.wgrad.request.n
    sizes = torch.full((groups,), rows // groups, device="cuda")
    x, dy = (torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) for columns in (hidden, width))
    x_codes, dy_codes = plan.quantize_x.run(x, sizes), plan.quantize_dy.run(dy, sizes)
    halves, in_turns = plan.wgrad.run, plan.wgrad.bound.interleaved(1).run
    exchange = plan.fprop.bound.interleave_halves

    def joined() -> Tensor:
        dw: Tensor = halves(x_codes, dy_codes, sizes)
        made: Tensor = exchange(dw.view(matrices), 1, True).view(shape)
        return made

    assert torch.equal(in_turns(x_codes, dy_codes, sizes), joined())
    total = torch.zeros(shape, device="cuda")
    return microseconds(
        {
            "turns": lambda: in_turns(x_codes, dy_codes, sizes),
            "halves": lambda: halves(x_codes, dy_codes, sizes),
            "joined": joined,
            "turns, added to fp32": lambda: in_turns(x_codes, dy_codes, sizes, out=total, accumulate=True),
            "halves, added to fp32": lambda: halves(x_codes, dy_codes, sizes, out=total, accumulate=True),
        },
        turns,
    )


def microseconds(runs: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Median microseconds of a call of each."""

    def in_a_row(run: Callable[[], object]) -> None:
        for _ in range(CALLS):
            run()

    times = timed({name: partial(in_a_row, run) for name, run in runs.items()}, turns)
    return {name: round(1000 * statistics.median(each) / CALLS, 1) for name, each in times.items()}


def main() -> None:
    """Measures every shape and order and writes the record."""
    options = arguments_of(__doc__, turns=7)
    torch.manual_seed(0)
    rows = []
    for name, order in ((name, order) for name in SHAPES for order in ORDERS):
        sides = dict(zip(("groups", "k", "f", "rows"), SHAPES[name], strict=True))
        for what, times in measure(name, order, options.turns).items():
            rows.append({"shape": name, **sides, "weight": order, "what": what, "microseconds": times})
            print(json.dumps(rows[-1]), flush=True)
    write(options.output, "interleaved.py", options.commit, rows)


if __name__ == "__main__":
    main()
