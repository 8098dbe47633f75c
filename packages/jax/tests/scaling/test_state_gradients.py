"""Delayed scaling in a training step that leaves its state out: a warning, and none where the state takes part."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import octavo
import octavo_jax
from octavo_jax import linen as octavo_linen
from octavo_jax import nnx as octavo_nnx

M, K, N, G = 16, 32, 8, 2
SIZES = [9, 5]
DELAYED = octavo.DelayedScaling(history=4)
X, KERNEL, STATE = jnp.ones((M, K)), jnp.ones((G, K, N)), octavo_jax.init_delayed(DELAYED, G)
BACKEND = "jax-reference"
LOST = "its DelayedState is not: the amax of the gradient is lost"


def _loss(x: Any, kernel: Any, state: Any) -> Any:
    y, _ = octavo_jax.grouped_dense(x, kernel, SIZES, recipe=DELAYED, state=state, backend=BACKEND)
    return jnp.sum(y)


def _nnx() -> Any:
    return octavo_nnx.GroupedLinear(G, K, N, recipe=DELAYED, backend=BACKEND, rngs=nnx.Rngs(0))


def _linen() -> tuple[Any, Any]:
    module = octavo_linen.GroupedDense(G, N, recipe=DELAYED, backend=BACKEND)
    return module, jax.eval_shape(lambda: module.init(jax.random.key(0), X, SIZES))


def _of_parameters(variables: Any, module: Any) -> Any:
    others = {name: value for name, value in variables.items() if name != "params"}

    def loss(parameters: Any) -> Any:
        return jnp.sum(module.apply({"params": parameters, **others}, X, SIZES))

    return jax.grad(loss)(variables["params"])


def _nnx_step(argnums: Any) -> None:
    model = _nnx()
    graph, values = nnx.split(model)
    gradient = nnx.value_and_grad(lambda model: jnp.sum(model(X, SIZES)), argnums=argnums)
    jax.eval_shape(lambda values: gradient(nnx.merge(graph, values))[0], values)


def _linen_step(whole: bool) -> None:
    module, variables = _linen()
    if whole:
        jax.eval_shape(jax.grad(lambda v: jnp.sum(module.apply(v, X, SIZES))), variables)
    else:
        jax.eval_shape(partial(_of_parameters, module=module), variables)


def _scanned(x: Any, kernel: Any, state: Any) -> Any:
    layer = jax.checkpoint(lambda x, kernel: _loss(x, kernel, state))
    return jax.lax.scan(lambda total, kernel: (total + layer(x, kernel), None), 0.0, kernel[None])[0]


FORGOTTEN: dict[str, Callable[[], Any]] = {
    "nnx, value_and_grad of the parameters": lambda: _nnx_step(0),
    "linen, the collection params": lambda: _linen_step(False),
    "a function's kernel": lambda: jax.eval_shape(jax.grad(_loss, 1), X, KERNEL, STATE),
    "a function's x": lambda: jax.eval_shape(jax.grad(_loss), X, KERNEL, STATE),
    "under jit, scan and remat": lambda: jax.eval_shape(jax.grad(jax.jit(_scanned), 1), X, KERNEL, STATE),
}
USED: dict[str, Callable[[], Any]] = {
    "nnx, DiffState": lambda: _nnx_step(nnx.DiffState(0, nnx.Any(nnx.Param, octavo_nnx.ScalingState))),
    "linen, all variables": lambda: _linen_step(True),
    "a function's kernel and state": lambda: jax.eval_shape(jax.grad(_loss, (1, 2)), X, KERNEL, STATE),
    "under jit, scan and remat": lambda: jax.eval_shape(jax.grad(jax.jit(_scanned), (1, 2)), X, KERNEL, STATE),
    "no gradient": lambda: jax.eval_shape(_loss, X, KERNEL, STATE),
}


@pytest.mark.parametrize("name", FORGOTTEN)
def test_a_state_that_is_left_out_is_said_aloud(name: str) -> None:
    """A plain optimizer's step trains for ever with scales of 1 otherwise, and without a word."""
    with pytest.warns(UserWarning, match=LOST):
        FORGOTTEN[name]()


@pytest.mark.parametrize("name", USED)
def test_a_state_that_takes_part_is_quiet(name: str) -> None:
    """Whoever differentiates with respect to the state, or takes no gradient, is told nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        USED[name]()
