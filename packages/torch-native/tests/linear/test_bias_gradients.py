"""Gradients of a bias and of its scales as grouped products: within the bounds of sums, zeros where no row is."""

from __future__ import annotations

from copy import copy

import numpy as np
import pytest
import torch
from cuda_device import MARKS
from torch import Tensor

import octavo_numerics
from octavo import PRESETS, HighPrecision
from octavo_torch import grouped_linear, grouped_mlp
from octavo_torch.arithmetic import operators
from octavo_torch.dispatch.layer import Layer
from octavo_torch.dispatch.layers import layer_for
from octavo_torch.wgrad import bias_gradients as subject

G, N, K = 5, 208, 64
DEVICES = ["cpu", pytest.param("cuda", marks=MARKS)]


def layer_on(device: str) -> Layer:
    """A bf16 layer of torch-native's; as on a GPU, where products are taken for the gradients."""
    x, w = (torch.zeros(shape, dtype=torch.bfloat16, device=device) for shape in ((1, K), (G, N, K)))
    layer = copy(layer_for(HighPrecision(), x, w, False, True, True, "torch-native"))
    layer.on_cpu = False
    return layer


def drawn(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape, np.float32))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scaled", [None, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_products_are_within_the_bounds_of_sums(
    device: str, scaled: torch.dtype | None, dtype: torch.dtype, rng: np.random.Generator
) -> None:
    """Of drawn sizes with an empty group and a tail of NaN. Factors of 24 bits lose none of them: a part left out
    would be seen, as 2^-16 of an fp32 sum."""
    sizes = rng.multinomial(int(rng.integers(60, 300)), np.ones(G - 1) / (G - 1))
    sizes = torch.from_numpy(np.insert(sizes, rng.integers(0, G), 0)).to(torch.int32)
    used = int(sizes.sum())
    dy = drawn(rng, used + 30, N).bfloat16()
    dy[used:] = torch.nan
    scales = None if scaled is None else drawn(rng, used + 30).to(scaled)
    bias = None if scaled is None else drawn(rng, G, N).to(dtype)
    if scales is not None:
        scales[used:] = torch.nan
    made = subject.bias_gradients(
        layer_on(device),
        *(None if value is None else value.to(device) for value in (dy, sizes, bias, scales)),
        need_scales=scaled is not None,
    )
    assert made.bias is not None
    assert made.bias.dtype is torch.float32
    ends = np.cumsum(sizes.numpy())
    rows, ones = dy.double().numpy(), np.ones(used)
    factors = ones if scales is None else scales[:used].double().numpy()
    for g, (start, end) in enumerate(zip(ends - sizes.numpy(), ends, strict=True)):
        bound = octavo_numerics.error_bound(
            HighPrecision(), end - start, gemm="wgrad", out_dtype="float32", accumulation="hopper_bf16"
        )
        found = made.bias[g].double().cpu().numpy()[:, None]
        report = bound.check(found, rows[start:end].T, factors[None, start:end], zero_mean=False)
        assert report.passed, report.describe()
        if start == end:
            assert not found.any()
    if bias is None:
        assert made.scales is None
        return
    assert made.scales is not None
    assert made.scales.dtype is torch.float32
    assert torch.equal(made.scales[used:].cpu(), torch.zeros(30))
    bound = octavo_numerics.error_bound(HighPrecision(), N, out_dtype="float32", accumulation="hopper_bf16")
    for g, (start, end) in enumerate(zip(ends - sizes.numpy(), ends, strict=True)):
        found = made.scales[start:end].double().cpu().numpy()[:, None]
        report = bound.check(found, rows[start:end], bias[g : g + 1].double().numpy(), zero_mean=False)
        assert report.passed, report.describe()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=MARKS)])
@pytest.mark.parametrize("name", ["bf16", "fp8-block", "nvfp4"])
def test_layers_and_mlps_on_a_gpu_take_products(
    device: str, name: str, compiled: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing there is composed of torch's operations on [M, N] in fp32, in a CUDA graph's capture neither."""
    monkeypatch.setattr(operators, "bias_grads", None)
    sizes = torch.tensor([100, 0, 77, 3, 70], device=device)
    recipe = None if name == "bf16" else PRESETS[name]

    def leaf(*shape: int) -> Tensor:
        return drawn(rng, *shape).to(device, torch.bfloat16).requires_grad_()

    x, w1, w2, b1, b2 = leaf(260, K), leaf(G, 2 * N, K), leaf(G, K, N), leaf(G, 2 * N), leaf(G, K)
    probs = torch.rand(260, device=device).requires_grad_()

    def mlp() -> Tensor:
        return grouped_mlp(
            x, w1, w2, sizes, recipe=recipe, probs=probs, bias1=b1, bias2=b2, bias2_scales=probs, interleave=1, seed=3
        )

    def linear() -> Tensor:
        return grouped_linear(x, w1, sizes, recipe=recipe, bias=b1, bias_scales=probs, seed=3)

    for run, biases in ((mlp, (b1, b2)), (linear, (b1,))):
        y = (torch.compile(run) if compiled else run)()
        grads = torch.autograd.grad(y, [probs, *biases], torch.ones_like(y))
        assert all(grad.isfinite().all() and grad.any() for grad in grads)
