"""layernorm_dense: the bits of normalize and dense, states, what is returned and what is kept."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
import octavo_jax
from octavo_jax.counting import count_runs, unnamed_planes
from octavo_jax.functions.norms import normalize
from octavo_jax.linear.dense import dense
from octavo_jax.linear.normalized_dense import layernorm_dense
from octavo_jax.policies import save_quantized

M, K, N = 40, 32, 48
REFERENCE: dict[str, Any] = {"backend": "jax-reference"}


def _arrays(rng: np.random.Generator, dtype: Any) -> list[np.ndarray]:
    """x [2, M/2, K], a kernel [N, K], gamma, beta [K], a bias [N], and gradients of y and the normalized rows."""
    shapes = ((2, M // 2, K), (N, K), (K,), (K,), (N,), (2, M // 2, N), (2, M // 2, K))
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("kind", ["fp8-current", "bf16"])
def test_the_bits_of_its_parts(kind: str, rng: np.random.Generator) -> None:
    """y, the normalized rows and every gradient, the one that comes through the rows that were returned included.

    The parts normalize rows [M, K], as the layer does: XLA adds up gamma's gradient over two leading axes in another
    order.
    """
    how: dict[str, Any] = {"recipe": octavo.recipe(kind), "contracting_dims": ((-1,), (1,)), **REFERENCE}
    norm: Any = "layer" if kind == "fp8-current" else "rms"

    def fused(x: Any, kernel: Any, gamma: Any, beta: Any, bias: Any) -> Any:
        return layernorm_dense(x, kernel, gamma, beta, norm=norm, bias=bias, return_normalized=True, **how)

    def parts(x: Any, kernel: Any, gamma: Any, beta: Any, bias: Any) -> Any:
        rows = normalize(x.reshape(-1, K), gamma, beta, norm=norm).reshape(x.shape)
        return dense(rows, kernel, bias=bias, **how), rows

    x, kernel, gamma, beta, bias, dy, drows = _arrays(rng, jnp.bfloat16)
    shift = beta if norm == "layer" else None

    @jax.jit
    def run(*given: Any) -> Any:
        def both(function: Any) -> Any:
            made, pull = jax.vjp(function, *given)
            return made, pull((jnp.asarray(dy), jnp.asarray(drows)))

        return both(fused), both(parts)

    one, other = run(x, kernel, gamma, shift, bias)
    for (path, a), b in zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype, path
        assert np.array_equal(a, b), path


def test_delayed_state(rng: np.random.Generator) -> None:
    """The state's gradient holds the amaxes of the normalized x, the kernel and dy."""
    recipe = octavo.DelayedScaling(history=4)
    x, kernel, gamma, _, _, dy, _ = _arrays(rng, np.float32)

    @jax.jit
    def run(x: Any, state: Any) -> Any:
        def layer(x: Any, state: Any) -> Any:
            return layernorm_dense(x, kernel.T, gamma, recipe=recipe, state=state, **REFERENCE)

        (_, after), pull = jax.vjp(layer, x, state)
        return after, pull((jnp.asarray(dy), jax.tree.map(jnp.zeros_like, after)))[1]

    after, gradient = run(x, octavo_jax.init_delayed(recipe, 1))
    amaxes = (normalize(x, gamma), kernel, dy)
    for history, array in zip((gradient.x, gradient.kernel, gradient.grad), amaxes, strict=True):
        assert float(history.history[0, 0]) == float(np.abs(array).max())
    assert float(after.grad.history[0, 0]) == 0


def test_quantizations_of_a_step() -> None:
    """Three quantizations with saved planes, remat or not: statistics do not bring one back (faults.md 42)."""
    avals = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((M, K), (K, N), (K,))]

    def layer(x: Any, kernel: Any, gamma: Any) -> Any:
        return jnp.tanh(layernorm_dense(x, kernel, gamma, recipe=octavo.MXFP8(), **REFERENCE))

    assert unnamed_planes(layer, *avals) == ()
    for policy, fprops in ((jax.checkpoint_policies.everything_saveable, 1), (save_quantized(), 2)):
        run = jax.checkpoint(layer, policy=policy)
        step = jax.value_and_grad(lambda *a, run=run: run(*a).sum(), argnums=(0, 1, 2))
        runs = count_runs(step, *avals)
        assert (runs.quantize, runs.fprop) == (3, fprops)


def test_bytes_that_the_backward_pass_keeps() -> None:
    """normalized_dense.py's table: x in its dtype, one plane of the normalized rows and of the kernel, rstd."""
    m, k, n = 1024, 128, 256
    avals = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((m, k), (k, n), (k,))]

    def layer(x: Any, kernel: Any, gamma: Any) -> Any:
        return layernorm_dense(x, kernel, gamma, recipe=octavo.RowScaling(), **REFERENCE)

    saved = jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(layer, *a)[1], *avals))
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in saved)
    wanted = 2 * m * k + m * k + k * n + 4 * m
    assert wanted <= total <= wanted + 4 * (k + k + n) + 1024


X, KERNEL, GAMMA = jnp.ones((8, K)), jnp.ones((K, N)), jnp.ones(K)


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        ((X, KERNEL, GAMMA[:8]), {}, r"gamma has shape \[8\] .* needs \[32\]"),
        ((X, KERNEL, GAMMA, GAMMA), {}, "beta was given and norm is 'rms'"),
        ((X, KERNEL, GAMMA), {"norm": "batch"}, "norm is 'batch'"),
        ((X, KERNEL, GAMMA), {"bias": jnp.ones(3)}, r"bias has shape \[3\]"),
        ((X, KERNEL, GAMMA), {"recipe": octavo.NVFP4()}, "seed is None"),
        (
            (jnp.ones((8, 4, K)), jnp.ones((4, K, N)), GAMMA),
            {"contracting_dims": ((-2, -1), (0, 1))},
            "the normalization is over the last axis of x alone",
        ),
    ],
)
def test_arguments_are_refused_by_name(arguments: Any, changes: dict[str, Any], message: str) -> None:
    """With what was given and what is needed."""
    with pytest.raises(ValueError, match=message):
        layernorm_dense(*arguments, **{"recipe": None, **REFERENCE, **changes})
