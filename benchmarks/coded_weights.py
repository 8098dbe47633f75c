"""A MoE layer whose weights live as codes beside one that quantizes bf16 weights in every step: time and peak memory.

python benchmarks/coded_weights.py OUTPUT COMMIT

Both layers, as one operation and as permute, grouped_mlp and unpermute, take turns in one process, on a CUDA device.
The step is forward and backward with gradients of everything. For memory several layers follow each other, each
quantized once for two microbatches: bf16 weights with their codes beside them, or codes alone.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from moe_forms import SHAPES, composed, draw, step_times
from torch import Tensor

import octavo
import octavo_torch as ot

TURNS, WARM = 24, 4
LAYERS = 4
"""Layers of the model whose memory is measured."""

Leaves = dict[str, Tensor]


def as_codes(leaves: Leaves, shape: ot.MoeShape, recipe: octavo.Recipe) -> Leaves:
    """The same leaves, the weights as codes."""
    with ot.quantized_parameters(recipe):
        mlp = ot.GroupedMLP(
            shape.experts, shape.in_features, shape.hidden_features, device="cuda", dtype=torch.bfloat16
        )
    with torch.no_grad():
        mlp.weight1.copy_(leaves["w1"])
        mlp.weight2.copy_(leaves["w2"])
    return {**leaves, "w1": mlp.weight1, "w2": mlp.weight2}


def trained(leaves: Leaves) -> list[Tensor]:
    """x, the choices' weights, w1 and w2, which get gradients."""
    return [leaves[name] for name in ("x", "weights", "w1", "w2")]


def peak_of(shape: ot.MoeShape, recipe: octavo.Recipe, coded: bool) -> dict[str, int]:
    """Bytes of LAYERS layers' weights, and the peak of two microbatches' steps that add to bf16 gradients."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    layers = []
    for _ in range(LAYERS):
        leaves, _ = draw(shape, recipe)
        layers.append(as_codes(leaves, shape, recipe) if coded else leaves)
    tokens = {name: layers[0][name] for name in ("x", "choices", "weights")}
    pairs = [(layer["w1"], layer["w2"]) for layer in layers]
    del layers, leaves
    held = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    dy = torch.randn_like(tokens["x"])
    quantized = [
        (w1, w2) if coded else (ot.quantize_weight(w1, recipe), ot.quantize_weight(w2, recipe)) for w1, w2 in pairs
    ]
    for _ in range(2):
        y = tokens["x"]
        for w1, w2 in quantized:
            y = ot.moe_mlp(y, tokens["choices"], tokens["weights"], w1, w2, recipe=recipe)
        y.backward(dy)
        del y
    return {"held_before": held, "peak": torch.cuda.max_memory_allocated() - before}


def record_of(label: str, kind: str) -> dict[str, Any]:
    """Times, bits and bytes of one shape and recipe."""
    shape, recipe = SHAPES[label], octavo.recipe(kind)
    values, how = draw(shape, recipe)
    codes = as_codes(values, shape, recipe)
    dy = torch.randn_like(values["x"])
    ways: dict[str, tuple[Callable[[], Tensor], list[Tensor]]] = {}
    for held, leaves in (("bf16 weights", values), ("codes", codes)):
        ways[f"three operations, {held}"] = partial(composed, leaves, how), trained(leaves)
        ways[f"one operation, {held}"] = partial(ot.moe_mlp, **leaves, **how), trained(leaves)
    results = {}
    for name, (call, leaves) in ways.items():
        y = call()
        results[name] = (y.detach(), *torch.autograd.grad(y, leaves, dy))
        del y
    first = next(iter(results.values()))
    same = all(torch.equal(ours, theirs) for each in results.values() for ours, theirs in zip(each, first, strict=True))
    del results, first
    times = step_times(ways, dy, TURNS, WARM)
    del ways, values, codes, dy
    peaks = {"bf16 weights and codes": peak_of(shape, recipe, False), "codes": peak_of(shape, recipe, True)}
    return {"shape": label, "recipe": kind, "same_bits": same, "times": times, "bytes": peaks}


def main() -> None:
    """Writes the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("commit")
    arguments = parser.parse_args()
    record = {
        "command": f"python benchmarks/coded_weights.py coded-weights.json {arguments.commit}",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": {"gpu": torch.cuda.get_device_name()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "octavo-torch": ot.__version__},
        "commit": arguments.commit,
        "layers": LAYERS,
        "rows": [record_of(label, "fp8-block") for label in ("Qwen3-30B", "DSv3, 32 of 256 experts")],
    }
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
