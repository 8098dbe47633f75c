"""watch: has torch count in-place changes of parameters by optimizers whose kernels do not, such as torch's fused ones.

torch counts changes in place in `Tensor._version`, but a fused optimizer step leaves it as it was. Code that compares
versions, to find out whether codes still belong to their weight, would miss such a step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

_SEEN = "_octavo_seen_version"
"""The attribute of each watched tensor that holds its version after its optimizer's last step. A dictionary would refer
to the tensors weakly, and torch.utils.swap_tensors, which modules use for conversions after
`torch.__future__.set_swap_module_params_on_conversion(True)`, refuses tensors that something refers to weakly."""

_hooked = False


def watch(tensors: Iterable[Tensor]) -> None:
    """From now on each step of a torch.optim.Optimizer raises the version of those of `tensors` that it has stepped.

    Call it before versions are compared to find out whether one of them has changed.
    """
    global _hooked
    for value in tensors:
        if not value.is_inference():  # a tensor of inference mode has no version
            setattr(value, _SEEN, value._version)
    if not _hooked:
        _hooked = True
        register_optimizer_step_post_hook(_count)


def _count(optimizer: Optimizer, *_: object) -> None:
    stepped = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None and hasattr(parameter, _SEEN)
    ]
    unseen = [parameter for parameter in stepped if parameter._version == getattr(parameter, _SEEN)]
    if unseen:
        torch.autograd.graph.increment_version(unseen)
    watch(stepped)
