"""What a caller changes between a forward and its backward, which kernels read by the addresses of the backward."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from cuda_device import MARKS
from torch import Tensor, nn

import octavo_torch
from octavo import DelayedScaling
from octavo_torch import DelayedState, grouped_linear

M, K, F, G = 40, 64, 32, 3
SIZES = [11, 0, 24]
DEVICES = ["cpu", pytest.param("cuda", marks=MARKS)]
LAYERS: dict[str, Callable[..., nn.Module]] = {
    "linear": lambda **rest: octavo_torch.GroupedLinear(G, K, F, recipe="bf16", **rest),
    "mlp": lambda **rest: octavo_torch.GroupedMLP(G, K, F, recipe="bf16", **rest),
    "moe": lambda **rest: octavo_torch.MoE(G, K, F, 2, recipe="bf16", **rest),
}


def _replace(layer: nn.Module, changed: Callable[[Tensor], Tensor]) -> None:
    for parameter in layer.parameters():
        parameter.data = changed(parameter.data)


def _strided(weight: Tensor) -> Tensor:
    return torch.stack([weight, torch.zeros_like(weight)], -1)[..., 0]


def _unaligned(weight: Tensor) -> Tensor:
    return torch.cat([weight.new_zeros(1), weight.flatten()])[1:].view(weight.shape)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAYERS)
def test_the_data_of_weights(name: str, device: str, rng: np.random.Generator) -> None:
    """autograd's saved tensors are the parameters, with the .data that they have then. In bf16 a whole layer read
    float32 as if it were bfloat16, and other strides, or memory that was too short, as if they were forward's."""
    layer = LAYERS[name](dtype=torch.bfloat16, device=device, backend="torch-native")
    x = torch.randn(M, K).to(device, torch.bfloat16).requires_grad_()
    given = () if name == "moe" else (torch.tensor(SIZES, device=device),)

    def gradient(change: Callable[[], object]) -> Tensor:
        y = layer(x, *given)
        change()
        (dx,) = torch.autograd.grad(y.float().square().sum(), x)
        return dx

    wanted, kept = gradient(lambda: None), {key: value.detach().clone() for key, value in layer.named_parameters()}
    assert wanted.any()
    for changed in (_strided, _unaligned):
        assert torch.equal(gradient(lambda: _replace(layer, changed)), wanted)  # noqa: B023
    with pytest.raises(ValueError, match=r"was bfloat16 .* in forward and is float32 .* now; cast or move modules"):
        gradient(layer.float)
    layer.bfloat16()
    with pytest.raises(ValueError, match=r"in forward and is bfloat16 \[1\] on"):
        gradient(lambda: _replace(layer, lambda weight: weight.new_empty(1)))
    for key, parameter in layer.named_parameters():
        parameter.data = kept[key]
    assert torch.equal(gradient(lambda: None), wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_the_tensors_of_a_state(device: str, rng: np.random.Generator) -> None:
    """A backward reads and writes those that its forward had: others, of fewer groups, were written beyond."""
    recipe = DelayedScaling(history=4)
    x, w, dy = torch.randn(M, K), torch.randn(G, F, K), torch.randn(M, F)
    results = []
    for replaced in (False, True):
        state = DelayedState.create(recipe, G, device)
        history = state.history
        leaves = [value.to(device, torch.bfloat16).requires_grad_() for value in (x, w)]
        y = grouped_linear(*leaves, SIZES, recipe=recipe, state=state, backend="torch-native")
        if replaced:
            state.history, state.scale = torch.zeros(3, 4, 1, device=device), torch.zeros(3, 1, device=device)
        results.append([*torch.autograd.grad(y, leaves, dy.to(device, torch.bfloat16)), history])
        assert not replaced or not state.history.any()
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    assert results[0][-1][2, 0].any()


@pytest.mark.parametrize("name", ["x", "weight", "scale", "history"])
def test_memory_that_was_freed_since(name: str, rng: np.random.Generator) -> None:
    """The kernels' own message spoke of an operand of a product that was not given."""
    recipe = DelayedScaling(history=4) if name in ("scale", "history") else "bf16"
    x, weight = torch.randn(M, K, requires_grad=True), torch.randn(G, F, K, requires_grad=True)
    state = DelayedState.create(recipe, G) if isinstance(recipe, DelayedScaling) else None
    y = grouped_linear(x, weight, SIZES, recipe=recipe, state=state, backend="torch-native")
    freed = {"x": x, "weight": weight}.get(name, None if state is None else getattr(state, name, None))
    assert freed is not None
    freed.detach().untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"a tensor \[.*\] in float32 on cpu has no memory; its storage was freed"):
        torch.autograd.grad(y.sum(), [x, weight])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"scale": torch.ones(3, G).bfloat16()}, r"give \[3, 4, G\] and \[3, G\], both in float32"),
        ({"history": torch.zeros(3, 8, G)}, r"give \[3, 4, G\] and \[3, G\], both in float32"),
        ({"scale": torch.ones(3, 1), "history": torch.zeros(3, 4, 1)}, "state holds 1 groups and the weight 3"),
    ],
)
def test_a_state_that_does_not_fit_any_longer(fields: dict[str, Tensor], says: str, rng: np.random.Generator) -> None:
    """A composed backward refuses it: kernels get addresses alone."""
    recipe = DelayedScaling(history=4)
    x = torch.randn(M, K).bfloat16().requires_grad_()
    weight = torch.randn(G, F, K).bfloat16().requires_grad_()
    state, scales = DelayedState.create(recipe, G), torch.rand(M)  # a scaled bias is composed
    bias = torch.randn(G, F).bfloat16()
    y = grouped_linear(
        x, weight, SIZES, recipe=recipe, state=state, bias=bias, bias_scales=scales, backend="torch-native"
    )
    for field, value in fields.items():
        setattr(state, field, value)
    with pytest.raises(ValueError, match=says):
        y.sum().backward()
