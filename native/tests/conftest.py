"""Fresh random inputs from a seed that a failing test prints; hypothesis without a deadline, because a machine that
others share may pause any example."""

from __future__ import annotations

import secrets

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("octavo", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("octavo")


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with a new seed each run."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")  # shown by pytest where the test fails
    return np.random.default_rng(seed)
