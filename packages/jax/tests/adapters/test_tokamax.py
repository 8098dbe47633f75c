"""octavo_jax.adapters.tokamax: through tokamax where it is installed, and through its recorded interface everywhere."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
import octavo_jax
from octavo_jax.adapters.tokamax import implementation

M, K, N, G = 24, 32, 16, 3
SIZES = np.array([7, 0, 12], np.int32)
RECIPE = octavo.recipe("mxfp8")
FORWARD = jax.lax.RaggedDotDimensionNumbers((([1], [1]), ([], [])), [0], [0])
TURNED = jax.lax.RaggedDotDimensionNumbers((([1], [2]), ([], [])), [0], [0])
WGRAD = jax.lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], [])


class Wrapped:
    """As tokamax.RaggedDotGroupSizes: an array in `value`."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _call(made: Any, lhs: Any, rhs: Any, group_sizes: Any, **changes: Any) -> Any:
    """As `ragged_dot_general` of tokamax 0.0.12 calls an implementation."""
    arguments = {
        "ragged_dot_dimension_numbers": FORWARD,
        "precision": None,
        "preferred_element_type": None,
        "activation": None,
        **changes,
    }
    return made(lhs, rhs, group_sizes=group_sizes, **arguments)


def _operands(rng: np.random.Generator) -> tuple[Any, Any]:
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((M, K), (G, K, N)))  # type: ignore[return-value]


def test_the_recorded_call(rng: np.random.Generator) -> None:
    """Both orientations, wrapped and plain sizes, a preferred dtype, and an activation before rounding."""
    lhs, rhs = _operands(rng)
    expected = octavo_jax.ragged_dot(lhs, rhs, SIZES, recipe=RECIPE)
    made = implementation(RECIPE)
    for sizes in (Wrapped(jnp.asarray(SIZES)), jnp.asarray(SIZES), SIZES, tuple(SIZES.tolist())):
        assert np.array_equal(_call(made, lhs, rhs, sizes), expected)
    turned = _call(made, lhs, jnp.swapaxes(rhs, 1, 2), SIZES, ragged_dot_dimension_numbers=TURNED)
    assert np.array_equal(turned, expected)
    wide = octavo_jax.ragged_dot(lhs, rhs, SIZES, None, jnp.float32, recipe=RECIPE)
    assert np.array_equal(_call(made, lhs, rhs, SIZES, preferred_element_type=jnp.float32), wide)
    activated = _call(made, lhs, rhs, SIZES, activation=jax.nn.silu)
    assert np.array_equal(activated, jax.nn.silu(wide).astype(jnp.bfloat16))


def test_what_it_leaves_to_the_next_of_the_sequence(rng: np.random.Generator) -> None:
    """NotImplementedError, the only error that tokamax goes on from, with the reason."""
    lhs, rhs = _operands(rng)
    made = implementation(RECIPE)
    for changes, reason in (
        ({"ragged_dot_dimension_numbers": WGRAD}, "weight gradients"),
        ({"precision": jax.lax.Precision.HIGHEST}, "multiplies quantized operands"),
        ({"precision": "F32_F32_F32"}, "the recipe decides"),
    ):
        with pytest.raises(NotImplementedError, match=reason):
            _call(made, lhs, rhs, SIZES, **changes)
    with pytest.raises(NotImplementedError, match="lhs is a Wrapped"):
        _call(made, Wrapped(lhs), rhs, SIZES)
    with pytest.raises(NotImplementedError, match="torch-reference"):
        _call(implementation(RECIPE, backend="torch-reference"), lhs, rhs, SIZES)
    with pytest.raises(ValueError, match="seed is None"):  # a mistake, which another implementation would hide
        _call(implementation(octavo.recipe("nvfp4")), lhs, rhs, SIZES)


def test_each_product_asks_for_its_seed(rng: np.random.Generator) -> None:
    """A function as the seed is called for every product, so that layers do not round alike (faults.md 40)."""
    lhs, rhs = _operands(rng)
    drawn = iter((1, 2))
    recipe = octavo.NVFP4(fprop="high_precision", wgrad="high_precision")  # what rounds stochastically alone is dy
    made = implementation(recipe, seed=lambda: next(drawn))

    def gradient(f: Any) -> Any:
        return np.asarray(jax.grad(lambda a: jnp.sum(jnp.sin(f(a).astype(jnp.float32))))(lhs), np.float32)

    first, second = (gradient(lambda a: _call(made, a, rhs, SIZES)) for _ in range(2))
    again = gradient(lambda a: octavo_jax.ragged_dot(a, rhs, SIZES, recipe=recipe, seed=1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, second)


def test_inside_tokamax(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """tokamax runs our product, alone and in a sequence, gradients too; what we refuse the next one computes."""
    tokamax = pytest.importorskip("tokamax", reason="tokamax is not installed; `nox -s adapters` installs it")
    assert tokamax.__version__ == "0.0.12"
    monkeypatch.setattr(sys, "argv", ["test"])  # tokamax reads options from it
    lhs, rhs = _operands(rng)
    sizes = jnp.asarray(SIZES)

    def gradients(f: Any) -> Any:
        return jax.jit(jax.value_and_grad(lambda a, b: jnp.sum(jnp.sin(f(a, b).astype(jnp.float32))), (0, 1)))(lhs, rhs)

    expected = gradients(lambda a, b: octavo_jax.ragged_dot(a, b, sizes, recipe=RECIPE))
    ours = implementation(RECIPE)
    for chosen, given in ((ours, sizes), ([ours], sizes), ([ours, "xla"], tokamax.RaggedDotGroupSizes(sizes, M))):
        mine = gradients(lambda a, b: tokamax.ragged_dot(a, b, given, implementation=chosen))  # noqa: B023
        for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(expected), strict=True):
            assert np.array_equal(a, b)
    high = jax.lax.Precision.HIGHEST
    with pytest.raises(NotImplementedError, match="multiplies quantized operands"):
        tokamax.ragged_dot(lhs, rhs, sizes, high, implementation=[ours])
    fallen = tokamax.ragged_dot(lhs, rhs, sizes, high, implementation=[ours, "xla"])
    assert np.array_equal(fallen, tokamax.ragged_dot(lhs, rhs, sizes, high, implementation="xla"))
