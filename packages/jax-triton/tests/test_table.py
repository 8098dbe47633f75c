"""The table of ragged rows, in the integers that JAX has."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo_jax_triton.arrays.table import groups_of_panels, row_table, sizes_of
from octavo_jax_triton.launch.arguments import Target
from octavo_triton.layouts import panels_of


def target_of(device: str) -> Target:
    if device == "cpu":
        return Target(None)
    major, minor = jax.devices()[0].compute_capability.split(".")
    return Target((int(major), int(minor)))


@pytest.mark.parametrize("dtype", ["int32", "uint32"])
def test_panels_are_the_groups_own(dtype: str, rng: np.random.Generator, device: str) -> None:
    """Any sizes, empty groups among them, as int32: sizes, each panel's group in order, and none past the last."""
    sizes = rng.integers(0, 250, 7).astype(dtype)
    sizes[rng.integers(0, 7)] = 0
    rows = int(sizes.sum()) + int(rng.integers(0, 300))
    table = row_table(jnp.asarray(sizes), rows, target_of(device))
    assert table.dtype == jnp.int32
    np.testing.assert_array_equal(sizes_of(table, 7), sizes)
    panels = panels_of(rows, 7)
    owners = np.repeat(np.arange(7), -(-sizes.astype(np.int64) // 128))
    expected = np.concatenate([owners, np.full(panels - len(owners), 7)])
    np.testing.assert_array_equal(groups_of_panels(table, 7, panels), expected)


def test_sizes_that_wrap_around_are_cut_to_the_rows(device: str) -> None:
    """A uint32 past 2^31 is many rows and not fewer than none."""
    sizes = jnp.array([3, 4_294_967_295, 5], jnp.uint32)
    np.testing.assert_array_equal(sizes_of(row_table(sizes, 100, target_of(device)), 3), [3, 97, 0])
