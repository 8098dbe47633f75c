"""Arrays of numpy are arguments like JAX's, under jax.vmap in particular, which hands them on as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
import octavo_jax
from octavo_jax import moe

M, K, N, G = 6, 32, 32, 2
HOW: Any = {"recipe": "bf16", "backend": "jax-reference"}
DELAYED: Any = {"recipe": octavo.DelayedScaling(history=2), "backend": "jax-reference"}


LAYERS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "dense": (lambda x, w, b: octavo_jax.dense(x, w, bias=b, **HOW), ("x", "w", "b")),
    "grouped_dense": (
        lambda x, w, s, state: octavo_jax.grouped_dense(x, w, s, state=state, **DELAYED)[0],
        ("x", "ws", "sizes", "state"),
    ),
    "layernorm_dense": (lambda x, w, g: octavo_jax.layernorm_dense(x, w, g, **HOW), ("x", "w", "gamma")),
    "grouped_mlp": (
        lambda x, wi, wo, s, p: octavo_jax.grouped_mlp(x, wi, wo, s, probs=p, activation="relu2", **HOW),
        ("x", "ws", "ws", "sizes", "probs"),
    ),
    "layernorm_mlp": (
        lambda x, g, wi, wo: octavo_jax.layernorm_mlp(x, g, wi, wo, activation="relu2", **HOW),
        ("x", "gamma", "w", "w"),
    ),
    "moe_mlp": (
        lambda x, r, wi, wo, m: moe.moe_mlp(x, r, wi, wo, k=1, mask=m, activation="relu2", **HOW)[0],
        ("x", "router", "ws", "ws", "mask"),
    ),
    "routed_mlp": (
        lambda x, e, p, wi, wo: moe.routed_mlp(x, moe.arrange(e, p, G), wi, wo, activation="relu2", **HOW),
        ("x", "experts", "weights", "ws", "ws"),
    ),
    "ragged_dot": (lambda x, w, s: octavo_jax.ragged_dot(x, w, s, **HOW), ("x", "ws", "sizes")),
    "activate": (lambda x, p: octavo_jax.activate(x, "swiglu", probs=p), ("x", "probs")),
    "normalize": (lambda x, g: octavo_jax.normalize(x, g), ("x", "gamma")),
    "permute": (lambda x, e, p: moe.permute(x, moe.arrange(e, p, G)), ("x", "experts", "weights")),
    "combine": (lambda x, e, p: moe.combine(x, moe.arrange(e, p, G)), ("x", "experts", "weights")),
    "row_weights": (lambda p, e: moe.row_weights(moe.arrange(e, p, G)), ("weights", "experts")),
    "route": (lambda x: moe.route(x, 2).weights, ("x",)),
    "choose_experts": (lambda x: octavo_jax.choose_experts(x, 2).weights, ("x",)),
}


@pytest.fixture
def arrays(rng: np.random.Generator) -> dict[str, Any]:
    """By name, of numpy."""
    shapes = {"x": (M, K), "w": (K, N), "ws": (G, K, N), "b": (N,), "gamma": (K,), "router": (K, G)}
    drawn = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    state = jax.tree.map(np.asarray, octavo_jax.init_delayed(DELAYED["recipe"], G))
    others = {"sizes": np.array([4, 1], np.int32), "mask": np.arange(M) < 5, "probs": np.ones(M, np.float32)}
    choices = {"experts": np.zeros((M, 1), np.int32), "weights": np.ones((M, 1), np.float32)}
    return {**drawn, **others, **choices, "state": state}


def _twice(a: Any) -> Any:
    return np.stack([a, a])


@pytest.mark.filterwarnings("ignore:a layer with delayed scaling is differentiated and its DelayedState is not")
@pytest.mark.parametrize("name", LAYERS)
def test_batches_of_numpy(name: str, arrays: dict[str, Any]) -> None:
    """Each argument alone in a batch, and the others whole: in a traced program, and with a derivative by one side of
    the vmap or the other in turns, JAX failed in an assertion of its own."""
    layer, names = LAYERS[name]
    given = [arrays[one] for one in names]

    result = jax.eval_shape(layer, *given).shape

    def summed(*given: Any) -> Any:
        return jnp.sum(layer(*given))

    for batched in range(len(given)):
        axes = tuple(0 if i == batched else None for i in range(len(given)))
        several = [jax.tree.map(_twice, one) if i == batched else one for i, one in enumerate(given)]
        calls = (
            lambda f=layer, axes=axes, several=several: jax.vmap(f, axes)(*several),
            lambda axes=axes, several=several: jax.vmap(jax.grad(summed), axes)(*several),
            lambda axes=axes, several=several: jax.grad(
                lambda first: jnp.sum(jax.vmap(layer, axes)(first, *several[1:]))
            )(several[0]),
        )
        wanted = (result, given[0].shape, several[0].shape)
        for turn in (0, 1 + batched % 2):
            made = jax.eval_shape(calls[turn]).shape
            assert made in (wanted[turn], (2, *wanted[turn])), names[batched]


def test_a_batch_of_numpy_is_the_batch(arrays: dict[str, Any]) -> None:
    """The same bits as of JAX's arrays."""
    layer, names = LAYERS["dense"]
    given = [_twice(arrays[one]) for one in names]
    run = jax.jit(jax.vmap(layer))
    assert np.array_equal(jax.jit(lambda: jax.vmap(layer)(*given))(), run(*map(jnp.asarray, given)))
