"""Steps of a grouped linear layer whose quantizers write the bf16 values that GEMMs read, beside codes and copies.

python benchmarks/steps/values_steps.py OUTPUT COMMIT [--turns N]

A step is forward and backward of `octavo_torch.grouped_linear` in exact MXFP8 and NVFP4, x, w and dy quantized in every
step, even groups. Both ways take turns in one process on a CUDA device, and y, dx and dw are compared bit for bit; the
way with codes is the same layer, told that nobody multiplies copies. The peak is what a step allocates beside its
operands.
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
from octavo_torch_native.linear import values

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from layers import LINEAR
from turns import arguments_of, draw, timed, write

Step = Callable[[], tuple[Tensor, Tensor, Tensor]]


def step_of(kind: str, of_values: bool, x: Tensor, w: Tensor, dy: Tensor, sizes: Tensor) -> Step:
    """y, dx and dw of one step. A recipe object of its own has a layer of its own."""
    recipe = type(octavo.recipe(kind)).model_validate(dict(octavo.recipe(kind)))

    def step() -> tuple[Tensor, Tensor, Tensor]:
        kept, values.emulates = values.emulates, lambda request: of_values
        try:
            y = ot.grouped_linear(x, w, sizes, recipe=recipe, seed=5, backend="torch-native")
        finally:
            values.emulates = kept
        dx, dw = torch.autograd.grad(y, (x, w), dy)
        return y.detach(), dx, dw

    return step


def peak_of(step: Step) -> int:
    """Bytes that a step has at once beside its operands."""
    step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - before


def row(name: str, kind: str, shape: tuple[int, int, int, int], turns: int) -> dict[str, Any]:
    """One shape in one recipe."""
    operands = draw(*shape)
    steps = {way: step_of(kind, way == "values", *operands) for way in ("codes", "values")}
    peaks = {way: peak_of(step) for way, step in steps.items()}
    same = all(torch.equal(ours, theirs) for ours, theirs in zip(steps["values"](), steps["codes"](), strict=True))
    times = timed(steps, turns)
    return {
        "name": name,
        "shape": list(shape),
        "recipe": kind,
        "ms": {way: statistics.median(each) for way, each in times.items()},
        "ratio": statistics.median(ours / theirs for ours, theirs in zip(times["values"], times["codes"], strict=True)),
        "same_bits": same,
        "peak_bytes": peaks,
        "turns": turns,
    }


def main() -> None:
    """Write the file."""
    arguments = arguments_of(__doc__, turns=20)
    rows = []
    for name, shape in LINEAR.items():
        for kind in ("mxfp8", "nvfp4"):
            rows.append(row(name, kind, shape, arguments.turns))
            print(json.dumps(rows[-1]), flush=True)
            torch.cuda.empty_cache()
    write(arguments.output, Path(__file__).name, arguments.commit, rows)


if __name__ == "__main__":
    main()
