"""Checks of the fused functions' arguments: what was given, what is needed, what to do."""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor

from octavo import QuantizerSpec
from octavo_native import GATED
from octavo_torch.arrays.operands import check_tensor
from octavo_torch.plugin_api import dtype_text
from octavo_torch_native.quantizers.work import Activation, Norm, Work

_ACTIVATIONS: tuple[str, ...] = get_args(Activation)
_NORMS: tuple[str, ...] = get_args(Norm)


def check_rows(name: str, value: Any) -> None:
    """Rows [M, K]: fused forms are defined for ragged operands."""
    check_tensor(name, value, "[M, K]")


def check_activation(activation: Any, x: Tensor) -> int:
    """The width of what the activation makes of `x`; ValueError where it has no name here or x no two halves."""
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; give one of {', '.join(_ACTIVATIONS)}")
    if activation not in GATED:
        return int(x.shape[1])
    if x.shape[1] % 2:
        raise ValueError(
            f"x has {x.shape[1]} columns and {activation} reads a gate and an up projection side by side; "
            "give [M, 2 F], the gate first"
        )
    return int(x.shape[1] // 2)


def check_norm(norm: Any, epsilon: Any, beta: Any) -> None:
    """A known normalization, with a shift only where it has one."""
    if norm not in _NORMS:
        raise ValueError(f"norm is {norm!r}; give 'rms' or 'layer'")
    if norm == "rms" and beta is not None:
        raise ValueError("beta was given and RMSNorm has no shift; leave it out, or give norm='layer'")
    if isinstance(epsilon, bool) or not isinstance(epsilon, (int, float)) or not epsilon >= 0.0:
        raise ValueError(f"epsilon is {epsilon!r}; give a number of zero or more")


def check_beside(name: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype, x: Tensor) -> None:
    """A tensor of just this shape and dtype on x's device; None passes."""
    if value is None:
        return
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is a {type(value).__name__}; give a {dtype_text(dtype)} tensor {list(shape)}")
    if tuple(value.shape) != shape or value.dtype is not dtype:
        raise ValueError(
            f"{name} is {dtype_text(value.dtype)} {list(value.shape)}; give {dtype_text(dtype)} {list(shape)}"
        )
    if value.device != x.device:
        raise ValueError(f"{name} is on {value.device} and x on {x.device}; move it there")


def check_extras(spec: QuantizerSpec, work: Work) -> None:
    """A dequantized copy is made of row data."""
    if work.dequantized and "rowwise" not in spec.directions:
        raise ValueError(
            f"dequantized=True copies row data and spec.orientation is {spec.orientation!r}; give 'rowwise' or 'both'"
        )
