"""Checks of the public functions' arguments."""

from __future__ import annotations

import operator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from octavo import QuantizerSpec, check_group_sizes
from octavo.quantizer import Direction, Operand
from octavo_numerics.casts import F32

_INPUT_DTYPES = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32))
_MAX_GROUP = (1 << 32) - 1


_LEAST_NORMAL = np.float32(2.0**-126)
_HALF = np.float32(0.5)


def check_subnormals() -> None:
    """RuntimeError where the calling thread flushes subnormals, a processor mode that any library may have set."""
    if _LEAST_NORMAL * _HALF == 0:
        raise RuntimeError(
            "this thread flushes subnormal numbers to zero, but the definition needs them; turn that off "
            "(`torch.set_flush_denormal(False)`) or call from another thread"
        )


def check_input(x: Any, name: str = "x") -> npt.NDArray[Any]:
    """`x` as a 2-D or 3-D array of a high-precision dtype, or ValueError."""
    array = np.asarray(x)
    if array.dtype not in _INPUT_DTYPES:
        raise ValueError(f"{name} has dtype {array.dtype}; cast it to bfloat16, float16 or float32")
    if array.ndim not in (2, 3):
        raise ValueError(f"{name} has shape {list(array.shape)}; give ragged rows [M, K] or stacked matrices [G, N, K]")
    return array


def to_fp32(x: npt.NDArray[Any]) -> F32:
    """bf16, fp16 or fp32 to fp32, exactly."""
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(x, dtype=np.float32)


def check_sizes(group_sizes: Any, rows: int) -> npt.NDArray[np.int64]:
    """Host sizes [G] as int64, or ValueError for a wrong rank, dtype, sign or sum."""
    array = np.asarray(group_sizes)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"group_sizes has shape {list(array.shape)}; give one size per group, [G] with G at least 1")
    if array.dtype.kind not in "iu":
        raise ValueError(f"group_sizes has dtype {array.dtype}; give integers (int32 or int64)")
    sizes = [int(size) for size in array]
    check_group_sizes(sizes, rows)
    return np.array(sizes, dtype=np.int64)


def sizes_for(x: npt.NDArray[Any], group_sizes: Any) -> npt.NDArray[np.int64]:
    """Rows of each group of `x`: `group_sizes`, all rows in one group, or N each for stacked matrices."""
    if x.ndim == 2:
        return check_sizes([x.shape[0]] if group_sizes is None else group_sizes, x.shape[0])
    if group_sizes is not None:
        raise ValueError(
            f"group_sizes was given with stacked matrices of shape {list(x.shape)}; leave it out: each is a group"
        )
    return np.full(x.shape[0], x.shape[1], dtype=np.int64)


def check_seed(seed: Any, spec: QuantizerSpec) -> int | None:
    """The seed of a stochastic spec as an int; None for other specs, which take none into account."""
    if not spec.stochastic:
        return None
    if seed is None:
        raise ValueError("seed is None and rounding is 'stochastic'; give an integer seed, another one each step")
    try:
        return operator.index(seed)
    except TypeError:
        raise ValueError(f"seed={seed!r} is not an integer; give an integer (taken modulo 2^64)") from None


def check_operand(operand: Any, spec: QuantizerSpec) -> Operand:
    """`operand`, or the spec's role where it is None."""
    if operand is None:
        return spec.role
    if operand == "x" or operand == "w" or operand == "dy":
        return operand  # type: ignore[no-any-return]
    raise ValueError(f"operand={operand!r} is none of 'x', 'w', 'dy'; leave it out to take the spec's role")


def check_group_offset(group_offset: Any, groups: int) -> int:
    """The number of the call's first group, which is part of a 32-bit counter word."""
    try:
        offset = operator.index(group_offset)
    except TypeError:
        raise ValueError(f"group_offset={group_offset!r} is not an integer; give the first group's number") from None
    if offset < 0 or offset + groups - 1 > _MAX_GROUP:
        raise ValueError(f"group_offset={offset} with {groups} groups is outside 0 to 2^32 - 1; give a smaller one")
    return offset


def check_scale(scale: Any, spec: QuantizerSpec, groups: int) -> F32 | None:
    """Delayed scaling's encode scales [G], finite and positive; ValueError where another scaling receives one."""
    if spec.scaling != "delayed":
        if scale is not None:
            raise ValueError(f"scale was given, but scaling={spec.scaling!r} computes its own; leave it out")
        return None
    if scale is None:
        raise ValueError("scale is None and scaling is 'delayed'; give the encode scales [G] of its state")
    array = np.asarray(scale)
    if array.dtype != np.float32:
        raise ValueError(f"scale has dtype {array.dtype}; give float32 encode scales")
    if array.shape != (groups,):
        raise ValueError(f"scale has shape {list(array.shape)}; give one encode scale per group, [{groups}]")
    bad = np.flatnonzero(~(np.isfinite(array) & (array > 0)))
    if bad.size:
        raise ValueError(f"scale[{bad[0]}] is {array[bad[0]]}; encode scales are finite and more than 0")
    return array


def check_direction(direction: Any) -> Direction:
    """`direction` or ValueError."""
    if direction == "rowwise" or direction == "columnwise":
        return direction  # type: ignore[no-any-return]
    raise ValueError(f"direction={direction!r} is neither 'rowwise' nor 'columnwise'; give one of them")
