"""An expert MLP that quantizes w2 beside fc1's product, and a GEMM that leaves multiprocessors to a copy.

python benchmarks/room.py OUTPUT COMMIT

Forward, forward and backward, and fc1's product alone, with so many multiprocessors left; a copy of half a gigabyte on
another stream beside that product. In turns in one process, on a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import octavo
import octavo_registry as registry
import octavo_torch as ot
from octavo_registry.contract import GemmRequest

SHAPES = {"DeepSeek-V3, 32 experts": (32, 7168, 2048, 32768), "Qwen3-30B": (128, 2048, 768, 65536)}
"""Groups, hidden size, width of the activation, rows in equal groups."""

LEFT = (4, 8, 16, 24, 32, 48)
"""Multiprocessors that fc1's product leaves to w2's quantizer."""

TURNS, WARM = 16, 4


def in_turns(ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median milliseconds of each; one after the other within a turn."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(TURNS + WARM):
        marks = []
        torch.cuda._sleep(20_000_000)  # the host is ahead of the device when the first begins, too
        for run in ways.values():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            marks.append((start, end))
        torch.cuda.synchronize()
        for name, (start, end) in zip(ways, marks, strict=True):
            if turn >= WARM:
                times[name].append(start.elapsed_time(end))
    return {name: round(statistics.median(found), 4) for name, found in times.items()}


def plan_of(recipe: octavo.Recipe, k: int, n: int, groups: int) -> Any:
    """A grouped layer's plan."""
    arch = torch.cuda.get_device_capability()
    request = GemmRequest(
        "fprop", "torch", "cuda", "bfloat16", "bfloat16", recipe=recipe, arch=arch, k=k, n=n, groups=groups
    )
    return registry.plan_layer(request, backend="torch-native")


def measure(recipe: octavo.Recipe, groups: int, hidden: int, width: int, rows: int) -> dict[str, dict[str, float]]:
    """Milliseconds by what is run and by what is left."""
    x = torch.randn(rows, hidden, device="cuda").bfloat16().requires_grad_()
    dy, sizes = torch.randn_like(x), torch.full((groups,), rows // groups, device="cuda")
    layers = {
        name: ot.GroupedMLP(groups, hidden, width, recipe=recipe, dtype=torch.bfloat16, device="cuda", room=room)
        for name, room in {"in turn": None, **{str(left): ot.Room(w2=left) for left in LEFT}}.items()
    }
    first = next(iter(layers.values()))
    for layer in layers.values():  # one copy of the weights
        layer.weight1, layer.weight2 = first.weight1, first.weight2

    def step(layer: ot.GroupedMLP) -> object:
        return torch.autograd.grad(layer(x, sizes), [x, *layer.parameters()], dy)

    made = {"forward and backward": in_turns({name: partial(step, layer) for name, layer in layers.items()})}
    with torch.no_grad():
        made["forward"] = in_turns({name: partial(layer, x, sizes) for name, layer in layers.items()})
        plan = plan_of(recipe, hidden, 2 * width, groups)
        codes, weights = plan.quantize_x.run(x, sizes), plan.quantize_w.run(first.weight1)
        have = torch.cuda.get_device_properties(0).multi_processor_count
        products = {"all": plan.fprop.run} | {str(left): plan.fprop.bound.limited(have - left) for left in LEFT}
        made["fc1's product"] = in_turns(
            {name: partial(product, codes, weights, sizes) for name, product in products.items()}
        )
        second = plan_of(recipe, width, hidden, groups)
        made["quantizers"] = in_turns(
            {
                "w1": partial(plan.quantize_w.run, first.weight1),
                "w2": partial(second.quantize_w.run, first.weight2),
            }
        )
        made |= beside_a_copy(products, (codes, weights, sizes))
    return made


def beside_a_copy(products: dict[str, Any], operands: tuple[Any, Any, Tensor]) -> dict[str, dict[str, float]]:
    """When the product has ended, and when the copy that was launched behind it has, from the start of both."""
    source = torch.randn(1 << 28, device="cuda").bfloat16()
    target, side = torch.empty_like(source), torch.cuda.Stream()
    ends: dict[str, dict[str, list[float]]] = {"product": {}, "copy": {}}
    for turn in range(TURNS + WARM):
        for name, product in products.items():
            start, done, copied = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            torch.cuda._sleep(2_000_000)  # both are in their queues before the first begins
            start.record()
            side.wait_event(start)
            product(*operands)
            done.record()
            with torch.cuda.stream(side):
                target.copy_(source)
                copied.record()
            torch.cuda.synchronize()
            if turn >= WARM:
                ends["product"].setdefault(name, []).append(start.elapsed_time(done))
                ends["copy"].setdefault(name, []).append(start.elapsed_time(copied))
    return {
        f"beside each other, end of the {what}": {name: round(statistics.median(each), 4) for name, each in by.items()}
        for what, by in ends.items()
    }


def main() -> None:
    """Writes the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("commit")
    chosen = parser.parse_args()
    recipes = (octavo.BlockScaling(), octavo.RowScaling())
    record = {
        "command": f"python benchmarks/room.py {chosen.output.name} {chosen.commit}",
        "machine": {"gpu": torch.cuda.get_device_name()},
        "versions": {"torch": torch.__version__, "octavo-torch": ot.__version__},
        "commit": chosen.commit,
        "unit": "ms",
        "results": {
            f"{name}, {recipe.kind}": measure(recipe, *shape) for name, shape in SHAPES.items() for recipe in recipes
        },
    }
    chosen.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
