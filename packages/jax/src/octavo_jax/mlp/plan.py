"""What an MLP runs: its two layers and the fused functions between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax import Array
from jax.typing import DTypeLike

from octavo import Recipe
from octavo_jax.dispatch.fused import Run, activation_run, gradient_run, norm_run
from octavo_jax.dispatch.layer import Cache, Layer, Names, Same, layer_for
from octavo_jax.functions.norms import NormSpec
from octavo_jax.sharding.placement import Placement
from octavo_registry.contract.cards import Activation

OutputNames = tuple[str | None, str | None]
"""Checkpoint names of fc1's and fc2's results."""

Placements = tuple[Placement | None, Placement | None]
"""Of fc1's and fc2's arrays."""


@dataclass(frozen=True, eq=False)
class Mlp:
    """What one MLP runs. Compared by identity, so it is a cheap static argument of `jax.jit`.

    fc1, fc2             the two linear layers
    activation           between them
    norm                 before them; None: none
    quantize_normalized, quantize_activated, quantize_gradient   fused functions; None where nothing is quantized
    """

    fc1: Layer
    fc2: Layer
    activation: Activation
    norm: NormSpec | None
    quantize_normalized: Run | None
    quantize_activated: Run | None
    quantize_gradient: Run | None

    def trained(self) -> Mlp:
        """The MLP with its gradients planned, too; itself where they are."""
        if self.fc1.asked.training:
            return self
        return mlp_of(self.fc1.trained(), self.fc2.trained(), self.activation, self.norm)


_seen = Cache()
_made = Same()


def mlp_of(fc1: Layer, fc2: Layer, activation: Activation, norm: NormSpec | None) -> Mlp:
    """The MLP of these layers: the same object as long as the registry chooses the same functions."""
    key = (fc1, fc2, activation, norm)
    seen: Mlp | None = _seen.get(key)
    if seen is not None:
        return seen
    backend = fc1.asked.backend
    x, activated, gradient = fc1.plan.quantize_x, fc2.plan.quantize_x, fc1.plan.quantize_dy
    runs = (
        None if norm is None or x is None else norm_run(x, norm, backend),
        None if activated is None else activation_run(activated, activation, backend),
        None if gradient is None else gradient_run(gradient, activation, backend),
    )
    mlp: Mlp = _made.of((*key, runs), lambda: Mlp(*key, *runs))
    _seen.put(key, mlp)
    return mlp


def mlp_for(
    recipe: Recipe | None,
    x: Array,
    wi: Array,
    wo: Array,
    activation: Activation,
    norm: NormSpec | None,
    checkpoint_name: str | None,
    output_checkpoint_names: OutputNames,
    preferred_element_type: DTypeLike | None,
    backend: Names,
    placements: Placements = (None, None),
) -> Mlp:
    """The MLP of x [M, K], wi [G, K, C] and wo [G, F, N], its forward pass planned.

    placements   of fc1 and fc2; x is [*B, M, K] then, and kernels have the groups of E blocks
    """
    names: dict[str, Any] = {"checkpoint_name": checkpoint_name, "backend": backend, "training": False}
    first, second = output_checkpoint_names
    fc1 = layer_for(
        recipe, x, wi, preferred_element_type=None, output_checkpoint_name=first, placement=placements[0], **names
    )
    fc2 = layer_for(
        recipe,
        x,
        wo,
        preferred_element_type=preferred_element_type,
        output_checkpoint_name=second,
        x_dtype=fc1.y_dtype,
        placement=placements[1],
        **names,
    )
    return mlp_of(fc1, fc2, activation, norm)
