"""Faults that users of comparable systems met in training loops and saved state, and that no other file here covers."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import octavo
import octavo_jax

M, K, N, G = 32, 32, 16, 3
SIZES = np.array([13, 0, 11], np.int32)
DELAYED = octavo.DelayedScaling(history=4)
BACKEND = "jax-reference"


def _arrays(rng: np.random.Generator) -> tuple[Any, Any, Any]:
    x, target = (rng.standard_normal((M, width)).astype(np.float32) for width in (K, N))
    x[SIZES.sum() :] = np.nan
    return jnp.asarray(x), jnp.asarray(target), jnp.asarray(rng.standard_normal((G, K, N)) / 6, jnp.float32)


@jax.jit
def _delayed_step(kernel: Any, state: Any, x: Any, target: Any) -> tuple[Any, Any]:
    """One step of gradient descent, and the state after it."""

    def loss(kernel: Any, state: Any) -> Any:
        y, _ = octavo_jax.grouped_dense(x, kernel, SIZES, recipe=DELAYED, state=state, backend=BACKEND)
        return jnp.sum(jnp.where(np.arange(M)[:, None] < SIZES.sum(), y - target, 0) ** 2)

    gradient, state = jax.grad(loss, (0, 1))(kernel, state)
    return kernel - 0.01 * gradient, octavo_jax.update_delayed(state, DELAYED)


def test_saved_delayed_state_continues_bit_for_bit(tmp_path: Path, rng: np.random.Generator) -> None:
    """Three steps, arrays to a file and back, three more: the run that never stopped; and the state has the size of the
    first step for ever (faults.md 47, 48)."""
    x, target, kernel = _arrays(rng)
    state = octavo_jax.init_delayed(DELAYED, G)
    leaves, structure = jax.tree.flatten(state)
    shapes = [leaf.shape for leaf in leaves]
    for _ in range(3):
        kernel, state = _delayed_step(kernel, state, x, target)
    np.savez(tmp_path / "state.npz", *jax.tree.leaves(state), kernel=kernel)
    for _ in range(3):
        kernel, state = _delayed_step(kernel, state, x, target)
    with np.load(tmp_path / "state.npz", allow_pickle=False) as saved:
        again = jax.tree.unflatten(structure, [jnp.asarray(saved[f"arr_{i}"]) for i in range(len(leaves))])
        resumed = jnp.asarray(saved["kernel"])
    for _ in range(3):
        resumed, again = _delayed_step(resumed, again, x, target)
    for mine, one in zip(jax.tree.leaves((resumed, again)), jax.tree.leaves((kernel, state)), strict=True):
        assert np.asarray(mine).tobytes() == np.asarray(one).tobytes()
    assert [leaf.shape for leaf in jax.tree.leaves(state)] == shapes
    assert float(state.x.scale[0]) != 1.0  # it did scale


def test_a_gradient_that_is_one_value_everywhere(rng: np.random.Generator) -> None:
    """The cotangent of sum() is a broadcast scalar: its gradients are those of an array of ones (faults.md 45)."""
    x, _, kernel = _arrays(rng)

    def layer(x: Any, kernel: Any) -> Any:
        return octavo_jax.grouped_dense(x, kernel, SIZES, recipe=octavo.recipe("fp8-current"), backend=BACKEND)

    summed = jax.jit(jax.grad(lambda x, kernel: layer(x, kernel).sum(), (0, 1)))(x, kernel)
    ones = jnp.asarray(np.ones((M, N), np.float32))
    pulled = jax.jit(lambda x, kernel, dy: jax.vjp(layer, x, kernel)[1](dy))(x, kernel, ones)
    for mine, one in zip(summed, pulled, strict=True):
        assert np.asarray(mine).tobytes() == np.asarray(one).tobytes()


def test_steps_in_high_precision_are_ragged_dots(rng: np.random.Generator) -> None:
    """Five steps of gradient descent: a backward pass that is wrong shows by the third, however right the forward
    is (faults.md 65)."""
    x, target, start = _arrays(rng)
    sizes = jnp.asarray(SIZES)

    def losses(product: Any) -> Any:
        def loss(kernel: Any) -> Any:
            used = np.arange(M)[:, None] < SIZES.sum()
            return jnp.sum(jnp.where(used, product(jnp.where(used, x, 0), kernel, sizes) - target, 0) ** 2)

        def step(kernel: Any, _: None) -> tuple[Any, Any]:
            value, gradient = jax.value_and_grad(loss)(kernel)
            return kernel - 0.005 * gradient, value

        return jax.jit(lambda kernel: jax.lax.scan(step, kernel, length=5)[1])(start)

    mine = losses(lambda *a: octavo_jax.ragged_dot(*a, recipe=None, backend=BACKEND))
    theirs = losses(lambda *a: jax.lax.ragged_dot(*a, precision="highest"))
    assert mine[-1] < mine[0]
    # fp32 sums of at most M * N terms in another order, five times over
    np.testing.assert_allclose(mine, theirs, rtol=5 * M * N * 2.0**-24)


def test_calls_leave_no_arrays_behind(rng: np.random.Generator) -> None:
    """Thirty eager calls keep nothing alive that ten did not (faults.md 52, 53)."""
    x, _, kernel = _arrays(rng)
    sizes, recipe = jnp.asarray(SIZES), octavo.recipe("fp8-current")

    def alive(calls: int) -> int:
        for _ in range(calls):
            octavo_jax.grouped_dense(x, kernel, sizes, recipe=recipe, backend=BACKEND)
        gc.collect()
        return len(jax.live_arrays())

    assert alive(10) >= alive(30)
