"""What tests of adapters share: modules that take them, drawn rows, and their results and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from octavo_torch import GroupedLinear, GroupedMLP, MoE

REFERENCE = "torch-reference"
G, K, F, M = 3, 64, 48, 20
SIZES = [5, 0, 12]
USED = sum(SIZES)
MODULES: dict[str, Any] = {
    "GroupedLinear": lambda **more: GroupedLinear(G, K, F, bias=True, backend=REFERENCE, **more),
    "GroupedMLP": lambda **more: GroupedMLP(G, K, F, **{"interleave": 16, "bias": True, "backend": REFERENCE, **more}),
    "MoE": lambda **more: MoE(G, K, F, 2, bias=True, backend=REFERENCE, **more),
}


def made(name: str, **more: Any) -> Any:
    return MODULES[name](**{"dtype": torch.bfloat16, "seed": 3, **more})


def randomize(module: nn.Module) -> list[nn.Parameter]:
    """Values other than zero for every B; the adapters' parameters."""
    own = [parameter for name, parameter in module.named_parameters() if "lora_" in name]
    for parameter in own:
        nn.init.normal_(parameter, std=0.2)
    return own


def rows(poison: bool = True) -> Tensor:
    x = torch.randn(M, K).bfloat16()
    if poison:
        x[USED:] = torch.nan
    return x.requires_grad_()


def called(module: nn.Module, x: Tensor, **more: Any) -> Tensor:
    y: Tensor = module(x, **more) if isinstance(module, MoE) else module(x, SIZES, **more)
    return y


def passed(module: nn.Module, x: Tensor, dy: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    y = called(module, x)
    return [y, *torch.autograd.grad(y, inputs, dy[:, : y.shape[1]].to(y.dtype))]
