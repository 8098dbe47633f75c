"""Converts a file's blocks to the planes of a recipe, and back: codes and scales stay, if the scaling units fit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo import GroupedTensorSpec, QuantizerSpec
from octavo.quantizer import Direction
from octavo_torch.arithmetic.casts import INF_BITS, bits_of
from octavo_torch.arrays.dtypes import PAYLOAD_DTYPE
from octavo_torch.arrays.grouped_tensor import GroupedTensor
from octavo_torch.checkpoint.formats.blocks import Blocks, as_bytes
from octavo_torch.distributed.fsdp.planes import from_planes, plane_names, plane_shape
from octavo_torch.quantizers.arguments import direction_name
from octavo_torch.quantizers.functional import dequantize, quantize


def unit_of(spec: QuantizerSpec, rows: int, columns: int) -> tuple[int, int]:
    """(rows, columns) that share a scale in a weight's rowwise plane [rows, columns]."""
    if spec.scaling in ("delayed", "current"):
        return rows, columns
    size = spec.block_size
    if size is None:
        return 1, columns
    return size if spec.square else 1, size


def blocks_of(codes: GroupedTensor, group: int) -> Blocks:
    """The rowwise plane of one group of plain stacked matrices."""
    payload, scale, factor = codes.plane("rowwise")
    unit = unit_of(codes.spec.quantizer, *codes.shape[1:])
    rows = -(-codes.shape[1] // unit[0])
    own = scale[group].reshape(rows, -1)
    return Blocks(payload[group], own, unit, None if factor is None else factor[group])


@dataclass(frozen=True)
class Misfit:
    """A plane that does not hold a file's values: how many of its elements differ, and why."""

    plane: Direction
    changed: int
    reason: str


class Planes:
    """The plain planes of a weight, written one group at a time."""

    def __init__(self, spec: GroupedTensorSpec, device: torch.device) -> None:
        """spec: of stacked matrices, with a rowwise plane."""
        self.spec = spec
        payloads, scales = plane_names(spec.quantizer)
        self._planes: dict[str, Tensor] = {}
        for name in (*payloads, *scales):
            shape, dtype = plane_shape(spec, name)
            self._planes[name] = torch.empty(shape, dtype=dtype, device=device)

    def tensor(self) -> GroupedTensor:
        """What was written."""
        return from_planes(self.spec, self._planes)

    def write(self, group: int, blocks: Blocks) -> list[Misfit]:
        """Write one group: the file's codes where its scales fit the recipe's units, else its values, quantized.

        Returns the planes that do not hold the file's values, which are then rounded.
        """
        spec = self.spec.quantizer
        direct = _direct(spec, blocks)
        if not isinstance(direct, str):
            self._put("rowwise", group, direct)
            if spec.shares_codes or spec.orientation == "rowwise":
                return []
        values = blocks.values()[None]
        rest = spec if isinstance(direct, str) else spec.with_orientation("columnwise")
        quantized = quantize(values, rest, operand="w")
        misfits = []
        for direction in map(direction_name, plane_names(rest)[0]):
            payload, scale, factor = quantized.plane(direction)
            self._put(direction, group, (payload[0], scale[0], None if factor is None else factor[0]))
            changed = int((dequantize(quantized, direction) != values).sum())
            if changed:
                reason = direct if isinstance(direct, str) else "the file has no scales along this direction"
                misfits.append(Misfit(direction, changed, reason))
        return misfits

    def _put(self, direction: str, group: int, plane: tuple[Tensor, Tensor, Tensor | None]) -> None:
        codes, scale, factor = plane
        for name, value in ((direction, codes), (f"{direction}_scale", scale), (f"{direction}_global", factor)):
            if value is not None:
                target = self._planes[name]
                as_bytes(target)[group] = as_bytes(value).reshape(target.shape[1:])


_Plane = tuple[Tensor, Tensor, Tensor | None]


def _direct(spec: QuantizerSpec, blocks: Blocks) -> _Plane | str:
    """The file's codes and scales as the recipe's rowwise plane, or why they are not."""
    unit = unit_of(spec, *blocks.codes.shape)
    if blocks.codes.dtype is not PAYLOAD_DTYPE[spec.format]:
        return (
            f"{spec.format.upper()} codes with a scale per {unit[0]}x{unit[1]} do not hold all values of such a block"
        )
    scale = blocks.scale_of(unit)
    if scale is None:
        return f"the file has several scales in a block of {unit[0]}x{unit[1]}, where the recipe has one"
    if spec.scale_format == "e4m3":
        if scale.dtype is not torch.float8_e4m3fn or blocks.factor is None:
            return "the parts of a matrix have factors of their own, and the recipe has one"
        return blocks.codes, scale, blocks.factor
    scale = Blocks(blocks.codes, scale, unit, blocks.factor).multipliers()
    if spec.power_of_two or spec.scale_format == "e8m0":
        if not _are_powers_of_two(scale):
            return "the file's scales are not powers of two, and the recipe's are"
        if spec.scale_format == "e8m0":
            scale = (bits_of(scale) >> 23).to(torch.uint8)
    return blocks.codes, scale, None


def _are_powers_of_two(scale: Tensor) -> bool:
    """Whether positive fp32 scales are powers of two; 2^-127, the inverse of an encode scale of 2^127, is subnormal."""
    bits = bits_of(scale)
    normal = (bits & ~INF_BITS) == 0
    return bool((normal | (bits == 0x00400000)).all())
