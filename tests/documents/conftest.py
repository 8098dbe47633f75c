"""Documents are run for what they say, not for bits: LLVM optimizes nothing of what JAX compiles for them."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope="package", autouse=True)
def in_a_hurry() -> Iterator[None]:
    """Programs of pages and examples compile in half the time; none of them is left for tests of bits."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
    jax.clear_caches()
