"""DenseGeneral and LayerNormDenseGeneral."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from flax import linen as nn
from jax import Array

from octavo_jax.linear.dense import dense
from octavo_jax.linear.normalized_dense import layernorm_dense
from octavo_jax.linen.base import Axes, QuantizedModule
from octavo_jax.modules.axes import as_tuple, cast, contracted_last, leading_dims
from octavo_jax.modules.initializers import Initializer, dense_kernel_init, flattened, ones_init, zeros_init
from octavo_registry.contract.cards import Norm


class DenseGeneral(QuantizedModule):
    """A dense layer over any axes of x, as flax.linen.DenseGeneral: y = x contracted with kernel, plus bias.

    Parameters: kernel [*lengths of the axes, *features], bias [*features]. The axes together are K, the features N.

    features                  length or lengths of y's last axes
    axis                      axes of x that are contracted; the kernel's first axes, in x's order
    kernel_axes, bias_axes    logical axes of the parameters; empty: none
    output_checkpoint_name    of y; None: no name
    recipe, dtype, param_dtype, quantization_checkpoint_name, sharding, backend, room
                              see `octavo_jax.linen.base.QuantizedModule`
    """

    features: int | Sequence[int]
    axis: int | Sequence[int] = -1
    use_bias: bool = True
    kernel_init: Initializer = dense_kernel_init
    bias_init: Initializer = zeros_init
    kernel_axes: Axes = ()
    bias_axes: Axes = ()
    output_checkpoint_name: str | None = None

    @nn.compact
    def __call__(self, x: Array, *, seed: int | Array | None = None) -> Array:
        """y [other axes of x, *features]."""
        features = as_tuple(self.features, "features")
        x, lengths = contracted_last(x, self.axis)
        init = flattened(self.kernel_init, len(lengths))
        kernel = self._parameter("kernel", init, lengths + features, self.kernel_axes)
        bias = self._parameter("bias", self.bias_init, features, self.bias_axes) if self.use_bias else None
        x, kernel, bias = cast(self.dtype, x, kernel, bias)
        call = partial(
            dense,
            x,
            kernel,
            contracting_dims=leading_dims(len(lengths)),
            bias=bias,
            output_checkpoint_name=self.output_checkpoint_name,
        )
        (y,) = self._run(call, seed)
        return y  # type: ignore[no-any-return]


class LayerNormDenseGeneral(QuantizedModule):
    """A normalization of x's last axis and a dense layer, as `octavo_jax.layernorm_dense` fuses them.

    Parameters: scale [K], with norm="layer" norm_bias [K], kernel [K, *features], bias [*features].

    features                  length or lengths of y's last axes
    norm, epsilon             "rms" or "layer", and what is added to the mean square
    scale_init, scale_axes    of scale; norm_bias starts at zero and has the same logical axes
    return_normalized         also return the normalized x
    kernel_axes, bias_axes    logical axes of the parameters; empty: none
    output_checkpoint_name    of y; None: no name
    recipe, dtype, param_dtype, quantization_checkpoint_name, sharding, backend, room
                              see `octavo_jax.linen.base.QuantizedModule`
    """

    features: int | Sequence[int]
    norm: Norm = "rms"
    epsilon: float = 1e-6
    use_bias: bool = True
    kernel_init: Initializer = dense_kernel_init
    bias_init: Initializer = zeros_init
    scale_init: Initializer = ones_init
    kernel_axes: Axes = ()
    bias_axes: Axes = ()
    scale_axes: Axes = ()
    return_normalized: bool = False
    output_checkpoint_name: str | None = None

    @nn.compact
    def __call__(self, x: Array, *, seed: int | Array | None = None) -> Any:
        """x [..., K] to y [..., *features], or (y, normalized x)."""
        features = as_tuple(self.features, "features")
        (x,) = cast(self.dtype, x)
        gamma, beta = self._norm_parameters(x, self.norm, self.scale_init, self.scale_axes)
        kernel = self._parameter("kernel", flattened(self.kernel_init, 1), x.shape[-1:] + features, self.kernel_axes)
        bias = self._parameter("bias", self.bias_init, features, self.bias_axes) if self.use_bias else None
        kernel, bias = cast(self.dtype, kernel, bias)
        call = partial(
            layernorm_dense,
            x,
            kernel,
            gamma,
            beta,
            norm=self.norm,
            epsilon=self.epsilon,
            bias=bias,
            output_checkpoint_name=self.output_checkpoint_name,
            return_normalized=self.return_normalized,
        )
        y, *normalized = self._run(call, seed)
        return (y, *normalized) if normalized else y
