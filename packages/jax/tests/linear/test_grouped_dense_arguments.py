"""grouped_dense's arguments: how the kernel lies, leading axes, dtypes, group_offset, and use without a gradient.

Integers make sums exact, so results are compared for equality: with scales that are powers of two e4m3 holds those up
to 16, and fp32 their products. Row scaling is the recipe that XLA compiles fastest.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
import octavo_jax
import octavo_registry
from octavo import NoBackendError
from octavo_jax.dispatch.device import device_of
from octavo_jax.dispatch.layer import LayerOptions, layer_for
from octavo_jax.linear.arguments import context_of
from octavo_registry import BackendCard, hookimpl

M, K, N, G = 24, 32, 64, 3
SIZES = np.array([9, 0, 11], np.int32)
ROW = octavo.RowScaling()


def _integers(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(-4, 5, shape).astype(np.float32)


def _expected(x: np.ndarray, kernel: np.ndarray, bias: np.ndarray, dy: np.ndarray) -> tuple[np.ndarray, ...]:
    """y, dx, dkernel [G, K, N], dbias of rows [M, .]."""
    y, dx = np.zeros((M, N), np.float32), np.zeros((M, K), np.float32)
    dw, db = np.zeros_like(kernel), np.zeros_like(bias)
    ends = np.cumsum(SIZES)
    for g, rows in enumerate(slice(end - size, end) for end, size in zip(ends, SIZES, strict=True)):
        y[rows], dx[rows] = x[rows] @ kernel[g] + bias[g], dy[rows] @ kernel[g].T
        dw[g], db[g] = x[rows].T @ dy[rows], dy[rows].sum(0)
    return y, dx, dw, db


@pytest.mark.parametrize("recipe", [None, ROW], ids=["bf16", "row"])
def test_kernels_that_lie_either_way_and_leading_axes(recipe: octavo.Recipe | None, rng: np.random.Generator) -> None:
    """[G, K, N] and [G, N, K], axes counted from either end, x of [2, 3, 4, K]: one result, gradients of x, kernel and
    bias in their arguments' shapes, none of group_sizes."""
    x, kernel, bias, dy = (_integers(rng, shape) for shape in ((M, K), (G, K, N), (G, N), (M, N)))
    y, dx, dw, db = _expected(x, kernel, bias, dy)
    turned = np.swapaxes(kernel, 1, 2).copy()
    lead = (2, 3, 4)
    for dims, x_axes, w, dw_expected in (
        (((-1,), (1,)), (M,), kernel, dw),
        (((1,), (-2,)), (M,), kernel, dw),
        (((-1,), (2,)), (M,), turned, np.swapaxes(dw, 1, 2)),
        (((3,), (-1,)), lead, turned, np.swapaxes(dw, 1, 2)),
        (((-1,), (1,)), lead, kernel, dw),
    ):

        def layer(x: Any, w: Any, bias: Any, sizes: Any, dims: Any = dims) -> Any:
            return octavo_jax.grouped_dense(x, w, sizes, recipe=recipe, contracting_dims=dims, bias=bias)

        arrays = x.reshape(*x_axes, K), w, bias, jnp.asarray(SIZES)
        made, pull = jax.vjp(layer, *map(jnp.asarray, arrays))
        gradients = pull(jnp.asarray(dy.reshape(*x_axes, N)))
        assert made.shape == (*x_axes, N)
        assert np.array_equal(np.asarray(made).reshape(M, N), y)
        for got, wanted in zip(gradients, (dx.reshape(*x_axes, K), dw_expected, db), strict=False):
            assert np.array_equal(got, wanted)
        assert gradients[3].dtype == jax.dtypes.float0


def test_a_dtype_of_its_own_for_y(rng: np.random.Generator) -> None:
    """fp32 y of bf16 x and kernel: gradients have the arguments' dtypes; where a GEMM's slot is high precision dy is
    rounded to bf16 first, and where it is quantized it is quantized as it comes."""
    x, kernel = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((M, K), (G, K, N)))
    dy = jnp.asarray(rng.standard_normal((M, N)), jnp.float32)
    rounded = dy.astype(jnp.bfloat16).astype(jnp.float32)
    for recipe in (None, octavo.RowScaling(wgrad="high_precision")):

        def layer(x: Any, kernel: Any, recipe: Any = recipe) -> Any:
            return octavo_jax.grouped_dense(x, kernel, SIZES, recipe=recipe, preferred_element_type=jnp.float32)

        y, pull = jax.vjp(layer, x, kernel)
        (dx, dw), (dx_rounded, dw_rounded) = pull(dy), pull(rounded)
        assert (y.dtype, dx.dtype, dw.dtype) == (jnp.float32, jnp.bfloat16, jnp.bfloat16)
        assert np.array_equal(dw, dw_rounded)
        assert np.array_equal(dx, dx_rounded) == (recipe is None)


