"""Halves of rows, such as gate and up, to blocks that take turns, and back: the optional part of fprop's answer.

octavo_registry.contract.gemm.InterleaveHalves describes the call.
"""

from __future__ import annotations

import torch
from torch import Tensor

import octavo_native
from octavo_torch_native.arrays.launch import address, submit
from octavo_torch_native.arrays.operators import define


def _interleave_into(value: Tensor, block: int, interleave: bool, out: Tensor) -> None:
    count, rows, columns = value.shape
    arguments = {
        "from_": address(value),
        "into": address(out),
        "rows": count,
        "blocks": rows // (2 * block),
        "block_bytes": block * columns * value.element_size(),
        "interleave": interleave,
    }
    if value.numel():
        submit(octavo_native.interleave_halves, value, arguments, recordable=False)


def _interleave(value: Tensor, block: int, interleave: bool) -> Tensor:
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    _interleave_into(value, block, interleave, out)
    return out


_new = define(
    "interleave(Tensor value, SymInt block, bool interleave) -> Tensor",
    _interleave,
    lambda value, *_: torch.empty_like(value),
)
_into = define("interleave_into(Tensor value, SymInt block, bool interleave, Tensor(a!) out) -> ()", _interleave_into)


def interleave_halves(value: Tensor, block: int, interleave: bool, out: Tensor | None = None, /) -> Tensor:
    """One launch; `value` and `out` are contiguous."""
    if out is None:
        return _new(value, block, interleave)
    if out.shape != value.shape or out.dtype is not value.dtype or out.device != value.device:
        raise ValueError(
            f"out is {out.dtype} {list(out.shape)} on {out.device}; give {value.dtype} {list(value.shape)} on "
            f"{value.device}"
        )
    _into(value, block, interleave, out)
    return out
