"""Products that read rows where a router's tokens stand, beside the same of rows, and what makes these: in bf16 a
permutation, in block scaling a quantizer that writes codes of rows, in the place of one that writes those of tokens.

python benchmarks/steps/token_gemms.py OUTPUT COMMIT [--turns N]

The products of a MoE layer that have tokens on one side, in turns in one process on a CUDA device; results are compared
bit by bit first.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from turns import arguments_of, timed, write

import octavo
import octavo_registry as registry
from octavo.grouped_tensor import PLAIN
from octavo_registry.contract import GemmRequest, MoveRequest, TokenRows

SHAPES = {
    "Qwen3-30B": (8192, 8, 128, 2048, 768),
    "DeepSeek-V3, 32 of 256 experts": (4096, 8, 32, 7168, 2048),
    "8 choices of experts of 512": (32768, 8, 128, 4096, 512),
    "16 choices of experts of 256": (32768, 16, 256, 4096, 256),
}
"""Tokens, choices of each, experts, in-features and hidden features."""
BACKEND = "torch-native"
Product = tuple[Callable[[Any], Tensor], TokenRows[Tensor]]


def plan_of(k: int, n: int, experts: int, recipe: octavo.Recipe) -> Any:
    """The products of one layer of the experts."""
    request = GemmRequest(
        op="fprop", framework="torch", device="cuda", in_dtype="bfloat16", out_dtype="bfloat16",
        recipe=recipe, arch=torch.cuda.get_device_capability(), k=k, n=n, groups=experts,
        sizes="device",
    )  # fmt: skip
    return registry.plan_layer(request, backend=BACKEND)


def move(op: Any, experts: int | None = None) -> Any:
    """A function that routes choices or moves rows."""
    return registry.plan(
        MoveRequest(
            op=op, framework="torch", device="cuda", in_dtype="bfloat16", out_dtype="bfloat16",
            arch=torch.cuda.get_device_capability(), groups=experts,
        ),
        backend=BACKEND,
    ).run  # fmt: skip


def draw(*shape: int) -> Tensor:
    """Normal values in bf16."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def routed(tokens: int, choices: int, experts: int) -> tuple[Tensor, list[Tensor]]:
    """Group sizes and places of choices that are drawn alike; from a seed, for all that is drawn after them, too."""
    torch.manual_seed(1)
    index = torch.rand(tokens, experts, device="cuda").topk(choices, -1)[1]
    sizes, *places = move("route", experts)(index, experts)
    return sizes, places


def products(tokens: int, choices: int, experts: int, hidden: int, width: int) -> Iterator[tuple[str, Product]]:
    """Each product as a function of its rows, and these as tokens."""
    rows = tokens * choices
    sizes, places = routed(tokens, choices, experts)
    x, dy = (TokenRows(draw(tokens, hidden), *places) for _ in range(2))
    fc1, fc2 = (plan_of(k, n, experts, octavo.HighPrecision()) for k, n in ((hidden, 2 * width), (width, hidden)))
    w1, w2 = draw(experts, 2 * width, hidden) * hidden**-0.5, draw(experts, hidden, width) * width**-0.5
    dh, a = draw(rows, 2 * width), draw(rows, width)
    h, da = torch.empty_like(dh), torch.empty_like(a)
    yield "fc1 fprop", (lambda x: fc1.fprop.run(x, w1, sizes, out=h), x)
    yield "fc2 dgrad", (lambda dy: fc2.dgrad.run(dy, w2, sizes, out=da), dy)
    for added, dtype in (("", torch.bfloat16), (" added to fp32", torch.float32)):
        how = {"accumulate": bool(added)}
        dw1, dw2 = torch.zeros_like(w1, dtype=dtype), torch.zeros_like(w2, dtype=dtype)
        yield f"fc1 wgrad{added}", (partial(_gradient, fc1.wgrad.run, None, dh, sizes, out=dw1, **how), x)
        yield f"fc2 wgrad{added}", (partial(_gradient, fc2.wgrad.run, a, None, sizes, out=dw2, **how), dy)


Quantized = tuple[Callable[[Any], Tensor], dict[str, Callable[[], Any]]]
"""A product of codes, and what makes them: "rows" and "tokens", and the other codes that a backward needs."""


