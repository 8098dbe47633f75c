"""Linear and LayerNormLinear."""

from __future__ import annotations

from functools import partial
from typing import Any, Unpack

from jax import Array

from octavo_jax.linear.dense import dense
from octavo_jax.linear.normalized_dense import layernorm_dense
from octavo_jax.modules.axes import cast
from octavo_jax.modules.initializers import Initializer, dense_kernel_init, ones_init, zeros_init
from octavo_jax.nnx.base import Axes, Common, QuantizedModule, value_of
from octavo_jax.nnx.whole_signature import with_whole_signature
from octavo_registry.contract.cards import Norm


@with_whole_signature
class Linear(QuantizedModule):
    """y = x @ kernel + bias; kernel [K, N], bias [N] or None.

    kernel_axes, bias_axes    logical axes of the parameters; empty: none
    output_checkpoint_name    of y; None: no name
    recipe, dtype, param_dtype, quantization_checkpoint_name, sharding, backend, room, rngs
                              see `octavo_jax.nnx.base.Common`
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        kernel_init: Initializer = dense_kernel_init,
        bias_init: Initializer = zeros_init,
        kernel_axes: Axes = (),
        bias_axes: Axes = (),
        output_checkpoint_name: str | None = None,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(groups=1, layers=1, **common)
        rngs = common["rngs"]
        self.kernel = self._parameter(rngs, kernel_init, (in_features, out_features), kernel_axes)
        self.bias = self._optional(use_bias, rngs, bias_init, (out_features,), bias_axes)
        self.output_checkpoint_name = output_checkpoint_name

    def __call__(self, x: Array, *, seed: int | Array | None = None) -> Array:
        """x [..., K] to [..., N]; `seed` overrides the module's own."""
        x, kernel, bias = cast(self.dtype, x, self.kernel[...], value_of(self.bias))
        call = partial(dense, x, kernel, bias=bias, output_checkpoint_name=self.output_checkpoint_name)
        (y,) = self._run(call, seed)
        return y  # type: ignore[no-any-return]


@with_whole_signature
class LayerNormLinear(Linear):
    """A normalization of x's last axis and a dense layer, as `octavo_jax.layernorm_dense` fuses them.

    Parameters beside `Linear`'s kernel and bias: scale [K], and norm_bias [K] with norm="layer", else None.

    norm, epsilon             "rms" or "layer", and what is added to the mean square
    scale_init, scale_axes    of scale; norm_bias starts at zero and has the same logical axes
    return_normalized         also return the normalized x
    Other arguments           `Linear`'s
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        norm: Norm = "rms",
        epsilon: float = 1e-6,
        scale_init: Initializer = ones_init,
        scale_axes: Axes = (),
        return_normalized: bool = False,
        **linear: Any,
    ) -> None:
        super().__init__(in_features, out_features, **linear)
        self.scale = self._parameter(linear["rngs"], scale_init, (in_features,), scale_axes)
        self.norm_bias = self._optional(norm == "layer", linear["rngs"], zeros_init, (in_features,), scale_axes)
        self.norm, self.epsilon, self.return_normalized = norm, epsilon, return_normalized

    def __call__(self, x: Array, *, seed: int | Array | None = None) -> Any:
        """x [..., K] to y [..., N], or (y, normalized x); `seed` overrides the module's own."""
        x, kernel, bias = cast(self.dtype, x, self.kernel[...], value_of(self.bias))
        gamma, beta = cast(x.dtype, self.scale[...], value_of(self.norm_bias))
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
        results = self._run(call, seed)
        return results if self.return_normalized else results[0]
