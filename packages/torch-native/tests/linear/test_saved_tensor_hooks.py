"""What saved-tensor hooks give back to a backward: kernels take addresses, so anything unlike what was saved is refused
and what lies otherwise in memory is copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cuda_device import MARKS
from torch import Tensor, nn

import octavo_torch

M, K, F, G = 40, 64, 32, 3
SIZES = [11, 0, 24]
LAYERS: dict[str, Callable[..., nn.Module]] = {
    "linear": lambda **rest: octavo_torch.GroupedLinear(G, K, F, **rest),
    "mlp": lambda **rest: octavo_torch.GroupedMLP(G, K, F, **rest),
    "moe": lambda **rest: octavo_torch.MoE(G, K, F, 2, **rest),
}


def _lying_otherwise(saved: Tensor) -> Tensor:
    return torch.stack([saved, torch.zeros_like(saved)], -1)[..., 0]


def _unaligned(saved: Tensor) -> Tensor:
    memory = torch.empty(saved.numel() + 1, dtype=saved.dtype, device=saved.device)[1:].view(saved.shape)
    return memory.copy_(saved)


SAME = {"strided": _lying_otherwise, "unaligned": _unaligned, "copied": torch.clone}
OTHER: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "no device": (lambda saved: saved.to("meta"), "hook gave back .* on meta in the place of"),
    "another device": (lambda saved: saved.cpu(), "hook gave back .* on cpu in the place of .* on cuda"),
    "another dtype": (lambda saved: saved.to(torch.float64), "hook gave back float64"),
    "another shape": (lambda saved: saved.flatten()[:1].clone(), r"hook gave back \w+ \[1\]"),
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=MARKS)])
def device(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(params=LAYERS)
def gradients(request: pytest.FixtureRequest, device: str, rng: np.random.Generator) -> Any:
    """`gradients(recipe, unpack)`: those of a layer, whose saved tensors come back through `unpack`."""

    def run(recipe: str, unpack: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(int(seed))
        layer = LAYERS[request.param](recipe=recipe, dtype=torch.bfloat16, device=device, backend="torch-native")
        x = torch.randn(M, K).to(device, torch.bfloat16).requires_grad_()
        given = () if request.param == "moe" else (torch.tensor(SIZES, device=device),)
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack):
            y = layer(x, *given)
        return list(torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()]))

    seed = rng.integers(1 << 31)
    return run


@pytest.mark.parametrize("recipe", ["bf16", "fp8-block", "mxfp8"])
def test_tensors_that_lie_otherwise_give_the_same_bits(recipe: str, gradients: Any) -> None:
    """A whole layer had read strided ones as if they were contiguous, and returned other gradients without a word."""
    wanted = gradients(recipe, lambda saved: saved)
    for name, unpack in SAME.items():
        for made, one in zip(gradients(recipe, unpack), wanted, strict=True):
            assert torch.equal(made, one), name
    assert all(one.isfinite().all() and one.any() for one in wanted)


@pytest.mark.parametrize("name", OTHER)
@pytest.mark.parametrize("recipe", ["bf16", "fp8-block"])
def test_another_tensor_is_refused(recipe: str, name: str, gradients: Any, device: str) -> None:
    """Memory of the process or of another device had been read, which ended the process or the CUDA context."""
    if (name, device) == ("another device", "cpu"):
        pytest.skip("it is this one")
    unpack, said = OTHER[name]
    with pytest.raises(ValueError, match=said):
        gradients(recipe, unpack)
