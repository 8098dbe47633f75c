"""Which GEMMs read an operand's rows where a router's tokens stand: what the kernels can, and what is worth it.

Pure data, as octavo_native.support is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeVar

from octavo_native.layouts import PLAIN

OperandName = TypeVar("OperandName", bound=str)

GATHERED_BESIDE: Final = 2560
"""Columns of a weight gradient's other operand up to which gathered rows are faster than permuted ones, measured on an
H200 (decision 69)."""

GATHERED_CODES: Final[Mapping[str, int]] = MappingProxyType({"x": 3072, "dy": 2048})
"""By operand, columns of a product up to which gathering codes of tokens is faster than quantizing rows of tokens,
measured on an H200 (decision 83)."""

GATHERED_BESIDE_COLUMNS: Final = 640
"""The same of dy where wgrad reads its codes, too: the pass that makes those along columns makes those along rows for
little more (decision 75)."""


class _Quantizer(Protocol):
    @property
    def scaling(self) -> str: ...
    @property
    def format(self) -> str: ...
    @property
    def square(self) -> bool: ...


class _Recipe(Protocol):
    def quantizes(self, gemm: Any, /) -> bool: ...
    def quantizer(self, operand: Any, /) -> _Quantizer | None: ...


class AskedGemm(Protocol):
    """What is read of octavo_registry.contract.GemmRequest."""

    @property
    def op(self) -> str:
        """fprop, dgrad or wgrad."""

    @property
    def device(self) -> str:
        """cpu or cuda."""

    @property
    def in_dtype(self) -> str:
        """Of the first operand."""

    @property
    def other_dtype(self) -> str | None:
        """Of the second; None: the first one's."""

    @property
    def k(self) -> int | None:
        """In-features; None: any."""

    @property
    def n(self) -> int | None:
        """Out-features; None: any."""

    @property
    def recipe(self) -> _Recipe:
        """What is quantized, and how."""


def tokens_refusal(name: str, gemm: str, scaling: str, layout: str, shape: Sequence[int]) -> str | None:
    """Why a GEMM does not gather rows of these codes of tokens, or None.

    name             of the operand
    layout, shape    of the codes along rows, and of what was quantized
    """
    if gemm == "wgrad" or scaling != "block":
        return (
            f"{name} is tokens quantized in {scaling}, whose codes are not those of rows in {gemm}; quantize the rows "
            "(`BoundQuantize.of_tokens`), or read tokens of block scaling in fprop or dgrad"
        )
    if layout != PLAIN or len(shape) != 3 or shape[0] != 1:
        return (
            f"{name} is tokens {list(shape)} quantized in the layout {layout}; quantize them as one matrix "
            f"[1, T, {shape[-1]}] in {PLAIN}"
        )
    return None


def gathered_operands(asked: AskedGemm, *operands: OperandName) -> tuple[OperandName, ...]:
    """Those of the operands, x and dy, that a GEMM should read where a router's tokens stand."""
    return tuple(operand for operand in operands if _gathers(asked, operand))


def _gathers(asked: AskedGemm, operand: OperandName) -> bool:
    cuda, columns = asked.device == "cuda", asked.n if operand == "x" else asked.k
    if not asked.recipe.quantizes(asked.op):
        dtypes = asked.in_dtype, asked.other_dtype or asked.in_dtype
        return gathers_values(asked.op, cuda=cuda, dtypes=dtypes, other_columns=columns)
    codes, weight = (asked.recipe.quantizer(name) for name in (operand, "w"))
    if codes is None or weight is None:
        return False
    formats = codes.format, weight.format
    return gathers_codes(
        asked.op,
        operand,
        cuda=cuda,
        scaling=codes.scaling,
        formats=formats,
        square=weight.square,
        columns=columns,
        alone=not asked.recipe.quantizes("wgrad"),
    )


def gathers_values(op: str, *, cuda: bool, dtypes: tuple[str, str], other_columns: int | None) -> bool:
    """Whether a GEMM of unquantized operands should read the rows of one of them where a router's tokens stand.

    dtypes         of both operands
    other_columns  of the other operand, N beside x and K beside dy; None: any

    On CUDA a weight gradient of gathered rows takes a tenth longer, which is more than permuting rows costs where the
    other operand is wide.
    """
    if not cuda:
        return True
    return set(dtypes) == {"bfloat16"} and (op != "wgrad" or (other_columns or 0) <= GATHERED_BESIDE)


def gathers_codes(
    op: str,
    operand: str,
    *,
    cuda: bool,
    scaling: str,
    formats: tuple[str, str],
    square: bool,
    columns: int | None,
    alone: bool,
) -> bool:
    """Whether a GEMM should read the codes of `operand`'s rows where those of a router's tokens stand, each quantized
    once: of block scaling, in which they are a token's own.

    formats  of the operand and of w
    square   whether w's scales are of square blocks
    columns  of the product, N of x's and K of dy's; None: any
    alone    whether wgrad reads no codes, so that dy has codes along rows alone

    On CUDA a product of gathered codes takes a twentieth longer, which is more than quantizing rows costs where it is
    wide.
    """
    if op == "wgrad" or scaling != "block":
        return False
    if not cuda:
        return True
    most = GATHERED_CODES[operand] if alone or operand == "x" else GATHERED_BESIDE_COLUMNS
    return set(formats) == {"e4m3"} and square and (columns or 0) <= most
