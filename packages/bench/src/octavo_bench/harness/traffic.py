"""The bytes that each case has to move through memory: every input read once a pass, every output written once.

Group sizes count as they are, so the padding of column panels to 128 rows counts: a GEMM reads it, so it has to be
written. Left out: the plan (32 bytes a panel), rows past the sum (never touched), and what a kernel reads twice.

Bytes an element of bf16 input, row / row + column, without panel padding:

    per tensor, scale known  3.00 / 4.00        1x128   3.03 / 4.06
    per tensor, current      5.00 / 6.00        MXFP8   3.03 / 4.06
    per row                  3.00 / 6.00        NVFP4   4.56 / 5.13 (the pass for the group's amax counted)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo_bench.quantize.case import Case

PANEL = 128
SQUARE = 128


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one call moves."""

    read: int
    written: int

    @property
    def total(self) -> int:
        """Read and written."""
        return self.read + self.written


def ceil_div(value: int, size: int) -> int:
    """`value / size`, rounded up."""
    return -(-value // size)


def panels(sizes: Sequence[int]) -> int:
    """Panels of 128 rows that these groups fill or begin."""
    return sum(ceil_div(size, PANEL) for size in sizes)


def traffic(case: Case, sizes: Sequence[int], cols: int, element: int = 2) -> Traffic:
    """Bytes of one call on groups of `sizes` rows and `cols` columns of `element` bytes.

    For weights each matrix is a group: [G, N, K] has sizes (N,) * G and K columns.
    """
    if case.kind == "plan":
        arrays = 16 + (len(sizes) + 1) * 6 + len(sizes)
        return Traffic(8 * len(sizes), 8 * (arrays + 4 * panels(sizes)))
    if case.kind == "dequantize":
        return Traffic(_column_plane(case, sizes, cols), panels(sizes) * cols * PANEL * 2)
    rows = sum(sizes)
    read = case.passes * rows * cols * element * (2 if case.swiglu else 1)
    if case.recipe == "delayed":
        read += 4 * len(sizes)  # encode scales
    written = _row_plane(case, sizes, cols) if case.has_rows else 0
    written += _column_plane(case, sizes, cols) if case.has_columns else 0
    return Traffic(read, written)


def _row_plane(case: Case, sizes: Sequence[int], cols: int) -> int:
    rows, groups = sum(sizes), len(sizes)
    if case.recipe == "nvfp4":
        return rows * (ceil_div(cols, 2) if case.native else cols) + rows * ceil_div(cols, 16) + 4 * groups
    return rows * cols + _scales(case, sizes, cols, columnwise=False)


def _column_plane(case: Case, sizes: Sequence[int], cols: int) -> int:
    if case.recipe == "nvfp4":
        code_bytes, global_bytes = PANEL // 2 if case.native else PANEL, 4 * len(sizes)
    else:
        code_bytes, global_bytes = PANEL, 0
    if case.native:
        codes = panels(sizes) * cols * code_bytes
    elif case.hadamard:
        codes = sum(ceil_div(size, 16) * 16 for size in sizes) * cols
    else:
        codes = sum(sizes) * cols
    return codes + global_bytes + _scales(case, sizes, cols, columnwise=True)


def _scales(case: Case, sizes: Sequence[int], cols: int, *, columnwise: bool) -> int:
    rows, groups = sum(sizes), len(sizes)
    if case.recipe in ("delayed", "current"):
        return 4 * groups
    if case.recipe == "row":
        return 4 * (groups * cols if columnwise else rows)
    if case.square:
        return 4 * sum(ceil_div(size, SQUARE) for size in sizes) * ceil_div(cols, SQUARE)
    width = 4 if case.recipe == "block" else 1
    block = {"block": 128, "mxfp8": 32, "nvfp4": 16}[str(case.recipe)]
    if not columnwise:
        return width * rows * ceil_div(cols, block)
    if case.native:
        return width * panels(sizes) * cols * (PANEL // block)
    return width * sum(ceil_div(size, block) for size in sizes) * cols
