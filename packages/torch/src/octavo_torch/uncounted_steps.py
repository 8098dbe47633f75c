"""Steps of optimizers whose kernels change parameters and do not count it in their versions, as torch's fused ones."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

_versions = WeakTensorKeyDictionary()
"""Of each tensor that is watched, the version after the last step; of no other one is anything changed."""

_hooked = False


def watch(tensors: Iterable[Tensor]) -> None:
    """From now on a step of a torch.optim.Optimizer that leaves the version of one of these as it was counts it.

    Whoever compares versions to find out whether a parameter has changed calls it.
    """
    global _hooked
    for value in tensors:
        if not value.is_inference():  # these have no version
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
