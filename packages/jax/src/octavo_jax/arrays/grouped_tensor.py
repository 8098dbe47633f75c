"""GroupedTensor: a quantized operand as a pytree."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

import jax
from jax import Array

from octavo import GroupedTensorSpec
from octavo.errors import one_of
from octavo.quantizer import Direction
from octavo_jax.arrays.exportable import exportable, in_json


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GroupedTensor:
    """Codes and decode scales of one operand; shapes as in `GroupedTensorSpec`, absent planes None.

    spec              static: logical shape, groups, quantizer, layouts
    group_sizes       [G] integers, or None for stacked matrices
    rowwise           payload: float8_e4m3fn, float8_e5m2, or uint8 with an E2M1 code in the low nibble
    rowwise_scale     float32, uint8 exponents (MX) or float8_e4m3fn (NVFP4)
    rowwise_global    [G] float32, NVFP4's second-level decode factor
    columnwise ...    the same for blocks along rows; in x's orientation, so shared codes are one array

    A leaf may be anything that a transformation puts there: nothing is checked here.
    """

    spec: GroupedTensorSpec = field(metadata={"static": True})
    group_sizes: Array | None = None
    rowwise: Array | None = None
    rowwise_scale: Array | None = None
    rowwise_global: Array | None = None
    columnwise: Array | None = None
    columnwise_scale: Array | None = None
    columnwise_global: Array | None = None

    def plane(self, direction: Direction) -> tuple[Array, Array, Array | None]:
        """(payload, decode scales, second level or None) of one direction; ValueError unless it has been computed."""
        one_of("direction", direction, get_args(Direction))
        payload = self.rowwise if direction == "rowwise" else self.columnwise
        scale = self.rowwise_scale if direction == "rowwise" else self.columnwise_scale
        if payload is None or scale is None:
            made = self.spec.orientation
            raise ValueError(f"the {direction} plane was not made (orientation={made!r}); quantize with 'both'")
        return payload, scale, self.rowwise_global if direction == "rowwise" else self.columnwise_global


exportable(GroupedTensor, *in_json(GroupedTensorSpec))
