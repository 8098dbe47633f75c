"""The block on one device's arrays: router, exchange where experts are spread, experts, statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from octavo import Recipe
from octavo.router import RouterRule
from octavo_jax.arithmetic.widening import in_dtype
from octavo_jax.dispatch.room import Room
from octavo_jax.mlp.call import MlpOptions
from octavo_jax.mlp.mlp import OutputNames, States
from octavo_jax.moe.arrangement import arrange_checked, counts
from octavo_jax.moe.exchange import Exchange
from octavo_jax.moe.expert_parallel import spread_mlp
from octavo_jax.moe.experts import LocalExperts
from octavo_jax.moe.layer.forms import Form, WeightCodes, WeightsOn
from octavo_jax.moe.router.logits import router_logits
from octavo_jax.moe.routing import RouterStats, choose_unmasked, stats_of
from octavo_jax.sharding.axes import MeshAxes
from octavo_registry.contract.cards import Activation


class BlockArrays(NamedTuple):
    """The arguments of `octavo_jax.moe.moe_mlp` that hold values, by their names there.

    x             [..., K]
    mask          [...], or None
    router        the matrix of the router's logits
    wi, wo, bi, bo   the experts' parameters
    seed, state   of stochastic rounding and of delayed scaling
    choice_bias   [E], added to scores when experts are chosen, or None
    replay        [..., k], choices that were made before, or None
    """

    x: Array
    mask: Array | None
    router: Array
    wi: Array
    wo: Array
    bi: Array | None
    bo: Array | None
    seed: int | Array | None
    state: States | None
    choice_bias: Array | None = None
    replay: Array | None = None


class BlockResult(NamedTuple):
    """What the block returns: y [..., N], statistics of the router, and delayed scaling's new states."""

    y: Array
    stats: RouterStats
    state: States | None


@dataclass(frozen=True)
class MoeBlock:
    """A MoE block: the static arguments of `octavo_jax.moe.moe_mlp`, and what runs on each device."""

    rule: RouterRule
    activation: Activation
    recipe: Recipe | None
    weights_on: WeightsOn
    dtype: DTypeLike | None
    checkpoint_name: str | None
    output_checkpoint_names: OutputNames
    out_dtype: DTypeLike
    backend: str | tuple[str, ...] | None
    room: Room | None
    sharding: MeshAxes | None
    exchange: Exchange
    form: Form
    weight_codes: WeightCodes

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Mesh axes over which tokens are spread, the outermost first."""
        axes = self.sharding
        return () if axes is None else axes.names("dp") + axes.names("fsdp") + axes.names("ep")

    def run(self, a: BlockArrays) -> BlockResult:
        """The block on arrays of one device, all axes of `sharding` manual."""
        tokens, mask = a.x.reshape(-1, a.x.shape[-1]), None if a.mask is None else a.mask.reshape(-1)
        if mask is not None:
            # a masked token may hold NaN, which the router's gradient would multiply by 0
            tokens = jnp.where(mask[:, None], tokens, 0)
        logits = router_logits(tokens, a.router)
        choices = choose_unmasked(
            logits,
            self.rule,
            bias=a.choice_bias,
            replay=None if a.replay is None else a.replay.reshape(-1, self.rule.k),
            mask=mask,
            checkpoint_name=self.checkpoint_name,
            backend=self.backend,
        )
        if self.dtype is not None:
            tokens = in_dtype(tokens, self.dtype)
        experts = self.local_experts(a)
        dropped = None
        spread = () if self.sharding is None else self.sharding.names("ep")
        if spread:
            load = counts(choices.experts, logits.shape[1])
            y, dropped, state = spread_mlp(tokens, choices, experts, spread, self.exchange)
        else:
            name, backend = self.checkpoint_name, self.backend
            routing = arrange_checked(choices.experts, choices.weights, logits.shape[1], name, backend)
            y, state = experts.routed(tokens, routing)
            load = routing.group_sizes
        y = y.reshape(*a.x.shape[:-1], y.shape[-1])
        inside = jnp.asarray(len(tokens)) if mask is None else jnp.sum(mask)
        return BlockResult(y, self._stats(load, jnp.sum(choices.shares, axis=0), inside, dropped), state)

    def local_experts(self, a: BlockArrays) -> LocalExperts:
        """The experts of this device, with parameters in `dtype` if there is one."""
        wi, wo, bi, bo = a.wi, a.wo, a.bi, a.bo
        if self.dtype is not None:
            wi, wo = (in_dtype(one, self.dtype) for one in (wi, wo))
            bi, bo = (None if b is None else in_dtype(b, self.dtype) for b in (bi, bo))
        options = MlpOptions(
            activation=self.activation,
            recipe=self.recipe,
            seed=a.seed,
            state=a.state,
            group_offset=0,
            checkpoint_name=self.checkpoint_name,
            output_checkpoint_names=self.output_checkpoint_names,
            preferred_element_type=None,
            sharding=self.sharding,
            backend=self.backend,
            room=self.room,
        )
        return LocalExperts(
            wi=wi,
            wo=wo,
            bi=bi,
            bo=bo,
            weights_on=self.weights_on,
            form=self.form,
            weight_codes=self.weight_codes,
            out_dtype=self.out_dtype,
            options=options,
        )

    def _stats(self, load: Array, shares: Array, inside: Array, dropped: Array | None) -> RouterStats:
        """The router's statistics over all tokens of the mesh.

        inside   how many tokens the mask keeps, whether or not their choices go to an expert
        """
        if self.token_axes:
            load, shares, inside = _summed((load, shares, inside), self.token_axes)
        stats = stats_of(load, shares, inside)
        if self.exchange.rows is None or dropped is None:
            return stats
        return stats._replace(dropped=_summed(dropped, self.token_axes))


def _summed(tree: Any, axes: tuple[str, ...]) -> Any:
    return lax.psum(tree, axes)  # type: ignore[no-untyped-call]
