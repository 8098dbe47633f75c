"""Activations, their derivatives and the probabilities' gradient against float64, in every dtype."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo_registry.contract.cards import GATED
from octavo_torch.functions.activations import ACTIVATIONS, activate, activate_gradient, probs_gradient

ROWS, F = 190, 72
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0.0}
STEP = {torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25, torch.float32: 2.0**-120}


def act64(name: str, x: Tensor) -> Tensor:
    """The activation in float64; torch's own gelu cancels where x is far below zero."""
    x = x.double()
    if name in ("silu", "swiglu"):
        return x * torch.sigmoid(x)
    if name == "relu2":
        return x.clamp(min=0).square()
    if name == "clamped_swiglu":
        gate = clamped64(x, -math.inf)
        return gate * torch.sigmoid(1.702 * gate)
    if name.endswith("tanh"):
        return x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))
    return x * 0.5 * torch.erfc(x * -math.sqrt(0.5))


def whole64(name: str, x: Tensor, probs: Tensor) -> Tensor:
    gate, *up = x.chunk(2, 1) if name in GATED else (x,)
    value = act64(name, gate) * probs.double()[:, None]
    return value * factor64(name, up[0]) if up else value


def clamped64(x: Tensor, low: float) -> Tensor:
    """Between `low` and 7, with the slope 1 at a limit, which torch's clamp had up to torch 2.14 and has no more."""
    return torch.where(x > 7, 7.0, torch.where(x < low, low, x))


def factor64(name: str, up: Tensor) -> Tensor:
    """What multiplies a gate, in float64."""
    return clamped64(up.double(), -7) + 1 if name == "clamped_swiglu" else up.double()


def assert_close(got: Tensor, exact: Tensor, factors: Tensor | float = 0.0) -> None:
    """One rounding to the dtype and 8 ulp of fp32; beside a derivative's root 2^-23 of what multiplies it."""
    bound = exact.abs() * (UNIT[got.dtype] + 2.0**-20) + torch.as_tensor(factors) * 2.0**-22 + STEP[got.dtype]
    worst = float(((got.double() - exact).abs() / bound).max())
    assert worst <= 1.0, f"error is {worst:.2f} of its bound"


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_values_and_gradients(name: str, dtype: torch.dtype, rng: np.random.Generator) -> None:
    """act(x), act(gate) * up, times probabilities, and every gradient, rounded once."""
    x = (4 * torch.randn(ROWS, F * (2 if name in GATED else 1))).to(dtype)
    dy, probs = torch.randn(ROWS, F).to(dtype), torch.rand(ROWS)
    leaf, weight = x.double().requires_grad_(), probs.double().requires_grad_()
    exact = whole64(name, leaf, weight)
    dx, dprobs = torch.autograd.grad(exact, (leaf, weight), dy.double())
    assert_close(activate(x, probs, name), exact.detach())
    assert torch.equal(activate(x, None, name), activate(x, torch.ones(ROWS), name))
    factors = (dy.double() * probs.double()[:, None]).abs()
    if name in GATED:
        gate, up = x.double().chunk(2, 1)
        factors = torch.cat([factors * factor64(name, up).abs(), factors * act64(name, gate).abs()], 1)
    assert_close(activate_gradient(dy, x, probs, name), dx, factors)
    terms = (dy.double() * whole64(name, x, torch.ones(ROWS))).abs().sum(1)
    error = (probs_gradient(dy, x, name).double() - dprobs).abs()
    assert bool((error <= (F + 8) * 2.0**-24 * terms).all())


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_bits_do_not_depend_on_other_rows(name: str, rng: np.random.Generator) -> None:
    """A row has the same bits whatever rows stand beside it, however few: a processor computes most values in vectors
    and an array's last ones apart. Experts over ranks, with fewer rows each, then have one process's bits."""
    columns = F - 1  # no multiple of any vector
    x, dy = 4 * torch.randn(ROWS, columns * (2 if name in GATED else 1)), torch.randn(ROWS, columns)
    whole, slope = activate(x, None, name), activate_gradient(dy, x, None, name)
    for rows in (1, 2, 3, 11, ROWS - 1):
        assert torch.equal(activate(x[:rows].clone(), None, name), whole[:rows]), rows
        assert torch.equal(activate_gradient(dy[:rows].clone(), x[:rows].clone(), None, name), slope[:rows]), rows


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_limits(name: str) -> None:
    """Infinities give the limit and NaN gives NaN, in the values and in the derivatives."""
    x = torch.tensor([[math.inf], [-math.inf], [math.nan], [-300.0]])
    gated, clamped = name in GATED, name == "clamped_swiglu"
    pair = torch.cat([x, torch.ones_like(x)], 1) if gated else x
    value = activate(pair, None, name)
    slope = activate_gradient(torch.ones_like(x), pair, None, name)[:, :1]
    assert torch.equal(value[0], activate(torch.tensor([[7.0, 1.0]]), None, name)[0] if clamped else x[0])
    assert value[1].item() == value[3].item() == slope[1].item() == slope[3].item() == 0
    assert slope[0].item() == (math.inf if name == "relu2" else 0 if clamped else 1)
    assert value[2].isnan()
    assert slope[2].isnan()


def test_at_the_clamp() -> None:
    """The subgradient that torch's clamp had when models were trained with it, up to torch 2.14: 1 at a limit, 0 past
    it."""
    x = torch.tensor([[7.0, 7.0], [7.0, -7.0], [7.0625, 7.0625], [1.0, -7.0625], [math.inf, -math.inf]])
    leaf = x.double().requires_grad_()
    gate, up = clamped64(leaf[:, :1], -math.inf), clamped64(leaf[:, 1:], -7.0)
    dy = torch.ones(len(x), 1)
    (expected,) = torch.autograd.grad((up + 1) * gate * torch.sigmoid(gate * 1.702), leaf, dy.double())
    dx = activate_gradient(dy, x, None, "clamped_swiglu")
    assert torch.equal(dx == 0, expected == 0)
    assert_close(dx, expected)
    assert (dx[:2] != 0).all()
    assert (dx[2] == 0).all()


def test_operators_pass_opcheck() -> None:
    """Fake kernels against real metadata (faults.md 46)."""
    space = torch.ops.octavo_torch
    x, dy, probs = torch.randn(5, 8).bfloat16(), torch.randn(5, 4).bfloat16(), torch.rand(5)
    for operator, arguments in (
        (space.activate, (x, probs, "swiglu")),
        (space.activate, (x, None, "gelu")),
        (space.activate_gradient, (dy, x, probs, "geglu_tanh")),
        (space.activate, (x, probs, "clamped_swiglu")),
        (space.activate_gradient, (dy, x, probs, "clamped_swiglu")),
        (space.probs_gradient, (dy, x, "swiglu")),
    ):
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
