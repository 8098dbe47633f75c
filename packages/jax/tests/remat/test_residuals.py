"""What the backward pass keeps, in bytes: the table of docs/guide/jax.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import octavo
import octavo_jax

pytestmark = pytest.mark.filterwarnings("ignore:a layer with delayed scaling")  # its scales are given and stay

GUIDE = Path(__file__).parents[4] / "docs" / "guide" / "jax.md"
M, K, N, G = 2048, 512, 256, 4
PADDING = 128
"""Rows that a group may be rounded up to, in some layout."""


def _table() -> dict[str, tuple[float, float]]:
    """Bytes for each element of x and of the kernel, by recipe."""
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| ([^|]+) \| ([^|]+) \|", GUIDE.read_text(), re.MULTILINE)
    return {name: (_value(x), _value(kernel)) for name, x, kernel in rows}


def _value(text: str) -> float:
    """1 + 1/32, with M/G and N of the layer below."""
    total = 0.0
    for term in text.split("+"):
        top, _, bottom = term.strip().partition("/")
        sizes = {"": 1, "m": M // G, "N": N}
        total += float(top) / (sizes[bottom] if bottom in sizes else float(bottom))
    return total


@pytest.mark.parametrize("kind", ["bf16", "fp8-delayed", "fp8-current", "fp8-row", "fp8-block", "mxfp8", "nvfp4"])
def test_bytes_that_the_backward_pass_keeps(kind: str) -> None:
    """One plane of x and one of the kernel, and nothing else of their size, as the guide's table has them."""
    recipe = octavo.DelayedScaling(history=4) if kind == "fp8-delayed" else octavo.recipe(kind)
    state = octavo_jax.init_delayed(recipe, G) if isinstance(recipe, octavo.DelayedScaling) else None

    def layer(x: Any, kernel: Any) -> Any:
        seed = 1 if recipe.stochastic else None
        return octavo_jax.grouped_dense(
            x, kernel, jnp.full(G, M // G), recipe=recipe, seed=seed, state=state, backend="jax-reference"
        )

    avals = jax.ShapeDtypeStruct((M, K), jnp.bfloat16), jax.ShapeDtypeStruct((G, K, N), jnp.bfloat16)
    saved = jax.tree.leaves(jax.eval_shape(lambda x, kernel: jax.vjp(layer, x, kernel)[1], *avals))
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in saved)
    x, kernel = _table()[kind]
    wanted = x * M * K + kernel * G * K * N
    small = 4 * 1024  # sizes, seed, state, second levels
    assert wanted <= total <= wanted + x * PADDING * G * K + small
