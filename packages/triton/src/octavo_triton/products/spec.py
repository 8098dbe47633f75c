"""GemmSpec: everything about a GEMM that its tensors do not say, as text in operators' schemas; a chip's products."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from octavo import QuantizerSpec
from octavo.formats import DType, Format
from octavo_triton.layouts import TURNED, TURNED_SCALINGS, kernels_scaling

Product = Literal["bfloat16", "float16", "float32", "half", "fp8", "scaled"]
Chip = Literal["interpreter", "sm_80", "sm_89", "sm_90", "sm_100", "sm_120"]
"""Triton's interpreter, or the first of the chips with the same products."""

_CODES: dict[Chip, Product] = {"interpreter": "float32", "sm_80": "half"}
_BLOCKS: dict[Chip, Product] = {"interpreter": "float32", "sm_100": "scaled"}


def chip_of(arch: tuple[int, int] | None) -> Chip:
    """The chip of a compute capability; None: the interpreter."""
    if arch is None:
        return "interpreter"
    known: tuple[tuple[tuple[int, int], Chip], ...] = (
        *(((12, 0), "sm_120"), ((10, 0), "sm_100")),
        *(((9, 0), "sm_90"), ((8, 9), "sm_89")),
    )
    return next((chip for least, chip in known if arch >= least), "sm_80")


@dataclass(frozen=True)
class GemmSpec:
    """One kind of grouped GEMM: fprop x w^T, dgrad dy w, wgrad dy^T x, left operand first.

    dtype        of the operands where `scaling` is "none"
    scaling ...  of the operands, as kernels.operands has it: the formats of both, how scales are stored, the block;
                 square blocks of the weights; Hadamard data, whose groups are padded to 16 rows
    """

    gemm: str
    chip: Chip
    out_dtype: DType
    dtype: DType = "bfloat16"
    scaling: str = "none"
    left_format: Format = "e4m3"
    right_format: Format = "e4m3"
    scales: str = "fp32"
    block: int = 128
    square: bool = False
    hadamard: bool = False
    accumulate: bool = False

    @property
    def product(self) -> Product:
        """What is multiplied: the most that the chip has for these operands."""
        if self.scaling == "none":
            # the interpreter would multiply the bits of bfloat16
            exact = self.dtype == "float32" or (self.dtype == "bfloat16" and self.chip == "interpreter")
            return "float32" if exact else "bfloat16" if self.dtype == "bfloat16" else "float16"
        if self.scaling in ("mxfp8", "nvfp4"):
            return _BLOCKS.get(self.chip, "bfloat16")
        return _CODES.get(self.chip, "fp8")

    @property
    def turned(self) -> bool:
        """Whether column codes come in panels, see layouts: FP8 products read both operands along the sum."""
        return self.product == "fp8" and self.gemm != "fprop"


def quantized(
    gemm: str, chip: Chip, left: QuantizerSpec, right: QuantizerSpec, out_dtype: DType, accumulate: bool
) -> GemmSpec:
    """The GEMM of operands that were quantized so."""
    return GemmSpec(
        gemm=gemm,
        chip=chip,
        out_dtype=out_dtype,
        scaling=kernels_scaling(left),
        left_format=left.format,
        right_format=right.format,
        scales=left.scale_format,
        block=left.block_size or 128,
        square=right.square,
        hadamard=left.hadamard,
        accumulate=accumulate,
    )


def layouts_of(gemm: str, chip: Chip, scaling: str) -> dict[str, str]:
    """The layouts in which the operands of a GEMM must arrive, where they are not plain."""
    turned = scaling in TURNED_SCALINGS and GemmSpec(gemm, chip, "bfloat16", scaling="group").turned
    operands = {"dgrad": ("w",), "wgrad": ("x", "dy")}.get(gemm, ())
    return dict.fromkeys(operands, TURNED) if turned else {}


def spec_text(spec: GemmSpec) -> str:
    """`spec` as JSON."""
    return json.dumps(vars(spec))


@lru_cache(maxsize=1024)
def spec_from(text: str) -> GemmSpec:
    """The spec that `spec_text` wrote."""
    return GemmSpec(**json.loads(text))
