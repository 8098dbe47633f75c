"""MoE."""

from __future__ import annotations

from dataclasses import field
from functools import partial
from typing import Any

from flax import linen as nn
from jax import Array

from octavo.renamed import renamed_fields
from octavo.router import Score
from octavo_jax.arrays.recipes import as_recipe
from octavo_jax.linen.base import Axes
from octavo_jax.linen.mlp import MLPModule
from octavo_jax.modules.block_options import block_options
from octavo_jax.modules.initializers import Initializer, dense_kernel_init, grouped_kernel_init
from octavo_jax.moe import DEFAULT_EXCHANGE, Exchange, MoeReport, RouterStats, explain, moe_mlp
from octavo_jax.moe.layer.forms import Form, WeightCodes, WeightsOn


@renamed_fields(normalize="renormalize")
class MoE(MLPModule):
    """A Mixture-of-Experts block, `octavo_jax.moe.moe_mlp` of its parameters: dropless, top k, sizes on the device.

    Parameters: router [K, E], wi [E, K, C], wo [E, F, N], wi_bias [E, C], wo_bias [E, N]. The router sees x before it
    is cast to `dtype`. Fields: `MLPModule`'s, `QuantizedModule`'s and

    num_experts, hidden, k       E, F, and experts a token goes to; k by name
    score, groups, kept_groups, renormalize, scale   how the router chooses, as in `octavo_jax.choose_experts`
    weights_on                   as in `octavo_jax.moe.moe_mlp`
    form, weight_codes           what is kept for the backward pass, as there
    exchange                     of tokens between devices, where `sharding` spreads the experts
    router_init, router_axes     of router
    """

    num_experts: int  # type: ignore[misc]  # mypy takes kernel_init, which is keyword-only, for the first field
    hidden: int  # type: ignore[misc]
    k: int = field(kw_only=True)
    score: Score = field(default="softmax", kw_only=True)
    groups: int = field(default=1, kw_only=True)
    kept_groups: int = field(default=1, kw_only=True)
    renormalize: bool = True
    scale: float = field(default=1.0, kw_only=True)
    weights_on: WeightsOn = "activation"
    exchange: Exchange = DEFAULT_EXCHANGE
    form: Form = "standard"
    weight_codes: WeightCodes = "keep"
    kernel_init: Initializer = field(default=grouped_kernel_init, kw_only=True)
    router_init: Initializer = dense_kernel_init
    router_axes: Axes = ()

    def __init_subclass__(cls, **options: Any) -> None:
        """flax gives each subclass, such as `nn.remat(MoE)`, an `__init__` of its own."""
        super().__init_subclass__(**options)
        renamed_fields(normalize="renormalize")(cls)

    @property
    def normalize(self) -> bool:
        """renormalize, by its old name."""
        return self.renormalize

    @nn.compact
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
        router = self._parameter("router", self.router_init, (x.shape[-1], self.num_experts), self.router_axes)
        wi, wo, bi, bo = self._mlp_parameters(self.hidden, x.shape[-1], self.num_experts)
        call = partial(
            moe_mlp,
            x,
            router,
            wi,
            wo,
            mask=mask,
            choice_bias=choice_bias,
            replay=replay,
            bi=bi,
            bo=bo,
            output_checkpoint_names=self.output_checkpoint_names,
            **block_options(self),
        )
        y, stats = self._run(call, seed, groups=self.num_experts, layers=2)
        return y, stats

    def explain(self, x: Array) -> MoeReport:
        """What a forward and backward of tokens x [..., K] run, printable: see `octavo_jax.moe.explain`.

        Call it with parameters, as `module.apply(variables, x, method="explain")`. It is traced, not computed, and no
        state changes. Raises as a call does, and ValueError without parameters.
        """
        router, wi, wo, bi, bo = map(self._present, ("router", "wi", "wo", "wi_bias", "wo_bias"))
        if router is None:
            raise ValueError(
                "the module has no parameters; give those that init returned: "
                'module.apply(variables, x, method="explain")'
            )
        return explain(
            x,
            router,
            wi,
            wo,
            recipe=as_recipe(self.recipe),
            bi=bi,
            bo=bo,
            sharding=self.sharding,
            backend=self.backend,
            room=self.room,
            **block_options(self),
        )

    @nn.nowrap
    def _present(self, name: str) -> Any:
        """A parameter that the module was given; None where there is none."""
        return nn.meta.unbox(self.get_variable("params", name))