def quantized_products(
    tokens: int, choices: int, experts: int, hidden: int, width: int
) -> Iterator[tuple[str, Quantized]]:
    """The products in block scaling whose left operand has codes along rows alone."""
    rows, recipe = tokens * choices, octavo.recipe("fp8-block")
    sizes, places = routed(tokens, choices, experts)
    values = draw(tokens, hidden)
    for name, operand, gemm, k, n in (
        ("fc1 fprop", "x", "fprop", hidden, 2 * width),
        ("fc2 dgrad", "dy", "dgrad", width, hidden),
    ):
        layer = plan_of(k, n, experts, recipe)
        weights = layer.quantize_w.run(draw(experts, n, k) * k**-0.5)
        whole = getattr(layer, f"quantize_{operand}")
        of_tokens = _narrow(whole, "rowwise", layouts=(PLAIN, PLAIN), stacked=True)
        out = torch.empty(rows, n if gemm == "fprop" else k, device="cuda", dtype=torch.bfloat16)
        made = whole if gemm == "dgrad" else _narrow(whole, "rowwise")
        makers: dict[str, Callable[[], Any]] = {
            "rows": partial(_first, made.bound.of_tokens, values, sizes, *places, operand=operand),
            "tokens": partial(_tokens, of_tokens.run, values, places, operand),
        }
        if gemm == "dgrad":
            columns = _narrow(whole, "columnwise")
            makers["columns"] = partial(_first, columns.bound.of_tokens, values, sizes, *places, operand=operand)
        yield name, (partial(_product, getattr(layer, gemm).run, weights, sizes, out), makers)


def _narrow(plan: Any, orientation: str, **how: Any) -> Any:
    spec = plan.request.quantizer.with_orientation(orientation)
    return registry.plan(replace(plan.request, quantizer=spec, **how), backend=BACKEND)


def _first(run: Any, *arguments: Any, **how: Any) -> Any:
    return run(*arguments, **how)[0]


def _tokens(run: Any, values: Tensor, places: list[Tensor], operand: str) -> Any:
    return TokenRows(run(values[None], operand=operand), *places)


def _product(run: Any, weights: Any, sizes: Tensor, out: Tensor, rows: Any) -> Tensor:
    result: Tensor = run(rows, weights, sizes, out=out)
    return result


def _gradient(run: Any, x: Tensor | None, dy: Tensor | None, sizes: Tensor, rows: Any, **how: Any) -> Tensor:
    """Of the rows in the place of the operand that is None."""
    dw: Tensor = run(rows if x is None else x, rows if dy is None else dy, sizes, **how)
    return dw


def main() -> None:
    """A row for each product of each shape."""
    arguments = arguments_of(__doc__, 9)
    permute, found = move("permute_rows"), []
    for label, sides in SHAPES.items():
        for name, (multiply, makers) in quantized_products(*sides):
            made = {way: make() for way, make in makers.items()}
            same = torch.equal(multiply(made["rows"]).clone(), multiply(made["tokens"]))
            calls = {way: partial(multiply, made[way]) for way in ("rows", "tokens")}
            calls |= {f"quantize {way}": make for way, make in makers.items()}
            found.append(_row(label, f"{name} in block scaling", same, calls, arguments.turns))
            del made, calls
        for name, (run, given) in products(*sides):
            rows = permute(*given, None)
            # sums begin at zero
            first = run(rows).clone()
            again = run(given)
            same = torch.equal(again, first + first if "added" in name else first)
            del first, again
            calls = {
                "rows": partial(run, rows),
                "tokens": partial(run, given),
                "permute": partial(permute, *given, None),
            }
            found.append(_row(label, name, same, calls, arguments.turns))
        torch.cuda.empty_cache()
    write(arguments.output, "token_gemms.py", arguments.commit, found)


def _row(label: str, name: str, same: bool, calls: dict[str, Callable[[], Any]], turns: int) -> dict[str, Any]:
    times = {way: round(statistics.median(each), 4) for way, each in timed(calls, turns).items()}
    row = {"shape": label, "product": name, "same_bits": same, "milliseconds": times}
    row["tokens / rows"] = round(times["tokens"] / times["rows"], 3)
    print(json.dumps(row), flush=True)
    return row


if __name__ == "__main__":
    main()
