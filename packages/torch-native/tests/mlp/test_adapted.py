"""Frozen weights with adapters: what stands between products is one launch, and MXFP4 becomes codes in one or two."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from cuda_device import MARKS
from torch import Tensor

from octavo import PRESETS
from octavo.quantizer import Direction
from octavo_torch import (
    CodedWeight,
    GroupedMLP,
    GroupedTensor,
    PackedWeight,
    add_lora,
    quantize_weight,
    quantized_parameters,
)
from octavo_torch.arrays.grouped_tensor import PLANES
from octavo_torch.mlp import activate_rows

G, K, F = 4, 80, 72


@pytest.mark.parametrize("activation", ["swiglu", "gelu_tanh", "clamped_swiglu"])
@pytest.mark.parametrize("recipe", ["fp8-block", "mxfp8", "fp8-row"])
def test_an_adapted_mlp_computes_its_activation_in_one_pass(
    recipe: str, activation: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New adapters change no bit of y, and of the gradients of x and probs: the kernels that a fused quantizer starts
    with compute the activation and its gradient, and none of torch's operations do."""
    with quantized_parameters(recipe):
        plain = GroupedMLP(G, K, F, activation=activation, dtype=torch.bfloat16, backend="torch-native", seed=1)
    adapted = copy.deepcopy(plain)
    add_lora(adapted, 8)

    def composed(*_: object, **__: object) -> Tensor:
        raise AssertionError("the activation is composed")

    monkeypatch.setattr(activate_rows, "activate", composed)
    monkeypatch.setattr(activate_rows, "activate_gradient", composed)
    sizes = [int(size) for size in rng.multinomial(50, [1 / G] * G)]
    rows, dy = torch.randn(53, K).bfloat16(), torch.randn(53, K).bfloat16()
    rows[50:], dy[50:] = torch.nan, torch.nan
    passed = []
    for module in (plain, adapted):
        x, probs = rows.clone().requires_grad_(), torch.rand(53).requires_grad_()
        with torch.no_grad():
            probs.copy_(torch.linspace(0, 1, 53))
        y = module(x, sizes, probs=probs)
        passed.append([y, *torch.autograd.grad(y, [x, probs], dy)])
    for ours, theirs in zip(*passed, strict=True):
        assert torch.equal(ours[:50], theirs[:50])
        assert bool(ours[:50].any())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=MARKS)])
@pytest.mark.parametrize("recipe", ["fp8-block", "mxfp8", "fp8-row", "fp8-current", "nvfp4"])
def test_mxfp4_becomes_the_codes_of_its_values(
    recipe: str, device: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both planes, bit for bit those of the values, which torch's operations do not compute; bytes at odd addresses."""
    rows, columns = 16 * int(rng.integers(1, 20)), 32 * int(rng.integers(1, 9))
    held = torch.randint(256, (G * rows * columns // 2 + 1,), dtype=torch.uint8, device=device)
    blocks = held[1:].view(G, rows, columns // 2)
    scales = torch.randint(100, 140, (G, rows, columns // 32), dtype=torch.uint8, device=device)
    scales[0, 0, 0] = 255  # of a block that is NaN
    weight = PackedWeight(blocks, scales, PRESETS[recipe], torch.bfloat16)
    wanted = quantize_weight(weight.dequantize().requires_grad_(), recipe, backend="torch-native").codes
    assert wanted is not None

    def composed(_: object) -> Tensor:
        raise AssertionError("values are computed by torch's operations")

    monkeypatch.setattr(PackedWeight, "_halves", composed)
    made = weight.expand_codes("torch-native")
    assert isinstance(made, CodedWeight)
    assert made.codes.spec == wanted.spec
    for only, codes in ((None, made.codes), *((way, read(weight, way)) for way in ("rowwise", "columnwise"))):
        names = [name for name in PLANES if getattr(wanted, name) is not None and (only is None or only in name)]
        assert names
        for name in names:
            assert torch.equal(getattr(codes, name).view(torch.uint8), getattr(wanted, name).view(torch.uint8)), name


def read(weight: PackedWeight, way: Direction) -> GroupedTensor:
    """The codes of which one plane will be read."""
    made = weight.expand_codes("torch-native", only=way)
    assert isinstance(made, CodedWeight)
    return made.codes
