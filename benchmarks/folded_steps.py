"""Steps of a grouped linear layer in MXFP8, exact and folded, beside block FP8 and bf16, in turns on a CUDA device.

python benchmarks/folded_steps.py OUTPUT COMMIT [--turns N]

A step is forward and backward of `octavo_torch.grouped_linear`, x, w and dy quantized in every step, y, dx and dw in
bf16, even groups. The recipes of a shape take turns in one process, in every order, so that clocks, temperature and
neighbours are shared; "reused" has its weights quantized before. Folded results are compared with block's bit for bit,
and with exact ones by norm.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import random
import statistics
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from layers import LINEAR
from torch import Tensor

import octavo
import octavo_torch as ot

KINDS = ("bf16", "fp8-block", "mxfp8", "mxfp8-folded")
REUSED = "mxfp8-folded, reused"
WARM = 3


def draw(groups: int, k: int, n: int, m: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, w, dy and even sizes on the device; rows differ in size by 4, as those of the other benchmarks do."""
    torch.manual_seed(1)
    loud = torch.exp2(torch.rand(m, 1, device="cuda") * 2)
    x = (torch.randn(m, k, device="cuda") * loud).bfloat16().requires_grad_()
    w = torch.empty(groups, n, k, device="cuda", dtype=torch.bfloat16).normal_(0, k**-0.5).requires_grad_()
    dy = (torch.randn(m, n, device="cuda") * loud).bfloat16()
    return x, w, dy, torch.full((groups,), m // groups, dtype=torch.int32, device="cuda")


def step_of(kind: str, x: Tensor, w: Tensor, dy: Tensor, sizes: Tensor) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
    """y, dx and dw of one step."""
    recipe = octavo.recipe(kind.partition(",")[0])
    weight: Any = ot.quantize_weight(w, recipe) if kind == REUSED else w

    def step() -> tuple[Tensor, Tensor, Tensor]:
        y = ot.grouped_linear(x, weight, sizes, recipe=recipe)
        dx, dw = torch.autograd.grad(y, (x, w), dy)
        return y.detach(), dx, dw

    return step


def timed(steps: dict[str, Callable[[], Any]], turns: int) -> dict[str, list[float]]:
    """Milliseconds of each step in each turn, each turn in an order of its own."""
    orders = list(itertools.permutations(steps))
    random.Random(1).shuffle(orders)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {kind: [] for kind in steps}
    for turn in range(-WARM, turns):
        for kind in orders[turn % len(orders)]:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            steps[kind]()
            last.record()
            if turn >= 0:
                events[kind].append((first, last))
    torch.cuda.synchronize()
    return {kind: [first.elapsed_time(last) for first, last in pairs] for kind, pairs in events.items()}


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("commit")
    parser.add_argument("--turns", type=int, default=40)
    arguments = parser.parse_args()
    rows = []
    for name, shape in LINEAR.items():
        rows.append(row(name, shape, arguments.turns))
        print(json.dumps({key: value for key, value in rows[-1].items() if key != "all_ms"}), flush=True)
        torch.cuda.empty_cache()
    content = {
        "schema_version": 1,
        "command": "python benchmarks/folded_steps.py OUTPUT COMMIT",
        "commit": arguments.commit,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"system": platform.system(), "gpu": torch.cuda.get_device_name()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "rows": rows,
    }
    arguments.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
