"""Programs that torch.jit.trace and make_fx would record of a layer on ordinary tensors: refused with a sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from octavo_torch import GroupedLinear, GroupedMLP, Linear, MoE

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


def test_modes_that_only_look_on_change_nothing(rng: object) -> None:
    make, sizes = LAYERS["linear"]
    layer, x = make(), torch.randn(8, 64)
    with FlopCounterMode(display=False):
        counted = layer(x, *sizes)
    assert torch.equal(counted, layer(x, *sizes))