def test_the_dtypes_that_backends_are_asked_for() -> None:
    """Unquantized operands have one dtype: x's and the kernel's, fp32 where these differ; dx has x's, dw the kernel's.
    What is quantized keeps its own, an fp32 kernel beside bf16 x too."""
    x, narrow, wide = jnp.ones((M, K), jnp.bfloat16), jnp.ones((G, K, N), jnp.bfloat16), jnp.ones((G, K, N))
    for kernel, product in ((narrow, "bfloat16"), (wide, "float32")):
        plan = layer_for(LayerOptions.of(None, jnp.float32), x, kernel).plan
        for part in plan.plans:
            assert (part.request.in_dtype, part.request.other_dtype) == (product, None), part.request.op
    plan = layer_for(LayerOptions.of(ROW, jnp.float32), x, wide).plan
    assert plan.dgrad is not None
    assert plan.wgrad is not None
    assert plan.quantize_w is not None
    assert (plan.dgrad.request.out_dtype, plan.wgrad.request.out_dtype) == ("bfloat16", "float32")
    assert plan.quantize_w.request.in_dtype == "float32"


def test_group_offset_counts_groups(rng: np.random.Generator) -> None:
    """Stochastic rounding depends on a group's number, not on where it stands: the second of two groups from 3 on has
    the dx of the first from 4 on."""
    x, kernel = (rng.standard_normal(shape).astype(np.float32) for shape in ((16, 32), (2, 32, 32)))
    dy = rng.standard_normal((16, 32)).astype(np.float32)
    recipe = octavo.NVFP4(fprop="high_precision", wgrad="high_precision")

    @jax.jit
    def dx(x: Any, kernel: Any, dy: Any, offset: Any) -> Any:
        sizes = jnp.array([8, 8])

        def layer(x: Any) -> Any:
            return octavo_jax.grouped_dense(x, kernel, sizes, recipe=recipe, seed=5, group_offset=offset)

        return jax.vjp(layer, x)[1](dy)[0]

    turned = np.roll(x, 8, 0), np.roll(kernel, 1, 0), np.roll(dy, 8, 0)
    first, second, other = dx(x, kernel, dy, 3), dx(*turned, 4), dx(*turned, 3)
    assert np.array_equal(first[8:], second[:8])
    assert not np.array_equal(first[8:], other[:8])
    assert context_of(recipe, jnp.array([8, 8]), 5, 3).group_offset == 3


class _ForwardOnly:
    """A plugin whose backend is the reference without gradients."""

    def __init__(self) -> None:
        from octavo_jax.plugin import CARD

        (row, *_) = CARD.capabilities
        update: Any = {"ops": frozenset({"quantize", "fprop"}), "device": device_of(np.ones(1)).kind}
        self.card = BackendCard(name="forward", api_level=CARD.api_level, capabilities=(row.model_copy(update=update),))

    @hookimpl
    def octavo_backends(self) -> list[BackendCard]:
        return [self.card]

    @hookimpl
    def octavo_load(self, name: str) -> Any:
        from octavo_jax.reference.backend import ReferenceBackend

        return ReferenceBackend() if name == "forward" else None


def test_inference_needs_no_gradient(rng: np.random.Generator) -> None:
    """A backend without dgrad and wgrad serves a forward pass, eager and jitted; a gradient says what is missing."""
    x, kernel = jnp.asarray(_integers(rng, (M, K))), jnp.asarray(_integers(rng, (G, K, N)))
    octavo_registry.register(_ForwardOnly(), "forward-only")
    try:

        def layer(x: Any) -> Any:
            return octavo_jax.grouped_dense(x, kernel, SIZES, recipe=ROW, backend="forward")

        y = layer(x)
        assert np.array_equal(y, jax.jit(layer)(x))
        zero = np.zeros((G, N), np.float32)
        assert np.array_equal(y, _expected(np.asarray(x), np.asarray(kernel), zero, np.zeros((M, N), np.float32))[0])
        with pytest.raises(NoBackendError, match="nothing here runs dgrad in row for jax"):
            jax.grad(lambda x: jnp.sum(layer(x)))(x)
    finally:
        octavo_registry.unregister("forward-only")
