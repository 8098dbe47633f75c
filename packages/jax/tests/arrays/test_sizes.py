"""Group sizes: their ends, and sizes past the rows in every place where they may lie."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import octavo
import octavo_jax
from octavo_jax.arrays.sizes import SUM_PAST_ROWS, group_ends, status

M, K, N = 24, 32, 8


def test_ends_do_not_wrap(rng: np.random.Generator) -> None:
    """Sizes may each be as large as the rows, and their sum past 2^32: an end that has reached the rows stays there."""
    rows, groups = 1 << 20, (1 << 12) + 60
    sizes = rng.integers(0, 3, groups).astype(np.int32)
    sizes[rng.integers(3, 40) :] = rows
    wanted = np.minimum(np.cumsum(sizes, dtype=np.int64), rows)
    assert sizes.sum(dtype=np.int64) > 1 << 32
    ends, word = jax.jit(lambda sizes: (group_ends(sizes, rows), status(sizes, rows)))(sizes)
    assert np.array_equal(ends, wanted)
    assert int(word) == SUM_PAST_ROWS


CALLS: dict[str, Any] = {
    "grouped_dense": lambda x, sizes: octavo_jax.grouped_dense(
        x, jnp.ones((2, K, N)), sizes, recipe=None, backend="jax-reference"
    ),
    "grouped_mlp": lambda x, sizes: octavo_jax.grouped_mlp(
        x, jnp.ones((2, K, 2 * N)), jnp.ones((2, N, K)), sizes, recipe=None, backend="jax-reference"
    ),
    "quantize": lambda x, sizes: octavo_jax.quantize(x, octavo.MXFP8().quantizer("x"), sizes, backend="jax-reference"),
}


@pytest.mark.parametrize("sizes", [[20, 5], [-1, 5]], ids=["past the rows", "negative"])
@pytest.mark.parametrize("name", CALLS)
def test_sizes_in_this_process_are_checked(name: str, sizes: list[int]) -> None:
    """Values that lie in this process's memory cost nothing to read, and what is wrong there is said and not cut off;
    in a traced program nothing is read."""
    call, x = CALLS[name], jnp.ones((M, K))
    here = [sizes, np.array(sizes), *([jnp.asarray(sizes, jnp.int32)] if jax.default_backend() == "cpu" else ())]
    for given in here:
        with pytest.raises(ValueError, match=r"sum to 25 and the tensor has 24 rows|group_sizes\[0\] is -1"):
            call(x, given)
    jax.eval_shape(call, x, jnp.asarray(sizes, jnp.int32))


@pytest.mark.parametrize("name", CALLS)
def test_sizes_of_one_by_one(name: str, rng: np.random.Generator) -> None:
    """A list of traced integers, or of some and Python's, counts as their array; numpy was asked to make one of them, a
    TracerArrayConversionError."""
    call, x = CALLS[name], jnp.asarray(rng.standard_normal((M, K)), jnp.float32)
    first = int(rng.integers(1, M - 3))
    made = jax.jit(lambda x, first: call(x, [first, 3]))(x, first)
    assert jax.tree.all(jax.tree.map(np.array_equal, made, jax.jit(call)(x, jnp.array([first, 3]))))
    if jax.default_backend() == "cpu":
        with pytest.raises(ValueError, match=f"sum to {M + first} and the tensor has {M} rows"):
            call(x, [jnp.int32(first), M])


def test_a_caller_who_asks_for_the_status_is_told_by_it() -> None:
    """With return_status an array is clamped on a CPU, too, and the word says what was wrong."""
    call = partial(octavo_jax.grouped_dense, recipe=None, return_status=True, backend="jax-reference")
    y, word = call(jnp.ones((M, K)), jnp.ones((2, K, N)), jnp.array([20, 5]))
    assert (int(word), float(y[-1, 0])) == (SUM_PAST_ROWS, K)


def test_symbolic_sizes_are_refused() -> None:
    """`jax.export` with a symbol for rows, features or groups: each was an error of nanobind's, of pydantic's or of
    JAX's that named no argument."""
    kernels, sizes = jnp.ones((2, 16, 16), jnp.bfloat16), jnp.ones(2, jnp.int32)
    spec = octavo.MXFP8().quantizer("x")
    assert spec is not None

    def moe(x: Any, router: Any, wi: Any) -> Any:
        return octavo_jax.moe.moe_mlp(x, router, wi, jnp.swapaxes(wi, 1, 2), k=1, activation="silu", recipe=None)

    calls: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
        (lambda x: octavo_jax.grouped_dense(x, kernels, sizes, recipe="mxfp8"), "x has m rows,", ("m, 16",)),
        (lambda x: octavo_jax.dense(x, kernels[0], recipe=None), "x has m rows,", ("m, 16",)),
        (lambda x: moe(x, kernels[0, :, :2], kernels), "x has an axis of m,", ("m, 16",)),
        (moe, "router has an axis of e,", ("8, 16", "16, e", "e, 16, 16")),
        (partial(octavo_jax.dense, recipe="mxfp8"), "kernel has an axis of k,", ("8, k", "k, n")),
        (
            lambda x, k: octavo_jax.grouped_dense(x, k, jnp.ones(k.shape[0], jnp.int32), recipe="mxfp8"),
            "kernel has an axis of g,",
            ("8, 16", "g, 16, 16"),
        ),
        (
            lambda x, w: octavo_jax.grouped_mlp(x, w, w, sizes, activation="silu", recipe="mxfp8"),
            "wi has an axis of f,",
            ("8, f", "2, f, f"),
        ),
        (partial(octavo_jax.quantize, spec=spec), "x has an axis of c,", ("8, c",)),
        (partial(octavo_jax.quantize, spec=spec), "x has an axis of g,", ("g, 8, 32",)),
    )
    for call, what, shapes in calls:
        scope = export.SymbolicScope()
        given = [jax.ShapeDtypeStruct(export.symbolic_shape(s, scope=scope), jnp.bfloat16) for s in shapes]
        with pytest.raises(ValueError, match=rf"{what} a symbolic size; .* export each shape"):
            jax.eval_shape(call, *given)
