"""Checks of a router's arguments."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from octavo.errors import one_of
from octavo.router import Score, check_choices
from octavo_torch.arrays.checks import brief, check_count, on_another_device
from octavo_torch.arrays.dtypes import DTYPE_NAMES
from octavo_torch.arrays.operands import check_layout

SCORES: tuple[Score, ...] = get_args(Score)

_FP32_MAX = torch.finfo(torch.float32).max


def check_router(logits: object, k: object, score: object, bias: object = None, scale: object = 1.0) -> None:
    """ValueError for arguments of a router that are none, or whose shapes or devices do not fit each other."""
    if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.dtype not in DTYPE_NAMES or not logits.shape[1]:
        raise ValueError(f"logits is {brief(logits)}; give [T, E] in bfloat16, float16 or float32")
    check_layout("logits", logits)
    check_count("k", k)
    check_score(score)
    check_scale(scale)
    if bias is None:
        return
    experts = logits.shape[1]
    if not isinstance(bias, Tensor) or tuple(bias.shape) != (experts,) or bias.dtype not in DTYPE_NAMES:
        raise ValueError(f"bias is {brief(bias)}; give [{experts}] in float32, bfloat16 or float16")
    check_layout("bias", bias)
    if bias.device != logits.device:
        raise on_another_device("bias", bias.device, "logits", logits.device)


def check_score(score: object) -> Score:
    """`score`; ValueError for a name that is none."""
    return one_of("score", score, SCORES)


def check_scale(scale: object) -> None:
    """ValueError for anything but a finite number."""
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not abs(scale) <= _FP32_MAX:
        raise ValueError(f"scale is {brief(scale)}; give a number that is finite in fp32")


def check_groups(experts: int, k: int, groups: int, kept_groups: int) -> None:
    """ValueError for groups that do not divide the experts, and for more choices than a token has."""
    check_count("groups", groups)
    check_count("kept_groups", kept_groups)
    check_choices(experts, k, groups, kept_groups)
