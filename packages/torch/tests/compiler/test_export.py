"""torch.export: a layer is a program of its operations, for one number of rows and any group sizes."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from octavo_torch import GroupedLinear, MoE

HOW: dict[str, Any] = {"dtype": torch.bfloat16, "backend": "torch-reference", "seed": 5}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: GroupedLinear(3, 64, 48, recipe="fp8-block", **HOW),
    "moe": lambda: MoE(4, 64, 48, 2, recipe="mxfp8", **HOW),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_stored_program_has_the_layers_bits(name: str, rng: np.random.Generator) -> None:
    """Weights are quantized in the program, and other group sizes or other choices need no other one."""
    torch.manual_seed(int(rng.integers(1 << 31)))
    layer = LAYERS[name]().eval()
    x, other = torch.randn(32, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    sizes: tuple[Tensor, ...] = (torch.tensor([10, 0, 15]),) if name == "linear" else ()
    others = tuple(size.flip(0) for size in sizes)
    stored = io.BytesIO()
    with torch.no_grad():
        torch.export.save(torch.export.export(layer, (x, *sizes), strict=False), stored)
        stored.seek(0)
        program = torch.export.load(stored).module()
        for given in ((x, *sizes), (other, *others)):
            assert torch.equal(_first(program(*given)), _first(layer(*given)))


def _first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result
