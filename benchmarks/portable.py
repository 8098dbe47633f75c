"""torch-triton on the GPU that is here, beside torch's own operations and torch-native's kernels where they run.

python benchmarks/portable.py OUTPUT COMMIT [--shape NAME] [--repeats N]

All ways of one case take turns in one process: products in bf16, steps of a layer in block scaling and in bf16,
quantizers beside a copy of their bytes, moved rows beside index_select. Group sizes are even and stay on the device.
A way that does not run here is left out, and the record says why.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from layers import LINEAR
from torch import Tensor

import octavo
import octavo_registry as registry
import octavo_torch as ot
from octavo.grouped_tensor import PLAIN
from octavo.recipe_base import GEMMS, Gemm
from octavo_bench.harness.machine import machine, versions
from octavo_bench.harness.timing import cuda_times_in_turn
from octavo_bench.harness.traffic import quantize_traffic
from octavo_registry.contract import GemmRequest, MoveRequest

MINE = "torch-triton"
BACKENDS = (MINE, "torch-native")
RECIPES = ("fp8-delayed", "fp8-current", "fp8-row", "fp8-block", "mxfp8", "nvfp4")
CHOICES = {"Mixtral fc1": 2, "gpt-oss-120b fc1": 4}  # of each token; 8 where a layer is not named

TORCH, COPY, SELECT = "torch grouped_mm, bf16", "a copy of the bytes", "torch index_select"
Call = Callable[[], object]
Make = dict[str, Callable[[], Call]]


class Case(NamedTuple):
    """Ways to do one thing, of which all that run take turns.

    make   makes the call of each way, or raises what the record says of it
    peer   the way whose time the others are compared with
    unit   of the rate: "tflops", "tb_per_s"
    work   floating-point operations of a call, or bytes that it has to move, of each way where they differ
    """

    name: str
    make: Make
    peer: str
    unit: str
    work: int | Mapping[str, int]


class Layer(NamedTuple):
    """x [M, K], w [G, N, K], dy [M, N] in bf16, even `sizes` [G], where each group ends; FLOPs of one product."""

    x: Tensor
    w: Tensor
    dy: Tensor
    sizes: Tensor
    ends: Tensor
    flops: int

    @classmethod
    def drawn(cls, groups: int, k: int, n: int, rows: int) -> Layer:
        """Normal values, whose rows differ in size: zeros would be cheaper to multiply."""
        torch.manual_seed(1)
        drawn = [torch.randn(side, device="cuda").bfloat16() for side in ((rows, k), (groups, n, k), (rows, n))]
        for value in drawn:
            value.mul_(torch.rand((*value.shape[:-1], 1), device="cuda").add_(0.25).bfloat16())
        sizes = torch.full((groups,), rows // groups, dtype=torch.int64, device="cuda")
        return cls(*drawn, sizes, sizes.cumsum(0).to(torch.int32), 2 * rows * n * k)

    def request(self, op: Gemm, recipe: octavo.Recipe) -> GemmRequest:
        """For one GEMM of the layer."""
        groups, n, k = self.w.shape
        return GemmRequest(op=op, recipe=recipe, k=k, n=n, groups=groups, sizes="device", **_here())


def _here() -> dict[str, Any]:
    where = {"framework": "torch", "device": "cuda", "arch": torch.cuda.get_device_capability()}
    return where | {"in_dtype": "bfloat16", "out_dtype": "bfloat16"}


def _grouped_mm(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    public = getattr(torch.nn.functional, "grouped_mm", None)  # where torch has it under a name of its own
    product: Tensor = (public or torch._grouped_mm)(left, right, offs=ends)
    return product


def products(layer: Layer) -> Iterator[Case]:
    """The three GEMMs in bf16."""
    x, w, dy, sizes, ends, flops = layer
    sides = {"fprop": ((x, w), (x, w.transpose(1, 2))), "dgrad": ((dy, w),) * 2, "wgrad": ((x, dy), (dy.t(), x))}

    def product(gemm: Gemm, backend: str) -> Call:
        plan = registry.plan(layer.request(gemm, octavo.HighPrecision()), backend=backend)
        # a layer makes this once for all its calls
        return partial(plan.run, *sides[gemm][0], plan.prepare(sizes, len(x), x) if plan.prepare else sizes)

    for gemm in GEMMS:
        make: Make = {name: partial(product, gemm, name) for name in BACKENDS}
        make[TORCH] = partial(partial, _grouped_mm, *sides[gemm][1], ends)
        yield Case(f"{gemm}, bf16", make, TORCH, "tflops", flops)


def steps(layer: Layer) -> Iterator[Case]:
    """fprop, dgrad and wgrad under autograd, of codes with the quantizing of x, w and dy."""
    x, w = (leaf.detach().requires_grad_() for leaf in (layer.x, layer.w))

    def step(forward: Callable[[], Tensor]) -> Call:
        return lambda: torch.autograd.grad(forward(), (x, w), layer.dy)

    make: Make = {}
    for recipe in ("fp8-block", "bf16"):
        for name in BACKENDS:
            run = partial(ot.grouped_linear, x, w, layer.sizes, recipe=recipe, backend=name)
            make[f"{name}, {recipe}"] = partial(step, run)
    make[TORCH] = partial(step, lambda: _grouped_mm(x, w.transpose(1, 2), layer.ends))
    yield Case("step: y, dx and dw", make, TORCH, "tflops", 3 * layer.flops)


def _copy(nbytes: int) -> Call:
    source = torch.zeros(nbytes // 2, dtype=torch.uint8, device="cuda")
    return partial(torch.empty_like(source).copy_, source)


def quantizers(layer: Layer) -> Iterator[Case]:
    """x in both planes, in the layouts that each backend's GEMMs read; the copy moves torch-triton's bytes."""
    x, sizes = layer.x, layer.sizes

    def quantizer(recipe: octavo.Recipe, work: dict[str, int], backend: str) -> Call:
        plan = registry.plan_layer(layer.request("fprop", recipe), backend=backend).quantize_x
        assert plan is not None  # of recipes with codes
        spec, own_layout = plan.request.quantizer, plan.request.layouts[1] != PLAIN
        assert spec is not None
        work[backend] = quantize_traffic(spec, sizes.tolist(), x.shape[1], native=own_layout).total
        more: dict[str, Any] = {"operand": spec.role}
        if spec.scaling == "delayed":
            more["scale"] = torch.ones(len(sizes), device="cuda")
        return partial(plan.run, x, plan.prepare(sizes, len(x), x) if plan.prepare else sizes, **more)

    def copy(work: dict[str, int]) -> Call:
        work[COPY] = work.get(MINE, 4 * x.numel())  # ways are made in their order; bf16 and codes where there is none
        return _copy(work[COPY])

    for text in RECIPES:
        work: dict[str, int] = {}
        make: Make = {name: partial(quantizer, octavo.recipe(text), work, name) for name in BACKENDS}
        yield Case(f"quantize x, {text}", {**make, COPY: partial(copy, work)}, COPY, "tb_per_s", work)


def moves(layer: Layer, choices: int) -> Iterator[Case]:
    """Rows of tokens to rows of groups, and their sums back; torch's sums are of rows that it gathered before."""
    (rows, columns), groups = layer.x.shape, len(layer.sizes)
    tokens = rows // choices
    x, chosen = layer.x[:tokens], torch.rand(tokens, groups, device="cuda").topk(choices).indices
    routing = ot.permute(x[:, :8], chosen, groups)[2]
    order, position, routed = routing.order, routing.position, routing.routed
    source, flat, work = order // choices, position.view(-1), 2 * columns * (rows + tokens)

    def move(op: Any, arguments: tuple[Tensor | None, ...], backend: str) -> Call:
        return partial(registry.plan(MoveRequest(op=op, **_here()), backend=backend).run, *arguments)

    def summed() -> Tensor:
        return layer.x.index_select(0, flat).view(tokens, choices, columns).sum(1)

    for op, arguments, peer in (
        ("permute_rows", (x, order, position, routed, None), partial(x.index_select, 0, source)),
        ("combine_rows", (layer.x, position, routed, None), summed),
    ):
        make: Make = {name: partial(move, op, arguments, name) for name in BACKENDS}
        make |= {SELECT: partial(partial, peer), COPY: partial(_copy, work)}
        yield Case(f"{op}, {choices} choices", make, SELECT, "tb_per_s", work)


