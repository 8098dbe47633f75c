"""The options of a parameter group, checked before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo_torch.arrays.checks import brief, check_flag
from octavo_torch.optimizers.arithmetic import Rule

Group = Mapping[str, Any]
"""A parameter group, as torch.optim has it: options by name, and `params`."""

OPTIONS = ("lr", "betas", "eps", "weight_decay", "master_dtype", "state_bits", "seed", "capturable")
UNSERVED = ("amsgrad", "maximize", "differentiable")
"""Options of torch.optim.AdamW that change what a step is."""

_FLT_MAX = torch.finfo(torch.float32).max
MASTER_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""The dtypes of masters, by their names in a state_dict()."""


def check_group(group: Group) -> None:
    """Raises ValueError for the option that does not fit."""
    for option in UNSERVED:
        if group.get(option):
            raise ValueError(
                f"{option} is {_shown(group[option])}, an option of torch.optim.AdamW that this step does not have; "
                "leave it out, or step these parameters with torch.optim.AdamW"
            )
    check_flag("capturable", group["capturable"])
    _check_rate(group["lr"], group["capturable"])
    betas = group["betas"]
    if not isinstance(betas, Sequence) or len(betas) != 2 or not all(_is_number(beta, 1.0) for beta in betas):
        raise ValueError(f"betas is {_shown(betas)}; give two numbers from 0 to below 1, such as (0.9, 0.999)")
    for name in ("eps", "weight_decay"):
        if not _is_number(group[name]):
            raise ValueError(f"{name} is {_shown(group[name])}; give a finite number of at least 0")
    if not any(group["master_dtype"] is dtype for dtype in MASTER_DTYPES.values()):
        raise ValueError(f"master_dtype is {_shown(group['master_dtype'])}; give torch.float32 or torch.bfloat16")
    if not _is_number(group["state_bits"]) or group["state_bits"] not in (32, 8):
        raise ValueError(f"state_bits is {_shown(group['state_bits'])}; give 32 or 8")
    if isinstance(group["seed"], bool) or not isinstance(group["seed"], int):
        raise ValueError(f"seed is {_shown(group['seed'])}; give an integer (taken modulo 2^64)")


def check_rate_device(group: Group, name: str, parameter: Tensor) -> None:
    """Raises ValueError where the learning rate is a tensor on another device than the parameter."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and group["capturable"] and lr.device != parameter.device:
        raise ValueError(
            f"lr is a tensor on {lr.device} and {name} on {parameter.device}; give a tensor there, or a number"
        )


def rule_of(group: Group, device: torch.device) -> Rule:
    """The group's hyperparameters, the learning rate as an fp32 tensor on `device`."""
    lr = group["lr"]
    if isinstance(lr, Tensor):
        rate = lr.detach().reshape(()).to(torch.float32)
    else:
        rate = torch.full((), lr, dtype=torch.float32, device=device)
    b1, b2 = group["betas"]
    return Rule(rate, (float(b1), float(b2)), float(group["eps"]), float(group["weight_decay"]))


def _check_rate(lr: object, capturable: bool) -> None:
    if not isinstance(lr, Tensor):
        if not _is_number(lr):
            raise ValueError(f"lr is {_shown(lr)}; give a finite number of at least 0, or a tensor of one element")
        return
    if lr.numel() != 1 or not lr.is_floating_point() or lr.is_meta or lr.layout is not torch.strided:
        raise ValueError(f"lr is {brief(lr)} on {lr.device}; give a dense floating-point tensor of one element")
    if not capturable and not lr.is_cpu:
        raise ValueError(
            f"lr is a tensor on {lr.device} and capturable is False; make capturable True, or give a number"
        )


def check_positive(name: str, value: object) -> None:
    """Raises ValueError for anything but a number above 0, infinity included."""
    infinite = isinstance(value, float) and value == math.inf
    if not infinite and not (_is_number(value) and value):
        raise ValueError(f"{name} is {_shown(value)}; give a number above 0")


def _is_number(value: object, below: float = _FLT_MAX) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < below


def _shown(value: object) -> str:
    if isinstance(value, tuple | list) and len(value) < 4 and all(isinstance(part, int | float) for part in value):
        return str(value)
    return brief(value)
