"""GroupedDense."""

from __future__ import annotations

from functools import partial

from flax import linen as nn
from jax import Array

from octavo_jax.arrays.sizes import GroupSizes
from octavo_jax.linear.grouped import grouped_dense
from octavo_jax.linen.base import Axes, QuantizedModule
from octavo_jax.modules.axes import cast
from octavo_jax.modules.initializers import Initializer, grouped_kernel_init, zeros_init


class GroupedDense(QuantizedModule):
    """One dense layer a group: y[r] = x[r] @ kernel[g] + bias[g].

    Parameters: kernel [G, K, N], bias [G, N].

    num_groups, features      G and N; K comes from x
    kernel_axes, bias_axes    logical axes of the parameters; empty: none
    output_checkpoint_name    of y; None: no name
    recipe, dtype, param_dtype, quantization_checkpoint_name, sharding, backend, room
                              see `octavo_jax.linen.base.QuantizedModule`
    """

    num_groups: int
    features: int
    use_bias: bool = False
    kernel_init: Initializer = grouped_kernel_init
    bias_init: Initializer = zeros_init
    kernel_axes: Axes = ()
    bias_axes: Axes = ()
    output_checkpoint_name: str | None = None

    @nn.compact
    def __call__(self, x: Array, group_sizes: GroupSizes, *, seed: int | Array | None = None) -> Array:
        """x [..., M, K] to [..., M, N]; rows past the sum of `group_sizes` are not read and come back as zeros."""
        shape = (self.num_groups, x.shape[-1], self.features)
        kernel = self._parameter("kernel", self.kernel_init, shape, self.kernel_axes)
        bias = self._parameter("bias", self.bias_init, shape[::2], self.bias_axes) if self.use_bias else None
        x, kernel, bias = cast(self.dtype, x, kernel, bias)
        call = partial(
            grouped_dense, x, kernel, group_sizes, bias=bias, output_checkpoint_name=self.output_checkpoint_name
        )
        (y,) = self._run(call, seed, groups=self.num_groups)
        return y  # type: ignore[no-any-return]
