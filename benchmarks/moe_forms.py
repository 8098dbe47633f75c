"""Forms of a MoE layer beside permute, grouped_mlp and unpermute in a row: kept bytes, peak, time and bits.

python benchmarks/moe_forms.py OUTPUT COMMIT

All ways of one shape and recipe take turns in one process, on a CUDA device. What is kept is what stays allocated
between forward and backward beside y and the caller's tensors.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from layers import MOE
from torch import Tensor

import octavo
import octavo_torch as ot
from octavo_bench.harness.timing import turn_order

SHAPES = {label: ot.MoeShape(*sides) for label, sides in MOE.items()}
KINDS = ("bf16", "fp8-block", "fp8-current", "fp8-row", "fp8-delayed", "mxfp8", "nvfp4")
FORMS = ("standard", "lean", "recompute", "keep_all")
TURNS, WARM = 12, 2
_BLOCK = 512


def draw(shape: ot.MoeShape, recipe: octavo.Recipe) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Leaves x, weights, w1 and w2, with choices; and the options of a call."""
    torch.manual_seed(1)
    k, f, experts = shape.in_features, shape.hidden_features, shape.experts
    weights, choices = torch.randn(shape.tokens, experts, device="cuda").softmax(-1).topk(shape.k, -1)
    leaves = {
        "x": torch.randn(shape.tokens, k, device="cuda").bfloat16(),
        "weights": weights,
        "w1": (torch.randn(experts, 2 * f, k, device="cuda") * k**-0.5).bfloat16(),
        "w2": (torch.randn(experts, k, f, device="cuda") * f**-0.5).bfloat16(),
    }
    how: dict[str, Any] = {"recipe": recipe}
    if isinstance(recipe, octavo.DelayedScaling):
        how["state"] = tuple(ot.DelayedState.create(recipe, experts, "cuda") for _ in range(2))
    if recipe.stochastic:
        how["seed"] = 1
    return {"choices": choices, **{name: leaf.requires_grad_() for name, leaf in leaves.items()}}, how


def composed(given: dict[str, Tensor], how: dict[str, Any]) -> Tensor:
    """The three operations in a row."""
    rows, sizes, routing = ot.permute(given["x"], given["choices"], given["w1"].shape[0])
    probs = routing.to_rows(given["weights"])
    return ot.unpermute(ot.grouped_mlp(rows, given["w1"], given["w2"], sizes, probs=probs, **how), routing)


def measure(call: Callable[[], Tensor], leaves: list[Tensor], dy: Tensor) -> tuple[dict[str, int], list[Tensor]]:
    """Bytes of the third step, from which on passes are run again that the second has written down, and its results."""
    for _ in range(3):
        y = result = None
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = call()
        kept = torch.cuda.memory_allocated() - before - y.untyped_storage().nbytes()
        forward = torch.cuda.max_memory_allocated() - before
        grads = torch.autograd.grad(y, leaves, dy)
        step = torch.cuda.max_memory_allocated() - before
        result = [y.detach(), *grads]
        del grads
    assert result is not None
    return {"kept_bytes": kept, "forward_peak_bytes": forward, "peak_bytes": step}, result


def step_times(
    ways: Mapping[str, tuple[Callable[[], Tensor], list[Tensor]]],
    dy: Tensor,
    turns: int,
    warm: int,
    queued_before: Callable[[], object] = lambda: None,
) -> dict[str, dict[str, float]]:
    """Median milliseconds of the forward and of the step of each way, a call and its leaves, in turns.

    queued_before   work for the GPU in front of each call, while which the host can queue the call
    host_ms         how long the host takes to queue a step
    """
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    for turn in range(turns):
        for name in (list(ways)[at] for at in turn_order(len(ways), turn)):
            call, leaves = ways[name]
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            queued_before()
            begun = time.perf_counter()
            marks[0].record()
            y = call()
            marks[1].record()
            torch.autograd.grad(y, leaves, dy)
            marks[2].record()
            host = (time.perf_counter() - begun) * 1e3
            torch.cuda.synchronize()
            times[name].append((marks[0].elapsed_time(marks[1]), marks[0].elapsed_time(marks[2]), host))
            del y
    return {
        name: {
            column: round(statistics.median(each), 4)
            for column, each in zip(("forward_ms", "step_ms", "host_ms"), zip(*runs[warm:], strict=True), strict=True)
        }
        for name, runs in times.items()
    }


def predicted(recipe: octavo.Recipe, shape: ot.MoeShape, form: str, weight_codes: str) -> int:
    """What bytes_kept says of the tensors that the caller does not hold."""
    kept = ot.bytes_kept(recipe, shape, form, weight_codes=weight_codes, device="cuda")  # type: ignore[arg-type]
    callers = ("weights",) if form == "keep_all" else ("x", "choices", "weights")
    return kept.allocated - sum(-(-kept.tensors[name] // _BLOCK) * _BLOCK for name in callers)


def rows_of(label: str, kind: str) -> list[dict[str, Any]]:
    """A row for each way of one shape and recipe."""
    shape, recipe = SHAPES[label], octavo.recipe(kind)
    given, how = draw(shape, recipe)
    leaves = [given[name] for name in ("x", "weights", "w1", "w2")]
    dy = torch.randn_like(given["x"])
    ways: dict[str, Callable[[], Tensor]] = {"composed": partial(composed, given, how)}
    rows: dict[str, dict[str, Any]] = {"composed": {}}
    for form in FORMS:
        for codes in ("keep",) if kind == "bf16" or form == "keep_all" else ("keep", "remake"):
            name = f"{form}, weights' codes: {codes}"
            ways[name] = partial(ot.moe_mlp, **given, form=form, weight_codes=codes, **how)  # type: ignore[arg-type]
            rows[name] = {"kept_predicted": predicted(recipe, shape, form, codes)}
    expected: list[Tensor] = []
    for name, call in ways.items():
        seen, result = measure(call, leaves, dy)
        expected = expected or result
        pairs = list(zip(result, expected, strict=True))
        rows[name] |= seen | {"same_bits": all(torch.equal(ours, theirs) for ours, theirs in pairs)}
        if name.startswith("lean"):
            errors = [((ours.float() - own.float()).norm() / own.float().norm()).item() for ours, own in pairs]
            rows[name]["relative_error"] = dict(zip(("y", "x", "weights", "w1", "w2"), errors, strict=True))
        del result, pairs
    for name, times in step_times({name: (call, leaves) for name, call in ways.items()}, dy, TURNS, WARM).items():
        rows[name] |= times
    return [{"shape": label, "recipe": kind, "way": name, **row} for name, row in rows.items()]


def main() -> None:
    """Writes OUTPUT after every recipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("commit")
    arguments = parser.parse_args()
    record: dict[str, Any] = {
        "command": f"python benchmarks/moe_forms.py moe.json {arguments.commit}",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": {"gpu": torch.cuda.get_device_name()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "octavo-torch": ot.__version__},
        "commit": arguments.commit,
        "shapes": {label: vars(shape) for label, shape in SHAPES.items()},
        "rows": [],
    }
    for label in SHAPES:
        for kind in KINDS:
            record["rows"] += rows_of(label, kind)
            torch.cuda.empty_cache()
            arguments.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
