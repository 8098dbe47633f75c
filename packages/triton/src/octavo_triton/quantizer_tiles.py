"""The tile of each quantizer: fixed, as those of products are, and found by timing on a GPU."""

from __future__ import annotations

from typing import NamedTuple

from octavo import QuantizerSpec


class QuantizerTile(NamedTuple):
    """A program has 128 rows and `width` columns, a thread runs of `run` rows and `beside` columns.

    registers   of a thread at most: the compiler takes what it can get, and fewer programs fit on a multiprocessor
    """

    run: int
    width: int
    beside: int
    warps: int
    registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """How a kernel is compiled."""
        return {"num_warps": self.warps} | ({} if self.registers is None else {"maxnreg": self.registers})


CODES = QuantizerTile(8, 128, 16, 4, 168)
"""Of FP8 codes. Three programs fit on a multiprocessor, and one's loads run beside the others' arithmetic."""
MX_CODES_OF_MATRICES = QuantizerTile(4, 128, 16, 8)
"""Of weights in MXFP8: in the tile above the assembler puts half of their loads off, in spite of `load_tile`."""
CODES_IN_INTEGERS = QuantizerTile(8, 128, 8, 8)
"""Chips that round to FP8 in integers have no registers for so much in a thread."""
NVFP4 = QuantizerTile(16, 64, 8, 2)
"""A run is a block of 16 rows and one transform, which a thread makes by itself."""
NVFP4_STOCHASTIC = QuantizerTile(16, 128, 4, 8)
"""Random bits of twice as many elements would be spilled."""
HADAMARD_AMAX = NVFP4
"""Of the pass before."""


def codes_tile(casts: bool) -> QuantizerTile:
    """Of quantizers to FP8; `casts`: the chip has instructions that round to it."""
    return CODES if casts else CODES_IN_INTEGERS


def blocks_tile(spec: QuantizerSpec, casts: bool, stacked: bool) -> QuantizerTile:
    """Of quantizers in blocks of one level; `stacked`: of matrices, not of ragged rows."""
    return MX_CODES_OF_MATRICES if casts and stacked and spec.scaling == "mxfp8" else codes_tile(casts)


def nvfp4_tile(spec: QuantizerSpec) -> QuantizerTile:
    """Of what is started for `spec`."""
    return NVFP4_STOCHASTIC if spec.stochastic else NVFP4
