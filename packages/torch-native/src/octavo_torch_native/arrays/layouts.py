"""The layout of a plane of an operand."""

from __future__ import annotations

from octavo import GroupedTensorSpec
from octavo.quantizer import Direction
from octavo_native.layouts import LAYOUTS_OF_DIRECTION, VALUES


def layout_of(spec: GroupedTensorSpec, direction: Direction) -> str:
    """The layout of a plane; ValueError where it is another backend's."""
    layout = _named(spec, direction)
    readable = LAYOUTS_OF_DIRECTION[direction]
    if layout not in readable:
        raise ValueError(f"{direction} data are in layout {layout!r}; torch-native reads {' and '.join(readable)}")
    return layout


def layout_in_gemm(spec: GroupedTensorSpec, direction: Direction) -> str:
    """The same of an operand of a GEMM, whose plane may also hold values."""
    return VALUES if _named(spec, direction) == VALUES else layout_of(spec, direction)


def _named(spec: GroupedTensorSpec, direction: Direction) -> str:
    return spec.rowwise_layout if direction == "rowwise" else spec.columnwise_layout
