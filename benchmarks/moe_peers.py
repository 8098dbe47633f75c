"""A MoE layer's forward and backward beside SonicMoE's and torch's own grouped GEMM: time, kept bytes, peak.

python benchmarks/moe_peers.py OUTPUT COMMIT [--shape LABEL ...]

All ways of one shape take turns in one process, on a CUDA device: from tokens, choices and their weights to combined
tokens, and back to every gradient. Where sonic-moe does not run, the record says why. Dense products are queued in
front of each call, so that what is timed is the GPU's work; `host_ms` is how long the host takes to queue a step. What
is kept is what stays allocated between forward and backward beside y and the caller's tensors: x, choices, weights, and
codes of weights that are given.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from layers import MOE
from moe_forms import measure, step_times
from torch import Tensor
from torch.nn.functional import silu

import octavo
import octavo_torch as ot
from octavo_bench.errors import AbsentError
from octavo_bench.peers.loading import loaded_sonic_moe

SHAPES: Mapping[str, tuple[int, int, int, int, int]] = {
    "Qwen3-30B": MOE["Qwen3-30B"],
    "32768 x 4096 x 1024, E 64, k 4": (32768, 4, 64, 4096, 1024),
    "32768 x 4096 x 256, E 256, k 16": MOE["16 choices of experts of 256"],
    "32768 x 4096 x 512, E 128, k 8": (32768, 8, 128, 4096, 512),
    "32768 x 4096 x 1024, E 128, k 8": (32768, 8, 128, 4096, 1024),
}
"""Tokens, choices of each, experts, in-features and hidden features; all but the first are SonicMoE's own."""

SONIC, TORCH = "sonic-moe, bf16", "torch _grouped_mm, bf16"
TURNS, WARM = 11, 2
ALIGNED = 8  # rows of which torch's wgrad takes multiples
NAMES = ("y", "x", "weights", "w1", "w2")
_PACKAGES = ("octavo-torch", "octavo-native", "sonic-moe", "quack-kernels", "nvidia-cutlass-dsl", "triton")
_IN_BLOCKS: tuple[tuple[str, octavo.Recipe, Literal["standard", "lean"]], ...] = (
    ("fp8-block", octavo.BlockScaling(), "standard"),
    ("fp8-block, wgrad in bf16", octavo.BlockScaling(wgrad="high_precision"), "standard"),
    ("fp8-block", octavo.BlockScaling(), "lean"),
)
Way = tuple[Callable[[], Tensor], list[Tensor]]
"""A forward, and the leaves whose gradients are taken: x, weights, w1, w2."""


def draw(shape: ot.MoeShape) -> dict[str, Tensor]:
    """Leaves x, weights, w1 and w2, with choices, and dy."""
    torch.manual_seed(1)
    k, f, experts = shape.in_features, shape.hidden_features, shape.experts
    weights, choices = torch.randn(shape.tokens, experts, device="cuda").topk(shape.k, -1)
    given = {
        "x": torch.randn(shape.tokens, k, device="cuda").bfloat16(),
        "weights": weights.softmax(-1),
        "w1": (torch.randn(experts, 2 * f, k, device="cuda") * k**-0.5).bfloat16(),
        "w2": (torch.randn(experts, k, f, device="cuda") * f**-0.5).bfloat16(),
    }
    leaves = {name: leaf.requires_grad_() for name, leaf in given.items()}
    return leaves | {"choices": choices, "dy": torch.randn(shape.tokens, k, device="cuda").bfloat16()}


