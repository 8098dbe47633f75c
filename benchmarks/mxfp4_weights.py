"""A step of an expert MLP whose weights are rounded to MXFP4, beside the same in block scaling.

python benchmarks/mxfp4_weights.py OUTPUT COMMIT

Forward and backward, eager, and the quantizing of both weights alone; in turns in one process, on a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import octavo
import octavo_torch as ot

SHAPES = {"DeepSeek-V3, 32 experts": (32, 7168, 2048, 32768), "Qwen3-30B": (128, 2048, 768, 65536)}
"""Groups, hidden size, width of the activation, rows in equal groups."""

TURNS, WARM, CALLS = 7, 2, 2


def step(layer: ot.GroupedMLP, x: Tensor, sizes: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    """Forward and all gradients."""
    return torch.autograd.grad(layer(x, sizes), [x, *layer.parameters()], dy)


def weights(layer: ot.GroupedMLP, recipe: octavo.Recipe) -> None:
    """The codes that a step makes of its weights."""
    spec = recipe.quantizer("w")
    assert spec is not None
    for weight in layer.parameters():
        ot.quantize(weight.detach(), spec)


def measure(groups: int, hidden: int, width: int, rows: int) -> dict[str, float]:
    """Median milliseconds of each."""
    x = torch.randn(rows, hidden, device="cuda").bfloat16().requires_grad_()
    dy, sizes = torch.randn_like(x), torch.full((groups,), rows // groups, device="cuda")
    runs: dict[str, Callable[[], object]] = {}
    for recipe in (octavo.BlockScaling(), octavo.MXFP4Weights()):
        layer = ot.GroupedMLP(groups, hidden, width, recipe=recipe, dtype=torch.bfloat16, device="cuda")
        runs[recipe.kind] = partial(step, layer, x, sizes, dy)
        runs[f"{recipe.kind}, weights alone"] = partial(weights, layer, recipe)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(TURNS):
        for name, run in runs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(CALLS):
                run()
            end.record()
            end.synchronize()
            if turn >= WARM:
                times[name].append(start.elapsed_time(end) / CALLS)
    return {name: round(statistics.median(each), 3) for name, each in times.items()}


def main() -> None:
    """Writes the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("commit")
    chosen = parser.parse_args()
    record = {
        "command": f"python benchmarks/mxfp4_weights.py {chosen.output.name} {chosen.commit}",
        "machine": {"gpu": torch.cuda.get_device_name()},
        "versions": {"torch": torch.__version__, "octavo-torch": ot.__version__},
        "commit": chosen.commit,
        "unit": "ms",
        "results": {name: measure(*shape) for name, shape in SHAPES.items()},
    }
    chosen.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
