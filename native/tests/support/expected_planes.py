"""What the definition says the planes of a quantizer's call are, byte for byte, in every layout. Not tests.

An expected array is poison wherever the contract says that nothing is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from cpu_calls import SCALE_DTYPE, Operand, Result, new_plane
from guarded import POISON, U8, Array, Guarded

from octavo import QuantizerSpec
from octavo_native import layouts
from octavo_numerics import QuantizedArray, valid
from octavo_numerics.groups import Groups


def leading(values: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> U8:
    """Bytes of an array of `shape` that begins with `values` and is poison after them."""
    out = np.full(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize, POISON, dtype=np.uint8)
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    out[: data.size] = data
    return out


def flat_rows(values: Array, cols: int) -> Array:
    """[..., cols] as [rows, cols], cols perhaps 0."""
    return values.reshape(int(np.prod(values.shape[:-1])), cols)


def pack_pairs(codes: U8) -> U8:
    """[..., C] to [..., ceil(C / 2)], the even element low."""
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros_like(codes[..., :1])], axis=-1)
    return (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)


@dataclass
class PanelRows:
    """One panel: number, rows of a payload and blocks of its scales that it holds."""

    number: int
    row0: int
    rows: int


def panels_of(sizes: npt.NDArray[np.int64]) -> list[PanelRows]:
    """Panels in use, groups in order; rows are packed as in `sizes`."""
    out = []
    row = 0
    for size in sizes.tolist():
        out += [PanelRows(0, row + at, min(128, size - at)) for at in range(0, size, 128)]
        row += size
    return [PanelRows(number, panel.row0, panel.rows) for number, panel in enumerate(out)]


def expected(
    q: QuantizedArray, spec: QuantizerSpec, op: Operand, direction: str, layout: str, cols: int
) -> dict[str, U8]:
    """Bytes of codes, scales and global of one plane."""
    planes = valid(q)
    codes = flat_rows(planes[direction].view(np.uint8), cols)
    scales = planes[f"{direction}_scale"]
    scale_dtype = SCALE_DTYPE[spec.scale_format]
    arrays = new_plane(spec, op, cols, direction, layout)
    out = {}
    if f"{direction}_global" in planes:
        out["global"] = leading(planes[f"{direction}_global"], (op.groups,), np.dtype(np.float32))
    size = spec.block_size
    if layout == layouts.NATIVE_COLUMNS:
        groups = Groups(op.group_sizes)
        groups = groups.padded() if spec.hadamard else groups
        grid = np.full((*arrays.codes.shape[:2], 128), POISON, dtype=np.uint8)
        panels = panels_of(groups.sizes)
        grid[: len(panels)] = 0
        for panel in panels:
            grid[panel.number, :, : panel.rows] = codes[panel.row0 : panel.row0 + panel.rows].T
        used = grid[: len(panels)]
        out["codes"] = leading(
            pack_pairs(used) if spec.format == "e2m1" else used, arrays.codes.shape, np.dtype(np.uint8)
        )
        if size is None or spec.square_in(direction):
            out["scales"] = leading(scales, arrays.scales.shape, scale_dtype)
        else:
            out["scales"] = _panel_scales(flat_rows(scales, cols), panels, size, arrays.scales)
    else:
        rows = pack_pairs(codes) if layout == layouts.NATIVE_ROWS and spec.format == "e2m1" else codes
        out["codes"] = leading(rows, arrays.codes.shape, np.dtype(np.uint8))
        if layout == layouts.NATIVE_ROWS and spec.scaling == "block" and not spec.square:
            turned = np.full(arrays.scales.size, POISON, dtype=np.uint8).view(np.float32).reshape(arrays.scales.shape)
            compact = flat_rows(scales, arrays.scales.shape[0])
            turned[:, : len(compact)] = compact.T
            out["scales"] = turned.reshape(-1).view(np.uint8)
        else:
            out["scales"] = leading(scales, arrays.scales.shape, scale_dtype)
    return out


def _panel_scales(scales: Array, panels: list[PanelRows], size: int, into: Guarded) -> U8:
    """Columnwise block scales [blocks, C] as panels; blocks past a group's end are zero bytes."""
    grid = np.full(into.size, POISON, dtype=np.uint8).view(into.dtype).reshape(into.shape)
    block = 0
    for panel in panels:
        count = -(-panel.rows // size)
        mine = scales[block : block + count].view(into.dtype)
        if size == 128:
            grid[panel.number, : scales.shape[1]] = mine[0]
        else:
            grid[panel.number] = 0
            grid[panel.number, :, :count] = mine.T
        block += count
    return grid.reshape(-1).view(np.uint8)


def differences(
    result: Result, q: QuantizedArray, spec: QuantizerSpec, op: Operand, planes: dict[str, str]
) -> list[str]:
    """What of a call's planes is not what the definition says, in words."""
    out = []
    cols = q.spec.shape[-1]
    for direction, layout in planes.items():
        want = expected(q, spec, op, direction, layout, cols)
        for name, array in result.planes[direction].named.items():
            wrong = np.flatnonzero(array.bytes != want[name])
            if wrong.size:
                first = int(wrong[0])
                out.append(
                    f"{direction} {layout} {name}{list(array.shape)}: {wrong.size} bytes differ, first {first}: "
                    f"{array.bytes[first]:#x} for {want[name][first]:#x}"
                )
    return out
