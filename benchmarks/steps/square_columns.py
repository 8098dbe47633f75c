"""wgrad, the quantizer of x and a whole step with square columns of x and without them, in turns on a CUDA device.

python benchmarks/steps/square_columns.py OUTPUT COMMIT [--turns N] [--shapes NAME ...]

Both recipes of a shape take turns in one process, so that clocks, temperature and neighbours are shared. "wgrad" is
stored in bf16, "adds" is added to fp32 gradients; "wgrad_kn" is that of a weight that lies as [G, K, N]. "fprop" and
"dgrad" are the same kernels on the same operands in both, and show what the noise of a turn is. A step is forward and
backward of `octavo_torch.grouped_linear`, x, w and dy quantized in every step. Groups are even.
"""

from __future__ import annotations

import argparse
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
from octavo_native.layouts import NATIVE_COLUMNS, NATIVE_ROWS
from octavo_torch_native.gemm.gemm import Dgrad, Fprop, Wgrad
from octavo_torch_native.quantizers.quantizer import Quantizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from layers import LINEAR
from turns import draw, timed, write

KINDS = ("fp8-block", "fp8-block-square-columns")
LAYOUTS = NATIVE_ROWS, NATIVE_COLUMNS


def calls_of(kind: str, x: Tensor, w: Tensor, dy: Tensor, sizes: Tensor) -> dict[str, Callable[[], Any]]:
    """What is timed, by name."""
    recipe = octavo.recipe(kind)
    specs = {operand: recipe.quantizer(operand) for operand in ("x", "w", "dy")}
    quantizers = {operand: Quantizer(spec, LAYOUTS) for operand, spec in specs.items() if spec is not None}
    quantize = quantizers["x"]
    qx, qdy, qw = quantize(x.detach(), sizes), quantizers["dy"](dy, sizes), quantizers["w"](w.detach())
    fprop, dgrad, wgrad, turned = (
        Fprop("bfloat16"),
        Dgrad("bfloat16"),
        Wgrad("bfloat16"),
        Wgrad("bfloat16", weight="kn"),
    )
    main_grad = torch.zeros(w.shape, device="cuda")

    def step() -> tuple[Tensor, ...]:
        y = ot.grouped_linear(x, w, sizes, recipe=recipe)
        return torch.autograd.grad(y, (x, w), dy)

    return {
        "quantize_x": lambda: quantize(x.detach(), sizes),
        "fprop": lambda: fprop(qx, qw, sizes),
        "dgrad": lambda: dgrad(qdy, qw, sizes),
        "wgrad": lambda: wgrad(qx, qdy, sizes),
        "adds": lambda: wgrad(qx, qdy, sizes, out=main_grad, accumulate=True),
        "wgrad_kn": lambda: turned(qx, qdy, sizes),
        "step": step,
    }


def row(name: str, shape: tuple[int, int, int, int], turns: int) -> dict[str, Any]:
    """One shape."""
    _, k, n, m = shape
    operands = draw(*shape)
    calls = {kind: calls_of(kind, *operands) for kind in KINDS}
    block, square = (calls[kind]["wgrad"]() for kind in KINDS)
    turned = calls[KINDS[1]]["wgrad_kn"]()
    found: dict[str, Any] = {
        "dw_from_block": float((square.float() - block.float()).norm() / block.float().norm()),
        "kn_has_the_bits_of_nk": torch.equal(turned.mT, square),
    }
    del block, square, turned
    medians: dict[str, Any] = {}
    for part in calls[KINDS[0]]:
        times = timed({kind: calls[kind][part] for kind in KINDS}, turns)
        ratios = [ours / theirs for ours, theirs in zip(times[KINDS[1]], times[KINDS[0]], strict=True)]
        medians[part] = {kind: statistics.median(each) for kind, each in times.items()}
        medians[part]["ratio"] = statistics.median(ratios)
    speed = {kind: 2 * m * n * k / medians["wgrad"][kind] / 1e9 for kind in KINDS}
    return {"name": name, "shape": list(shape), "turns": turns, "ms": medians, "wgrad_tflops": speed, **found}


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("commit")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--shapes", nargs="*", default=list(LINEAR))
    arguments = parser.parse_args()
    rows = []
    for name in arguments.shapes:
        rows.append(row(name, LINEAR[name], arguments.turns))
        print(json.dumps(rows[-1]), flush=True)
        torch.cuda.empty_cache()
        write(arguments.output, Path(__file__).name, arguments.commit, rows)


if __name__ == "__main__":
    main()
