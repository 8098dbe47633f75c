"""Programs that torch.jit.trace and make_fx would record of calls on ordinary tensors: refused with a sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import octavo_torch as ot
from octavo import MXFP8
from octavo_torch import GroupedLinear, GroupedMLP, Linear, MoE
from octavo_torch.moe.router import choosing

HOW: dict[str, Any] = {"recipe": "fp8-block", "backend": "torch-reference"}
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "linear": (lambda: GroupedLinear(2, 64, 48, **HOW), (torch.tensor([3, 5]),)),
    "mlp": (lambda: GroupedMLP(2, 64, 48, **HOW), (torch.tensor([3, 5]),)),
    "moe": (lambda: MoE(2, 64, 48, 1, **HOW), ()),
    "one matrix": (lambda: Linear(64, 48, **HOW), ()),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", LAYERS)
def test_a_program_that_lacks_the_kernels_is_refused(name: str, rng: object) -> None:
    """Kernels get addresses, so a recorded program would return its tensors as they were allocated."""
    make, sizes = LAYERS[name]
    layer, x = make(), torch.randn(8, 64)
    recorders: dict[str, Callable[[], object]] = {
        "torch.jit.trace": lambda: torch.jit.trace(layer, (x, *sizes), check_trace=False),
        "make_fx": lambda: make_fx(lambda rows: layer(rows, *sizes))(x),
    }
    for recorder, record in recorders.items():
        for enabled in (True, False):
            with torch.set_grad_enabled(enabled), pytest.raises(NotImplementedError, match=f"^{recorder} records"):
                record()
    layer(x, *sizes)


SIZES, SPEC = torch.tensor([3, 5]), MXFP8().quantizer("x")
FUNCTIONS: dict[str, Callable[[Tensor], object]] = {
    "quantize": lambda x: ot.dequantize(ot.quantize(x, SPEC, SIZES)),
    "act_quantize": lambda x: ot.dequantize(ot.act_quantize(x, SPEC, SIZES, activation="swiglu")[0]),
    "permute": lambda x: ot.permute(x, torch.zeros(8, 1, dtype=torch.int64), 2)[0],
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_outside_of_layers_are_refused(name: str, rng: object) -> None:
    """make_fx's program had returned memory that nothing had written, and torch.jit.trace's its example's codes."""
    function, x = FUNCTIONS[name], torch.randn(8, 64)
    with pytest.raises(NotImplementedError, match=r"^make_fx records .*; use torch.export.export"):
        make_fx(function)(x)
    with pytest.raises(NotImplementedError, match=r"^torch.jit.trace records"):
        torch.jit.trace(function, (x,), check_trace=False)
    function(x)


def test_a_routing_and_a_backends_router_are_refused(monkeypatch: pytest.MonkeyPatch, rng: object) -> None:
    """Rows that are summed, weights as rows, and a router that a kernel computes; torch's operations are recorded."""
    x, logits = torch.randn(8, 64), torch.randn(8, 4)
    rows, _, routing = ot.permute(x, torch.zeros(8, 1, dtype=torch.int64), 2)
    served = choosing.Choosers(lambda *_: pytest.fail("was called"), lambda *_: pytest.fail("was called"))
    weights = lambda t: ot.choose_experts(t, 2, backend="torch-reference").weights  # noqa: E731
    assert torch.equal(make_fx(weights)(logits)(2 * logits), weights(2 * logits))
    monkeypatch.setattr(choosing, "choosers_for", lambda *_: served)
    for call, given in (
        (lambda t: ot.unpermute(t, routing), rows),
        (lambda t: routing.to_rows(t), torch.randn(8, 1)),
        (weights, logits),
    ):
        with pytest.raises(NotImplementedError, match=r"^make_fx records"):
            make_fx(call)(given)


def test_modes_that_only_look_on_change_nothing(rng: object) -> None:
    make, sizes = LAYERS["linear"]
    layer, x = make(), torch.randn(8, 64)
    with FlopCounterMode(display=False):
        counted = layer(x, *sizes)
    assert torch.equal(counted, layer(x, *sizes))
