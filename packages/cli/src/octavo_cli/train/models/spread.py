"""How the demo's model lies on several devices, in JAX."""

from __future__ import annotations

from dataclasses import dataclass

from octavo_jax import MeshAxes
from octavo_jax.moe import DEFAULT_EXCHANGE, Exchange

EXPERT_AXIS = "experts"


@dataclass(frozen=True)
class Spread:
    """How the model lies on several devices: experts and sequences along one mesh axis, everything else on each.

    devices    in all; experts and sequences of a batch are multiples of it. 1: no mesh
    exchange   of tokens between the devices
    """

    devices: int = 1
    exchange: Exchange = DEFAULT_EXCHANGE

    @property
    def sharding(self) -> MeshAxes | None:
        """Of the experts' block."""
        return None if self.devices == 1 else MeshAxes(ep=EXPERT_AXIS)


ONE_DEVICE = Spread()
