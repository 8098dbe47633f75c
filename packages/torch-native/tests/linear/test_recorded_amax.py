"""Delayed scaling's amax comes with the codes, equals the reference's, and is taken for what is recorded alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gemm_layers import Layer, draw_layer
from linear_steps import BACKEND, SPLIT, state_of
from torch import Tensor

from octavo import PRESETS
from octavo_torch import DelayedState, grouped_linear, quantize_weight
from octavo_torch.arithmetic import operators as reference_ops
from octavo_torch.linear.call import Call
from octavo_torch.linear.grouped import apply
from octavo_torch_native.quantizers import operators
from octavo_torch_native.quantizers.launches import launch_of


def recorded(layer: Layer, backend: str, *, frozen: bool = False, weights: bool = False) -> DelayedState:
    """The state after one step with NaN, Inf and poisoned tails."""
    state = state_of(layer)
    assert state is not None
    x, w, dy = layer.array("x"), layer.array("w"), layer.array("dy")
    x[33, 3], x[50, 1], dy[0, 0] = torch.inf, -300.0, torch.nan
    x.requires_grad_(not frozen)
    w.requires_grad_()
    matrices: Any = quantize_weight(w, layer.recipe, state=state, backend=backend) if weights else w
    y = grouped_linear(x, matrices, layer.sizes, recipe=layer.recipe, state=state, backend=backend)
    torch.autograd.grad(y, (w,) if frozen else (x, w), dy)
    return state


@pytest.fixture
def amax_calls(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What the reference takes the amax of from here on."""
    calls: list[Tensor] = []
    real = reference_ops.group_amax_of
    monkeypatch.setattr(reference_ops, "group_amax_of", lambda x, sizes: (calls.append(x), real(x, sizes))[1])
    return calls


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("rest", [{}, {"frozen": True}, {"weights": True}], ids=["all", "no dx", "quantize_weight"])
def test_amax_comes_with_the_codes(
    dtype: str, rest: dict[str, bool], rng: np.random.Generator, amax_calls: list[Tensor]
) -> None:
    """Delayed scaling records bit for bit what the reference records, and no operand is read once more for it."""
    layer = draw_layer(rng, PRESETS["fp8-delayed"], dtype, sizes=SPLIT)
    state = recorded(layer, BACKEND, **rest)
    assert not amax_calls
    expected = recorded(layer, "torch-reference", **rest)
    assert len(amax_calls) == 3
    assert torch.equal(state.history.view(torch.int32), expected.history.view(torch.int32))
    assert torch.equal(state.scale, expected.scale)
    assert state.history[0, 0, 2].isinf()
    assert not state.history[:, 0, 1][[0, 2]].any()


def test_no_amax_where_nothing_is_recorded(
    rng: np.random.Generator, amax_calls: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation's launches make codes alone, and the state stays as it is."""
    layer = draw_layer(rng, PRESETS["fp8-delayed"], sizes=SPLIT)
    state = state_of(layer)
    assert state is not None
    x, w = layer.array("x"), layer.array("w")
    works: list[str] = []
    real = operators.quantize
    monkeypatch.setattr(operators, "quantize", lambda *given: (works.append(given[3]), real(*given))[1])
    y = apply(x, w, layer.sizes, None, None, Call(layer.recipe, BACKEND, state=state, record=False))
    buffered = Call(layer.recipe, BACKEND, state=state, record=False, out=torch.empty_like(y))
    apply(x, w, layer.sizes, None, None, buffered)  # which no whole layer takes
    assert not amax_calls
    assert not state.history.any()
    assert [launch_of(work).extras for work in works] == [[], []]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_with_amax_is_the_reference(dtype: torch.dtype) -> None:
    """Codes of `run`, amax of the reference: NaN wins over Inf, empty groups have 0, tails are not read."""
    import octavo_registry
    from octavo import QuantizerSpec
    from octavo_registry.contract.request import Request

    name = str(dtype).removeprefix("torch.")
    x = torch.randn(130, 48).to(dtype)
    x[40, 5], x[41, 6], x[45, 1], x[120:] = torch.inf, -torch.nan, -torch.inf, torch.nan
    sizes = torch.tensor([33, 0, 9, 70, 8])
    for orientation in ("rowwise", "columnwise", "both"):
        spec = QuantizerSpec(scaling="delayed", format="e4m3", orientation=orientation)
        request = Request(op="quantize", framework="torch", device="cpu", in_dtype=name, out_dtype=name, quantizer=spec)
        plan = octavo_registry.plan(request, backend=BACKEND)
        assert plan.bound.with_amax is not None
        codes, amax = plan.bound.with_amax(x, sizes, scale=torch.ones(5))
        expected = reference_ops.group_amax_of(x, sizes)
        assert expected[2].isnan()
        assert torch.equal(amax.view(torch.int32), expected.view(torch.int32))
        plain = plan.run(x, sizes, scale=torch.ones(5))
        for plane in ("rowwise", "rowwise_scale", "columnwise", "columnwise_scale"):
            made, wanted = getattr(codes, plane), getattr(plain, plane)
            assert (made is None) == (wanted is None)
            assert made is None or torch.equal(made.view(torch.uint8), wanted.view(torch.uint8))
