"""A generator whose seed a failing test prints, and the backend that serves here."""

from __future__ import annotations

import secrets

import jax
import numpy as np
import pytest

DEVICE = "cuda" if jax.default_backend() == "gpu" else "cpu"
BACKEND = "jax-triton" if DEVICE == "cuda" else "jax-triton-interpreter"


def pytest_configure(config: pytest.Config) -> None:
    """The interpreter of Triton 3.6 makes integers of arrays [1] where a loop ends at a value."""
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim:DeprecationWarning")


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with a new seed each run."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")  # shown by pytest where the test fails
    return np.random.default_rng(seed)


@pytest.fixture
def device() -> str:
    """Where the kernels run."""
    return DEVICE


@pytest.fixture
def backend() -> str:
    """The backend that serves there."""
    return BACKEND
