"""Flax NNX modules. Needs the extra `octavo-jax[flax]`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from octavo import DelayedScaling, Recipe
from octavo.quantizer import DEFAULT_CHECKPOINT_NAME
from octavo_jax.delayed import DelayedState, init_delayed
from octavo_jax.dense import grouped_dense
from octavo_jax.dispatch import Names
from octavo_jax.sizes import GroupSizes

_zeros = nnx.initializers.zeros_init()
kernel_init = nnx.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=(0,))


class ScalingState(nnx.Variable[Any]):
    """Delayed scaling's state: differentiate with respect to it and overwrite it with the result."""


class SeedState(nnx.Variable[Any]):
    """uint32 words of stochastic rounding: a base seed, or the number of calls so far."""


class GroupedLinear(nnx.Module):
    """One dense layer a group: y[r] = x[r] @ kernel[g] + bias[g]; kernel [G, K, N], bias [G, N] or None.

    delayed   with DelayedScaling a `ScalingState`, else None. Its "gradient" is its new value (see
              `octavo_jax.delayed`): `nnx.grad(..., argnums=nnx.DiffState(0, nnx.Any(nnx.Param, ScalingState)))`;
              call the module once a pass, and `octavo_jax.update_delayed` once a step
    base_seed, calls   with a stochastic recipe `SeedState`s, else None: a call without a seed takes
              base_seed + calls and counts itself

    recipe                         None: HighPrecision
    dtype                          x, kernel and bias are cast to it first; None: as they are
    quantization_checkpoint_name   of the quantized x and kernel, for `octavo_jax.policies`; None: no name
    output_checkpoint_name         of y; None: no name
    rngs                           streams "params" and, for a stochastic recipe, "quantization" (or the default one)
    """

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        recipe: Recipe | None = None,
        use_bias: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Any = kernel_init,
        bias_init: Any = _zeros,
        quantization_checkpoint_name: str | None = DEFAULT_CHECKPOINT_NAME,
        output_checkpoint_name: str | None = None,
        backend: Names = None,
        rngs: nnx.Rngs,
    ) -> None:
        shape = (num_groups, in_features, out_features)
        self.kernel = nnx.Param(kernel_init(rngs.params(), shape, param_dtype))
        bias = bias_init(rngs.params(), (num_groups, out_features), param_dtype) if use_bias else None
        self.bias = nnx.data(None if bias is None else nnx.Param(bias))
        state = init_delayed(recipe, num_groups) if isinstance(recipe, DelayedScaling) else None
        self.delayed = nnx.data(None if state is None else ScalingState(state))
        base = calls = None
        if recipe is not None and recipe.stochastic:
            base = SeedState(jax.random.bits(rngs.quantization(), (2,), jnp.uint32))
            calls = SeedState(jnp.zeros((), jnp.uint32))
        self.base_seed = nnx.data(base)
        self.calls = nnx.data(calls)
        self.recipe = recipe
        self.dtype = dtype
        self.quantization_checkpoint_name = quantization_checkpoint_name
        self.output_checkpoint_name = output_checkpoint_name
        self.backend = backend

    def __call__(self, x: Array, group_sizes: GroupSizes, *, seed: int | Array | None = None) -> Array:
        """x [M, K] to [M, N]; `seed` overrides the module's own."""
        kernel, bias = self.kernel[...], None if self.bias is None else self.bias[...]
        if self.dtype is not None:
            x, kernel = x.astype(self.dtype), kernel.astype(self.dtype)
            bias = None if bias is None else bias.astype(self.dtype)
        if seed is None and self.base_seed is not None and self.calls is not None:
            calls = self.calls[...]
            seed = self.base_seed[...] + jnp.stack([calls, jnp.zeros_like(calls)])
            self.calls[...] = calls + 1
        state: DelayedState | None = None if self.delayed is None else self.delayed.get_value()
        result = grouped_dense(
            x,
            kernel,
            group_sizes,
            recipe=self.recipe,
            bias=bias,
            seed=seed,
            state=state,
            checkpoint_name=self.quantization_checkpoint_name,
            output_checkpoint_name=self.output_checkpoint_name,
            backend=self.backend,
        )
        return result if state is None else result[0]  # type: ignore[no-any-return]


__all__ = ["GroupedLinear", "ScalingState", "SeedState", "kernel_init"]
