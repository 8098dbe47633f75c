"""tensor_stats: what a quantizer does to a tensor, group by group."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from octavo import GroupedTensorSpec, QuantizerSpec
from octavo.errors import one_of
from octavo.health import FIELDS, WINDOW
from octavo.quantizer import Direction
from octavo_jax.arithmetic.stats import operand_stats
from octavo_jax.arrays.checks import check_spec
from octavo_jax.arrays.exportable import exportable
from octavo_jax.arrays.sizes import GroupSizes
from octavo_jax.quantizers.arguments import check_scale, drawn_seed, sizes_of
from octavo_jax.sharding.conflicts import check_whole


@exportable
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TensorStats:
    """One entry per group, float32 [G]. octavo_numerics.TensorStats defines each; past 2^24 a count is rounded.

    elements    elements that were looked at
    amax        largest magnitude, NaN winning, of all rows
    non_finite  elements that decode to NaN or infinity
    saturated   finite elements cut to the format's largest value
    underflow   finite elements that are not zero and decode to zero
    signal      sum of x^2, and noise the sum of (decoded - x)^2, over elements finite on both sides
    inexact     of weights that are rounded to MXFP4 first: finite elements that decode to another value than MXFP4's
    """

    elements: Array
    amax: Array
    non_finite: Array
    saturated: Array
    underflow: Array
    signal: Array
    noise: Array
    inexact: Array

    @property
    def sqnr_db(self) -> Array:
        """10 log10(signal / noise): Inf where nothing was lost, NaN where there was no signal."""
        return 10 * jnp.log10(self.signal / self.noise)

    def total(self) -> TensorStats:
        """The groups taken together, as one."""
        sums = {name: getattr(self, name).sum(keepdims=True) for name in FIELDS if name != "amax"}
        return TensorStats(amax=self.amax.max(keepdims=True), **sums)


def check_rows(rows: int | None) -> int:
    """`rows` with 0 for None; ValueError for anything but a positive multiple of WINDOW below 2^31."""
    if rows is None:
        return 0
    if isinstance(rows, bool) or not isinstance(rows, int) or rows % WINDOW or not 0 < rows < 1 << 31:
        raise ValueError(
            f"rows is {rows!r}; give a multiple of {WINDOW}, the rows of a block of scales, below 2^31, or None"
        )
    return rows


def tensor_stats(
    x: Array | np.ndarray,
    spec: QuantizerSpec,
    group_sizes: GroupSizes | None = None,
    *,
    direction: Direction | None = None,
    seed: int | Array | None = None,
    scale: Array | np.ndarray | None = None,
    rows: int | None = None,
) -> TensorStats:
    """Quantize `x` as `quantize` does and count what is lost: octavo_numerics.tensor_stats on x's device.

    direction   "rowwise" or "columnwise"; None: the first that `spec.orientation` names. Hadamard column data are
                judged in the Hadamard domain
    rows        look at this many rows of each group, a multiple of 128, evenly spread, and at 1024 of their columns, in
                windows of 128; None: at all. The amax is that of all, and scales are made from it where they span a
                group. Scales of whole columns and Hadamard data always take all rows, scales of whole rows all columns

    Other arguments are those of `quantize`. It may be jitted; it is not differentiated. Raises ValueError for arguments
    that do not fit.
    """
    check_spec(spec)
    x = jnp.asarray(x)
    check_whole("tensor_stats", x=x)
    sizes = sizes_of(x, group_sizes)
    if direction is not None:
        one_of("direction", direction, get_args(Direction))
    words = drawn_seed(spec, seed)
    groups = x.shape[0] if sizes is None else sizes.shape[0]
    if groups:  # refuses what quantize refuses, such as Hadamard data of matrices
        GroupedTensorSpec(shape=x.shape, groups=groups, quantizer=spec, ragged_axis=None if sizes is None else 0)
    scale = check_scale(scale, spec, groups)
    way: Direction = "rowwise" if spec.shares_codes else direction or spec.directions[0]
    return TensorStats(*counted(x, sizes, words, scale, spec=spec, direction=way, rows=check_rows(rows)))


@partial(jax.jit, static_argnames=("spec", "direction", "rows"))
def counted(
    x: Array,
    sizes: Array | None,
    seed: Array | None,
    scale: Array | None,
    *,
    spec: QuantizerSpec | None,
    direction: Direction,
    rows: int,
) -> Array:
    """float32 [8, G]: see arithmetic.stats.operand_stats. No gradient flows into it."""
    return operand_stats(lax.stop_gradient(x), sizes, spec, direction, seed, scale, rows)
