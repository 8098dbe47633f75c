"""The layout of a plane of an operand."""

from __future__ import annotations

from octavo import GroupedTensorSpec
from octavo.quantizer import Direction
from octavo_native.layouts import LAYOUTS_OF_DIRECTION


def layout_of(spec: GroupedTensorSpec, direction: Direction) -> str:
    """The layout of a plane; ValueError where it is another backend's."""
    layout = spec.rowwise_layout if direction == "rowwise" else spec.columnwise_layout
    readable = LAYOUTS_OF_DIRECTION[direction]
    if layout not in readable:
        raise ValueError(f"{direction} data are in layout {layout!r}; torch-native reads {' and '.join(readable)}")
    return layout
