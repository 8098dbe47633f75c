"""What the kernels compute on which chips, as a table from which the cards of both frameworks' backends are built.

Pure data: nothing here imports Triton.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

from octavo.formats import DType
from octavo.grouped_tensor import PLAIN
from octavo_triton.layouts import TURNED

Arch = tuple[int, int]
Op = Literal["quantize", "dequantize", "fprop", "dgrad", "wgrad", "permute_rows", "combine_rows", "dot_rows"]
Accumulation = Literal["fp32", "hopper_bf16", "hopper_fp8_promoted"]
Weight = Literal["nk", "kn"]

QUANTIZERS: Final[frozenset[Op]] = frozenset({"quantize", "dequantize"})
GEMMS: Final[frozenset[Op]] = frozenset({"fprop", "dgrad", "wgrad"})
MOVES: Final[frozenset[Op]] = frozenset({"permute_rows", "combine_rows", "dot_rows"})
HIGH_PRECISION: Final = frozenset({"high_precision"})
CODED: Final = frozenset({"delayed", "current", "row", "block"})
BLOCKED: Final = frozenset({"mxfp8", "nvfp4"})
HALVES: Final[frozenset[DType]] = frozenset({"bfloat16", "float16"})
SINGLES: Final[frozenset[DType]] = frozenset({"float32"})
WEIGHTS: Final[frozenset[Weight]] = frozenset({"nk", "kn"})
"""How the GEMMs take weights: in either order, as they lie."""

CHIPS: Final[tuple[tuple[Arch, Arch], ...]] = (
    ((8, 0), (8, 8)),
    ((8, 9), (8, 9)),
    ((9, 0), (9, 0)),
    ((10, 0), (10, 9)),
    ((12, 0), (12, 9)),
)
"""The first and the last compute capability of chips with the same products."""

_PLAIN = frozenset({PLAIN})
_EITHER = frozenset({PLAIN, TURNED})


@dataclass(frozen=True, slots=True)
class Support:
    """One row of a card: any of these operations with any of these recipes.

    in_dtypes     of unquantized operands
    layouts       that a quantizer makes
    accumulation  how a GEMM sums: octavo_registry.Capability has the names
    emulated      how a product is computed that the chip has no instructions for; None: it is not emulated
    untried       what has not been tried of it on the chip; None: the conformance suite has passed there
    """

    ops: frozenset[Op]
    recipes: frozenset[str]
    in_dtypes: frozenset[DType] = HALVES | SINGLES
    layouts: frozenset[str] = _PLAIN
    accumulation: Accumulation = "fp32"
    emulated: str | None = None
    untried: str | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of octavo_registry.Capability of these names, and how a GEMM takes weights: as they lie."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return own | {"weights": WEIGHTS} if self.ops == GEMMS else own


def support_on(first: Arch, run: Collection[Arch]) -> Iterator[Support]:
    """What is served on the chips that begin with the capability `first`.

    run   where the conformance suite has passed, by the first capability of the chips
    """
    name = f"sm_{first[0]}{first[1]}"
    untried = None if first in run else f"compiled for {name}, its results checked in Triton's interpreter alone"
    yield Support(QUANTIZERS, CODED, layouts=_EITHER, untried=untried)
    yield Support(QUANTIZERS, BLOCKED, untried=untried)
    yield Support(MOVES, HIGH_PRECISION, untried=untried)
    yield Support(GEMMS, HIGH_PRECISION, HALVES, accumulation="hopper_bf16", untried=untried)
    # no tensor core multiplies them: a sum in fp32 rounds after each product
    yield Support(GEMMS, HIGH_PRECISION, SINGLES, accumulation="fp32", untried=untried)
    if first < (8, 9):
        emulated = "fp16 products of FP8 codes"
        yield Support(GEMMS, CODED, accumulation="hopper_bf16", emulated=emulated, untried=untried)
    else:
        yield Support(GEMMS, CODED, accumulation="hopper_fp8_promoted", untried=untried)
    if first[0] == 10:
        yield Support(GEMMS, frozenset({"mxfp8"}), accumulation="hopper_fp8_promoted", untried=untried)
        # the interpreter takes every block scale for an E8M0 one
        untried = f"compiled for {name}, its results checked by nothing"
        yield Support(GEMMS, frozenset({"nvfp4"}), accumulation="hopper_fp8_promoted", untried=untried)
    else:
        emulated = "bf16 products of exact dequantized copies"
        yield Support(GEMMS, BLOCKED, accumulation="hopper_bf16", emulated=emulated, untried=untried)


INTERPRETED: Final = (
    Support(QUANTIZERS, CODED, layouts=_EITHER),
    Support(QUANTIZERS, BLOCKED),
    Support(GEMMS, CODED | BLOCKED | HIGH_PRECISION),
    Support(MOVES, HIGH_PRECISION),
)
"""What is served on a CPU in Triton's interpreter."""