def measured(case: Case, repeats: int, notes: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each way that runs; what does not is noted."""
    calls: dict[str, Call] = {}
    for name, make in case.make.items():
        try:
            call = make()
            call()
            torch.cuda.synchronize()
            calls[name] = call
        except Exception as error:  # what a chip, a version or a missing package refuses says nothing of the others
            text = " ".join(str(error).split())[:400]
            notes.append(f"{case.name}, {name}: not measured: {type(error).__name__}: {text}")
    times = dict(zip(calls, cuda_times_in_turn([[call] for call in calls.values()], repeats), strict=True))
    for name, each in times.items():
        work = case.work if isinstance(case.work, int) else case.work[name]
        row = {"case": case.name, "way": name, "us": each.as_dict(), case.unit: round(work / each.median / 1e6, 3)}
        if case.peer in times:
            row |= {"peer": case.peer, "of_peer": round(each.median / times[case.peer].median, 3)}
        yield row


def rows_of(label: str, repeats: int, notes: list[str]) -> Iterator[dict[str, Any]]:
    """The rows of one shape, each of them printed."""
    layer = Layer.drawn(*LINEAR[label])
    for case in chain(products(layer), steps(layer), quantizers(layer), moves(layer, CHOICES.get(label, 8))):
        for row in measured(case, repeats, notes):
            rate, share = f"{row[case.unit]:8.2f} {case.unit:8}", row.get("of_peer", "?")
            print(f"  {case.name:26} {row['way']:24} {row['us']['median']:10.1f} us {rate} {share:>8} of {case.peer}")
            yield {"shape": label, **row}
        torch.cuda.empty_cache()


def main() -> None:
    """Prints a table and writes OUTPUT after every shape."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("commit")
    parser.add_argument("--shape", choices=LINEAR, action="append", help="one of the layers; repeat for more")
    parser.add_argument("--repeats", type=int, default=20)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("portable.py times kernels on a GPU, and torch sees no CUDA device here; run it where torch sees one")
    record: dict[str, Any] = {
        "command": f"python benchmarks/portable.py FILE {given.commit}",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine("cuda"),
        "versions": versions(),
        "commit": given.commit,
        "of_peer": "time of a way over that of its peer; below 1: it is faster",
        "repeats": given.repeats,
    }
    record |= {"rows": (rows := []), "notes": (notes := [])}
    for label in given.shape or LINEAR:
        print(f"{label} {LINEAR[label]}")
        of_shape: list[str] = []
        rows += rows_of(label, given.repeats, of_shape)
        notes += [f"{label}: {note}" for note in of_shape]
        given.output.write_text(json.dumps(record, indent=1) + "\n")
    print("\n".join(notes))
    if not any(row["way"].startswith(MINE) for row in rows):
        sys.exit(f"no way of {MINE} ran; the notes in {given.output} say why")


if __name__ == "__main__":
    main()
