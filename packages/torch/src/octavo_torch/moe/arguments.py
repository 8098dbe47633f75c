"""Checks of choices and of their weights: what was given, what is needed, what to do."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_torch.arrays.checks import brief, on_another_device
from octavo_torch.arrays.dtypes import DTYPE_NAMES
from octavo_torch.arrays.operands import check_layout

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_choices(name: str, choices: object, x: Tensor) -> None:
    """ValueError unless `choices` are integers [T, k], at least one for each of the tokens x [T, K], on x's device."""
    if not isinstance(choices, Tensor) or choices.dim() != 2 or choices.dtype not in _INTEGERS:
        raise ValueError(f"{name} is {brief(choices)}; give integers [T, k], the group of each choice")
    check_layout(name, choices)
    if choices.shape[0] != x.shape[0] or not choices.shape[1]:
        raise ValueError(
            f"{name} has shape {list(choices.shape)} and x {list(x.shape)}; give [{x.shape[0]}, k], "
            "with at least one choice per token"
        )
    if choices.device != x.device:
        raise on_another_device(name, choices.device, "x", x.device)


def check_weights(weights: object, choices: Tensor) -> None:
    """ValueError unless `weights` has a number for each of the choices [T, k], on their device."""
    shape = choices.shape
    if isinstance(weights, Tensor):
        check_layout("weights", weights)
    if not isinstance(weights, Tensor) or weights.shape != shape or weights.dtype not in DTYPE_NAMES:
        raise ValueError(f"weights is {brief(weights)}; give {list(shape)} in float32, bfloat16 or float16")
    if weights.device != choices.device:
        raise on_another_device("weights", weights.device, "the choices", choices.device)
