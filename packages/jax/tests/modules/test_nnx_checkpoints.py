"""Checkpoints of stacked nnx modules: a run that was restored goes on as one that was never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization

import octavo
from octavo_jax import nnx as octavo_nnx

M, K, G, LAYERS = 32, 16, 3, 3
SIZES = jnp.array([10, 0, 15])
DELAYED = octavo.DelayedScaling(history=3)
STOCHASTIC = octavo.NVFP4(hadamard=False, fprop="high_precision", dgrad="high_precision")  # in wgrad, and no more
BOTH = nnx.Any(nnx.Param, octavo_nnx.ScalingState)


def _stacked(recipe: Any, seed: int) -> Any:
    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap
    def make(rngs: nnx.Rngs) -> Any:
        return octavo_nnx.GroupedLinear(G, K, K, recipe=recipe, rngs=rngs)

    return make(nnx.Rngs(seed))


@nnx.jit
def _step(module: Any, x: Any) -> None:
    def loss(module: Any) -> Any:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def forward(layer: Any, x: Any) -> Any:
            return jnp.tanh(layer(x, SIZES))

        return jnp.sum(forward(module, x)[:25] ** 2)

    gradients = nnx.grad(loss, argnums=nnx.DiffState(0, BOTH))(module)
    steps = nnx.filter_state(gradients, nnx.Param)
    nnx.update(module, jax.tree.map(lambda a, b: a - 0.1 * b, nnx.state(module, nnx.Param), steps))
    nnx.update(module, nnx.filter_state(gradients, octavo_nnx.ScalingState))
    octavo_nnx.update_state(module, DELAYED)


def _through_orbax(state: Any, target: Any, folder: Path) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "checkpoint", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(folder / "checkpoint", jax.eval_shape(lambda: target))
    return jax.tree.map(np.asarray, restored)  # of no device, for which a step would be compiled again


def _through_bytes(state: Any, target: Any, _: Path) -> Any:
    nnx.replace_by_pure_dict(
        target, serialization.from_bytes(nnx.to_pure_dict(target), serialization.to_bytes(nnx.to_pure_dict(state)))
    )
    return target


@pytest.mark.parametrize("recipe", [DELAYED, STOCHASTIC], ids=["delayed", "nvfp4"])
def test_a_restored_stack_goes_on_with_the_same_bits(recipe: Any, tmp_path: Path, rng: np.random.Generator) -> None:
    """Layers that nnx.vmap made and nnx.scan runs keep histories, scales, seeds and counts of calls one by one, through
    orbax and through Flax's bytes of a pure dict, in a module of another seed: two more steps change the same bits."""
    x = jnp.asarray(rng.standard_normal((M, K)), jnp.float32)
    module = _stacked(recipe, 0)
    _step(module, x)
    saved = jax.tree.map(jnp.copy, nnx.state(module))
    for _ in range(2):
        _step(module, x)
    wanted = nnx.state(module)
    assert not jax.tree.all(jax.tree.map(np.array_equal, wanted, saved))
    if recipe is STOCHASTIC:
        assert len(np.unique(np.asarray(wanted["base_seed"][...]), axis=0)) == LAYERS
        assert wanted["calls"][...].tolist() == [3] * LAYERS
    for number, through in enumerate((_through_orbax, _through_bytes), 1):
        again = _stacked(recipe, number)
        nnx.update(again, through(saved, nnx.state(again), tmp_path))
        for _ in range(2):
            _step(again, x)
        for (path, a), b in zip(jax.tree.leaves_with_path(wanted), jax.tree.leaves(nnx.state(again)), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), (through.__name__, path)
