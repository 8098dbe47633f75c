"""What gradients of a bias are made of: exact parts of factors, and who takes products for them."""

from __future__ import annotations

from copy import copy

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo import HighPrecision
from octavo_torch.arithmetic import operators
from octavo_torch.dispatch.layer import Layer
from octavo_torch.dispatch.layers import layer_for
from octavo_torch.wgrad import bias_gradients as subject

G, N, K = 5, 40, 16


def layer_on_cpu(*, as_on_gpu: bool) -> Layer:
    x, w = torch.zeros(1, K).bfloat16(), torch.zeros(G, N, K).bfloat16()
    layer = copy(layer_for(HighPrecision(), x, w, False, True, True, "torch-reference"))
    layer.on_cpu = not as_on_gpu
    return layer


def drawn(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape, np.float32))


@pytest.mark.parametrize("values", [[torch.inf, -torch.inf, torch.nan, 0.0, 1.0, -(2.0**-100), 1 + 2.0**-23]])
def test_three_parts_are_the_value(values: list[float], rng: np.random.Generator) -> None:
    """What is not finite keeps its kind, and of what is finite nothing is lost."""
    given = torch.cat([torch.tensor(values), drawn(rng, 1000) * 2.0 ** torch.from_numpy(rng.integers(-60, 60, 1000))])
    parts = subject._parts(given)
    assert (parts.dtype, parts.shape[-1]) == (torch.bfloat16, 3)
    # of doubles the sum is exact
    torch.testing.assert_close(parts.double().sum(-1).float(), given, rtol=0, atol=0, equal_nan=True)


def test_other_dtypes_and_a_cpu_are_composed(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 and fp16 rows would not be exact in bf16, and a CPU has no use for products of eight columns."""
    calls: list[torch.dtype] = []
    composed = operators.bias_grads

    def counted(dy: Tensor, sizes: Tensor, bias: Tensor | None, scales: Tensor | None) -> list[Tensor]:
        calls.append(dy.dtype)
        return composed(dy, sizes, bias, scales)

    monkeypatch.setattr(operators, "bias_grads", counted)
    sizes = torch.tensor([10, 0, 7, 3, 0])
    for dtype, as_on_gpu in ((torch.float32, True), (torch.float16, True), (torch.bfloat16, False)):
        subject.bias_gradients(layer_on_cpu(as_on_gpu=as_on_gpu), drawn(rng, 20, N).to(dtype), sizes)
    assert calls == [torch.float32, torch.float16, torch.bfloat16]
    subject.bias_gradients(layer_on_cpu(as_on_gpu=True), drawn(rng, 20, N).bfloat16(), sizes)
    assert len(calls) == 3


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_an_infinity_stays_in_its_group(value: float, rng: np.random.Generator) -> None:
    """Groups are independent: the sums of the others are those of finite rows, and of no rows exactly zero."""
    dy, bias, scales = drawn(rng, 90, N), drawn(rng, G, N), drawn(rng, 90)
    sizes = torch.tensor([70, 0, 7, 3, 0])
    finite, _ = operators.bias_grads(dy, sizes, bias, scales)
    dy[75], bias[4] = value, value
    gradient, of_scales = operators.bias_grads(dy, sizes, bias, scales)
    others = [0, 1, 3, 4]
    assert torch.equal(gradient[others], finite[others])
    assert not gradient[2].isfinite().any()
    assert not gradient[1].any()
    assert bool(of_scales[:70].isfinite().all())
    assert not of_scales[80:].any()
