"""octavo_torch.grouped_linear on this backend alone: values and gradients of every recipe, and the caller's buffers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gemm_layers import SEED, draw_layer
from linear_steps import BACKEND, SPLIT, state_of, step

from octavo import PRESETS, HighPrecision
from octavo.recipe_base import GEMMS
from octavo_torch import GroupedLinear, grouped_linear, grouped_mm, quantize_weight


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", PRESETS)
def test_gradients_end_to_end(name: str, dtype: str, rng: np.random.Generator) -> None:
    """y, dx, dw against float64 on the definition's codes; NaN tails change nothing (faults 8 to 12, 38, 65)."""
    layer = draw_layer(rng, PRESETS[name], dtype, sizes=SPLIT)
    made = step(layer)
    for gemm in GEMMS:
        layer.check(gemm, made[gemm])
    for gemm, value in step(layer).items():
        assert torch.equal(value, made[gemm]), f"{gemm}, repeated"


@pytest.mark.parametrize("name", ["bf16", "mxfp8", "nvfp4", "fp8-current"])
def test_everything_is_served_here(name: str, rng: np.random.Generator) -> None:
    """Nothing falls back to another backend, and operands come in the layouts of the GEMMs (fault 57)."""
    import octavo_registry
    from octavo_registry.contract.request import Request

    recipe = PRESETS[name]
    request = Request(
        op="fprop", framework="torch", device="cpu", in_dtype="bfloat16", out_dtype="bfloat16", recipe=recipe
    )
    plan = octavo_registry.plan_layer(request)
    assert {part.backend for part in plan.plans} == {BACKEND}
    if plan.quantize_x is not None:
        assert plan.quantize_x.request.layouts == ("rows", "panels")
        assert plan.quantize_w is not None
        assert plan.quantize_w.request.layouts == ("rows", "panels")


def test_with_reference_quantizers(rng: np.random.Generator) -> None:
    """A list of backends still composes: the reference's GEMMs on plain codes where it alone may serve, this one's
    where both may."""
    layer = draw_layer(rng, PRESETS["mxfp8"], sizes=SPLIT)
    x, w = layer.array("x"), layer.array("w")
    results = {}
    for backend in ("torch-reference", ("torch-reference", BACKEND), (BACKEND, "torch-reference"), BACKEND):
        results[backend] = grouped_linear(x, w, layer.sizes, recipe=layer.recipe, backend=backend)
        layer.check("fprop", results[backend])
    assert torch.equal(results[BACKEND], results[BACKEND, "torch-reference"])
    assert torch.equal(results["torch-reference"], results["torch-reference", BACKEND])


@pytest.mark.parametrize("name", ["bf16", "mxfp8"])
def test_out_and_grad_input(name: str, rng: np.random.Generator) -> None:
    """The caller's buffers get y and dx."""
    layer = draw_layer(rng, PRESETS[name], sizes=SPLIT)
    expected = step(layer)
    out = torch.full(layer.shape("fprop"), torch.nan, dtype=torch.bfloat16)
    grad_input = torch.full(layer.shape("dgrad"), torch.nan, dtype=torch.bfloat16)
    made = step(layer, out=out, grad_input=grad_input)
    for gemm in GEMMS:
        assert torch.equal(made[gemm], expected[gemm])
    assert torch.equal(out, expected["fprop"])
    assert torch.equal(grad_input, expected["dgrad"])


@pytest.mark.parametrize("mode", ["accumulate", "overwrite"])
@pytest.mark.parametrize("name", PRESETS)
def test_main_grad_is_written_in_place(name: str, mode: str, rng: np.random.Generator) -> None:
    """fp32 dw goes into a strided main_grad: with the bits of out=, empty groups keep theirs or are +0 (issue 7)."""
    layer = draw_layer(rng, PRESETS[name], sizes=SPLIT)
    groups, n, k = layer.shape("wgrad")
    memory = torch.full((groups, n + 1, k + 16), 3.0)
    buffer = memory[:, :n, :k]
    start = torch.zeros(groups, n, k)
    start[1] = 5.0
    buffer.copy_(start)
    x, w = layer.array("x"), layer.array("w").requires_grad_()
    w.main_grad = buffer  # type: ignore[attr-defined]
    made = []
    for _ in range(2):
        y = grouped_linear(
            x, w, layer.sizes, recipe=layer.recipe, seed=SEED, state=state_of(layer), backend=BACKEND, main_grad=mode
        )  # type: ignore[call-overload]
        y.backward(layer.array("dy"))
        made.append(buffer.clone())
    full = SPLIT.index(0)
    assert torch.equal(made[0][full], start[full] if mode == "accumulate" else torch.zeros(n, k))
    first = made[0].clone()
    first[full] = 0.0
    layer.check("wgrad", first)
    assert torch.equal(made[1], 2 * first + start if mode == "accumulate" else first)
    assert bool((memory[:, n:] == 3.0).all())
    assert bool((memory[:, :, k:] == 3.0).all())
    assert w.grad_added_to_main_grad  # type: ignore[attr-defined]
    assert w.grad is not None
    assert not w.grad.any()


@pytest.mark.parametrize("name", ["bf16", "fp8-block", "nvfp4"])
def test_quantized_weights_are_used_again(name: str, rng: np.random.Generator) -> None:
    """quantize_weight once, the same bits in every microbatch; no conversion on the way."""
    layer = draw_layer(rng, PRESETS[name], sizes=SPLIT)
    w = layer.array("w").requires_grad_()
    handle = quantize_weight(w, layer.recipe, backend=BACKEND)
    expected = step(layer)
    x = layer.array("x").requires_grad_()
    y = grouped_linear(x, handle, layer.sizes, recipe=layer.recipe, seed=SEED, backend=BACKEND)
    dx, dw = torch.autograd.grad(y, (x, w), layer.array("dy"))
    for gemm, value in zip(GEMMS, (y, dx, dw), strict=True):
        assert torch.equal(value, expected[gemm]), gemm


def test_grouped_mm(rng: np.random.Generator) -> None:
    """torch's own convention: weights [G, K, N] of any strides, cumulative ends."""
    layer = draw_layer(rng, HighPrecision(), sizes=SPLIT)
    ends = layer.sizes.cumsum(0).int()
    b = layer.array("w").transpose(1, 2)
    expected = grouped_linear(layer.array("x"), layer.array("w"), layer.sizes, recipe=None)
    for weights in (b, b.contiguous()):
        assert torch.equal(grouped_mm(layer.array("x"), weights, ends), expected)


def test_a_module_learns(rng: np.random.Generator) -> None:
    """Three steps of a layer go where the reference's go, up to the rounding of sums (fault 65)."""
    x = torch.randn(60, 48)
    losses = []
    for backend in (BACKEND, "torch-reference"):
        torch.manual_seed(1)
        module = GroupedLinear(3, 48, 32, recipe=PRESETS["mxfp8"], backend=backend)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            loss = module(x, [20, 0, 40]).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.detach())
    # codes of the last step may differ where a weight was rounded otherwise: one step of E4M3, 2^-3, in one of the 32
    # elements of a block is 2^-8 of the whole
    torch.testing.assert_close(*losses, rtol=2**-8, atol=0)
