"""Flax NNX modules. Needs the extra `octavo-jax[flax]`.

Parameters are of `nnx.Param`, named as Flax users expect. Beside them a module has

delayed             with DelayedScaling a `ScalingState`, else None. Its "gradient" is its new value (see
                    `DelayedState`): `nnx.grad(..., argnums=nnx.DiffState(0, nnx.Any(nnx.Param, ScalingState)))`.
                    Overwrite it after each microbatch (`nnx.update`), and apply `update_state` once per step. A call
                    that is differentiated with respect to it keeps in it what it recorded, for the next call; other
                    calls leave it as it is. A transformation that discards what a module keeps (JAX's own, of a
                    module as an argument; `nnx.scan`, of one with in_axes=None) may call the module once
base_seed, calls    with a stochastic recipe of `SeedState`, else None: a call without a seed takes base_seed + calls
                    and counts itself
"""

from octavo_jax.modules.initializers import grouped_kernel_init as kernel_init
from octavo_jax.nnx.base import QuantizedModule, ScalingState, SeedState, update_state
from octavo_jax.nnx.grouped import GroupedLinear
from octavo_jax.nnx.linear import LayerNormLinear, Linear
from octavo_jax.nnx.mlp import GroupedMLP, LayerNormMLP, MLPModule
from octavo_jax.nnx.moe import MoE

__all__ = [
    "GroupedLinear",
    "GroupedMLP",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MLPModule",
    "MoE",
    "QuantizedModule",
    "ScalingState",
    "SeedState",
    "kernel_init",
    "update_state",
]
