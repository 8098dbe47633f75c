"""What an MLP runs: its two layers and the fused functions between them."""

from __future__ import annotations

from dataclasses import dataclass

from jax import Array

from octavo_jax.arrays.checks import check_text
from octavo_jax.dispatch.fused import (
    FusedQuantizer,
    ValuesFunction,
    activation_run,
    activation_values,
    gradient_run,
    norm_run,
)
from octavo_jax.dispatch.layer import Layer, LayerOptions, layer_for
from octavo_jax.functions.norms import NormSpec
from octavo_jax.linear.computed_operands import ActivationQuantizer
from octavo_jax.memo import Interned, Memo
from octavo_jax.sharding.placement import Placement
from octavo_registry.contract.cards import Activated, Activation

OutputNames = tuple[str | None, str | None]
"""Checkpoint names of fc1's and fc2's results."""

Placements = tuple[Placement | None, Placement | None]
"""Of fc1's and fc2's arrays."""


@dataclass(frozen=True, eq=False)
class Mlp:
    """What one MLP runs. Compared by identity, so it is a cheap static argument of `jax.jit`.

    fc1, fc2             the two linear layers
    activation           the function between them
    norm                 the normalization before them, or None
    quantize_normalized, quantize_activated, quantize_gradient
                         the normalization, the activation and its gradient, fused with the quantizers after them; None
                         where nothing is quantized
    activated_values, gradient_values
                         the backend's functions for the activation and its gradient alone; None: JAX's operations
    """

    fc1: Layer
    fc2: Layer
    activation: Activation
    norm: NormSpec | None
    quantize_normalized: FusedQuantizer | None
    quantize_activated: FusedQuantizer | None
    quantize_gradient: FusedQuantizer | None
    activated_values: ValuesFunction | None
    gradient_values: ValuesFunction | None

    def activation_quantizer(self, probs: Array | None) -> ActivationQuantizer:
        """The activation, times `probs` [M] if given, with what computes it."""
        return ActivationQuantizer(self.quantize_activated, self.activated_values, self.activation, probs)

    def gradient_quantizer(self, probs: Array | None) -> ActivationQuantizer:
        """The gradient of that activation, with what computes it."""
        return ActivationQuantizer(self.quantize_gradient, self.gradient_values, self.activation, probs)

    def for_training(self) -> Mlp:
        """This MLP with its gradients planned; itself if they are."""
        if self.fc1.request.training:
            return self
        return mlp_of(self.fc1.for_training(), self.fc2.for_training(), self.activation, self.norm)


_planned: Memo[Mlp] = Memo()
_interned: Interned[Mlp] = Interned()


def mlp_of(fc1: Layer, fc2: Layer, activation: Activation, norm: NormSpec | None) -> Mlp:
    """The MLP of these layers: the same object as long as the registry chooses the same functions."""
    key = (fc1, fc2, activation, norm)

    def build() -> Mlp:
        backend = fc1.options.backend
        x, activated, gradient = fc1.plan.quantize_x, fc2.plan.quantize_x, fc1.plan.quantize_dy
        runs = (
            None if norm is None or x is None else norm_run(x, norm, backend, fc1),
            None if activated is None else activation_run(activated, activation, backend, fc2),
            None if gradient is None else gradient_run(gradient, activation, backend, fc1),
        )
        unquantized = (
            None if _quantizes_x(fc2) else _values(fc2, "act_quantize", activation),
            None if gradient is not None or not fc1.request.training else _values(fc1, "dact_quantize", activation),
        )
        return _interned.of((*key, runs, unquantized), lambda: Mlp(*key, *runs, *unquantized))

    return _planned.get(key, build)


def _quantizes_x(fc2: Layer) -> bool:
    """Whether fc2's GEMMs read codes of the activation alone, so that nothing computes it without quantizing."""
    return fc2.plan.quantize_x is not None and fc2.plan.recipe.quantizes("wgrad")


def _values(layer: Layer, op: Activated, activation: Activation) -> ValuesFunction | None:
    values = activation_values(layer.plan, op, activation, layer.options.backend)
    return None if isinstance(values, str) else values


def mlp_for(
    options: LayerOptions,
    output_checkpoint_names: OutputNames,
    x: Array,
    wi: Array,
    wo: Array,
    activation: Activation,
    norm: NormSpec | None,
    placements: Placements = (None, None),
) -> Mlp:
    """The MLP of x [M, K], wi [G, K, C] and wo [G, F, N], its forward pass planned.

    options      of both layers; `preferred_element_type` is fc2's
    placements   of fc1 and fc2; x is [*B, M, K] then, and kernels have the groups of E blocks
    """
    if not isinstance(output_checkpoint_names, tuple | list) or len(output_checkpoint_names) != 2:
        raise ValueError(
            f"output_checkpoint_names is {output_checkpoint_names!r}; give a pair, the names of fc1's and fc2's results"
        )
    first, second = output_checkpoint_names
    for one in (first, second):
        check_text("output_checkpoint_names", one)
    called = options.called
    fc1_called, fc2_called = called._replace(kernel="wi", bias="bi"), called._replace(kernel="wo", bias="bo")
    hidden = options._replace(preferred_element_type=None, output_checkpoint_name=first, called=fc1_called)
    fc1 = layer_for(hidden, x, wi, training=False, placement=placements[0])
    last = options._replace(output_checkpoint_name=second, called=fc2_called)
    fc2 = layer_for(last, x, wo, x_dtype=fc1.y_dtype, training=False, placement=placements[1])
    return mlp_of(fc1, fc2, activation, norm)
