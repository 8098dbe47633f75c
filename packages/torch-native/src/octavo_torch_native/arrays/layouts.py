"""The layouts that a plane may have here; imports neither torch nor the kernels, because the card names them too."""

from __future__ import annotations

from octavo import GroupedTensorSpec
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Direction

ROWS, PANELS = "rows", "panels"
"""The names of octavo_native.layouts: row data, and panels of 128 rows of one group, as the GEMMs read them."""

LAYOUTS: dict[Direction, tuple[str, str]] = {"rowwise": (PLAIN, ROWS), "columnwise": (PLAIN, PANELS)}
"""The plain and the native layout of each plane."""


def layout_of(spec: GroupedTensorSpec, direction: Direction) -> str:
    """The layout of a plane; ValueError where it is another backend's."""
    layout = spec.rowwise_layout if direction == "rowwise" else spec.columnwise_layout
    if layout not in LAYOUTS[direction]:
        raise ValueError(
            f"{direction} data are in layout {layout!r}; torch-native reads {' and '.join(LAYOUTS[direction])}"
        )
    return layout
