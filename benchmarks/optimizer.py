"""AdamW's step by a kernel, composed of torch's operations, and torch's fused AdamW followed by the quantizer.

python benchmarks/optimizer.py OUTPUT COMMIT

Everything that is compared takes turns in one process, on a CUDA device, with a copy of the bytes that the step has to
move: read and write together, counted below. A weight is [64, 1536, 2048], half of fc1 of Qwen3-30B's layer, with
codes of block scaling; gradients are fp32 `main_grad`s, as wgrad adds to them, or bf16.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import octavo_torch as ot
from octavo_torch.optimizers import stepping

SHAPE = (64, 1536, 2048)
TURNS, CALLS = 8, 4
Run = Callable[[], object]

CASES: tuple[tuple[torch.dtype, int, torch.dtype], ...] = (
    (torch.float32, 32, torch.float32),
    (torch.float32, 32, torch.bfloat16),
    (torch.float32, 8, torch.float32),
    (torch.float32, 8, torch.bfloat16),
    (torch.bfloat16, 32, torch.float32),
    (torch.bfloat16, 32, torch.bfloat16),
    (torch.bfloat16, 8, torch.float32),
    (torch.bfloat16, 8, torch.bfloat16),
)
"""Dtype of masters, bits of moments, dtype of gradients."""


def bytes_of_step(master: torch.dtype, state_bits: int, grad: torch.dtype, written: float) -> float:
    """Per element: master and moments read and written, the gradient read, `written` bytes of codes or values."""
    moments = 2 * (1 + 4 / 128) if state_bits == 8 else 8
    return 2 * master.itemsize + 2 * moments + grad.itemsize + written


def in_turns(runs: Mapping[str, Run], calls: int = CALLS) -> dict[str, float]:
    """Median microseconds of each call."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(TURNS + 1):
        for name, run in runs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(calls):
                run()
            end.record()
            end.synchronize()
            if turn:  # the first one warms up
                times[name].append(start.elapsed_time(end) * 1e3 / calls)
    return {name: round(statistics.median(each), 1) for name, each in times.items()}


def copy_of(count: int) -> Run:
    """A copy that reads and writes so many bytes in all."""
    source, to = (torch.zeros(count // 2, dtype=torch.uint8, device="cuda") for _ in range(2))
    return lambda: to.copy_(source)


def weight(coded: bool) -> torch.nn.Parameter:
    """Codes of block scaling in both planes, or bf16 values."""
    values = torch.randn(SHAPE, device="cuda").mul_(0.02).bfloat16()
    if not coded:
        return torch.nn.Parameter(values)
    with ot.quantized_parameters("fp8-block"):
        layer = ot.GroupedLinear(SHAPE[0], SHAPE[2], SHAPE[1], device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(values)
    return layer.weight


def measure(case: tuple[torch.dtype, int, torch.dtype], coded: bool) -> dict[str, Any]:
    """One row: microseconds of each way, and the part of the copy's rate that the kernel reaches."""
    master, bits, grad = case
    parameter = weight(coded)
    written = 2 + 8 / 128**2 if coded else 0 if master is torch.bfloat16 else 2
    per_element = bytes_of_step(master, bits, grad, written)
    total = int(per_element * parameter.numel())
    parameter.main_grad = torch.randn(SHAPE, device="cuda", dtype=grad).mul_(1e-3)  # type: ignore[attr-defined]
    options: dict[str, Any] = {"master_dtype": master, "state_bits": bits}
    steps = ot.AdamW([parameter], 1e-4, capturable=True, **options)
    eager = ot.AdamW([parameter], 1e-4, **options)

    def composed() -> None:
        with mock.patch.object(stepping, "step_for", return_value=None):
            eager.step()

    steps.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps.step()
    runs: dict[str, Run] = {"copy": copy_of(total), "kernel": eager.step, "kernel in a graph": graph.replay}
    row = in_turns({**runs, "copy again": runs["copy"]})
    row |= in_turns({"composed": composed}, 1)
    copied = (row["copy"] + row["copy again"]) / 2
    found: dict[str, Any] = {
        "bytes per element": round(per_element, 3),
        "copy TB/s": round(total / copied / 1e6, 3),
        "microseconds": row,
        "kernel over copy": round(copied / row["kernel"], 3),
    }
    if case == CASES[0] and coded:
        del steps, graph, eager
        found["torch"] = torch_fused(parameter)
    return found


def torch_fused(parameter: torch.nn.Parameter) -> dict[str, float]:
    """torch's fused AdamW over an fp32 master, and then the weight's quantizer."""
    master = torch.nn.Parameter(torch.randn(SHAPE, device="cuda"))
    master.grad = parameter.main_grad  # type: ignore[attr-defined]
    optimizer = torch.optim.AdamW([master], 1e-4, fused=True)

    @torch.no_grad()
    def both() -> None:
        optimizer.step()
        parameter.copy_(master)

    return in_turns({"fused": optimizer.step, "fused, then quantized": both})


def name_of(case: tuple[torch.dtype, int, torch.dtype]) -> str:
    """A case in words."""
    master, bits, grad = (str(part).removeprefix("torch.") for part in case)
    return f"{master} master, {bits}-bit moments, {grad} gradient"


def main() -> None:
    """Writes the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("commit")
    chosen = parser.parse_args()
    results: dict[str, Any] = {}
    for coded in (True, False):
        rows = results["codes of block scaling, both planes" if coded else "bf16 values"] = {}
        for case in CASES:
            rows[name_of(case)] = measure(case, coded)
            torch.cuda.empty_cache()
            print(coded, name_of(case), rows[name_of(case)], flush=True)
    record = {
        "command": f"python benchmarks/optimizer.py {chosen.output.name} {chosen.commit}",
        "machine": {"gpu": torch.cuda.get_device_name()},
        "versions": {"torch": torch.__version__, "octavo-torch": ot.__version__},
        "commit": chosen.commit,
        "shape": SHAPE,
        "turns": TURNS,
        "unit": "us",
        "results": results,
    }
    chosen.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
