"""Layers of arrays past 2^31 elements, by shape: what 32-bit counts would get wrong before anything runs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import octavo
import octavo_jax

M, K, N, G = 1 << 19, 1 << 13, 1 << 13, 64
"""x, y and the kernel have 2^32 elements each."""


@pytest.mark.parametrize("name", ["bf16", "fp8-row", "mxfp8"])
def test_shapes_of_a_training_step(name: str) -> None:
    """y and both gradients have their arguments' shapes and dtypes, the kernel in either orientation."""
    recipe = octavo.recipe(name)

    def step(x: Any, kernel: Any, dy: Any, sizes: Any) -> Any:
        y, pull = jax.vjp(
            lambda x, kernel: octavo_jax.grouped_dense(x, kernel, sizes, recipe=recipe, backend="jax-reference"),
            x,
            kernel,
        )
        return (y, *pull(dy))

    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((M, K), (G, K, N), (M, N))]
    made = jax.eval_shape(step, *arrays, jax.ShapeDtypeStruct((G,), jnp.int32))
    for one, like in zip(made, (arrays[2], arrays[0], arrays[1]), strict=True):
        assert (one.shape, one.dtype, one.size) == (like.shape, like.dtype, 1 << 32)


def test_planes_of_a_quantizer() -> None:
    """Codes and scales of 2^32 elements, both planes."""
    spec = octavo.MXFP8().quantizer("x")
    assert spec is not None
    rows, sizes = jax.ShapeDtypeStruct((M, K), jnp.bfloat16), jax.ShapeDtypeStruct((G,), jnp.int32)
    q = jax.eval_shape(lambda x, sizes: octavo_jax.quantize(x, spec, sizes, backend="jax-reference"), rows, sizes)
    for direction in ("rowwise", "columnwise"):
        assert q.plane(direction)[0].shape == q.spec.payload_shape(direction) == (M, K)
        assert q.plane(direction)[1].shape == q.spec.scale_shape(direction)
