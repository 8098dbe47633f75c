"""The demo's model in JAX; `model` says what it computes."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from octavo import DelayedScaling, Recipe
from octavo_cli.train.config import HEAD_WIDTH, TrainConfig
from octavo_cli.train.data import Tokens
from octavo_cli.train.models.model import (
    ADAM,
    NORM_EPSILON,
    TAPS,
    Array,
    StepResult,
    expert_names,
    initial_parameters,
    learning_rate,
    rounding_seed,
)
from octavo_cli.train.models.spread import EXPERT_AXIS, ONE_DEVICE, Spread
from octavo_jax import DelayedState, init_delayed, update_delayed
from octavo_jax.moe import moe_mlp

Parameters = dict[str, jax.Array]
Delayed = dict[str, tuple[DelayedState, DelayedState]]
"""Delayed scaling's states of fc1 and fc2 by layer; empty for other recipes."""


def rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Each row over its root mean square, times `weight`."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + NORM_EPSILON) * weight


def mixing(x: jax.Array, taps: jax.Array, qkv: jax.Array, projection: jax.Array) -> jax.Array:
    """Causal multi-head attention in parallel with a short causal convolution, over [batch, context, width]."""
    batch, context, width = x.shape
    heads = (x @ qkv.T).reshape(batch, context, 3, width // HEAD_WIDTH, HEAD_WIDTH)
    q, k, v = heads[:, :, 0], heads[:, :, 1], heads[:, :, 2]
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    padded = jnp.pad(x, ((0, 0), (TAPS - 1, 0), (0, 0)))
    near = sum((padded[:, tap : tap + context] * taps[tap] for tap in range(TAPS)), start=jnp.zeros_like(x))
    return near + mixed.reshape(batch, context, width) @ projection.T


def experts(
    x: jax.Array,
    p: Parameters,
    delayed: Delayed,
    prefix: str,
    config: TrainConfig,
    recipe: Recipe,
    spread: Spread,
    seed: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Router and experts over [tokens, width]: the mixed outputs, the balance loss, the rows of each expert."""
    y, stats, *_ = moe_mlp(
        x,
        p[f"{prefix}.router"].T,
        p[f"{prefix}.fc1"],
        p[f"{prefix}.fc2"],
        k=config.top_k,
        weights_on="output",  # as the model in torch weighs what its experts return
        recipe=recipe,
        dtype=jnp.bfloat16,
        seed=seed,
        # The new state is not threaded on: each block's comes back as the state's own cotangent.
        state=delayed.get(prefix),
        sharding=spread.sharding,
        exchange=spread.exchange,
    )
    return y, stats.balance_loss, stats.load


def losses(
    p: Parameters,
    delayed: Delayed,
    tokens: jax.Array,
    seeds: jax.Array,
    config: TrainConfig,
    recipe: Recipe,
    spread: Spread,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cross entropy [batch, context] of [batch, context + 1] tokens, the balance loss, loads [layers, experts]."""
    x = p["embedding"][tokens[:, :-1]] + p["position"][: tokens.shape[1] - 1]
    balances, loads = [], []
    for layer in range(config.layers):
        prefix = f"layer{layer}"
        normed = rms_norm(x, p[f"{prefix}.mixing_norm"])
        x = x + mixing(normed, p[f"{prefix}.taps"], p[f"{prefix}.qkv"], p[f"{prefix}.projection"])
        normed = rms_norm(x, p[f"{prefix}.expert_norm"]).reshape(-1, config.width)
        mixed, balance, sizes = experts(normed, p, delayed, prefix, config, recipe, spread, seeds[layer])
        x = x + mixed.reshape(x.shape)
        balances.append(balance)
        loads.append(sizes)
    logits = jax.nn.log_softmax(rms_norm(x, p["final_norm"]) @ p["logits"].T)
    nats = -jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return nats, jnp.stack(balances).mean(), jnp.stack(loads)


def adam(p: Parameters, grads: Parameters, state: Any, step: jax.Array, rate: jax.Array) -> tuple[Parameters, Any]:
    """One step of Adam with bias correction (Kingma and Ba 2015, algorithm 1); `step` counts from 0."""
    beta1, beta2, epsilon = ADAM
    mean = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state[0], grads)
    square = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g * g, state[1], grads)
    correct1, correct2 = 1 - beta1 ** (step + 1.0), 1 - beta2 ** (step + 1.0)
    p = jax.tree.map(lambda w, m, v: w - rate * (m / correct1) / (jnp.sqrt(v / correct2) + epsilon), p, mean, square)
    return p, (mean, square)


