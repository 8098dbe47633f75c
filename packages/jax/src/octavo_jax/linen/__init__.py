"""Flax linen modules. Needs the extra `octavo-jax[flax]`.

Variables: `params`, named as Flax users expect, and with DelayedScaling `_overwrite_with_gradient`/state, whose
gradient is its new value (see `octavo_jax.DelayedState`): overwrite it after each microbatch, and apply
`update_state` once per step. Where that collection is mutable, a call records the forward amaxes in it, so that a
module that is called several times in one pass threads its state; where it is not, call the module once per pass: a
derivative of two calls with one state is a ValueError, as far as they are in one trace (each call of `nn.remat` has its
own).

A stochastic recipe takes a `seed`, or draws one from the stream "quantization".
"""

from octavo_jax.linen.base import RNG, STATE_COLLECTION, QuantizedModule, update_state
from octavo_jax.linen.dense import DenseGeneral, LayerNormDenseGeneral
from octavo_jax.linen.grouped import GroupedDense
from octavo_jax.linen.mlp import GroupedMLP, LayerNormMLP, MLPModule
from octavo_jax.linen.moe import MoE
from octavo_jax.modules.initializers import grouped_kernel_init as kernel_init

__all__ = [
    "RNG",
    "STATE_COLLECTION",
    "DenseGeneral",
    "GroupedDense",
    "GroupedMLP",
    "LayerNormDenseGeneral",
    "LayerNormMLP",
    "MLPModule",
    "MoE",
    "QuantizedModule",
    "kernel_init",
    "update_state",
]
