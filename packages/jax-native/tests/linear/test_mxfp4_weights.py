"""MXFP4Weights: a layer is that of blocks of the rounded kernel, and gradients go straight through."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo_jax
import octavo_numerics
from octavo import BlockScaling, MXFP4Weights, QuantizerSpec
from octavo_jax.quantizers import rounded
from octavo_numerics import round_mxfp4

G, K, N = 3, 160, 144
SIZES = np.array([5, 0, 9], np.int32)


def spread(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Blocks of 32 along either axis that E4M3 holds, and some that it does not."""
    w = rng.standard_normal(shape).astype(np.float32)
    w[:, 3:7] *= np.float32(2.0**-18)
    w[..., 9:12] *= np.float32(2.0**-19)
    return w


@pytest.mark.parametrize("weight", ["kn", "nk"])
def test_a_layer_is_that_of_blocks_of_the_rounded_kernel(weight: str, rng: np.random.Generator) -> None:
    """y and both gradients, jitted, with the kernel as [G, K, N] and as [G, N, K]: blocks of 32 run along K."""
    shape, along = ((G, K, N), "columnwise") if weight == "kn" else ((G, N, K), "rowwise")
    kernel = spread(rng, *shape)
    x = jnp.asarray(rng.standard_normal((17, K)), jnp.bfloat16)
    dy = jnp.asarray(rng.standard_normal((17, N)), jnp.bfloat16)

    def step(recipe: Any) -> Any:
        def layer(x: jax.Array, kernel: jax.Array) -> jax.Array:
            return octavo_jax.grouped_dense(
                x, kernel, SIZES, recipe=recipe, contracting_dims=((-1,), (shape.index(K),)), backend="jax-native"
            )

        def both(x: jax.Array, kernel: jax.Array) -> Any:
            y, pull = jax.vjp(layer, x, kernel)
            return y, *pull(dy)

        return jax.jit(both)

    ours = step("mxfp4")(x, jnp.asarray(kernel))
    blocks = step(BlockScaling())(x, jnp.asarray(round_mxfp4(kernel, along)))  # type: ignore[arg-type]
    for one, other in zip(ours, blocks, strict=True):
        assert one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("axis", ["rowwise", "columnwise"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_kernels_round_what_they_quantize(
    axis: Any, dtype: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Along rows and down columns the codes are the definition's, of NaN and infinities, too; XLA's operations round
    fp16 alone, which the kernels do not read."""
    composed: list[Any] = []
    real = rounded.octavo_mxfp4_values
    monkeypatch.setattr(rounded, "octavo_mxfp4_values", lambda *given, **how: composed.append(1) or real(*given, **how))
    whole = MXFP4Weights().quantizer("w")
    assert whole is not None
    spec = QuantizerSpec(**{**dict(whole), "mxfp4": axis})
    w = spread(rng, G, K, N)
    w[1, 1, 0], w[2, -1, -1] = np.nan, -np.inf
    given = jnp.asarray(w, dtype)
    ours = octavo_jax.quantize(given, spec, backend="jax-native")
    wanted = octavo_numerics.quantize(np.asarray(given), spec)
    assert ours.spec.quantizer == spec
    for name, plane in octavo_numerics.valid(wanted).items():
        assert np.asarray(getattr(ours, name)).tobytes() == plane.tobytes(), name
    assert bool(composed) == (dtype == "float16")
