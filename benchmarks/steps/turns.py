"""What the scripts of this folder share: arguments, operands of a layer, calls that take turns, and the record."""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import random
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WARM = 3


def arguments_of(script: str | None, turns: int) -> argparse.Namespace:
    """output, commit and turns, as given; `script` is the script's docstring."""
    parser = argparse.ArgumentParser(description=script, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("commit")
    parser.add_argument("--turns", type=int, default=turns)
    return parser.parse_args()


def draw(groups: int, k: int, n: int, m: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, w, dy and even sizes on the device; rows differ in size by 4, as those of the other benchmarks do."""
    torch.manual_seed(1)
    loud = torch.exp2(torch.rand(m, 1, device="cuda") * 2)
    x = (torch.randn(m, k, device="cuda") * loud).bfloat16().requires_grad_()
    w = torch.empty(groups, n, k, device="cuda", dtype=torch.bfloat16).normal_(0, k**-0.5).requires_grad_()
    dy = (torch.randn(m, n, device="cuda") * loud).bfloat16()
    return x, w, dy, torch.full((groups,), m // groups, dtype=torch.int32, device="cuda")


def timed(calls: dict[str, Callable[[], Any]], turns: int, busy_cycles: int = 0) -> dict[str, list[float]]:
    """Milliseconds of each call in each turn, each turn in another order.

    busy_cycles   for which the device is kept busy in front of each call, so that a short one is queued behind it
    """
    orders = list(itertools.permutations(calls))
    random.Random(1).shuffle(orders)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for turn in range(-WARM, turns):
        for name in orders[turn % len(orders)]:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if busy_cycles:
                torch.cuda._sleep(busy_cycles)
            first.record()
            calls[name]()
            last.record()
            if turn >= 0:
                events[name].append((first, last))
    torch.cuda.synchronize()
    return {name: [first.elapsed_time(last) for first, last in pairs] for name, pairs in events.items()}


def write(output: Path, script: str, commit: str, rows: list[dict[str, Any]]) -> None:
    """The record of one of these scripts, by its file name."""
    content = {
        "schema_version": 1,
        "command": f"python benchmarks/steps/{script} OUTPUT COMMIT",
        "commit": commit,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"system": platform.system(), "gpu": torch.cuda.get_device_name()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "rows": rows,
    }
    output.write_text(json.dumps(content, indent=1) + "\n")
