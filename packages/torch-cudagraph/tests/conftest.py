"""A seed that a failing test prints."""

from __future__ import annotations

import secrets

import numpy as np
import pytest
import torch


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with a new seed each run; torch's own generator is seeded with it, too."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")  # shown by pytest where the test fails
    torch.manual_seed(seed)
    return np.random.default_rng(seed)
