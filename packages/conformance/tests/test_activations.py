"""The contract's activations are those that octavo_numerics defines: what a card may declare is held to something."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from octavo_conformance.oracles.functions import activated, activated_gradient, width
from octavo_numerics import activate, activate_gradient
from octavo_numerics.moe.activations import Activation
from octavo_registry.contract.cards import ALL_ACTIVATIONS

ROWS, FEATURES = 5, 3


def test_the_names_are_the_same() -> None:
    """In the contract and in the definition."""
    assert set(get_args(Activation)) == ALL_ACTIVATIONS


@pytest.mark.parametrize("name", sorted(ALL_ACTIVATIONS))
def test_both_take_the_same_columns(name: str) -> None:
    """A gate is a gate in both, and every element has a bound that is above 0."""
    x, dy = np.ones((ROWS, width(name, FEATURES)), np.float32), np.ones((ROWS, FEATURES), np.float32)
    value, gradient = activated(x, name, None), activated_gradient(dy, x, name, None)
    assert value.value.shape == value.error.shape == dy.shape
    assert gradient.value.shape == gradient.error.shape == x.shape
    assert (value.error > 0).all()
    assert (gradient.error > 0).all()
    np.testing.assert_array_equal(value.value, activate(x, name))  # type: ignore[arg-type]
    np.testing.assert_array_equal(gradient.value, activate_gradient(dy, x, name))  # type: ignore[arg-type]
