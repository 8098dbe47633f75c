"""UnusedAmax: notices delayed scaling that records amax step after step and never computes a scale from it."""

from __future__ import annotations

import warnings

from torch import Tensor, nn

from octavo.caller import stacklevel_of_caller
from octavo_torch.uncounted_steps import watch

STEPS = 8
"""A weight that has changed so often without new scales has a training loop that forgets update_scales. A loop that
computes scales less often than in every step may have fewer changes between two updates."""


class UnusedAmax:
    """Watches one module with delayed scaling.

    It recognizes steps and updates by the versions of tensors, in which torch counts changes in place: an optimizer
    changes the weight, and `update_scales` the scales. Versions are in host memory, so nothing waits for a device.
    """

    __slots__ = ("scales", "steps", "weight")

    def __init__(self) -> None:
        self.scales = self.weight = -1
        self.steps = 0

    def recorded(self, module: nn.Module, weight: Tensor) -> None:
        """Called by each forward of `module` that records amax: warns once, after STEPS changes of `weight` without new
        scales."""
        scales = module._buffers["encode_scale"]
        if scales is None or scales.is_inference() or weight.is_inference():  # these have no version
            return
        if scales._version != self.scales:
            self.scales, self.weight, self.steps = scales._version, weight._version, 0
            watch([weight])
        elif weight._version != self.weight:
            self.weight = weight._version
            self.steps += 1
            if self.steps == STEPS:
                warnings.warn(
                    f"{type(module).__name__} has recorded amax over {STEPS} changes of its weight, and no scale was "
                    "computed from it: delayed scaling still quantizes with the scales of before; call "
                    "octavo_torch.update_scales(model) after each optimizer step",
                    stacklevel=stacklevel_of_caller(),
                )
