"""Quantized: everything that one launch made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from octavo_torch.plugin_api import GroupedTensor


@dataclass(eq=False)
class Quantized:
    """What one launch made; what was not asked for is None.

    codes        the planes of the spec
    amax         fp32 [G]: max |.| of what was quantized, NaN winning
    dequantized  bf16, codes times scales of the row data, rounded once
    activated    what was quantized, in the input's dtype
    dbias        fp32 [G, C]: column sums of what was quantized, in a fixed order
    dprobs       fp32 [M]: row sums of dy times the activation before probs, in a fixed order; 0 past the sum
    mean, rstd   fp32 [M]: of each row before normalization (mean: LayerNorm)

    Rows past the sum are unspecified in `dequantized`, `activated`, `mean` and `rstd`.
    """

    codes: GroupedTensor
    amax: Tensor | None = None
    dequantized: Tensor | None = None
    activated: Tensor | None = None
    dbias: Tensor | None = None
    dprobs: Tensor | None = None
    mean: Tensor | None = None
    rstd: Tensor | None = None


_NAMES = tuple(field.name for field in fields(Quantized))
EXTRAS = _NAMES[1:]
"""The fields beside the codes, in their order."""


def _flatten(made: Quantized) -> tuple[list[Any], tuple[str, ...]]:
    # what was not made is no leaf: torch.compile takes no None there
    present = tuple(name for name in _NAMES if getattr(made, name) is not None)
    return [getattr(made, name) for name in present], present


def _unflatten(leaves: Iterable[Any], present: tuple[str, ...]) -> Quantized:
    return Quantized(**dict(zip(present, leaves, strict=True)))


pytree.register_pytree_node(Quantized, _flatten, _unflatten, serialized_type_name="octavo_torch_native.Quantized")
