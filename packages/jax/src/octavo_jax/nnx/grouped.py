"""GroupedLinear."""

from __future__ import annotations

from functools import partial
from typing import Unpack

from jax import Array

from octavo_jax.arrays.sizes import GroupSizes
from octavo_jax.linear.grouped import grouped_dense
from octavo_jax.modules.axes import cast
from octavo_jax.modules.initializers import Initializer, grouped_kernel_init, zeros_init
from octavo_jax.nnx.base import Axes, Common, QuantizedModule, value_of
from octavo_jax.nnx.whole_signature import with_whole_signature


@with_whole_signature
class GroupedLinear(QuantizedModule):
    """One dense layer a group: y[r] = x[r] @ kernel[g] + bias[g]; kernel [G, K, N], bias [G, N] or None.

    kernel_axes, bias_axes    logical axes of the parameters; empty: none
    output_checkpoint_name    of y; None: no name
    recipe, dtype, param_dtype, quantization_checkpoint_name, sharding, backend, room, rngs
                              see `octavo_jax.nnx.base.Common`
    """

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = False,
        kernel_init: Initializer = grouped_kernel_init,
        bias_init: Initializer = zeros_init,
        kernel_axes: Axes = (),
        bias_axes: Axes = (),
        output_checkpoint_name: str | None = None,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(groups=num_groups, layers=1, **common)
        rngs, shape = common["rngs"], (num_groups, in_features, out_features)
        self.kernel = self._parameter(rngs, kernel_init, shape, kernel_axes)
        self.bias = self._optional(use_bias, rngs, bias_init, shape[::2], bias_axes)
        self.output_checkpoint_name = output_checkpoint_name

    def __call__(self, x: Array, group_sizes: GroupSizes, *, seed: int | Array | None = None) -> Array:
        """x [..., M, K] to [..., M, N]; `seed` overrides the module's own."""
        x, kernel, bias = cast(self.dtype, x, self.kernel[...], value_of(self.bias))
        call = partial(
            grouped_dense, x, kernel, group_sizes, bias=bias, output_checkpoint_name=self.output_checkpoint_name
        )
        (y,) = self._run(call, seed)
        return y  # type: ignore[no-any-return]
