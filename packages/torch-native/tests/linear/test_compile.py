"""torch.compile in one graph, with the bits of eager; operators pass torch's own checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import octavo_registry
from octavo import PRESETS, QuantizerSpec
from octavo_conformance.cards.variants import RAGGED, STACKED
from octavo_torch import (
    GroupedTensor,
    act_quantize,
    choose_experts,
    convert_layout,
    dact_quantize,
    dequantize,
    group_amax,
    grouped_linear,
    moe_mlp,
    norm_quantize,
    quantize,
)
from octavo_torch_native.arrays import operators as array_operators
from octavo_torch_native.plugin import NAME
from octavo_torch_native.quantizers import operators
from octavo_torch_native.quantizers.launches import launch_of
from octavo_torch_native.quantizers.spec import LaunchSpec, spec_text

SIZES = torch.tensor([20, 0, 40])
SPEC = RAGGED["mxfp8.e4m3"]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


def tensors(value: Any) -> list[torch.Tensor]:
    """Dequantized values and every extra output, which are the same wherever memory was poisoned."""
    if isinstance(value, tuple):
        codes, extras = value
        rows = int(SIZES.sum())
        cut = [
            None if extra is None else extra[:rows] if len(extra) == 70 else extra for extra in vars(extras).values()
        ]
        return [extra for extra in cut if extra is not None] + tensors(codes)
    if isinstance(value, GroupedTensor):
        return [dequantize(value, direction) for direction in value.spec.quantizer.directions]
    return [value]


def every(*more: str) -> dict[str, Any]:
    """All extras that an activation's quantizer has, and `more`."""
    return {"wanted": ("activated", "amax", "dequantized", *more)}


CALLS: dict[str, Callable[..., Any]] = {
    "quantize": lambda x, s: quantize(x * 2, SPEC, s),
    "quantize, native": lambda x, s: quantize(x, RAGGED["nvfp4.hadamard"], s, layouts=("rows", "panels")),
    "quantize, shared": lambda x, s: quantize(x, RAGGED["current.e4m3"], s),
    "quantize, stochastic": lambda x, s: quantize(x, RAGGED["nvfp4.stochastic"], s, seed=5, group_offset=3),
    "quantize, one group": lambda x, s: quantize(x[:60], SPEC),
    "act_quantize": lambda x, s: act_quantize(x, SPEC, s, activation="swiglu", probs=x[:, 0].float().abs(), **every()),
    "act_quantize, usual": lambda x, s: act_quantize(x, SPEC, s, activation="silu"),
    "dact_quantize": lambda x, s: dact_quantize(x[:, :32], x, SPEC, s, activation="geglu", **every("dbias", "dprobs")),
    "norm_quantize": lambda x, s: norm_quantize(x, x[0], SPEC, s),
    "layer_norm": lambda x, s: norm_quantize(x, x[0], SPEC, s, beta=x[1], norm="layer", epsilon=1e-3, **every()),
    "group_amax": lambda x, s: group_amax(x, s),
    "dequantize": lambda x, s: dequantize(quantize(x, SPEC, s), "columnwise") + 1,
    "dequantize, bf16": lambda x, s: dequantize(quantize(x, SPEC, s), dtype=torch.bfloat16),
    "convert": lambda x, s: dequantize(convert_layout(quantize(x, SPEC, s), ("rows", "panels")), "columnwise"),
    "convert, back": lambda x, s: dequantize(
        convert_layout(quantize(x, SPEC, s, layouts=("rows", "panels")), ("rows", "plain")), "columnwise"
    ),
    "matrices": lambda x, s: quantize(x.view(2, 35, 64), STACKED["block.e4m3.square"], layouts=("plain", "panels")),
}


