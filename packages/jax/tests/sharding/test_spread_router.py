"""The router of tokens that are spread over a mesh against the router of all of them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from octavo_jax import choose_experts, router_losses

T, E, C = 24, 12, 3
FP32 = 2**-20
"""Sixteen units of fp32: means of 24 tokens' shares, in two orders, and sums of at most 12 experts."""


def test_spread_tokens_have_their_choices_and_the_losses_of_all(mesh_of: Any, rng: np.random.Generator) -> None:
    """Inside jax.shard_map each device chooses for its tokens with the bits of one device; losses, and their gradient,
    are those of all tokens, where a device's own would weigh its experts' load by its own tokens alone."""
    logits = (rng.integers(-8, 9, (T, E)) / 4).astype(np.float32)

    def run(logits: Any, axes: Any, sequences: int) -> Any:
        def loss(logits: Any) -> Any:
            choice = choose_experts(logits, C, score="sigmoid", groups=4, kept_groups=2)
            losses = router_losses(logits, choice.choices, score="sigmoid", sequences=sequences, axes=axes)
            return losses.z + 2 * losses.aux + 3 * losses.sequence, (choice.choices, losses)

        gradient, made = jax.grad(loss, has_aux=True)(logits)
        return *made, gradient

    mesh = mesh_of(dp=4)
    devices = mesh.size
    choices, losses, gradient = jax.jit(run, static_argnums=(1, 2))(logits, (), 2 * devices)
    whole = jax.shard_map(
        lambda logits: run(logits, "dp", 2), mesh=mesh, in_specs=P("dp"), out_specs=(P("dp"), P(), P("dp"))
    )
    spread_choices, spread_losses, spread_gradient = jax.jit(whole)(logits)
    assert np.array_equal(spread_choices, choices)
    for name, value in losses._asdict().items():
        np.testing.assert_allclose(getattr(spread_losses, name), value, rtol=FP32)
    np.testing.assert_allclose(spread_gradient, gradient, rtol=0, atol=FP32 * np.abs(gradient).max())
