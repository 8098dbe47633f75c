"""A new seed for each test, which a failing test shows."""

from __future__ import annotations

import secrets

import numpy as np
import pytest


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator from a random seed, printed so that a failure can be repeated."""
    seed = secrets.randbits(64)
    print(f"rng seed: {seed}")
    return np.random.default_rng(seed)
