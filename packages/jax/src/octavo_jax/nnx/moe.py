"""MoE."""

from __future__ import annotations

from functools import partial
from typing import Unpack

from jax import Array

from octavo.renamed import renamed_arguments
from octavo.router import Score
from octavo_jax.modules.block_options import block_options
from octavo_jax.modules.initializers import Initializer, dense_kernel_init
from octavo_jax.moe import DEFAULT_EXCHANGE, Exchange, MoeReport, RouterStats, explain, moe_mlp
from octavo_jax.moe.layer.forms import Form, WeightCodes, WeightsOn
from octavo_jax.nnx.base import Axes, value_of
from octavo_jax.nnx.mlp import MLPModule, MLPOptions
from octavo_jax.nnx.whole_signature import with_whole_signature


@with_whole_signature
class MoE(MLPModule):
    """A Mixture-of-Experts block, `octavo_jax.moe.moe_mlp` of its parameters: dropless, top k, sizes on the device.

    Parameters: router [K, E], wi [E, K, C], wo [E, F, N], wi_bias [E, C] and wo_bias [E, N] or None. The router sees x
    before it is cast to `dtype`.

    num_experts, in_features, hidden, k   E, K, F, and experts a token goes to
    score, groups, kept_groups, renormalize, scale   how the router chooses, as in `octavo_jax.choose_experts`
    weights_on                            as in `octavo_jax.moe.moe_mlp`
    form, weight_codes                    what is kept for the backward pass, as there
    exchange                              of tokens between devices, where `sharding` spreads the experts
    router_init, router_axes              of router
    Other arguments                       `MLPModule`'s
    """

    @renamed_arguments(normalize="renormalize")
    def __init__(
        self,
        num_experts: int,
        in_features: int,
        hidden: int,
        *,
        k: int,
        score: Score = "softmax",
        groups: int = 1,
        kept_groups: int = 1,
        renormalize: bool = True,
        scale: float = 1.0,
        weights_on: WeightsOn = "activation",
        exchange: Exchange = DEFAULT_EXCHANGE,
        form: Form = "standard",
        weight_codes: WeightCodes = "keep",
        router_init: Initializer = dense_kernel_init,
        router_axes: Axes = (),
        **options: Unpack[MLPOptions],
    ) -> None:
        super().__init__((num_experts,), in_features, hidden, **options)
        self.router = self._parameter(options["rngs"], router_init, (in_features, num_experts), router_axes)
        self.k, self.renormalize, self.scale = k, renormalize, scale
        self.score: Score = score
        self.groups, self.kept_groups = groups, kept_groups
        self.weights_on: WeightsOn = weights_on
        self.exchange = exchange
        self.form: Form = form
        self.weight_codes: WeightCodes = weight_codes

    @property
    def normalize(self) -> bool:
        """renormalize, by its old name."""
        return self.renormalize

    def __call__(
        self,
        x: Array,
        *,
        mask: Array | None = None,
        choice_bias: Array | None = None,
        replay: Array | None = None,
        seed: int | Array | None = None,
    ) -> tuple[Array, RouterStats]:
        """x [..., K] to (y [..., N] in x's dtype, load and balance loss).

        mask [...] bool, False for padding; choice_bias [E] and replay [..., k] as in `octavo_jax.moe.moe_mlp`.
        """
        call = partial(
            moe_mlp,
            x,
            self.router[...],
            self.wi[...],
            self.wo[...],
            mask=mask,
            choice_bias=choice_bias,
            replay=replay,
            bi=value_of(self.wi_bias),
            bo=value_of(self.wo_bias),
            output_checkpoint_names=self.output_checkpoint_names,
            **block_options(self),
        )
        y, stats = self._run(call, seed)
        return y, stats

    def explain(self, x: Array) -> MoeReport:
        """What a forward and backward of tokens x [..., K] run, printable: see `octavo_jax.moe.explain`.

        It is traced, not computed, and no seed or state changes. Raises as a call does.
        """
        return explain(
            x,
            self.router[...],
            self.wi[...],
            self.wo[...],
            recipe=self.recipe,
            bi=value_of(self.wi_bias),
            bo=value_of(self.wo_bias),
            sharding=self.sharding,
            backend=self.backend,
            room=self.room,
            **block_options(self),
        )
