"""main_grad: weight gradients are accumulated within their bounds or overwritten, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from main_grad_calls import SEED, SIZES, G, K, M, N, backward, microbatch, parameter
from torch import Tensor

import octavo_numerics
from octavo import PRESETS, Recipe
from octavo_torch import dequantize, grouped_linear, quantize, quantize_weight


def products(x: Tensor, dy: Tensor, recipe: Recipe) -> list[tuple[Tensor, Tensor]]:
    """The float64 factors of each group's dw, [N, rows] and [rows, K], as wgrad reads them."""
    values = []
    padded = False
    for name, value in (("x", x), ("dy", dy)):
        spec = recipe.quantizer(name) if recipe.quantizes("wgrad") else None  # type: ignore[arg-type]
        if spec is None:
            values.append(value.double())
            continue
        scale = torch.ones(G) if recipe.stateful else None
        values.append(dequantize(quantize(value, spec, SIZES, seed=SEED, scale=scale), "columnwise").double())
        padded = padded or spec.hadamard
    made, start = [], 0
    for size in SIZES:
        end = start + (-(-size // 16) * 16 if padded else size)
        made.append((values[1][start:end].T, values[0][start:end]))
        start = end
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", PRESETS)
def test_microbatches_accumulate_within_the_bounds(name: str, dtype: torch.dtype, rng: np.random.Generator) -> None:
    """fp32 main_grad is what it held plus the sum of every microbatch's dw; groups without rows keep their bits."""
    recipe = PRESETS[name]
    w = parameter(dtype)
    start = torch.randn(G, N, K)
    start[1, 0, 0], start[1, 0, 1] = -0.0, torch.nan
    buffer = w.main_grad = start.clone()  # type: ignore[attr-defined]
    batches = [microbatch(dtype) for _ in range(2)]
    for x, dy in batches:
        backward(w, x, dy, recipe, main_grad="accumulate")
    assert w.main_grad is buffer  # type: ignore[attr-defined]
    assert torch.equal(buffer[1].view(torch.int32), start[1].view(torch.int32))
    parts = [products(x, dy, recipe) for x, dy in batches]
    for g, size in enumerate(SIZES):
        if not size:
            continue
        # one sum over the rows of both, and what the buffer held is a product with the identity
        a = torch.cat([*(part[g][0] for part in parts), start[g].double()], 1)
        b = torch.cat([*(part[g][1] for part in parts), torch.eye(K, dtype=torch.float64)], 0)
        bound = octavo_numerics.error_bound(recipe, a.shape[1], gemm="wgrad", out_dtype="float32")
        report = bound.check(buffer[g].double().numpy(), a.numpy(), b.T.numpy(), zero_mean=False)
        assert report.passed, report.describe()


@pytest.mark.parametrize("name", PRESETS)
def test_overwrite_has_the_bits_of_dw(name: str, rng: np.random.Generator) -> None:
    """NaN in the buffer is gone, groups without rows are +0, and the flag of the weight does the same."""
    recipe = PRESETS[name].model_copy()
    x, dy = microbatch()
    w = parameter()
    backward(w, x, dy, recipe)
    expected = w.grad
    assert expected is not None
    for mode in ("overwrite", "accumulate"):
        w.grad = None
        w.main_grad = torch.full_like(w, torch.nan)  # type: ignore[attr-defined]
        w.overwrite_main_grad = mode == "accumulate"  # type: ignore[attr-defined]
        for _ in range(2):
            backward(w, x, dy, recipe, main_grad=mode)
        assert torch.equal(w.main_grad, expected)  # type: ignore[attr-defined]
        assert not w.main_grad[1].view(torch.int16).any()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["bf16", "mxfp8", "nvfp4"])
def test_the_other_gradients_do_not_change(name: str, rng: np.random.Generator) -> None:
    """y, dx, db and the gradient of bias_scales have the bits of a call without main_grad."""
    w, (x, dy) = parameter(), microbatch()
    b, s = torch.randn(G, N), torch.randn(M)
    w.main_grad = torch.zeros(G, N, K)  # type: ignore[attr-defined]
    made = []
    for mode in (None, "accumulate"):
        leaves = [value.clone().requires_grad_() for value in (x, b, s)]
        y = grouped_linear(
            leaves[0], w, SIZES, recipe=PRESETS[name], bias=leaves[1], bias_scales=leaves[2], main_grad=mode, seed=SEED
        )  # type: ignore[call-overload]
        y.backward(dy)
        made.append([y.detach(), *(leaf.grad for leaf in leaves)])
    for plain, fused in zip(*made, strict=True):
        assert torch.equal(plain, fused)


def test_quantized_weights(rng: np.random.Generator) -> None:
    """The buffer is that of the weight which was quantized; two microbatches in one backward add up."""
    recipe = PRESETS["mxfp8"]
    w = parameter()
    w.main_grad = torch.zeros(G, N, K)  # type: ignore[attr-defined]
    batches = [microbatch() for _ in range(2)]
    for x, dy in batches:
        backward(w, x, dy, recipe, main_grad="accumulate")
    separate = w.main_grad  # type: ignore[attr-defined]
    w.main_grad = torch.zeros(G, N, K)  # type: ignore[attr-defined]
    handle = quantize_weight(w, recipe)
    ys = [grouped_linear(x, handle, SIZES, recipe=recipe, main_grad="accumulate") for x, _ in batches]
    torch.autograd.backward(ys, [dy for _, dy in batches])
    # of two microbatches the order of the two additions to +0 does not matter
    assert torch.equal(w.main_grad, separate)  # type: ignore[attr-defined]


@pytest.mark.parametrize("rows", [0, 4])
def test_no_group_has_rows(rows: int, rng: np.random.Generator) -> None:
    """Accumulating keeps every bit, overwriting leaves +0; hooks and flag come all the same."""
    w = parameter()
    for mode in ("accumulate", "overwrite"):
        start = torch.randn(G, N, K)
        w.main_grad = start.clone()  # type: ignore[attr-defined]
        w.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        x = torch.full((rows, K), torch.nan, dtype=w.dtype)
        y = grouped_linear(x, w, [0] * G, recipe=None, main_grad=mode)  # type: ignore[call-overload]
        y.backward(torch.full((rows, N), torch.nan, dtype=w.dtype))
        assert torch.equal(w.main_grad, start if mode == "accumulate" else torch.zeros(G, N, K))  # type: ignore[attr-defined]
        assert w.grad_added_to_main_grad  # type: ignore[attr-defined]
