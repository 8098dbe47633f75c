"""tensor_stats: what a quantizer does to a tensor, group by group, counted on the tensor's device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from octavo import QuantizerSpec
from octavo.health import FIELDS, WINDOW
from octavo_torch.arithmetic import operators
from octavo_torch.arrays.checks import brief
from octavo_torch.arrays.sizes import GroupSizes
from octavo_torch.compiler.transforms import GROUPS, Subject, without_derivative
from octavo_torch.quantizers import arguments
from octavo_torch.quantizers.functional import sizes_of
from octavo_torch.scaling.seeds import seed_tensor


@dataclass(frozen=True, slots=True, eq=False)
class TensorStats:
    """One entry per group, float64 [G] on the tensor's device. octavo_numerics.TensorStats defines each.

    elements    elements that were looked at
    amax        largest magnitude, NaN winning, of all rows
    non_finite  elements that decode to NaN or infinity
    saturated   finite elements cut to the format's largest value
    underflow   finite elements that are not zero and decode to zero
    signal      sum of x^2, and noise the sum of (decoded - x)^2, over elements finite on both sides
    inexact     of weights that are rounded to MXFP4 first: finite elements that decode to another value than MXFP4's
    """

    elements: Tensor
    amax: Tensor
    non_finite: Tensor
    saturated: Tensor
    underflow: Tensor
    signal: Tensor
    noise: Tensor
    inexact: Tensor

    @property
    def sqnr_db(self) -> Tensor:
        """10 log10(signal / noise): Inf where nothing was lost, NaN where there was no signal."""
        return 10 * torch.log10(self.signal / self.noise)

    def total(self) -> TensorStats:
        """The groups taken together, as one."""
        sums = {name: getattr(self, name).sum(0, keepdim=True) for name in FIELDS if name != "amax"}
        return TensorStats(amax=self.amax.amax(0, keepdim=True), **sums)


def tensor_stats(
    x: Tensor,
    spec: QuantizerSpec,
    group_sizes: GroupSizes | None = None,
    *,
    direction: Literal["rowwise", "columnwise"] | None = None,
    seed: int | Tensor | None = None,
    scale: Tensor | None = None,
    rows: int | None = None,
) -> TensorStats:
    """Quantize `x` as `quantize` does and count what is lost: octavo_numerics.tensor_stats on x's device.

    direction   "rowwise" or "columnwise"; None: the first that `spec.orientation` names. Hadamard column data are
                judged in the Hadamard domain
    rows        look at this many rows of each group, a multiple of 128, evenly spread, and at 1024 of their columns, in
                windows of 128; None: at all. The amax is that of all, and scales are made from it where they span a
                group. Scales of whole columns and Hadamard data always take all rows, scales of whole rows all columns

    Other arguments are those of `quantize`. No value is read back, so the call may stand in a CUDA graph or in a
    function that torch.compile compiles; it is not differentiable. Raises ValueError for arguments that do not fit.
    """
    arguments.check_quantize(x, spec, group_sizes, seed, scale)
    side = spec.directions[0] if direction is None else arguments.direction_name(direction)
    check_rows(rows)
    counted = _counted(x, spec, group_sizes, direction=side, seed=seed, scale=scale, rows=0 if rows is None else rows)
    return TensorStats(*counted.unbind())


def check_rows(rows: object) -> None:
    """ValueError for anything but None and a positive multiple of WINDOW below 2^31."""
    if rows is not None and (
        isinstance(rows, bool) or not isinstance(rows, int) or rows % WINDOW or not 0 < rows < 1 << 31
    ):
        raise ValueError(
            f"rows is {brief(rows)}; give a multiple of {WINDOW}, the rows of a block of scales, below 2^31, or None"
        )


@without_derivative(Subject("tensor_stats", GROUPS))
def _counted(
    x: Tensor,
    spec: QuantizerSpec,
    group_sizes: GroupSizes | None = None,
    *,
    direction: str,
    seed: int | Tensor | None = None,
    scale: Tensor | None = None,
    rows: int = 0,
) -> Tensor:
    """float64 [8, G]."""
    sizes, _ = sizes_of(x, group_sizes)
    arguments.check_scale(scale, x.shape[0] if sizes is None else sizes.shape[0], x)
    produced = "rowwise" if spec.shares_codes else direction
    drawn = seed_tensor(seed, x.device)
    text = operators.quantizer_text(spec)
    return operators.stats_of(x, sizes, text, produced, drawn, spec.role, scale, rows)
