"""Flax NNX modules. Needs the extra `octavo-jax[flax]`.

Parameters are of `nnx.Param`, named as Flax users expect. A module also has these attributes:

delayed             a `ScalingState` with DelayedScaling, else None. Its "gradient" is its new value (see
                    `DelayedState`): `nnx.grad(..., argnums=nnx.DiffState(0, nnx.Any(nnx.Param, ScalingState)))`.
                    Overwrite it after each microbatch (`nnx.update`), and apply `update_state` once per step. A call
                    that is differentiated with respect to it stores what it recorded there, for the next call; other
                    calls leave it as it is. Call the module only once in a transformation that discards what a module
                    stores: one of JAX's own with the module as an argument, or `nnx.scan` with in_axes=None for it
base_seed, calls    a `SeedState` each with a stochastic recipe, else None. A call without a seed rounds by
                    base_seed + calls, and adds 1 to calls
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
