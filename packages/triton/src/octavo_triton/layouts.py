"""How operands lie in memory: panels of 128 rows, and the layout that this package has beside the plain one.

"turned" is a layout of columnwise FP8 codes, [P, C, 128]: panels of 128 rows of one group, packed in group order, in
which the rows of a column lie side by side, zeros past the group's last. FP8 products read both operands along the sum,
and no chip's tensor cores turn bytes on the way. Scales stay plain.
"""

from __future__ import annotations

import struct

from octavo import GroupedTensorSpec, QuantizerSpec, block_bound
from octavo.grouped_tensor import PLAIN

TILE = 128
"""Rows of a panel and columns of a quantizer's tile."""
MOST_GROUPS = 4096
"""More would not fit into the registers of the program that sums their sizes."""
TURNED = "turned"
TURNED_SCALINGS = frozenset({"delayed", "current", "row", "block"})

_CELLS = 16384


def tiles(length: int, size: int = TILE) -> int:
    """Tiles of `size` that cover `length`."""
    return -(-length // size)


def panels_of(rows: int, groups: int) -> int:
    """Panels in the table of ragged rows: enough for every split of the rows, and for those past the sum."""
    return block_bound(rows, groups, TILE) + 1


def table_words(rows: int, groups: int) -> int:
    """Integers in that table, see kernels.panels."""
    return 4 * groups + 1 + 2 * panels_of(rows, groups)


def index_programs(rows: int, groups: int) -> tuple[int, int, int]:
    """(programs that write the table, groups that each sees, panels that each writes); the latter are powers of two."""
    panels, padded = panels_of(rows, groups), max(16, 1 << (groups - 1).bit_length())
    chunk = max(1, min(1 << (panels - 1).bit_length(), _CELLS // padded))
    return tiles(panels, chunk), padded, chunk


def share_of(units: int, programs: int) -> int:
    """How many of `units` each program has, a power of two."""
    return 1 << (max(1, tiles(units, programs)) - 1).bit_length()


def output_names(layout: GroupedTensorSpec) -> list[str]:
    """The planes in the order in which a quantizer returns them; what both directions share is made once."""
    spec = layout.quantizer
    shares = spec.shares_codes and layout.columnwise_layout == PLAIN
    directions = ("rowwise",) if shares else spec.directions
    names = [direction + part for direction in directions for part in parts_of(spec)]
    if spec.shares_codes and "rowwise_scale" in names:
        names = [name for name in names if name != "columnwise_scale"]
    return names


def with_shared(spec: QuantizerSpec, made: dict[str, object]) -> dict[str, object]:
    """Planes of every direction of `spec`, of those that were made: whichever direction's were, serve both."""
    if not spec.shares_codes:
        return dict(made)
    names = [(direction, part) for direction in spec.directions for part in parts_of(spec)]
    return {
        direction + part: made[direction + part if direction + part in made else "rowwise" + part]
        for direction, part in names
    }


def parts_of(spec: QuantizerSpec) -> tuple[str, ...]:
    """What a plane has beside codes, as suffixes."""
    return ("", "_scale", "_global") if spec.scaling == "nvfp4" else ("", "_scale")


def turned_shape(layout: GroupedTensorSpec) -> tuple[int, int, int]:
    """[P, C, 128] of column codes in panels."""
    rows, columns = layout.shape[-2:]
    ragged = layout.ragged_axis == 0
    panels = block_bound(rows, layout.groups, TILE) if ragged else layout.groups * tiles(rows)
    return panels, columns, TILE


def turned_layout(layout: GroupedTensorSpec, columnwise: str) -> GroupedTensorSpec:
    """`layout` with its column codes in the layout `columnwise`, where it has any."""
    if layout.columnwise_layout == columnwise or "columnwise" not in layout.quantizer.directions:
        return layout
    return GroupedTensorSpec(**{**dict(layout), "columnwise_layout": columnwise})


_SQUARE_COLUMNS = "square_columns gives 128 columns of x one scale, and its kernels write and read one for each column"


def layout_refusal(spec: QuantizerSpec, layouts: tuple[str, str]) -> str | None:
    """Why the (rowwise, columnwise) `layouts` are none that a quantizer of `spec` makes; None: it makes them."""
    rowwise, columnwise = layouts
    if "rowwise" in spec.directions and rowwise != PLAIN:
        return f"layout of rowwise planes is {rowwise}; it has {PLAIN}"
    known = (PLAIN, TURNED) if spec.scaling in TURNED_SCALINGS else (PLAIN,)
    if "columnwise" in spec.directions and columnwise not in known:
        return f"layout of columnwise planes in {spec.scaling} is {columnwise}; it has {' and '.join(known)}"
    return None


def pattern(value: float) -> int:
    """The int32 pattern of a number rounded to fp32."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def kernels_scaling(spec: QuantizerSpec) -> str:
    """How kernels.operands finds a scale: "group" for one per group, whatever it was computed from."""
    return "group" if spec.scaling in ("delayed", "current") else spec.scaling


def kernels_refusal(
    groups: int | None, square_columns: bool, quantizer: QuantizerSpec | None, layouts: tuple[str, str]
) -> str | None:
    """Why no kernel here serves an operation, on whatever machine; None where one does.

    groups, square_columns, quantizer, layouts   those of the octavo_registry request; None: any, or not quantized
    """
    if groups is not None and groups > MOST_GROUPS:
        return f"groups is {groups}, and its kernels index up to {MOST_GROUPS}"
    if square_columns:
        return _SQUARE_COLUMNS
    return None if quantizer is None else layout_refusal(quantizer, layouts)
