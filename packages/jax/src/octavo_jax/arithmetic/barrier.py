"""A typed optimization barrier."""

from __future__ import annotations

from jax import Array, lax


def barrier(*arrays: Array) -> tuple[Array, ...]:
    """The same arrays, computed once: XLA will not fuse what makes them into every reader."""
    return tuple(lax.optimization_barrier(arrays))  # type: ignore[no-untyped-call]
