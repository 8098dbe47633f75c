"""Grouped GEMMs from names, the layouts that they read, and the tiles that their CUDA kernels come in.

| gemm | result | left | right |
|---|---|---|---|
| fprop | y [M, N] = x w[g]^T | x [M, K], rowwise | w [G, N, K], rowwise |
| dgrad | dx [M, K] = dy w[g] | dy [M, N], rowwise | w [G, N, K], columnwise |
| wgrad | dw [G, N, K] = dy_g^T x_g | dy [M, N], columnwise | x [M, K], columnwise |

wgrad of block scaling reads x in square blocks, too. On the right that saves an operation per product; on the left,
where dw is [G, K, N], it takes as long as a scale for each column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, Literal, Protocol

from octavo_native._native import DTYPES, FORMATS, GEMMS, SCALINGS, Gemm
from octavo_native.layouts import NATIVE_COLUMNS, NATIVE_ROWS

GemmName = Literal["fprop", "dgrad", "wgrad"]
OperandName = Literal["x", "w", "dy"]

OPERANDS_OF_GEMM: Final[Mapping[GemmName, tuple[OperandName, OperandName]]] = MappingProxyType(
    {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}
)
"""The left and the right operand of each GEMM."""

LAYOUTS_OF_GEMM: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        "fprop": MappingProxyType({"x": NATIVE_ROWS, "w": NATIVE_ROWS}),
        "dgrad": MappingProxyType({"dy": NATIVE_ROWS, "w": NATIVE_COLUMNS}),
        "wgrad": MappingProxyType({"x": NATIVE_COLUMNS, "dy": NATIVE_COLUMNS}),
    }
)
"""Layout of the plane that each quantized operand of a GEMM is read from (octavo_native.layouts)."""


class Quantized(Protocol):
    """What `names_of` reads of octavo.QuantizerSpec: names of SCALINGS and FORMATS, and two ways to quantize."""

    @property
    def scaling(self) -> str:
        """Of codes and scales."""

    @property
    def format(self) -> str:
        """Of the codes."""

    @property
    def square(self) -> bool:
        """Scales of square blocks."""

    @property
    def square_columns(self) -> bool:
        """Scales of square blocks in columnwise data alone."""

    @property
    def hadamard(self) -> bool:
        """Columnwise data in the Hadamard domain."""


def names_of(gemm: GemmName, left: Quantized, right: Quantized) -> dict[str, Any]:
    """The arguments of `gemm_named` that follow from how its operands are quantized, both in one scaling."""
    return {
        "scaling": left.scaling,
        "left_format": left.format,
        "right_format": right.format,
        "left_square": left.square_columns and gemm == "wgrad",
        "right_square": right.square or (right.square_columns and gemm == "wgrad"),
        "hadamard": left.hadamard and gemm == "wgrad",
    }


@lru_cache(maxsize=1024)
def gemm_named(
    *,
    gemm: str,
    dtype: str = "bfloat16",
    scaling: str | None = None,
    left_format: str = "e4m3",
    right_format: str = "e4m3",
    right_square: bool = False,
    hadamard: bool = False,
    out_dtype: str = "bfloat16",
    accumulate: bool = False,
    fast_accumulation: bool = False,
    left_square: bool = False,
    left_values: bool = False,
    right_values: bool = False,
    left_interleave: int = 0,
    right_interleave: int = 0,
) -> Gemm:
    """The GEMM of these names, the same object for the same ones.

    gemm, dtype, formats and scaling are keys of GEMMS, DTYPES, FORMATS and SCALINGS. Without a scaling the operands
    are unquantized arrays of `dtype`; with one they are codes, or values where left_values or right_values says so, and
    `dtype` says nothing. ValueError for another name; what the names make together is checked by the calls of the Gemm.
    """
    return Gemm(
        gemm=_number(GEMMS, gemm, "gemm"),
        quantized=scaling is not None,
        dtype=_number(DTYPES, dtype, "dtype"),
        scaling=0 if scaling is None else _number(SCALINGS, scaling, "scaling"),
        left_format=_number(FORMATS, left_format, "left_format"),
        right_format=_number(FORMATS, right_format, "right_format"),
        right_square=right_square,
        hadamard=hadamard,
        out_dtype=_number(DTYPES, out_dtype, "out_dtype"),
        accumulate=accumulate,
        fast_accumulation=fast_accumulation,
        left_square=left_square,
        left_values=left_values,
        right_values=right_values,
        left_interleave=left_interleave,
        right_interleave=right_interleave,
    )


@dataclass(frozen=True, slots=True)
class TileChoice:
    """A tile of a GEMM's CUDA kernels, and what the model expects of it on one problem.

    tile          number, as Gemm.run takes it
    tiles         tiles that are computed, each group's last ones in part
    waves         tiles a CTA
    filled        part of the computed outputs that the result has
    microseconds  expected time
    chosen        whether Gemm.run takes it by itself
    """

    name: str
    tile: int
    tiles: int
    waves: float
    filled: float
    microseconds: float
    chosen: bool


def gemm_choices(gemm: Gemm, *, rows: int, n: int, k: int, groups: int, sms: int = 132) -> tuple[TileChoice, ...]:
    """Every tile of `gemm` for M rows in equal groups on `sms` multiprocessors: the chosen one, then by time.

    Host arithmetic alone, in builds without CUDA too. ValueError where the CUDA kernels do not take the problem.
    """
    sides = {"rows": rows, "n": n, "k": k, "groups": groups, "sms": sms}
    chosen = gemm.tile(**sides)["tile"]
    expected = [gemm.tile(**sides, tile=number) for number in range(len(gemm.tiles()))]
    choices = [TileChoice(**one, chosen=one["tile"] == chosen) for one in expected]
    return tuple(sorted(choices, key=lambda one: (not one.chosen, one.microseconds)))


def _number(numbers: Mapping[str, int], name: str, what: str) -> int:
    if name not in numbers:
        raise ValueError(f"{what} is {name!r}; it is one of {', '.join(numbers)}")
    return numbers[name]
