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
from torch.utils.weak import WeakTensorKeyDictionary

_versions = WeakTensorKeyDictionary()
"""The version of each watched tensor after its optimizer's last step. Other tensors are left alone."""

_hooked = False


def watch(tensors: Iterable[Tensor]) -> None:
    """From now on each step of a torch.optim.Optimizer raises the version of those of `tensors` that it has stepped.

    Call it before versions are compared to find out whether one of them has changed.
    """
    global _hooked
    for value in tensors:
        if not value.is_inference():  # a tensor of inference mode has no version
            _versions[value] = value._version
    if not _hooked:
        _hooked = True
        register_optimizer_step_post_hook(_count)


def _count(optimizer: Optimizer, *_: object) -> None:
    stepped = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None and parameter in _versions
    ]
    unseen = [parameter for parameter in stepped if parameter._version == _versions[parameter]]
    if unseen:
        torch.autograd.graph.increment_version(unseen)
    for parameter in stepped:
        _versions[parameter] = parameter._version
