"""GroupedMLP and LayerNormMLP."""

from __future__ import annotations

from dataclasses import field
from functools import partial

from flax import linen as nn
from jax import Array

from octavo_jax.arrays.sizes import GroupSizes
from octavo_jax.linen.base import Axes, QuantizedModule
from octavo_jax.mlp.mlp import grouped_mlp, layernorm_mlp
from octavo_jax.modules.axes import cast, inner_columns
from octavo_jax.modules.initializers import Initializer, dense_kernel_init, grouped_kernel_init, ones_init, zeros_init
from octavo_registry.contract.cards import Activation, Norm


class MLPModule(QuantizedModule, kw_only=True):
    """Fields of every MLP, act(x @ wi + wi_bias) @ wo + wo_bias, beside `hidden`, which is F, the rows of wo; wi has C
    columns, 2 F with a gated activation (gate half first), else F.

    features                  N; None: K
    wi_axes ... wo_bias_axes  logical axes of the parameters; empty: none
    output_checkpoint_names   of the results of wi and of wo; None: no name
    """

    features: int | None = None
    activation: Activation = "swiglu"
    use_bias: bool = False
    kernel_init: Initializer = dense_kernel_init
    bias_init: Initializer = zeros_init
    wi_axes: Axes = ()
    wo_axes: Axes = ()
    wi_bias_axes: Axes = ()
    wo_bias_axes: Axes = ()
    output_checkpoint_names: tuple[str | None, str | None] = (None, None)

    @nn.nowrap
    def _mlp_parameters(self, hidden: int, k: int, *groups: int) -> tuple[Array, Array, Array | None, Array | None]:
        """wi, wo, and their biases or None, in `dtype`."""
        columns = inner_columns(hidden, self.activation)
        n = k if self.features is None else self.features
        wi = self._parameter("wi", self.kernel_init, (*groups, k, columns), self.wi_axes)
        wo = self._parameter("wo", self.kernel_init, (*groups, hidden, n), self.wo_axes)
        bi = bo = None
        if self.use_bias:
            bi = self._parameter("wi_bias", self.bias_init, (*groups, columns), self.wi_bias_axes)
            bo = self._parameter("wo_bias", self.bias_init, (*groups, n), self.wo_bias_axes)
        parameters: tuple[Array, Array, Array | None, Array | None] = cast(self.dtype, wi, wo, bi, bo)
        return parameters


class GroupedMLP(MLPModule):
    """One MLP a group, as `octavo_jax.grouped_mlp` fuses it.

    Parameters: wi [G, K, C], wo [G, F, N], wi_bias [G, C], wo_bias [G, N]. Fields: `MLPModule`'s, `QuantizedModule`'s
    and

    num_groups, hidden        G and F
    """

    num_groups: int  # type: ignore[misc]  # mypy takes kernel_init, which is keyword-only, for the first field
    hidden: int  # type: ignore[misc]
    kernel_init: Initializer = field(default=grouped_kernel_init, kw_only=True)

    @nn.compact
    def __call__(
        self,
        x: Array,
        group_sizes: GroupSizes,
        *,
        probs: Array | None = None,
        bo_scales: Array | None = None,
        seed: int | Array | None = None,
    ) -> Array:
        """x [..., M, K] to [..., M, N]; probs [..., M] float32 multiplies what the activation returns, row by row, and
        bo_scales wo_bias."""
        wi, wo, bi, bo = self._mlp_parameters(self.hidden, x.shape[-1], self.num_groups)
        (x,) = cast(self.dtype, x)
        call = partial(
            grouped_mlp,
            x,
            wi,
            wo,
            group_sizes,
            activation=self.activation,
            probs=probs,
            bi=bi,
            bo=bo,
            bo_scales=bo_scales,
            output_checkpoint_names=self.output_checkpoint_names,
        )
        (y,) = self._run(call, seed, groups=self.num_groups, layers=2)
        return y  # type: ignore[no-any-return]


class LayerNormMLP(MLPModule):
    """A normalization of x's last axis and an MLP, as `octavo_jax.layernorm_mlp` fuses them.

    Parameters: scale [K], with norm="layer" norm_bias [K], wi [K, C], wo [F, N], wi_bias [C], wo_bias [N]. Fields:
    `MLPModule`'s, `QuantizedModule`'s and

    hidden                    F
    norm, epsilon             "rms" or "layer", and what is added to the mean square
    scale_init, scale_axes    of scale; norm_bias starts at zero and has the same logical axes
    """

    hidden: int
    norm: Norm = "rms"
    epsilon: float = 1e-6
    scale_init: Initializer = ones_init
    scale_axes: Axes = ()

    @nn.compact
    def __call__(self, x: Array, *, seed: int | Array | None = None) -> Array:
        """x [..., K] to [..., N]."""
        (x,) = cast(self.dtype, x)
        gamma, beta = self._norm_parameters(x, self.norm, self.scale_init, self.scale_axes)
        wi, wo, bi, bo = self._mlp_parameters(self.hidden, x.shape[-1])
        call = partial(
            layernorm_mlp,
            x,
            gamma,
            wi,
            wo,
            beta,
            norm=self.norm,
            epsilon=self.epsilon,
            activation=self.activation,
            bi=bi,
            bo=bo,
            output_checkpoint_names=self.output_checkpoint_names,
        )
        (y,) = self._run(call, seed, layers=2)
        return y  # type: ignore[no-any-return]
