"""Checks of the arguments of quantizers, alone and fused: ValueErrors that say what was given and what is needed."""

from __future__ import annotations

import math
from typing import get_args

import torch
from torch import Tensor

from octavo import QuantizerSpec
from octavo.errors import one_of
from octavo.quantizer import Direction, Operand
from octavo_registry.contract import Norm
from octavo_torch.arrays.checks import brief, check_spec, on_another_device
from octavo_torch.arrays.dtypes import DTYPE_NAMES, name_of
from octavo_torch.arrays.grouped_tensor import GroupedTensor, check_planes
from octavo_torch.arrays.operands import check_layout
from octavo_torch.scaling.seeds import check_seed

NEEDS_SEED = (
    "seed is None and the recipe rounds stochastically; give an integer or an integer scalar tensor, "
    "another one each step"
)


def check_quantize(x: object, spec: QuantizerSpec, group_sizes: object, seed: object, scale: object) -> None:
    """ValueError for arguments of `quantize` that do not fit, whatever the number of groups."""
    if not isinstance(x, Tensor):
        raise ValueError(f"x is a {type(x).__name__}; give a tensor [M, K] or [G, N, K]")
    if x.dim() not in (2, 3):
        raise ValueError(f"x has shape {list(x.shape)}; give rows [M, K] or stacked matrices [G, N, K]")
    if x.dtype not in DTYPE_NAMES:
        raise ValueError(f"x has dtype {name_of(x.dtype)}; give bfloat16, float16 or float32")
    check_layout("x", x)
    check_spec("spec", spec)
    if x.dim() == 3:
        if group_sizes is not None:
            raise ValueError("group_sizes was given with stacked matrices [G, N, K]; leave it out: each is a group")
        if not x.shape[0]:
            raise ValueError(f"x has shape {list(x.shape)}; give at least one matrix")
        if spec.hadamard:
            raise ValueError("spec.hadamard is True and x holds stacked matrices; take it off, or give rows [M, K]")
    check_seed(seed)
    if spec.stochastic and seed is None:
        raise ValueError(NEEDS_SEED)
    if spec.scaling == "delayed" and scale is None:
        raise ValueError("scale is None and delayed scaling takes its scales from history; give [G] encode scales")
    if spec.scaling != "delayed" and scale is not None:
        raise ValueError(f"scale was given and {spec.scaling} scaling makes its own; leave it out")


def check_group_offset(group_offset: object, groups: int) -> None:
    """ValueError for anything but an integer with which every group's number has 32 bits."""
    if isinstance(group_offset, bool) or not isinstance(group_offset, int | torch.SymInt):
        raise ValueError(f"group_offset is {brief(group_offset)}; give an integer, the first group's number")
    if not 0 <= group_offset <= (1 << 32) - groups:
        raise ValueError(
            f"group_offset is {brief(group_offset)} with {groups} groups, whose numbers are 0 to 2^32 - 1; give a "
            f"number from 0 to 2^32 - {groups}"
        )


def check_scale(scale: object, groups: int, x: Tensor) -> None:
    """ValueError unless `scale` is None, or delayed scaling's encode scales: float32 [G] on x's device."""
    if scale is None:
        return
    if not isinstance(scale, Tensor) or scale.dtype is not torch.float32 or tuple(scale.shape) != (groups,):
        given = f"{name_of(scale.dtype)} {list(scale.shape)}" if isinstance(scale, Tensor) else type(scale).__name__
        raise ValueError(f"scale is {given}; give float32 [{groups}], the encode scale of each group")
    check_layout("scale", scale)
    if scale.device != x.device:
        raise on_another_device("scale", scale.device, "x", x.device)


def operand_name(operand: object) -> Operand | None:
    """`operand`; ValueError unless it is one, or None."""
    return None if operand is None else one_of("operand", operand, get_args(Operand))


def direction_name(direction: object) -> Direction:
    """`direction`; ValueError unless it is one."""
    return one_of("direction", direction, get_args(Direction))


def check_unchanged(unchanged: object, out: object, x: Tensor) -> None:
    """ValueError unless `unchanged` is None, or an int32 flag on x's device for a call that has `out`."""
    if unchanged is None:
        return
    if out is None:
        raise ValueError("unchanged was given without out; give the tensors that may stay as they are")
    if not isinstance(unchanged, Tensor) or unchanged.dtype is not torch.int32 or unchanged.numel() != 1:
        given = (
            f"{name_of(unchanged.dtype)} {list(unchanged.shape)}"
            if isinstance(unchanged, Tensor)
            else type(unchanged).__name__
        )
        raise ValueError(f"unchanged is {given}; give an int32 tensor of one element on x's device")
    check_layout("unchanged", unchanged)
    if unchanged.device != x.device:
        raise on_another_device("unchanged", unchanged.device, "x", x.device)


def check_exact(name: str, value: object, shape: tuple[int, ...], dtype: torch.dtype, x: Tensor) -> None:
    """ValueError unless `value` is None, or a tensor of exactly this shape and dtype on x's device."""
    if value is None:
        return
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is a {type(value).__name__}; give a {name_of(dtype)} tensor {list(shape)}")
    if tuple(value.shape) != shape or value.dtype is not dtype:
        raise ValueError(f"{name} is {name_of(value.dtype)} {list(value.shape)}; give {name_of(dtype)} {list(shape)}")
    check_layout(name, value)
    if value.device != x.device:
        raise on_another_device(name, value.device, "x", x.device)


def check_norm(norm: object, epsilon: object, x: Tensor, gamma: object, beta: object) -> Norm:
    """`norm`; ValueError unless it names a normalization and the other arguments fit it and x [M, C]."""
    chosen: Norm = one_of("norm", norm, get_args(Norm))
    if norm == "rms" and beta is not None:
        raise ValueError("beta was given and RMSNorm has no shift; leave it out, or give norm='layer'")
    if isinstance(epsilon, bool) or not isinstance(epsilon, (int, float)) or not 0.0 <= epsilon < math.inf:
        raise ValueError(f"epsilon is {brief(epsilon)}; give a finite number of zero or more")
    if gamma is None:
        raise ValueError(f"gamma is None; give the weight of the normalization, [{x.shape[1]}]")
    for name, value in (("gamma", gamma), ("beta", beta)):
        fp32 = isinstance(value, Tensor) and value.dtype is torch.float32
        check_exact(name, value, (x.shape[1],), torch.float32 if fp32 else x.dtype, x)
    return chosen


def layout_names(layouts: object) -> tuple[str, str]:
    """`layouts`; ValueError unless they are two names, of the rowwise plane's layout and the columnwise plane's."""
    if (
        not isinstance(layouts, (tuple, list))
        or len(layouts) != 2
        or not all(isinstance(layout, str) for layout in layouts)
    ):
        raise ValueError(f"layouts is {brief(layouts)}; give two names, of the rowwise and of the columnwise plane")
    return layouts[0], layouts[1]


def check_quantized(q: object) -> None:
    """ValueError for anything but a GroupedTensor whose planes fit its spec."""
    if not isinstance(q, GroupedTensor):
        raise ValueError(f"q is a {type(q).__name__}; give the GroupedTensor that quantize returned")
    check_planes("q", q)
