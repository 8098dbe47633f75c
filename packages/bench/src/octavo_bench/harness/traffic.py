"""The bytes that a grouped quantizer has to move: every input read once per pass, every output written once.

Group sizes count as they are, so the padding of column panels to 128 rows counts: a GEMM reads it, so it has to be
written. Left out: the plan (32 bytes per panel), rows past the sum (never touched), and what a kernel reads twice.

Bytes per element of bf16 input, row / row + column, without panel padding:

    per tensor, scale known  3.00 / 4.00        1x128   3.03 / 4.06
    per tensor, current      5.00 / 6.00        MXFP8   3.03 / 4.06
    per row                  3.00 / 6.00        NVFP4   4.56 / 5.13 (the pass for the group's amax counted)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo import QuantizerSpec
from octavo.quantizer import HADAMARD_SIZE, Direction

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


def passes(spec: QuantizerSpec) -> int:
    """How often the input has to be read: a scale that covers more than a tile needs its amax first."""
    wide = spec.scaling in ("current", "nvfp4") or (spec.scaling == "row" and "columnwise" in spec.directions)
    return 2 if wide else 1


def quantize_traffic(
    spec: QuantizerSpec, sizes: Sequence[int], cols: int, *, native: bool = True, element: int = 2, gated: bool = False
) -> Traffic:
    """Bytes of one call on groups of `sizes` rows and `cols` columns of `element` bytes.

    For weights each matrix is a group: [G, N, K] has sizes (N,) * G and K columns.

    native   the layouts that the GEMMs read; else plain ones
    gated    the input is twice as wide, gate first
    """
    read = passes(spec) * sum(sizes) * cols * element * (2 if gated else 1)
    if spec.scaling == "delayed":
        read += 4 * len(sizes)  # encode scales
    return Traffic(read, sum(plane_bytes(spec, sizes, cols, way, native=native) for way in spec.directions))


def plane_bytes(spec: QuantizerSpec, sizes: Sequence[int], cols: int, direction: Direction, *, native: bool) -> int:
    """Codes, scales and second-level factors of one direction."""
    columnwise, fp4 = direction == "columnwise", spec.scaling == "nvfp4"
    halved = fp4 and native  # two codes per byte
    if not columnwise:
        codes = sum(sizes) * (ceil_div(cols, 2) if halved else cols)
    elif native:
        codes = panels(sizes) * cols * (PANEL // 2 if halved else PANEL)
    elif spec.hadamard:
        codes = sum(ceil_div(size, HADAMARD_SIZE) * HADAMARD_SIZE for size in sizes) * cols
    else:
        codes = sum(sizes) * cols
    return codes + (4 * len(sizes) if fp4 else 0) + _scale_bytes(spec, sizes, cols, columnwise, native)


def _scale_bytes(spec: QuantizerSpec, sizes: Sequence[int], cols: int, columnwise: bool, native: bool) -> int:
    rows, groups, block = sum(sizes), len(sizes), spec.block_size
    if spec.scaling == "row":
        return 4 * (groups * cols if columnwise else rows)
    if block is None:
        return 4 * groups
    if spec.square:
        return 4 * sum(ceil_div(size, SQUARE) for size in sizes) * ceil_div(cols, SQUARE)
    width = 4 if spec.scale_format == "fp32" else 1
    if not columnwise:
        return width * rows * ceil_div(cols, block)
    if native:
        return width * panels(sizes) * cols * (PANEL // block)
    return width * sum(ceil_div(size, block) for size in sizes) * cols
