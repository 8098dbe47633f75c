"""What `octavo bench quantize` times: one `Case` per row of the table, and the bytes that it moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from octavo import QuantizerSpec
from octavo.formats import Format
from octavo.quantizer import Operand, Orientation, Scaling
from octavo_bench.errors import InputError
from octavo_bench.harness.recipes import family_of, names_of_recipes
from octavo_bench.harness.traffic import PANEL, Traffic, panels, passes, plane_bytes, quantize_traffic

Kind = Literal["quantize", "weights", "dequantize", "plan"]
Outputs = Literal["row", "both", "column", ""]

RECIPES: tuple[Scaling, ...] = ("delayed", "current", "row", "block", "mxfp8", "nvfp4")
"""What `--recipes` chooses from; each brings its variants (prologues, weights, dequantization)."""

POWER_OF_TWO = frozenset({"row", "block"})
"""Recipes whose fp32 scales are powers of two by default (octavo.recipes)."""

_ORIENTATION: dict[Outputs, Orientation] = {"row": "rowwise", "both": "both", "column": "columnwise"}


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to time.

    kind      quantize: ragged [M, C]; weights: stacked [G, N, K]; dequantize: column panels to bf16 panels;
              plan: the kernel that reads the group sizes
    outputs   the planes that are written: row data, or row and column data in one call
    swiglu    the input is [M, 2 C], gate first, and what is quantized is [M, C]
    native    the layouts that the GEMMs read ("rows", "panels"); False: plain ones
    """

    kind: Kind
    recipe: Scaling | None = None
    outputs: Outputs = ""
    operand: Operand = "x"
    stochastic: bool = False
    hadamard: bool = False
    square: bool = False
    swiglu: bool = False
    native: bool = True

    @property
    def format(self) -> Format:
        """E2M1 for NVFP4, E4M3 for the rest: the time does not depend on which FP8 it is."""
        return "e2m1" if self.recipe == "nvfp4" else "e4m3"

    @property
    def has_columns(self) -> bool:
        """True where column data are written."""
        return self.outputs in ("both", "column")

    @property
    def has_rows(self) -> bool:
        """True where row data are written."""
        return self.outputs in ("row", "both")

    @property
    def passes(self) -> int:
        """How often the input is read."""
        return 1 if self.kind in ("dequantize", "plan") else passes(self.spec)

    @property
    def label(self) -> str:
        """The row's name, the same in every run."""
        if self.kind == "plan":
            return "plan"
        words = ["per-row" if self.recipe == "row" else str(self.recipe)]
        words += [name for name in ("stochastic", "hadamard") if getattr(self, name)]
        if self.kind == "weights":
            words.append("weights")
        if self.kind == "dequantize":
            return f"{words[0]} panels to bf16"
        planes = {"row": "row", "both": "row+col", "column": "col"}[self.outputs]
        text = f"{'swiglu + ' if self.swiglu else ''}{' '.join(words)} {planes}"
        return text if self.native else f"{text}, plain layout"

    @property
    def spec(self) -> QuantizerSpec:
        """The quantizer, for the registry and for the definition. A plan has none."""
        assert self.recipe is not None
        return QuantizerSpec(
            format=self.format,
            scaling=self.recipe,
            orientation=_ORIENTATION[self.outputs],
            role=self.operand,
            square=self.square,
            rounding="stochastic" if self.stochastic else "nearest",
            power_of_two=self.recipe in POWER_OF_TWO,
            hadamard=self.hadamard,
        )


def _pair(recipe: Scaling, *, swiglu: bool = False) -> list[Case]:
    return [Case("quantize", recipe, "row", swiglu=swiglu), Case("quantize", recipe, "both", swiglu=swiglu)]


CASES: tuple[Case, ...] = (
    Case("plan"),
    *_pair("delayed"),
    *_pair("current"),
    *_pair("row"),
    *_pair("block"),
    Case("quantize", "block", "both", native=False),
    *_pair("block", swiglu=True),
    Case("weights", "block", "both", operand="w", square=True),
    Case("dequantize", "block", "column"),
    *_pair("mxfp8"),
    *_pair("mxfp8", swiglu=True),
    Case("dequantize", "mxfp8", "column"),
    *_pair("nvfp4"),
    Case("quantize", "nvfp4", "row", operand="dy", stochastic=True),
    Case("quantize", "nvfp4", "both", operand="dy", stochastic=True),
    Case("quantize", "nvfp4", "both", hadamard=True),
    Case("quantize", "nvfp4", "both", operand="dy", stochastic=True, hadamard=True),
    Case("dequantize", "nvfp4", "column"),
)
"""The whole table, in its order."""


def chosen_cases(recipes: str) -> tuple[Case, ...]:
    """The cases of `block,mxfp8`, or all for ""; the plan is always there. `InputError` for unknown names.

    A preset stands for its kind: the cases of a kind cover its variants.
    """
    names = []
    for name in names_of_recipes("--recipes", recipes, RECIPES):
        family = family_of(name)
        if family not in RECIPES:
            raise InputError(f"--recipes names {name!r}, which quantizes nothing; known kinds are {', '.join(RECIPES)}")
        if family in names:
            raise InputError(f"--recipes names {family!r} twice; give each kind once")
        names.append(family)
    return tuple(case for case in CASES if case.recipe is None or case.recipe in names)


def traffic(case: Case, sizes: Sequence[int], cols: int, element: int = 2) -> Traffic:
    """Bytes of one call of a case on groups of `sizes` rows and `cols` columns of `element` bytes.

    For weights each matrix is a group: [G, N, K] has sizes (N,) * G and K columns.
    """
    if case.kind == "plan":
        arrays = 16 + (len(sizes) + 1) * 6 + len(sizes)
        return Traffic(8 * len(sizes), 8 * (arrays + 4 * panels(sizes)))
    if case.kind == "dequantize":
        codes = plane_bytes(case.spec, sizes, cols, "columnwise", native=case.native)
        return Traffic(codes, panels(sizes) * cols * PANEL * 2)
    return quantize_traffic(case.spec, sizes, cols, native=case.native, element=element, gated=case.swiglu)
