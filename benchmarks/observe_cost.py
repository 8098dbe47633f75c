"""What octavo_torch.observe costs: a training step of one expert MLP, observed and not, in turns.

    python benchmarks/observe_cost.py [--device cuda] [--recipe mxfp8] [--shape G,K,F,M] [--out FILE]

Prints both medians with their ranges, and the share that observing one step in a hundred adds.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import octavo
import octavo_torch


def measure(device: str, recipe: str, shape: tuple[int, int, int, int], repeats: int) -> dict[str, Any]:
    """Seconds of a step: forward, backward and what `observer.step()` does, by whether it was observed."""
    groups, features, hidden, rows = shape
    model = octavo_torch.GroupedMLP(
        groups, features, hidden, recipe=octavo.recipe(recipe), dtype=torch.bfloat16, device=device, seed=0
    )
    x = torch.randn(rows, features, dtype=torch.bfloat16, device=device, requires_grad=True)
    dy = torch.randn(rows, features, dtype=torch.bfloat16, device=device)
    sizes = torch.full((groups,), rows // groups, device=device)

    def step(observer: octavo_torch.Observer) -> float:
        _wait(device)
        start = time.perf_counter()
        model(x, sizes).backward(dy)
        observer.step()
        _wait(device)
        return time.perf_counter() - start

    seconds: dict[bool, list[float]] = {True: [], False: []}
    with octavo_torch.observe(model, every=2) as observer:
        for turn in range(2 * repeats + 4):
            observed = observer.observing
            model.zero_grad()
            took = step(observer)
            if turn >= 4:
                seconds[observed].append(took)
    plain, observed_seconds = (statistics.median(seconds[kind]) for kind in (False, True))
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "recipe": recipe,
        "shape": list(shape),
        "plain_ms": _range(seconds[False]),
        "observed_ms": _range(seconds[True]),
        "percent_at_one_step_in_a_hundred": round((observed_seconds / plain - 1), 4),
    }


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _range(seconds: list[float]) -> dict[str, float]:
    found = {"median": statistics.median(seconds), "low": min(seconds), "high": max(seconds)}
    return {name: round(1000 * value, 3) for name, value in found.items()}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--recipe", default="mxfp8")
    parser.add_argument("--shape", default="8,512,1024,4096", help="G,K,F,M of the MLP")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    groups, features, hidden, rows = (int(side) for side in options.shape.split(","))
    result = measure(options.device, options.recipe, (groups, features, hidden, rows), options.repeats)
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
