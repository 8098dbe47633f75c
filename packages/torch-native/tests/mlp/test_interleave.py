"""Gate and up rows that take turns, taken apart and joined by one launch: the bits of torch's copies, none made."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from cuda_device import MARKS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import octavo_registry
from octavo import PRESETS, HighPrecision, Recipe
from octavo_registry.dispatch.preference import renew_tokens
from octavo_torch import GroupedMLP, grouped_mlp, quantize_weight
from octavo_torch.arrays.interleaving import from_halves, to_halves
from octavo_torch_native.arrays import interleaving
from octavo_torch_native.arrays.interleaving import interleave_halves

DEVICES = ["cpu", pytest.param("cuda", marks=MARKS)]
NATIVE = "torch-native"
G, K, F, N, M = 3, 64, 48, 32, 70
SIZES = [20, 0, 40]
RECIPES: dict[str, Recipe] = {"bf16": HighPrecision(), "fp8-block": PRESETS["fp8-block"]}


class Copied(TorchDispatchMode):
    """Counts torch's copies of arrays of w1's size."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        copies = func in (torch.ops.aten.copy_.default, torch.ops.aten.clone.default)
        self.count += copies and args[0].numel() == G * 2 * F * K
        return func(*args, **(kwargs or {}))


def leaf(device: str, *shape: int, turned: bool = False) -> Tensor:
    """bf16 [G, N, K], in memory as [G, K, N] where it is turned."""
    value = (torch.randn(shape, device=device) * shape[-1] ** -0.5).bfloat16()
    return (value.mT.contiguous().mT if turned else value).requires_grad_()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.int64], ids=str)
@pytest.mark.parametrize("turned", [False, True], ids=["nk", "kn"])
def test_bits_of_torchs_copies(turned: bool, dtype: torch.dtype, device: str, rng: np.random.Generator) -> None:
    """Blocks of one row, of some and of a half; into an array of the caller's that lies alike, or otherwise."""
    for block in (1, 2, 3, 8, 24):
        groups, columns, half = int(rng.integers(1, 4)), int(rng.choice([1, 7, 40])), block * int(rng.integers(1, 9))
        values = torch.randint(0, 100, (groups, 2 * half, columns), device=device).to(dtype)
        value = values.mT.contiguous().mT if turned else values
        for exchange in (to_halves, from_halves):
            expected, made = exchange(value, block), exchange(value, block, interleave_halves)
            assert torch.equal(made, expected)
            assert made.stride() == expected.stride()
        for out in (torch.empty_like(value), value.new_empty((groups, 2 * half + 1, columns))[:, 1:]):
            for run in (interleave_halves, None):
                out.zero_()
                assert from_halves(value, block, run, out) is out
                assert torch.equal(out, from_halves(value, block))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("turned", [False, True], ids=["nk", "kn"])
@pytest.mark.parametrize("name", RECIPES)
def test_an_mlp_copies_no_weight(
    name: str, turned: bool, device: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward have the bits that they have on torch's copies, of which they make none; where products read
    codes, the weight is quantized where it lies and its gradient is written so."""
    del rng  # seeds torch
    x, w1, w2 = leaf(device, M, K), leaf(device, G, 2 * F, K, turned=turned), leaf(device, G, N, F)
    sizes = torch.tensor(SIZES, device=device)
    dy = torch.randn(M, N, device=device).bfloat16()

    def call() -> list[Tensor]:
        with Copied() as copied:
            codes = quantize_weight(w1, RECIPES[name], backend=NATIVE, interleave=1)
            made = []
            for weight in (w1, codes):
                y = grouped_mlp(x, weight, w2, sizes, recipe=RECIPES[name], interleave=1, backend=NATIVE)
                made += [y, *torch.autograd.grad(y, (x, w1, w2), dy)]
        counts.append((copied.count, launches.call_count > 0))
        return made

    counts: list[tuple[int, bool]] = []
    launches = Mock(wraps=interleaving.submit)
    monkeypatch.setattr(interleaving, "submit", launches)
    ours = call()
    monkeypatch.setattr("octavo_torch.dispatch.layer.Layer.interleave_halves", None)
    for part in ("interleaving_refusal", "joining_refusal"):
        monkeypatch.setattr(f"octavo_native.support.{part}", lambda *_, **__: "not served")
    renew_tokens()  # layers that have been resolved keep their functions
    theirs = call()
    assert counts[0] == (0, name == "bf16")
    assert counts[1][0] > 0
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["accumulate", "overwrite"])
def test_main_grad_is_written_where_it_is(mode: Any, device: str, rng: np.random.Generator) -> None:
    """The joined gradient goes into the buffer: torch copies nothing of its size."""
    del rng  # seeds torch
    made = []
    start = torch.randn(G, 2 * F, K, device=device)
    x = torch.randn(M, K, device=device).bfloat16()
    for block in (None, 4):
        with octavo_registry.prefer(NATIVE):
            layer = GroupedMLP(
                G, K, F, N, recipe=RECIPES["fp8-block"], dtype=torch.bfloat16, device=device, main_grad=mode,
                interleave=block, seed=1,
            )  # fmt: skip
            torch.manual_seed(3)
            with torch.no_grad():
                for weight, shape in ((layer.weight1, (G, 2 * F, K)), (layer.weight2, (G, N, F))):
                    values = (torch.randn(shape, device=device) / 8).bfloat16()
                    weight.copy_(from_halves(values, block) if block and weight is layer.weight1 else values)
            layer.weight1.main_grad = from_halves(start, block) if block else start.clone()
            layer.weight2.main_grad = torch.zeros(G, N, F, device=device)
            with Copied() as copied:
                layer(x, torch.tensor(SIZES, device=device)).sum().backward()
            assert copied.count == 0
        main_grad = layer.weight1.main_grad
        made.append(to_halves(main_grad, block) if block else main_grad)
    assert torch.equal(made[0], made[1])


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_compiled(recipe: Recipe, rng: np.random.Generator) -> None:
    """One graph, in which taking apart and joining are operators, with the bits of eager."""
    del rng  # seeds torch
    torch.compiler.reset()
    x, w1, w2 = leaf("cpu", M, K), leaf("cpu", G, 2 * F, K), leaf("cpu", G, N, F)
    sizes = torch.tensor(SIZES)

    def call(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return grouped_mlp(x, w1, w2, sizes, recipe=recipe, interleave=2, backend=NATIVE)

    dy = torch.randn(M, N).bfloat16()
    results = []
    for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        y = run(x, w1, w2)
        results.append([y, *torch.autograd.grad(y, (x, w1, w2), dy)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    torch.compiler.reset()


def test_torch_accepts_the_operators() -> None:
    """opcheck: schemas, fakes and functionalization, of the one that returns and of the one that writes."""
    value = torch.randn(3, 8, 5)
    torch.library.opcheck(torch.ops.octavo_torch_native.interleave.default, (value, 2, True))
    out = torch.zeros_like(value)
    torch.library.opcheck(torch.ops.octavo_torch_native.interleave_into.default, (value, 2, False, out))


def test_an_array_that_does_not_fit_is_refused() -> None:
    """The kernel sees addresses alone."""
    value = torch.randn(3, 8, 5)
    for out in (value.new_empty(3, 8, 4), value.double()):
        with pytest.raises(ValueError, match=r"give torch.float32 \[3, 8, 5\] on cpu"):
            interleave_halves(value, 2, True, out)
