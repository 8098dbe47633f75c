"""The plan of a step's rows: one for quantizers, GEMMs and biases, of the sizes that forward was given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gemm_layers import SEED, draw_layer
from linear_steps import BACKEND, SPLIT, state_of, step

from octavo import PRESETS
from octavo.recipe_base import GEMMS
from octavo_torch import grouped_linear
from octavo_torch_native.arrays import operators as array_operators
from octavo_torch_native.backend import NativeBackend
from octavo_torch_native.plugin import CARD


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each plan that is launched from here on."""
    made: list[int] = []
    real = array_operators.plan
    monkeypatch.setattr(
        array_operators, "plan", lambda sizes, rows, like: (made.append(rows), real(sizes, rows, like))[1]
    )
    return made


@pytest.mark.parametrize("name", PRESETS)
def test_one_plan_a_step(name: str, rng: np.random.Generator, plans: list[int]) -> None:
    """Quantizers of x and dy and three GEMMs share the layer's plan; so do the sums of the bias."""
    layer = draw_layer(rng, PRESETS[name], sizes=SPLIT)
    bias = torch.zeros(layer.problem.w.shape[:2], dtype=torch.bfloat16, requires_grad=True)
    step(layer, bias=bias, bias_scales=torch.ones(len(layer.problem.x)))  # which no whole layer takes
    assert plans == [len(layer.problem.x)]


@pytest.mark.parametrize("name", ["bf16", "mxfp8", "fp8-delayed"])
def test_sizes_overwritten_before_backward(name: str, rng: np.random.Generator) -> None:
    """A router's buffer that holds the next step's sizes already: gradients are those of the sizes of forward."""
    layer = draw_layer(rng, PRESETS[name], sizes=SPLIT)
    expected = step(layer)
    x, w, sizes = layer.array("x").requires_grad_(), layer.array("w").requires_grad_(), layer.sizes.long()
    y = grouped_linear(x, w, sizes, recipe=layer.recipe, seed=SEED, state=state_of(layer), backend=BACKEND)
    sizes.copy_(sizes.flip(0))
    dx, dw = torch.autograd.grad(y, (x, w), layer.array("dy"))
    for gemm, value in zip(GEMMS, (y, dx, dw), strict=True):
        assert torch.equal(value, expected[gemm]), gemm


def test_no_shared_plan_with_other_backends(rng: np.random.Generator, plans: list[int]) -> None:
    """The reference's GEMMs take sizes, not plans: quantizers of this backend each make their own beside them."""
    import octavo_registry
    from octavo_registry.contract.request import Request

    class Quantizers:
        """This backend without its GEMMs."""

        def octavo_backends(self) -> list[Any]:
            rows = [row for row in CARD.capabilities if "quantize" in row.ops and row.device == "cpu"]
            rows = [row.model_copy(update={"ops": frozenset({"quantize"})}) for row in rows]
            return [CARD.model_copy(update={"name": "native-quantizers", "capabilities": tuple(rows)})]

        def octavo_load(self, name: str) -> Any:
            return NativeBackend()

    layer = draw_layer(rng, PRESETS["mxfp8"], sizes=SPLIT)
    x, w = layer.array("x").requires_grad_(), layer.array("w").requires_grad_()
    octavo_registry.register(Quantizers(), "native-quantizers")
    try:
        both = ("native-quantizers", "torch-reference")
        request = Request(
            op="fprop", framework="torch", device="cpu", in_dtype="bfloat16", out_dtype="bfloat16", recipe=layer.recipe
        )
        assert {part.backend for part in octavo_registry.plan_layer(request, backend=both).plans} == set(both)
        y = grouped_linear(x, w, layer.sizes, recipe=layer.recipe, backend=both)
        dx, dw = torch.autograd.grad(y, (x, w), layer.array("dy"))
    finally:
        octavo_registry.unregister("native-quantizers")
    assert len(plans) == 2
    for gemm, value in zip(GEMMS, (y.detach(), dx, dw), strict=True):
        layer.check(gemm, value)
