"""Weights whose gate and up columns or rows take turns: quantized where they lie, and gradients written so.

python benchmarks/steps/interleaved.py OUTPUT COMMIT

Each beside the same of two halves, the kernel that takes apart or joins, and a copy; in turns in one process, on a CUDA
device. Codes and gradients are compared bit by bit first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import octavo
import octavo_registry as registry
from octavo_registry.contract import GemmRequest, Weight

SHAPES = {"gpt-oss": (32, 2880, 2880, 32768), "128 small experts": (128, 2048, 768, 65536)}
"""Groups, hidden size, width of the activation, rows in equal groups."""
RECIPES = {"block": octavo.BlockScaling(), "current": octavo.CurrentScaling(), "delayed": octavo.DelayedScaling()}
PLANES = ("rowwise", "rowwise_scale", "columnwise", "columnwise_scale")
ORDERS: tuple[Weight, ...] = ("kn", "nk")
TURNS, CALLS = 7, 6


def measure(name: str, order: Weight) -> dict[str, dict[str, float]]:
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
        found[f"quantize {kind}"] = timed(
            {
                "turns": lambda w=w, run=in_turns.run, how=scale: run(w, None, **how),
                "halves": lambda w=w, run=quantize, how=scale: run(w, None, **how),
                "taken apart": apart,
                "copy": lambda w=w: torch.empty_like(w).copy_(w),
            }
        )
        if kind != "delayed":
            found[f"wgrad {kind}"] = _gradients(plan, shape, matrices, rows)
    return found


def _gradients(plan: Any, shape: tuple[int, ...], matrices: tuple[int, ...], rows: int) -> dict[str, float]:
    groups, hidden, width = shape[0], plan.wgrad.request.k, plan.wgrad.request.n
    sizes = torch.full((groups,), rows // groups, device="cuda")
    x, dy = (torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) for columns in (hidden, width))
    x_codes, dy_codes = plan.quantize_x.run(x, sizes), plan.quantize_dy.run(dy, sizes)
    halves, turns = plan.wgrad.run, plan.wgrad.bound.interleaved(1).run
    exchange = plan.fprop.bound.interleave_halves

    def joined() -> Tensor:
        dw: Tensor = halves(x_codes, dy_codes, sizes)
        made: Tensor = exchange(dw.view(matrices), 1, True).view(shape)
        return made

    assert torch.equal(turns(x_codes, dy_codes, sizes), joined())
    total = torch.zeros(shape, device="cuda")
    return timed(
        {
            "turns": lambda: turns(x_codes, dy_codes, sizes),
            "halves": lambda: halves(x_codes, dy_codes, sizes),
            "joined": joined,
            "turns, added to fp32": lambda: turns(x_codes, dy_codes, sizes, out=total, accumulate=True),
            "halves, added to fp32": lambda: halves(x_codes, dy_codes, sizes, out=total, accumulate=True),
        }
    )


def timed(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median microseconds of each, in turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(TURNS):
        for name, run in runs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            run()
            start.record()
            for _ in range(CALLS):
                run()
            end.record()
            end.synchronize()
            times[name].append(1000 * start.elapsed_time(end) / CALLS)
    return {name: round(statistics.median(measured), 1) for name, measured in times.items()}


def main() -> None:
    """Measures every shape and order and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("commit")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for name, order in ((name, order) for name in SHAPES for order in ORDERS):
        for what, times in measure(name, order).items():
            rows.append({"shape": name, "weight": order, "what": what, "microseconds": times})
            print(json.dumps(rows[-1]), flush=True)
    record = {
        "command": "python benchmarks/steps/interleaved.py FILE COMMIT",
        "commit": options.commit,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__},
        "shapes": {name: dict(zip(("groups", "k", "f", "rows"), sides, strict=True)) for name, sides in SHAPES.items()},
        "rows": rows,
    }
    options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