def grouped_mm(x: Tensor, choices: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """The layer by torch's operations, rows sorted by expert in between, with zeros up to the sizes that it takes."""
    flat, k, rows = choices.view(-1), choices.shape[1], choices.numel()
    order = torch.argsort(flat, stable=True)
    by_expert, experts = flat[order], torch.arange(w1.shape[0], device=x.device)
    ends = torch.searchsorted(by_expert, experts, right=True)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    padded = (sizes + ALIGNED - 1) // ALIGNED * ALIGNED
    ends_padded = padded.cumsum(0)
    place = torch.arange(rows, device=x.device) + (ends_padded - padded - ends + sizes)[by_expert]
    length, offsets = rows + ALIGNED * len(experts), ends_padded.to(torch.int32)
    spread = x.new_zeros(length, x.shape[1]).index_copy(0, place, x.index_select(0, order // k))
    probs = weights.new_zeros(length).index_copy(0, place, weights.view(-1)[order])
    gate, up = torch._grouped_mm(spread, w1.transpose(1, 2), offs=offsets).chunk(2, -1)
    y = torch._grouped_mm(silu(gate) * up * probs[:, None].to(gate.dtype), w2.transpose(1, 2), offs=offsets)
    back = torch.empty_like(order).scatter_(0, order, place)
    return y.index_select(0, back).view(-1, k, y.shape[1]).sum(1)


def ways_of(given: dict[str, Tensor], sonic: Any) -> Iterator[tuple[str, Way]]:
    """Every way of one shape; what a way needs beside the leaves is made here and is the caller's."""
    leaves = {name: given[name] for name in NAMES[1:]}
    values, of_all = {**leaves, "choices": given["choices"]}, list(leaves.values())
    if sonic is not None:
        # its own order of w1's rows and its own integers
        w1 = sonic.interleaved(leaves["w1"].detach()).requires_grad_()
        own = {**values, "w1": w1, "choices": given["choices"].int()}
        yield SONIC, (partial(sonic.layer, **own), [leaves["x"], leaves["weights"], w1, leaves["w2"]])
    yield TORCH, (partial(grouped_mm, **values), of_all)
    for form in ("standard", "lean"):
        yield f"octavo bf16, {form}", (partial(ot.moe_mlp, **values, recipe="bf16", form=form), of_all)
    for label, recipe, form in _IN_BLOCKS:
        block = partial(ot.moe_mlp, **values, recipe=recipe, form=form)
        yield f"octavo {label}, {form}", (block, of_all)
        yield f"octavo {label}, {form}, codes made again", (partial(block, weight_codes="remake"), of_all)
        codes = {name: ot.quantize_weight(leaves[name], recipe) for name in ("w1", "w2")}
        yield f"octavo {label}, {form}, codes given", (partial(block, **codes), of_all)


def _queue_products(filler: Tensor) -> None:
    """Work of some milliseconds, longer than the host takes to queue a step."""
    for _ in range(3):
        torch.mm(filler, filler)


def rows_of(label: str, sonic: Any) -> list[dict[str, Any]]:
    """A row for each way of one shape."""
    shape = ot.MoeShape(*SHAPES[label])
    given = draw(shape)
    ways, rows = dict(ways_of(given, sonic)), {}
    expected: list[Tensor] = []
    for name, way in (
        *((name, ways[name]) for name in ways if name.startswith("octavo bf16, standard")),
        *ways.items(),
    ):
        seen, results = measure(*way, given["dy"])
        if name == SONIC:
            results[3] = sonic.separated(results[3])
        expected = expected or results
        errors = {
            result: round(((ours.float() - own.float()).norm() / own.float().norm()).item(), 5)
            for result, ours, own in zip(NAMES, results, expected, strict=True)
        }
        rows[name] = {
            "kept_bytes_per_token": round(seen["kept_bytes"] / shape.tokens, 1), **seen, "from_octavo_bf16": errors
        }  # fmt: skip
        del results
    del expected
    torch.cuda.empty_cache()
    filler = torch.randn(8192, 8192, device="cuda").bfloat16()
    times = step_times(ways, given["dy"], TURNS, WARM, partial(_queue_products, filler))
    base = times[SONIC if sonic is not None else TORCH]["step_ms"]
    return [
        {"shape": label, "way": name, **row, **times[name], "of_peer": round(times[name]["step_ms"] / base, 3)}
        for name, row in rows.items()
    ]


def peer() -> tuple[Any, str]:
    """SonicMoE's layer and how it was tuned, or None and why it cannot run."""
    try:
        return loaded_sonic_moe()
    except AbsentError as error:
        return None, str(error)


def main() -> None:
    """Writes OUTPUT after every shape."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("commit")
    parser.add_argument(
        "--shape", action="append", choices=SHAPES, help="one of the shapes, instead of all; repeatable"
    )
    arguments = parser.parse_args()
    shapes = {label: SHAPES[label] for label in arguments.shape or SHAPES}
    sonic, tuned = peer()
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    record: dict[str, Any] = {
        "command": f"python benchmarks/moe_peers.py FILE {arguments.commit}",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": {"gpu": torch.cuda.get_device_name()},
        "versions": versions,
        "commit": arguments.commit,
        "sonic-moe": tuned,
        "of_peer": f"time of a step over that of {SONIC if sonic is not None else TORCH}",
        "turns": TURNS - WARM,
        "shapes": {label: vars(ot.MoeShape(*sides)) for label, sides in shapes.items()},
        "rows": [],
    }
    for label in shapes:
        record["rows"] += rows_of(label, sonic)
        torch.cuda.empty_cache()
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
