"""GroupedMLP and LayerNormMLP."""

from __future__ import annotations

from functools import partial
from typing import Unpack

from jax import Array

from octavo_jax.arrays.sizes import GroupSizes
from octavo_jax.mlp.mlp import OutputNames, grouped_mlp, layernorm_mlp
from octavo_jax.modules.axes import cast, inner_columns
from octavo_jax.modules.initializers import Initializer, dense_kernel_init, grouped_kernel_init, ones_init, zeros_init
from octavo_jax.nnx.base import Axes, Common, QuantizedModule, value_of
from octavo_jax.nnx.whole_signature import with_whole_signature
from octavo_registry.contract.cards import Activation, Norm


class MLPOptions(Common, total=False):
    """Keyword arguments that every MLP takes and passes on to `MLPModule`."""

    out_features: int | None
    activation: Activation
    use_bias: bool
    kernel_init: Initializer
    bias_init: Initializer
    wi_axes: Axes
    wo_axes: Axes
    wi_bias_axes: Axes
    wo_bias_axes: Axes
    output_checkpoint_names: OutputNames


class MLPModule(QuantizedModule):
    """Parameters and options of every MLP, act(x @ wi + wi_bias) @ wo + wo_bias.

    wi [*groups, K, C], wo [*groups, F, N], wi_bias [*groups, C] and wo_bias [*groups, N] or None; C = 2 F with a gated
    activation (gate half first), else F.

    out_features              N; None: K
    wi_axes ... wo_bias_axes  logical axes of the parameters; empty: none
    output_checkpoint_names   of the results of wi and of wo; None: no name
    Other arguments           `octavo_jax.nnx.base.Common`'s
    """

    def __init__(
        self,
        groups: tuple[int, ...],
        in_features: int,
        hidden: int,
        *,
        out_features: int | None = None,
        activation: Activation = "swiglu",
        use_bias: bool = False,
        kernel_init: Initializer | None = None,
        bias_init: Initializer = zeros_init,
        wi_axes: Axes = (),
        wo_axes: Axes = (),
        wi_bias_axes: Axes = (),
        wo_bias_axes: Axes = (),
        output_checkpoint_names: OutputNames = (None, None),
        **common: Unpack[Common],
    ) -> None:
        super().__init__(groups=groups[0] if groups else 1, layers=2, **common)
        self.activation, self.output_checkpoint_names = activation, output_checkpoint_names
        rngs, columns = common["rngs"], inner_columns(hidden, activation)
        n = in_features if out_features is None else out_features
        init = kernel_init or (grouped_kernel_init if groups else dense_kernel_init)
        self.wi = self._parameter(rngs, init, (*groups, in_features, columns), wi_axes)
        self.wo = self._parameter(rngs, init, (*groups, hidden, n), wo_axes)
        self.wi_bias = self._optional(use_bias, rngs, bias_init, (*groups, columns), wi_bias_axes)
        self.wo_bias = self._optional(use_bias, rngs, bias_init, (*groups, n), wo_bias_axes)

    def _kernels(self) -> tuple[Array, Array]:
        wi, wo = cast(self.dtype, self.wi[...], self.wo[...])
        return wi, wo

    def _biases(self) -> tuple[Array | None, Array | None]:
        bi, bo = cast(self.dtype, value_of(self.wi_bias), value_of(self.wo_bias))
        return bi, bo


@with_whole_signature
class GroupedMLP(MLPModule):
    """One MLP a group, as `octavo_jax.grouped_mlp` fuses it; wi [G, K, C], wo [G, F, N], wi_bias, wo_bias or None.

    num_groups, in_features, hidden   G, K and F
    Other arguments                   `MLPModule`'s
    """

    def __init__(self, num_groups: int, in_features: int, hidden: int, **options: Unpack[MLPOptions]) -> None:
        super().__init__((num_groups,), in_features, hidden, **options)

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
        (x,), (bi, bo) = cast(self.dtype, x), self._biases()
        call = partial(
            grouped_mlp,
            x,
            *self._kernels(),
            group_sizes,
            activation=self.activation,
            probs=probs,
            bi=bi,
            bo=bo,
            bo_scales=bo_scales,
            output_checkpoint_names=self.output_checkpoint_names,
        )
        (y,) = self._run(call, seed)
        return y  # type: ignore[no-any-return]


@with_whole_signature
class LayerNormMLP(MLPModule):
    """A normalization of x's last axis and an MLP, as `octavo_jax.layernorm_mlp` fuses them.

    Parameters: scale [K], norm_bias [K] with norm="layer", else None, wi [K, C], wo [F, N], wi_bias, wo_bias or None.

    in_features, hidden       K and F
    norm, epsilon             "rms" or "layer", and what is added to the mean square
    scale_init, scale_axes    of scale; norm_bias starts at zero and has the same logical axes
    Other arguments           `MLPModule`'s
    """

    def __init__(
        self,
        in_features: int,
        hidden: int,
        *,
        norm: Norm = "rms",
        epsilon: float = 1e-6,
        scale_init: Initializer = ones_init,
        scale_axes: Axes = (),
        **options: Unpack[MLPOptions],
    ) -> None:
        super().__init__((), in_features, hidden, **options)
        rngs, shape = options["rngs"], (in_features,)
        self.scale = self._parameter(rngs, scale_init, shape, scale_axes)
        self.norm_bias = self._optional(norm == "layer", rngs, zeros_init, shape, scale_axes)
        self.norm: Norm = norm
        self.epsilon = epsilon

    def __call__(self, x: Array, *, seed: int | Array | None = None) -> Array:
        """x [..., K] to [..., N]; `seed` overrides the module's own."""
        (x,), (bi, bo) = cast(self.dtype, x), self._biases()
        gamma, beta = cast(x.dtype, self.scale[...], value_of(self.norm_bias))
        call = partial(
            layernorm_mlp,
            x,
            gamma,
            *self._kernels(),
            beta,
            norm=self.norm,
            epsilon=self.epsilon,
            activation=self.activation,
            bi=bi,
            bo=bo,
            output_checkpoint_names=self.output_checkpoint_names,
        )
        (y,) = self._run(call, seed)
        return y  # type: ignore[no-any-return]
