"""Shapes of the arrays that the kernels read and write: `include/octavo/layouts.h` in Python, in plain integers.

A plane's layout is "plain" (`octavo.GroupedTensorSpec` defines it), "rows" (native, rowwise) or "panels" (native,
columnwise); both native ones are as the Hopper kernels read them. Sizes are those of the operand:

    rows         M of a ragged [M, C]; G * N of stacked [G, N, C]
    cols         C
    matrix_rows  0 for a ragged operand, N for a stacked one

| plane | codes | scales |
|---|---|---|
| rows | [M, C]; E2M1 [M, ceil(C/2)], the even column low | block [ceil(C/128), M rounded up to 4]; others plain |
| panels | [P, C, 128]; E2M1 [P, C, 64] | delayed, current [G]; row [G, C]; block [P, C rounded up to 4]; mxfp8 [P, C, 4]; nvfp4 [P, C, 8] |

Stacked rowwise codes are [G, N, C]. Square blocks keep their plain scales in every layout.

"values" stands for rows and panels whose codes are replaced by the bf16 values that the kernels multiply, code times
block scale: [M, C] and [P, C, 128], of mxfp8 and nvfp4. Such planes have no scales, and no GroupedTensor that a caller
sees holds them: they are read in the pass that writes them (`octavo_native.values`).
"""  # noqa: E501  a table's row stands in one line

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

PLAIN = "plain"
NATIVE_ROWS = "rows"
NATIVE_COLUMNS = "panels"

VALUES = "values"

LAYOUTS_OF_DIRECTION: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {"rowwise": (PLAIN, NATIVE_ROWS), "columnwise": (PLAIN, NATIVE_COLUMNS)}
)
"""The layouts that a plane of each direction may have."""

PANEL_ROWS = 128
"""Rows of one group in a panel."""

HADAMARD_ROWS = 16
"""Rows to which Hadamard data pad each group."""

_BLOCK_SIZE = {"delayed": 0, "current": 0, "row": 0, "block": 128, "mxfp8": 32, "nvfp4": 16}
_PLAN_HEADER_WORDS = 16
_TILE_HEIGHTS = 5
_PANEL_WORDS = 4


def ceil_div(value: int, size: int) -> int:
    """value / size, rounded up."""
    return -(-value // size)


def round_up(value: int, to: int) -> int:
    """The smallest multiple of `to` that is not below `value`."""
    return ceil_div(value, to) * to


def block_bound(rows: int, groups: int, size: int) -> int:
    """Most row blocks of `size` that `rows` rows in `groups` groups can need when blocks restart at each group."""
    return (rows + (size - 1) * groups) // size


def panel_bound(rows: int, groups: int, matrix_rows: int = 0) -> int:
    """P: panels of a ragged operand whatever its sizes are, or of a stacked one."""
    if matrix_rows:
        return groups * ceil_div(matrix_rows, PANEL_ROWS)
    return block_bound(rows, groups, PANEL_ROWS)


def plan_words(rows: int, groups: int) -> int:
    """int64 words of a plan: header, row_start, block_start of every tile height, order, panels (plan.h)."""
    arrays = _PLAN_HEADER_WORDS + (groups + 1) * (1 + _TILE_HEIGHTS) + groups
    return round_up(arrays, 4) + _PANEL_WORDS * panel_bound(rows, groups)


def codes_shape(
    *,
    format: str,
    scaling: str,
    layout: str,
    direction: str,
    rows: int,
    cols: int,
    groups: int,
    matrix_rows: int = 0,
    square: bool = False,
    hadamard: bool = False,
) -> tuple[int, ...]:
    """Shape of one plane's codes, one byte per element; ValueError where the layout is not one of this direction."""
    _check(layout, direction, scaling, rows, groups, matrix_rows)
    if layout == NATIVE_COLUMNS:
        return (panel_bound(rows, groups, matrix_rows), cols, PANEL_ROWS // 2 if format == "e2m1" else PANEL_ROWS)
    if layout == NATIVE_ROWS and format == "e2m1":
        cols = ceil_div(cols, 2)
    if matrix_rows:
        return (groups, matrix_rows, cols)
    if hadamard and direction == "columnwise":
        rows = block_bound(rows, groups, HADAMARD_ROWS) * HADAMARD_ROWS
    return (rows, cols)


def scales_shape(
    *,
    format: str,
    scaling: str,
    layout: str,
    direction: str,
    rows: int,
    cols: int,
    groups: int,
    matrix_rows: int = 0,
    square: bool = False,
    hadamard: bool = False,
) -> tuple[int, ...]:
    """Shape of one plane's decode scales: fp32, E8M0 bytes (mxfp8) or E4M3 codes (nvfp4).

    ValueError where the layout is not one of this direction.
    """
    _check(layout, direction, scaling, rows, groups, matrix_rows)
    size = _BLOCK_SIZE[scaling]
    if layout == NATIVE_ROWS and scaling == "block" and not square:
        return (ceil_div(cols, size), round_up(rows, 4))
    if layout == NATIVE_COLUMNS and size and not square:
        panels = panel_bound(rows, groups, matrix_rows)
        return (panels, round_up(cols, 4)) if scaling == "block" else (panels, cols, PANEL_ROWS // size)
    return _plain_scales(size, direction, rows, cols, groups, matrix_rows, square, scaling == "row")


def values_shape(*, direction: str, rows: int, cols: int, groups: int, matrix_rows: int = 0) -> tuple[int, ...]:
    """Shape of one plane's values."""
    _check(LAYOUTS_OF_DIRECTION[direction][1], direction, "mxfp8", rows, groups, matrix_rows)
    if direction == "columnwise":
        return (panel_bound(rows, groups, matrix_rows), cols, PANEL_ROWS)
    return (groups, matrix_rows, cols) if matrix_rows else (rows, cols)


def _plain_scales(
    size: int, direction: str, rows: int, cols: int, groups: int, matrix_rows: int, square: bool, per_row: bool
) -> tuple[int, ...]:
    lead = (groups,) if matrix_rows else ()
    rows_of_one = matrix_rows or rows
    if not size:
        if not per_row:
            return (groups,)
        return (*lead, rows_of_one) if direction == "rowwise" else (groups, cols)
    row_blocks = ceil_div(matrix_rows, size) if matrix_rows else block_bound(rows, groups, size)
    if square:
        return (*lead, row_blocks, ceil_div(cols, size))
    return (*lead, rows_of_one, ceil_div(cols, size)) if direction == "rowwise" else (*lead, row_blocks, cols)


def _check(layout: str, direction: str, scaling: str, rows: int, groups: int, matrix_rows: int) -> None:
    if direction not in LAYOUTS_OF_DIRECTION:
        raise ValueError(f"direction is {direction!r}; it is one of {', '.join(LAYOUTS_OF_DIRECTION)}")
    if layout not in LAYOUTS_OF_DIRECTION[direction]:
        known = ", ".join(LAYOUTS_OF_DIRECTION[direction])
        raise ValueError(f"layout is {layout!r}; {direction} data have one of {known}")
    if scaling not in _BLOCK_SIZE:
        raise ValueError(f"scaling is {scaling!r}; it is one of {', '.join(_BLOCK_SIZE)}")
    if matrix_rows and rows != groups * matrix_rows:
        raise ValueError(f"rows is {rows}; {groups} matrices of {matrix_rows} rows have {groups * matrix_rows}")
