"""Flax linen modules. Needs the extra `octavo-jax[flax]`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.typing import DTypeLike

from octavo import DelayedScaling, Recipe
from octavo.quantizer import DEFAULT_CHECKPOINT_NAME
from octavo_jax.delayed import DelayedState, init_delayed, update_delayed
from octavo_jax.dense import grouped_dense
from octavo_jax.dispatch import Names
from octavo_jax.sizes import GroupSizes

STATE_COLLECTION = "_overwrite_with_gradient"
"""Where delayed scaling's state lives: Flax's name for variables whose gradient is their new value."""

RNG = "quantization"
"""The random number stream that stochastic rounding draws a seed from."""

kernel_init = nn.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=(0,))


class GroupedDense(nn.Module):
    """One dense layer a group: y[r] = x[r] @ kernel[g] + bias[g].

    Variables: params/kernel [G, K, N], params/bias [G, N]; with DelayedScaling also
    `_overwrite_with_gradient`/state, whose gradient is its new value (see `octavo_jax.delayed`; once a step apply
    `update_state`). Where that collection is mutable, a call records the forward amaxes in it, so that a module that
    is called several times in one pass threads its state; where it is not, call the module once a pass.

    num_groups, features           G and N; K comes from x
    recipe                         None: HighPrecision
    dtype                          x, kernel and bias are cast to it first; None: as they are
    quantization_checkpoint_name   of the quantized x and kernel, for `octavo_jax.policies`; None: no name
    output_checkpoint_name         of y; None: no name
    """

    num_groups: int
    features: int
    recipe: Recipe | None = None
    use_bias: bool = False
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    kernel_init: Any = kernel_init
    bias_init: Any = nn.initializers.zeros_init()
    quantization_checkpoint_name: str | None = DEFAULT_CHECKPOINT_NAME
    output_checkpoint_name: str | None = None
    backend: Names = None

    @nn.compact
    def __call__(self, x: Array, group_sizes: GroupSizes, *, seed: int | Array | None = None) -> Array:
        """x [M, K] to [M, N]. A stochastic recipe takes `seed`, or draws one from the stream "quantization"."""
        kernel_shape = (self.num_groups, x.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, kernel_shape, self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.num_groups, self.features), self.param_dtype)
        if self.dtype is not None:
            x, kernel = x.astype(self.dtype), kernel.astype(self.dtype)
            bias = None if bias is None else bias.astype(self.dtype)
        if seed is None and self.recipe is not None and self.recipe.stochastic:
            seed = jax.random.bits(self.make_rng(RNG), (2,), jnp.uint32)
        state = None
        if isinstance(self.recipe, DelayedScaling):
            recipe = self.recipe
            state = self.variable(STATE_COLLECTION, "state", lambda: init_delayed(recipe, self.num_groups))
        result = grouped_dense(
            x,
            kernel,
            group_sizes,
            recipe=self.recipe,
            bias=bias,
            seed=seed,
            state=None if state is None else state.value,
            checkpoint_name=self.quantization_checkpoint_name,
            output_checkpoint_name=self.output_checkpoint_name,
            backend=self.backend,
        )
        if state is None:
            return result  # type: ignore[no-any-return]
        y, recorded = result
        if self.is_mutable_collection(STATE_COLLECTION) and not self.is_initializing():
            state.value = recorded
        return y  # type: ignore[no-any-return]


def update_state(collection: Any, recipe: DelayedScaling, *, axis_name: str | tuple[str, ...] = ()) -> Any:
    """`octavo_jax.update_delayed` of every state in a collection: once a step, on the collection's gradient."""

    def update(leaf: Any) -> Any:
        return update_delayed(leaf, recipe, axis_name=axis_name) if isinstance(leaf, DelayedState) else leaf

    return jax.tree.map(update, collection, is_leaf=lambda leaf: isinstance(leaf, DelayedState))


__all__ = ["RNG", "STATE_COLLECTION", "GroupedDense", "kernel_init", "update_state"]
