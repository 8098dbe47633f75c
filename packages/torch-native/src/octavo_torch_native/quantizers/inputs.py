"""QuantizeInputs: what a quantizing launch reads."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from octavo.quantizer import Direction


class QuantizeInputs(NamedTuple):
    """What a launch reads: the operators' arguments of these names; None where there is none.

    plan       the words of a GroupIndex; None for matrices
    scale      fp32 [G], encode scales of delayed scaling
    unchanged  int32 [1]: where it is not 0, the outputs are left as they are
    order      where x is tokens [T, K], whose rows are gathered: int64 [M], the choice of each row
    each       the number of choices per token
    mxfp4      where x is MXFP4's packed codes, uint8 [G, N, K / 2]: their scales, uint8 [G, N, K / 32]
    only       the one direction whose plane is written; None: all that the spec has
    """

    x: Tensor
    plan: Tensor | None
    seed: Tensor | None
    group_offset: int
    scale: Tensor | None
    dy: Tensor | None = None
    probs: Tensor | None = None
    gamma: Tensor | None = None
    beta: Tensor | None = None
    unchanged: Tensor | None = None
    order: Tensor | None = None
    each: int = 1
    mxfp4: Tensor | None = None
    only: Direction | None = None