@pytest.mark.parametrize("name", CALLS)
def test_one_graph_with_the_bits_of_eager(name: str, rng: np.random.Generator) -> None:
    """fullgraph, with group sizes that change from call to call (fault 46: fake metadata is the real one)."""
    call = CALLS[name]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with octavo_registry.prefer(NAME):
        for sizes in (SIZES, torch.tensor([0, 60, 0]), torch.tensor([1, 2, 57])):
            x = torch.randn(70, 64)
            ours, theirs = tensors(compiled(x, sizes)), tensors(call(x, sizes))
            assert len(ours) == len(theirs)
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def _experts(x: torch.Tensor, sizes: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    choice = choose_experts(x[:, ::4], 2, score="sigmoid", backend=NAME)  # `scale` is its default: a symbol
    return moe_mlp(x, choice.choices, choice.weights, w1, w2, recipe="fp8-block", backend=NAME)


def _layer(x: torch.Tensor, sizes: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    return grouped_linear(x, w1, sizes, recipe="mxfp8", backend=NAME)


SYMBOLS: dict[str, Callable[..., Any]] = {
    **{
        name: lambda x, s, *_, call=CALLS[name]: call(x, s)
        for name in ("quantize, native", "dact_quantize", "matrices", "convert, back")
    },
    "a layer": _layer,
    "experts": _experts,
}


@pytest.mark.parametrize("name", SYMBOLS)
def test_sizes_that_are_symbols(name: str, rng: np.random.Generator) -> None:
    """With dynamic=True sizes and floats are symbols, which no dictionary takes as a key."""
    call = SYMBOLS[name]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    given = torch.randn(70, 64).requires_grad_(), SIZES, torch.randn(3, 32, 64), torch.randn(3, 48, 16)
    with octavo_registry.prefer(NAME):
        ours, theirs = tensors(compiled(*given)), tensors(call(*given))
    assert len(ours) == len(theirs) > 0
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_out_in_a_graph(rng: np.random.Generator) -> None:
    """A graph that writes the caller's tensors writes them, and leaves them where the flag says so."""
    w, other = torch.randn(3, 40, 48), torch.randn(3, 40, 48)
    spec = STACKED["mxfp8.e4m3"]
    out = quantize(w, spec)
    address, first = out.rowwise.data_ptr(), dequantize(out)

    def run(w: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
        quantize(w * 2, spec, out=out, unchanged=flag)
        return w + 1

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    compiled(other, torch.ones(1, dtype=torch.int32))
    assert torch.equal(dequantize(out), first)
    compiled(other, torch.zeros(1, dtype=torch.int32))
    assert torch.equal(dequantize(out), dequantize(quantize(other * 2, spec)))
    assert out.rowwise.data_ptr() == address


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_a_layer_in_one_graph(name: str, rng: np.random.Generator) -> None:
    """grouped_linear forward and backward, quantized here; wrong sizes raise when the graph runs."""
    recipe = PRESETS[name]
    w = torch.randn(3, 32, 64, requires_grad=True)

    def run(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        return grouped_linear(x, w, sizes, recipe=recipe, seed=3)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    x, dy = torch.randn(70, 64), torch.randn(70, 32)
    results = []
    for call in (run, compiled):
        leaf = x.clone().requires_grad_()
        y = call(leaf, SIZES)
        results.append([y, *torch.autograd.grad(y, (leaf, w), dy)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    with pytest.raises(ValueError, match="sum to 80"):
        compiled(x, torch.tensor([40, 0, 40]))


def check(operator: Any, *arguments: Any, schema: bool = False) -> None:
    """torch's own checks; its schema test compares no float8 tensors."""
    utilities = ("test_schema", "test_faketensor") if schema else ("test_faketensor",)
    torch.library.opcheck(operator, arguments, test_utils=utilities)


@pytest.mark.parametrize("layouts", [("plain", "plain"), ("rows", "panels")], ids="-".join)
@pytest.mark.parametrize("name", RAGGED)
def test_fake_kernels(name: str, layouts: tuple[str, str], rng: np.random.Generator) -> None:
    """Shapes, dtypes and strides of every output before it is made (fault 46)."""
    space, spec = torch.ops.octavo_torch_native, RAGGED[name]
    x = torch.randn(70, 64)
    words, sizes = array_operators.plan(SIZES, 70, x)
    launched = LaunchSpec(spec, "dy", layouts, "activation", "swiglu", amax=True, dequantized=True, activated=True)
    work = spec_text(launched)
    seed = torch.tensor(3) if spec.stochastic else None
    scale = torch.ones(3) if spec.scaling == "delayed" else None
    check(space.quantize, x, words, 3, work, seed, 0, scale, None, None, None, None)
    launch = launch_of(work)
    outputs = operators.quantize(x, words, 3, work, seed, 0, scale, None, None, None, None)
    made = launch.tensor(launch.shapes(x, 3), sizes, outputs)
    text = spec.model_dump_json()
    for direction in ("rowwise", "columnwise"):
        codes, scales, factor = made.plane(direction)
        layout = layouts[direction == "columnwise"]
        for dtype in (torch.float32, torch.bfloat16):
            check(space.dequantize, codes, scales, factor, words, text, [70, 32], 3, direction, layout, dtype)
        to = "plain" if layout != "plain" else "rows" if direction == "rowwise" else "panels"
        check(space.convert, codes, scales, words, text, [70, 32], 3, direction, to)


def test_fake_kernels_of_the_rest(rng: np.random.Generator) -> None:
    """Plans, gradients, norms, matrices; the schema names the one mutation that there is."""
    space, x = torch.ops.octavo_torch_native, torch.randn(70, 64)
    check(space.plan, SIZES, 70, x, schema=True)
    check(space.plan, SIZES.int(), 70, x, schema=True)
    words, _ = array_operators.plan(SIZES, 70, x)
    gradient = spec_text(LaunchSpec(SPEC, "dy", prologue="activation_grad", activation="geglu", dbias=True))
    check(space.quantize, x, words, 3, gradient, None, 0, None, torch.randn(70, 32), torch.rand(70), None, None)
    norm = spec_text(LaunchSpec(SPEC, "x", prologue="norm", norm="layer", epsilon=1e-5))
    check(space.quantize, x, words, 3, norm, None, 0, None, None, None, torch.ones(64), torch.ones(64))
    matrices = spec_text(LaunchSpec(STACKED["nvfp4.square"], "w", ("rows", "panels")))
    check(space.quantize, torch.randn(3, 40, 64), None, 3, matrices, None, 0, None, None, None, None, None)
    # without float8 outputs the schema's aliases can be checked
    codes = QuantizerSpec(scaling="mxfp8", format="e4m3", orientation="rowwise")
    work = spec_text(LaunchSpec(codes, "x", amax=True))
    outputs = operators.quantize(x, words, 3, work, None, 0, None, None, None, None, None)
    arguments = (x, words, 3, work, None, 0, None, torch.zeros(1, dtype=torch.int32), outputs)
    check(space.quantize_into, *arguments)
