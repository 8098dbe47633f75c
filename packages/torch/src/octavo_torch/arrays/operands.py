"""Checks of the two operands of a GEMM against each other."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from octavo_torch.arrays.dtypes import DTYPE_NAMES, ONE_DTYPE, name_of


def check_layout(name: str, value: Tensor) -> None:
    """Raises ValueError for a nested or sparse tensor, and for a DTensor, of which a kernel would see nothing."""
    check_not_nested(name, value)
    if value.layout is not torch.strided:
        raise ValueError(f"{name} has layout {value.layout}; give a strided tensor, such as its to_dense()")
    if isinstance(value, DTensor):
        placed = ", ".join(map(str, value.placements))
        raise ValueError(f"{name} is a DTensor ({placed}); give this rank's part of it, such as its to_local()")


def check_not_nested(name: str, value: Tensor) -> None:
    """Raises ValueError for a nested tensor, which may have no shape that another check could read."""
    if value.is_nested:
        raise ValueError(
            f"{name} is a nested tensor; give a strided one, such as its values(), and put the result together by "
            "torch.nested.nested_tensor_from_jagged"
        )


def check_tensor(name: str, value: object, shape: str) -> Tensor:
    """`value`; raises ValueError unless it is a tensor of a high-precision dtype with as many axes as "[M, K]" has."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is a {type(value).__name__}; give a tensor {shape}")
    check_not_nested(name, value)
    if value.dim() != shape.count(",") + 1:
        raise ValueError(f"{name} has shape {list(value.shape)}; give {shape}")
    if value.dtype not in DTYPE_NAMES:
        raise ValueError(f"{name} has dtype {name_of(value.dtype)}; give bfloat16, float16 or float32")
    check_layout(name, value)
    return value


def check_weight(weight: object) -> Tensor:
    """`weight`; raises ValueError unless it is [G, N, K] with at least one group."""
    weight = check_tensor("weight", weight, "[G, N, K]")
    if not weight.shape[0]:
        raise ValueError(f"weight has shape {list(weight.shape)}; give at least one group")
    check_sides("weight", weight)
    return weight


def check_sides(name: str, matrices: Tensor) -> None:
    """Raises ValueError for matrices [G, N, K] without rows or without columns."""
    if not (matrices.shape[1] and matrices.shape[2]):
        raise ValueError(f"{name} has shape {list(matrices.shape)}; give N and K of at least 1")


def check_operands(x: object, weight: object) -> None:
    """Raises ValueError unless x is [M, K] and weight [G, N, K], of one dtype and on one device."""
    if not (
        isinstance(x, Tensor)
        and isinstance(weight, Tensor)
        and not (x.is_nested or weight.is_nested)
        and x.dim() == 2
        and weight.dim() == 3
        and x.dtype is weight.dtype
        and x.dtype in DTYPE_NAMES
        and x.shape[1] == weight.shape[2]
        and x.device == weight.device
        and weight.numel()
        and x.layout is weight.layout is torch.strided
        and not isinstance(x, DTensor)
    ):
        _explain_operands(x, weight)


def _explain_operands(x: object, weight: object) -> None:
    x = check_tensor("x", x, "[M, K]")
    weight = check_weight(weight)
    if x.shape[1] != weight.shape[2]:
        raise ValueError(
            f"x has {x.shape[1]} features and weight has shape {list(weight.shape)}; "
            f"give [G, N, K] with K = {x.shape[1]}"
            + ("; this looks like [G, K, N]: give weight.mT" if x.shape[1] == weight.shape[1] else "")
        )
    if x.dtype is not weight.dtype:
        raise ValueError(f"x has dtype {name_of(x.dtype)} and weight {name_of(weight.dtype)}; {ONE_DTYPE}")
    raise ValueError(f"x is on {x.device} and weight on {weight.device}; move one to the other's device")
