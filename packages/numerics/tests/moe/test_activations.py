"""The definition of activations: derivatives of the values, limits, and the gradient at a clamp."""

from __future__ import annotations

import secrets
from typing import get_args

import numpy as np
import pytest

from octavo_numerics import activate, activate_gradient, activation_parts
from octavo_numerics.moe.activations import Activation

STEP = 2.0**-16
ROWS, F = 300, 7


def draw(seed: int, columns: int) -> np.ndarray:
    """Values on both sides of where an activation bends, none within a step of a clamp or of relu2's corner."""
    print(f"seed {seed}")
    x = np.random.default_rng(seed).standard_normal((ROWS, columns)) * 4
    for edge in (-7, 0, 7):
        x[np.abs(x - edge) < 4 * STEP] += 8 * STEP
    return x


@pytest.mark.parametrize("activation", get_args(Activation))
def test_the_gradient_is_the_derivative_of_the_value(activation: Activation) -> None:
    """Central differences in float64, whose error is a sixth of the third derivative (below 6 here, times a factor of
    32 or less and dy) times the step squared, and the rounding of values below 2^10 over the step."""
    columns = F if activation in ("silu", "gelu", "gelu_tanh", "relu2") else 2 * F
    seed = secrets.randbits(32)
    x, rng = draw(seed, columns), np.random.default_rng(seed + 1)
    dy, probs = rng.uniform(-1, 1, (ROWS, F)), rng.random(ROWS)
    gradient = activate_gradient(dy, x, activation, probs)
    assert gradient.shape == x.shape
    for column in range(columns):
        step = np.zeros_like(x)
        step[:, column] = STEP
        ahead, behind = (activate(x + sign * step, activation, probs) for sign in (1, -1))
        difference = (dy * (ahead - behind)).sum(1) / (2 * STEP)
        assert np.abs(gradient[:, column] - difference).max() <= 32 * STEP**2 + 2.0**-43 / STEP


@pytest.mark.parametrize("activation", get_args(Activation))
def test_infinities_give_the_limit(activation: Activation) -> None:
    """Of the value and of the derivative; NaN gives NaN."""
    x = np.array([[np.inf], [-np.inf], [np.nan]])
    gated = activation not in ("silu", "gelu", "gelu_tanh", "relu2")
    parts = activation_parts(np.concatenate([x, np.ones_like(x)], 1) if gated else x, activation)
    clamped = activation == "clamped_swiglu"
    assert parts.value[0] == (7 / (1 + np.exp(-1.702 * 7)) if clamped else np.inf)
    assert parts.slope[0] == (0 if clamped else np.inf if activation == "relu2" else 1)
    assert parts.value[1] == parts.slope[1] == 0
    assert np.isnan(parts.value[2])
    assert np.isnan(parts.slope[2])


def test_at_the_clamp() -> None:
    """1 at a limit and 0 past it, as torch's clamp has it."""
    x = np.array([[7.0, 7.0], [7.0, -7.0], [7.5, 7.5], [-9.0, -7.5]])
    parts = activation_parts(x, "clamped_swiglu")
    np.testing.assert_array_equal(parts.factor[:, 0], [8, -6, 8, -6])
    np.testing.assert_array_equal(parts.passes[:, 0], [1, 1, 0, 0])
    np.testing.assert_array_equal(parts.slope[:, 0] != 0, [True, True, False, True])


def test_nothing_gets_past_a_clamp() -> None:
    """An up projection past the clamp has the gradient 0 where dy or the gate is not finite, as a clamp's backward in
    torch has it; the gate's gradient says that something is NaN."""
    x = np.array([[1.0, 7.5], [-1.0, -8.0], [np.nan, 9.0], [1.0, np.inf], [1.0, 6.0]])
    dy = np.array([[np.nan], [np.nan], [1.0], [np.nan], [np.nan]])
    gradient = activate_gradient(dy, x, "clamped_swiglu")
    assert np.array_equal(gradient[:, 1], [0, 0, 0, 0, np.nan], equal_nan=True)
    assert np.isnan(gradient[:, 0]).all()


def test_arguments_that_do_not_fit() -> None:
    """With what was given and what is needed."""
    with pytest.raises(ValueError, match="activation is 'tanh'; give one of silu, gelu"):
        activate(np.ones((2, 4)), "tanh")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"x has 3 columns and swiglu reads gates and an up projection; give 2 F"):
        activate(np.ones((2, 3)), "swiglu")
