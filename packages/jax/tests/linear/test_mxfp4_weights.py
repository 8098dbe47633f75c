"""MXFP4Weights in JAX: values, codes and counts are those of the definition, and a step rounds a kernel once."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import octavo_jax
import octavo_numerics
from octavo import BlockScaling, MXFP4Weights
from octavo.quantizer import Direction
from octavo_jax.arithmetic.mxfp4 import octavo_mxfp4_values
from octavo_jax.counting import count_runs
from octavo_numerics import round_mxfp4

REFERENCE = "jax-reference"
DIRECTIONS: tuple[Direction, ...] = ("rowwise", "columnwise")
SIZES = np.array([5, 0, 9], np.int32)
G, K, N = 3, 160, 136
SPEC = MXFP4Weights().quantizer("w")
assert SPEC is not None


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_values_are_those_of_the_definition(direction: Direction, rng: np.random.Generator) -> None:
    """Of any fp32 pattern, subnormal ones included, which XLA flushes: the bits, with the signs of zeros."""
    patterns = rng.integers(0, 1 << 32, (2, K, N), np.uint32)
    patterns[1] &= np.uint32(0x80FFFFFF)
    w = patterns.view(np.float32)
    w[0, :64] = np.where(np.isfinite(w[0, :64]), w[0, :64], 0)
    ours = octavo_mxfp4_values(jnp.asarray(w), None, direction=direction)
    wanted = round_mxfp4(w, direction).astype(ml_dtypes.bfloat16)
    assert ours.dtype == jnp.bfloat16
    assert np.asarray(ours).tobytes() == wanted.tobytes()
    assert np.isfinite(wanted[0, :64].astype(np.float32)).all()


def test_codes_and_counts_are_those_of_the_definition(rng: np.random.Generator) -> None:
    """Both planes are one, their quantizer says what came before, and what is not held is counted by expert."""
    w = rng.standard_normal((G, K, N)).astype(np.float32)
    w[1, 3:7] *= np.float32(2.0**-18)
    ours, wanted = octavo_jax.quantize(jnp.asarray(w), SPEC, backend=REFERENCE), octavo_numerics.quantize(w, SPEC)
    assert ours.spec.quantizer == SPEC
    for name, plane in octavo_numerics.valid(wanted).items():
        assert np.asarray(getattr(ours, name)).tobytes() == plane.tobytes(), name
    inexact = octavo_numerics.tensor_stats(w, SPEC).inexact
    assert inexact[1] > 0
    assert octavo_jax.tensor_stats(jnp.asarray(w), SPEC).inexact.tolist() == inexact.tolist()


def test_a_step_rounds_a_kernel_once(rng: np.random.Generator) -> None:
    """Not a plane more is made than BlockScaling makes, and the kernel is rounded once for both."""
    x, kernel = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((14, K), (G, K, N)))

    def loss(x: jax.Array, kernel: jax.Array, recipe: Any) -> jax.Array:
        return octavo_jax.grouped_dense(x, kernel, SIZES, recipe=recipe, backend=REFERENCE).sum()

    ours, blocks = (
        count_runs(jax.grad(partial(loss, recipe=recipe), (0, 1)), x, kernel)
        for recipe in (MXFP4Weights(), BlockScaling())
    )
    assert ours.by_name == blocks.by_name
    program = str(jax.make_jaxpr(jax.grad(partial(loss, recipe=MXFP4Weights()), (0, 1)))(x, kernel))
    assert program.count("name=octavo_mxfp4_values") == 1
    assert ours.quantize == 3
