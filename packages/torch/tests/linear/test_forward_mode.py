"""Derivatives that grouped layers do not have are refused: nothing is dropped in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, linearize

import octavo
from octavo_torch import GroupedLinear, GroupedMLP, grouped_linear, grouped_mlp

G, K, N, M = 3, 16, 8, 12
SIZES = [4, 0, 6]
RECIPES = ("bf16", "mxfp8")

# torch's forward mode loads its decompositions with torch.jit.script, which it deprecates
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


def linear(x: Tensor, w: Any, **rest: Any) -> Tensor:
    return grouped_linear(x, w, SIZES, **rest)


def mlp(x: Tensor, w: Any, **rest: Any) -> Tensor:
    return grouped_mlp(x, w, torch.ones(G, 5, N), SIZES, activation="silu", **rest)


def per_group(x: Tensor, w: Tensor, **rest: Any) -> Tensor:
    return grouped_linear(x, list(w.unbind(0)), SIZES, **rest)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("function", [linear, mlp, per_group])
@pytest.mark.parametrize("of", ["x", "w"])
@pytest.mark.parametrize("other_needs_grad", [False, True])
def test_a_tangent_is_refused(
    recipe: str, function: Callable[..., Tensor], of: str, other_needs_grad: bool, rng: np.random.Generator
) -> None:
    """Operators without a rule would return a result without a tangent: zero, for who asks."""
    x, w = torch.randn(M, K), torch.randn(G, N, K)
    with forward_ad.dual_level():
        dual = {"x": x, "w": w}
        dual[of] = forward_ad.make_dual(dual[of], torch.ones_like(dual[of]))
        dual["w" if of == "x" else "x"].requires_grad_(other_needs_grad)
        with pytest.raises(NotImplementedError, match="an input of a grouped layer carries a tangent"):
            function(**dual, recipe=recipe)
        plain = function(x.detach(), w.detach(), recipe=recipe)  # inside of a level, without a tangent
    assert torch.equal(plain, function(x.detach(), w.detach(), recipe=recipe))


@pytest.mark.parametrize("recipe", RECIPES)
def test_linearize_is_refused(recipe: str, rng: np.random.Generator) -> None:
    """It runs forward mode, too, and would be the zero function."""
    w = torch.randn(G, N, K)
    with pytest.raises(NotImplementedError, match="an input of a grouped layer carries a tangent"):
        linearize(lambda x: linear(x, w, recipe=recipe), torch.randn(M, K))


def test_many_gradients_at_once_are_refused(rng: np.random.Generator) -> None:
    """`functional.jacobian(vectorize=True)` runs the backward on a batch of gradients."""
    layer = GroupedLinear(G, K, N, recipe="mxfp8")
    x = torch.randn(M, K)
    with pytest.raises(NotImplementedError, match="give all rows in one call"):
        torch.autograd.functional.jacobian(lambda x: layer(x, SIZES), x, vectorize=True)
    assert torch.autograd.functional.jacobian(lambda x: layer(x, SIZES), x).shape == (M, N, M, K)


@pytest.mark.parametrize("kind", [GroupedLinear, GroupedMLP])
def test_buffers_inside_a_transform(kind: type[Any], rng: np.random.Generator) -> None:
    """torch.func.grad wraps parameters and buffers alike; amax is recorded in the buffers' own memory."""
    recipe = octavo.DelayedScaling(history=4)
    layer = kind(G, K, N, recipe=recipe)
    x, buffers = torch.randn(M, K), {name: buffer.clone() for name, buffer in layer.named_buffers()}

    def loss(parameters: Any, buffers: Any) -> Tensor:
        y: Tensor = functional_call(layer, (parameters, buffers), (x, SIZES))
        return y.square().sum()

    gradients = grad(loss)(dict(layer.named_parameters()), buffers)
    layer(x, SIZES).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert torch.equal(gradients[name], parameter.grad)
    for name, buffer in layer.named_buffers():
        assert torch.equal(buffers[name], buffer)
    assert buffers["amax_history"].count_nonzero()
