"""ragged_dot beside jax.lax.ragged_dot: signature, dtypes, gradients within the error bound, and what is refused."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
import octavo_jax
import octavo_numerics

M, K, N, G = 40, 48, 32, 4
SIZES = np.array([17, 0, 9, 8], np.int32)  # an empty group and a tail of six rows


def _arrays(rng: np.random.Generator, dtype: Any = jnp.float32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    shapes = ((M, K), (G, K, N), (M, N))
    lhs, rhs, dy = (rng.standard_normal(shape).astype(np.float32).astype(dtype) for shape in shapes)
    lhs[SIZES.sum() :] = np.nan
    return lhs, rhs, dy


def test_the_signature_is_jaxs() -> None:
    """Positions, names and defaults of jax.lax.ragged_dot; what is ours comes by keyword alone."""
    mine, theirs = (inspect.signature(f).parameters.values() for f in (octavo_jax.ragged_dot, jax.lax.ragged_dot))
    positional = [(p.name, p.default) for p in mine if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert positional == [(p.name, p.default) for p in theirs]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_high_precision_is_jaxs_product(dtype: Any, rng: np.random.Generator) -> None:
    """Result and both gradients: of one dtype, and within the bound around float64 (faults.md 4, 8, 12)."""
    lhs, rhs, dy = _arrays(rng, dtype)
    sizes = jnp.asarray(SIZES)

    def both(f: Any) -> Any:
        y, pull = jax.vjp(lambda lhs, rhs: f(lhs, rhs, sizes, precision="highest"), lhs, rhs)
        return (y, *pull(dy))

    mine = jax.jit(lambda: both(lambda *a, **k: octavo_jax.ragged_dot(*a, recipe=None, **k)))()
    theirs = jax.jit(lambda: both(jax.lax.ragged_dot))()
    used = slice(SIZES.sum())
    wide = [a.astype(np.float64) for a in (lhs, rhs, dy)]
    wide[2][SIZES.sum() :] = 0
    rows = np.split(np.arange(SIZES.sum()), np.cumsum(SIZES)[:-1])
    gemms: tuple[Any, ...] = ("fprop", "dgrad", "wgrad")
    for gemm, a, b in zip(gemms, mine, theirs, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert not a[SIZES.sum() :].any() if gemm != "wgrad" else not a[1].any()
        for g in (0, 2, 3):
            left, right, at = {
                "fprop": (wide[0][rows[g]], wide[1][g].T, rows[g]),
                "dgrad": (wide[2][rows[g]], wide[1][g], rows[g]),
                "wgrad": (wide[0][rows[g]].T, wide[2][rows[g]].T, g),
            }[gemm]
            for result in (a, b):
                bound = octavo_numerics.error_bound(
                    octavo.HighPrecision(), left.shape[1], gemm=gemm, out_dtype=a.dtype.name
                )
                report = bound.check(result[at], left, right, zero_mean=False)
                assert report.passed, f"{gemm}, group {g}: {report.describe()}"
    assert np.isfinite(np.asarray(mine[0])[used].astype(np.float32)).all()


@pytest.mark.parametrize(
    ("lhs", "rhs", "preferred"),
    [("bfloat16", "float32", None), ("float32", "float16", None), ("bfloat16", "bfloat16", "float32")],
)
def test_dtypes_are_jaxs(lhs: str, rhs: str, preferred: Any) -> None:
    """Two dtypes promote, a preferred one is the result's, gradients have their argument's."""
    a, b, sizes = jnp.ones((4, 16), lhs), jnp.ones((2, 16, 16), rhs), jnp.array([1, 3])

    def dtypes(f: Any) -> list[Any]:
        made = jax.eval_shape(lambda a, b: jax.vjp(lambda a, b: f(a, b, sizes, None, preferred), a, b)[0], a, b)
        gradients = jax.eval_shape(
            jax.grad(lambda a, b: jnp.sum(f(a, b, sizes, None, preferred).astype(jnp.float32)), (0, 1)), a, b
        )
        return [made.dtype, *(one.dtype for one in gradients)]

    assert dtypes(lambda *args: octavo_jax.ragged_dot(*args, recipe=None)) == dtypes(jax.lax.ragged_dot)


def test_a_recipe_computes_what_grouped_dense_does(rng: np.random.Generator) -> None:
    """The same program, forward and backward, stochastic gradients with their seed among them, so the same bits."""
    recipe = octavo.recipe("nvfp4")

    def gradients(f: Any, sizes: Any, seed: Any, lhs: Any, rhs: Any, dy: Any) -> Any:
        y, pull = jax.vjp(lambda lhs, rhs: f(lhs, rhs, sizes, recipe=recipe, seed=seed), lhs, rhs)
        return (y, *pull(dy))

    arguments = jnp.asarray(SIZES), jnp.asarray([5, 0], jnp.uint32), *_arrays(rng)
    mine, theirs = (
        str(jax.make_jaxpr(gradients, static_argnums=0)(f, *arguments))
        for f in (octavo_jax.ragged_dot, octavo_jax.grouped_dense)
    )
    assert mine == theirs


def test_what_is_refused() -> None:
    """A precision that codes do not have, or that is no level; an offset, which JAX does not compute either."""
    lhs, rhs, sizes = jnp.ones((4, 16)), jnp.ones((2, 16, 16)), jnp.array([1, 3])
    for precision in (jax.lax.Precision.HIGHEST, ("default", "high")):
        with pytest.raises(ValueError, match=r"'mxfp8' multiplies quantized operands; leave it out"):
            octavo_jax.ragged_dot(lhs, rhs, sizes, precision, recipe=octavo.recipe("mxfp8"))
    with pytest.raises(ValueError, match="the recipe decides"):
        octavo_jax.ragged_dot(lhs, rhs, sizes, "F32_F32_F32", recipe=None)
    for offset in (0, jnp.array([1])):
        with pytest.raises((NotImplementedError, TypeError)):  # the day JAX computes it, so should this
            jax.lax.ragged_dot(lhs, rhs, sizes, group_offset=offset)
        with pytest.raises(ValueError, match="slice rhs and group_sizes"):
            octavo_jax.ragged_dot(lhs, rhs, sizes, group_offset=offset, recipe=None)
    with pytest.raises(ValueError, match=r"recipe is DelayedScaling, .* ragged_dot has no place for a state"):
        octavo_jax.ragged_dot(lhs, rhs, sizes, recipe="fp8-delayed")
    with pytest.raises(ValueError, match=r"jax\.shard_map"):
        octavo_jax.ragged_dot(lhs, rhs, sizes, out_sharding="x", recipe=None)
    for left, right, message in (
        (lhs.astype(int), rhs, "lhs has dtype int32"),
        (lhs, rhs.astype(int), "rhs has dtype int32"),
        (lhs, rhs[0], r"lhs has shape \[4, 16\] and rhs \[16, 16\]; they are \[M, K\] and \[G, K, N\]$"),
        (lhs, jnp.ones((2, 8, 16)), r"rhs \[2, 8, 16\]; they are .*; swap rhs's last two axes, or give it to .*dense"),
    ):
        with pytest.raises(ValueError, match=message):  # in the names of its own arguments
            octavo_jax.ragged_dot(left, right, sizes, recipe=None)
