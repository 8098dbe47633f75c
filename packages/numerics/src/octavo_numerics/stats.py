"""tensor_stats: what a quantizer does to a tensor, group by group."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from octavo import QuantizerSpec
from octavo.formats import PAST_LARGEST
from octavo.health import FIELDS
from octavo.quantizer import Direction
from octavo_numerics import checks
from octavo_numerics.dequantize import decode_plane, scale_values
from octavo_numerics.groups import Units, units_of
from octavo_numerics.quantize import Plane, prepare, quantize_plane

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

SMALLEST_EXPONENT = -149
"""The smallest exponent of a positive fp32 number, to which column 0 of `TensorStats.scale_exponents` belongs."""

_EXPONENTS = 128 - SMALLEST_EXPONENT + 1


@dataclass(frozen=True, slots=True, eq=False)
class TensorStats:
    """One entry per group, all [G].

    elements    elements quantized (the padded rows of Hadamard data included)
    amax        largest magnitude of what was quantized, NaN winning; 0 without elements
    non_finite  elements that decode to NaN or infinity
    saturated   finite elements cut to the largest value: scaled, they lie half a unit past it or further
    underflow   finite elements that are not zero and decode to zero
    signal      sum of x^2, and noise the sum of (decoded - x)^2, over elements finite on both sides
    inexact     finite elements that decode to another value than MXFP4's of x, of a quantizer that is to hold those
                (`QuantizerSpec.mxfp4`); 0 of others
    first_non_finite  place of the first element of x that is not finite, counted along the group's rows; -1: none
    scale_exponents   [G, 278]: how many scaling units have a decode scale in [2^e, 2^(e+1)), at e - SMALLEST_EXPONENT;
                      scales that are zero (NVFP4's, of zero blocks) or NaN are in none
    """

    elements: I64
    amax: F64
    non_finite: I64
    saturated: I64
    underflow: I64
    signal: F64
    noise: F64
    inexact: I64
    first_non_finite: I64
    scale_exponents: I64

    @property
    def sqnr_db(self) -> F64:
        """10 log10(signal / noise): Inf where nothing was lost, NaN where there was no signal."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return 10 * np.log10(self.signal / self.noise)

    def total(self) -> TensorStats:
        """The groups taken together, as one: the first element that is not finite is counted from the first group."""
        sums = {
            name: getattr(self, name).sum(axis=0, keepdims=True)
            for name in (*FIELDS, "scale_exponents")
            if name != "amax"
        }
        before = np.cumsum(self.elements) - self.elements
        places = (before + self.first_non_finite)[self.first_non_finite >= 0]
        first = places.min(keepdims=True) if len(places) else np.array([-1], dtype=np.int64)
        return TensorStats(amax=self.amax.max(keepdims=True), first_non_finite=first, **sums)

    def exponents(self) -> dict[int, int]:
        """Scaling units of all groups by their decode scale's binary exponent, smallest first."""
        counts = self.scale_exponents.sum(axis=0)
        return {int(place) + SMALLEST_EXPONENT: int(counts[place]) for place in np.flatnonzero(counts)}


def tensor_stats(
    x: Any,
    spec: QuantizerSpec,
    group_sizes: Any = None,
    *,
    direction: Direction | None = None,
    seed: SupportsIndex | None = None,
    scale: Any = None,
) -> TensorStats:
    """Quantize `x` as `quantize` does and count what was lost.

    direction   "rowwise" or "columnwise"; None: the first that `spec.orientation` names. Hadamard column data are
                judged in the Hadamard domain

    Other arguments, and errors, are those of `quantize`.
    """
    call = prepare(x, spec, group_sizes, seed=seed, scale=scale)
    direction = spec.directions[0] if direction is None else checks.check_direction(direction)
    produced: Direction = "rowwise" if spec.shares_codes else direction
    plane = quantize_plane(call.valid, spec, call.groups, produced, call.scale, call.random)
    groups = call.groups.padded() if spec.hadamard and produced == "columnwise" else call.groups
    units = units_of(spec, produced, groups, plane.source.shape[1])
    decoded = decode_plane(plane.codes, plane.scales, plane.factor, spec, units)

    source = plane.source
    finite = np.isfinite(source)
    comparable = finite & np.isfinite(decoded)
    part = groups.whole
    edges = np.append(part.start, groups.rows).astype(np.int64)

    def summed(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        rows: npt.NDArray[Any] = values.sum(axis=1)
        return np.array([rows[first:last].sum() for first, last in pairwise(edges)], dtype=values.dtype)

    def counted(mask: npt.NDArray[np.bool_]) -> I64:
        return summed(mask.astype(np.int64))

    with np.errstate(all="ignore"):
        clipped = finite & (np.abs(plane.scaled) > np.float32(PAST_LARGEST[spec.format]))
        wide, error = source.astype(np.float64), decoded.astype(np.float64) - source.astype(np.float64)
        amax = part.maximum(np.abs(source)).max(axis=1, initial=0).astype(np.float64)
    return TensorStats(
        elements=groups.sizes * source.shape[1],
        amax=amax,
        non_finite=counted(~np.isfinite(decoded)),
        saturated=counted(clipped),
        underflow=counted(comparable & (source != 0) & (decoded == 0)),
        signal=summed(np.where(comparable, wide**2, 0.0)),
        noise=summed(np.where(comparable, error**2, 0.0)),
        inexact=counted(np.zeros_like(finite) if plane.wanted is None else comparable & (decoded != plane.wanted)),
        first_non_finite=_first_places(~finite, edges),
        scale_exponents=_scale_exponents(plane, units, groups.count),
    )


def _first_places(mask: npt.NDArray[np.bool_], edges: I64) -> I64:
    """[G]: where the first true element of each group of rows stands in it; -1 where none is."""
    columns = max(mask.shape[1], 1)
    rows = np.flatnonzero(mask.any(axis=1))
    at = np.searchsorted(rows, edges[:-1])
    places = np.full(len(edges) - 1, -1, dtype=np.int64)
    for group, (first, last) in enumerate(pairwise(edges)):
        if at[group] < len(rows) and rows[at[group]] < last:
            row = rows[at[group]]
            places[group] = (row - first) * columns + int(mask[row].argmax())
    return places


def _scale_exponents(plane: Plane, units: Units, groups: int) -> I64:
    """[G, 278]: see TensorStats."""
    values = scale_values(plane.scales, plane.factor, units).astype(np.float64)
    counts = np.zeros((groups, _EXPONENTS), dtype=np.int64)
    row, column = np.nonzero(np.isfinite(values) & (values > 0))
    exponent = np.frexp(values[row, column])[1] - 1 - SMALLEST_EXPONENT
    np.add.at(counts, (units.rows.group[row], exponent), 1)
    return counts
