"""Extras: what a fused quantizer computes beside codes and scales."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(eq=False)
class Extras:
    """What a fused quantizer computes beside codes and scales; None for what the caller did not want.

    activated     [M, C]        what was quantized, in the input's dtype
    forward       [M, F]        beside an activation's gradient without codes: the activation times probs
    amax          fp32 [G]      max |.| of it in each group, NaN winning
    dequantized   bf16 [M, C]   row codes times their scales, rounded once
    dbias         fp32 [G, C]   its column sums by group, in a fixed order
    dprobs        fp32 [M]      the gradient of probs: row sums in a fixed order, 0 past the sum of the sizes
    mean, rstd    fp32 [M]      statistics of the rows before a normalization; RMSNorm has no mean

    Rows past the sum of the sizes mean nothing in `activated`, `forward`, `dequantized`, `mean` and `rstd`. A torch
    pytree.
    """

    activated: Tensor | None = None
    forward: Tensor | None = None
    amax: Tensor | None = None
    dequantized: Tensor | None = None
    dbias: Tensor | None = None
    dprobs: Tensor | None = None
    mean: Tensor | None = None
    rstd: Tensor | None = None


_NAMES = tuple(field.name for field in fields(Extras))


def _flatten(extras: Extras) -> tuple[list[object], tuple[str, ...]]:
    # absent fields are no leaves: torch.compile takes no None there
    present = tuple(name for name in _NAMES if getattr(extras, name) is not None)
    return [getattr(extras, name) for name in present], present


def _unflatten(leaves: Iterable[Any], present: tuple[str, ...]) -> Extras:
    return Extras(**dict(zip(present, leaves, strict=True)))


pytree.register_pytree_node(Extras, _flatten, _unflatten, serialized_type_name="octavo_torch.Extras")