@partial(jax.jit, static_argnames=("config", "recipe", "spread"), donate_argnums=(0,))
def _train_step(
    state: tuple[Parameters, Any, Delayed],
    tokens: jax.Array,
    seeds: jax.Array,
    step: jax.Array,
    rate: jax.Array,
    config: TrainConfig,
    recipe: Recipe,
    spread: Spread,
) -> tuple[tuple[Parameters, Any, Delayed], jax.Array, jax.Array, jax.Array, jax.Array]:
    """The parameters, Adam's moments and the delayed states after one step; losses, loads and the norm before."""
    p, moments, delayed = state

    def objective(p: Parameters, delayed: Delayed) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
        nats, balance, load = losses(p, delayed, tokens, seeds, config, recipe, spread)
        return nats.mean() + config.balance * balance, (nats.mean(), balance, load)

    (grads, delayed), (loss, balance, load) = jax.grad(objective, argnums=(0, 1), has_aux=True)(p, delayed)
    if isinstance(recipe, DelayedScaling):
        delayed = {name: (update_delayed(a, recipe), update_delayed(b, recipe)) for name, (a, b) in delayed.items()}
    norm = jnp.sqrt(sum(jnp.sum(grad * grad) for grad in grads.values()))
    p, moments = adam(p, grads, moments, step, rate)
    return (p, moments, delayed), loss, balance, load, norm


@partial(jax.jit, static_argnames=("config", "recipe", "spread"))
def _sequence_losses(
    p: Parameters,
    delayed: Delayed,
    tokens: jax.Array,
    seeds: jax.Array,
    config: TrainConfig,
    recipe: Recipe,
    spread: Spread,
) -> jax.Array:
    return losses(p, delayed, tokens, seeds, config, recipe, spread)[0].mean(axis=1)


class JaxModel:
    """Parameters and optimizer state: what the loop drives."""

    def __init__(
        self, config: TrainConfig, recipe: Recipe, vocabulary: int, seed: int, device: str, spread: Spread = ONE_DEVICE
    ) -> None:
        self._config, self._recipe, self._seed, self._spread = config, recipe, seed, spread
        self._mesh = jax.make_mesh(
            (spread.devices,), (EXPERT_AXIS,), (AxisType.Auto,), devices=jax.devices(device)[: spread.devices]
        )
        initial = initial_parameters(config, vocabulary, seed)
        # JAX's kernels are [experts, in, out]; what is compared and reported is [experts, out, in].
        initial |= {name: initial[name].swapaxes(1, 2) for name in expert_names(config)}
        self._parameters = self._all_placed(initial)
        zeros = {name: np.zeros_like(one) for name, one in initial.items()}
        self._moments: Any = (self._all_placed(zeros), self._all_placed(zeros))
        self._delayed: Delayed = {}
        if isinstance(recipe, DelayedScaling):
            fresh = {f"layer{i}": (init_delayed(recipe, config.experts),) * 2 for i in range(config.layers)}
            self._delayed = jax.tree.map(lambda leaf: self._placed(np.asarray(leaf)), fresh)  # donated: no leaf twice

    def _all_placed(self, parameters: dict[str, Array]) -> Parameters:
        grouped = expert_names(self._config)
        return {name: self._placed(one, spread=name in grouped) for name, one in parameters.items()}

    def _placed(self, array: Any, *, spread: bool = False) -> jax.Array:
        """A new array on the devices: cut along its first axis, or whole on each."""
        spec = PartitionSpec(EXPERT_AXIS if spread else None)  # type: ignore[no-untyped-call]
        placed: jax.Array = jax.device_put(array, NamedSharding(self._mesh, spec), may_alias=False)
        return placed

    def step(self, tokens: Tokens, step: int, *, observe: bool = False) -> StepResult:
        """One Adam step on [batch, context + 1] tokens. Nothing is observed: that would be another compilation."""
        rate = np.float32(learning_rate(self._config, step))
        state, loss, balance, load, norm = _train_step(
            (self._parameters, self._moments, self._delayed),
            self._placed(tokens, spread=True),
            self._seeds(step),
            np.float32(step),
            rate,
            config=self._config,
            recipe=self._recipe,
            spread=self._spread,
        )
        self._parameters, self._moments, self._delayed = state
        return StepResult(float(loss), float(balance), np.asarray(load, np.int64), float(norm))

    def evaluate(self, tokens: Tokens) -> NDArray[np.float64]:
        """[sequences] mean cross entropy of each sequence."""
        seeds = self._seeds(self._config.steps)
        result = _sequence_losses(
            self._parameters,
            self._delayed,
            self._placed(tokens, spread=True),
            seeds,
            config=self._config,
            recipe=self._recipe,
            spread=self._spread,
        )
        return np.asarray(result, np.float64)

    def expert_weights(self) -> dict[str, Array]:
        """The grouped layers' weights [experts, out, in]."""
        return {name: np.asarray(self._parameters[name]).swapaxes(1, 2) for name in expert_names(self._config)}

    def _seeds(self, step: int) -> NDArray[np.uint32]:
        """[layers, 2]: the low and the high word of each block's seed."""
        seeds = [rounding_seed(self._seed, step, layer) for layer in range(self._config.layers)]
        return np.array(seeds, "<u8").view("<u4").reshape(-1, 2).astype(np.uint32)
