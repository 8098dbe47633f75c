"""Calls that would compute something else than they say: each is refused, with what to give instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import octavo_jax
from octavo import DelayedScaling
from octavo_jax import MeshAxes, init_delayed
from octavo_jax.moe import arrange
from octavo_jax.optimizers import AdamW

X, KERNEL, SIZES = jnp.ones((8, 32)), jnp.ones((2, 32, 32)), jnp.array([3, 4])
RECIPE = DelayedScaling(history=2)


def with_state(change: Callable[[Any], Any]) -> Any:
    """A call with a changed state."""
    return octavo_jax.grouped_dense(X, KERNEL, SIZES, recipe=RECIPE, state=change(init_delayed(RECIPE, 2)))


def shaped(dtype: Any) -> Any:
    """Eight choices of 2^28 tokens, without memory."""
    return jax.ShapeDtypeStruct((1 << 28, 8), dtype)


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "a state that was cast with the parameters": (
        lambda: with_state(lambda state: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state)),
        r"state.x.history has dtype bfloat16; it stays float32 where parameters are cast",
    ),
    "a history that is none": (
        lambda: with_state(lambda state: replace(state, kernel=(state.kernel.history, state.kernel.scale))),
        "state.kernel is a tuple; give a ScalingHistory, as init_delayed does",
    ),
    "choices of other tokens": (
        lambda: octavo_jax.choose_experts(X, 2, replay=jnp.zeros((7, 2), jnp.int32)),
        r"replay has shape \[7, 2\] and logits \[8, 32\]; give \[8, k\], with at least one choice per token",
    ),
    "more rows than int32 counts": (
        lambda: jax.eval_shape(lambda *each: arrange(*each, 8), *map(shaped, (jnp.int32, jnp.float32))),
        "268435456 tokens with 8 choices are 2\\^31 rows or more; route fewer tokens at once",
    ),
    "a dtype without steps": (
        lambda: AdamW(0.1).init({"a": jnp.ones(3, jnp.int32)}),
        r"params\['a'\] has dtype int32; AdamW steps float32, bfloat16 and float16",
    ),
    "a norm of zero rows": (
        lambda: octavo_jax.normalize(X, jnp.ones(32), epsilon=0.0),
        "epsilon is 0.0; it must be more than 0, or a row of zeros has no rstd",
    ),
    "an epsilon that is traced": (
        lambda: jax.jit(lambda epsilon: octavo_jax.normalize(X, jnp.ones(32), epsilon=epsilon))(1e-6),
        "it is compiled in, so give a number, or make it static under jax.jit",
    ),
    "a precision that no recipe has": (
        lambda: octavo_jax.ragged_dot(X, KERNEL, SIZES, recipe="bf16", precision="exact"),
        "precision is 'exact'; the recipe decides how products are formed, so leave it out",
    ),
    "a bias of another length": (
        lambda: octavo_jax.grouped_mlp(X, KERNEL, jnp.ones((2, 16, 32)), SIZES, recipe="bf16", bi=jnp.ones((2, 16))),
        r"bi has shape \[2, 16\]; it is \[2, 32\]",
    ),
    "two owners of the groups": (
        lambda: MeshAxes(fsdp="a", ep="b", fsdp_dim="G"),
        "fsdp='a' shards the kernel's group dimension, which ep='b' owns; give fsdp_dim='K' or 'N'",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_is_refused(name: str) -> None:
    """ValueError that names what was given."""
    call, message = CALLS[name]
    with pytest.raises(ValueError, match=message):
        call()
