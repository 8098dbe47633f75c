"""What `octavo bench quantize` times: one `Case` a row of the table, with the goal that it is held to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo import QuantizerSpec
from octavo.formats import Format
from octavo.quantizer import Operand, Orientation, Scaling
from octavo_bench.errors import InputError

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
    outputs   the planes that are made: row data, or row and column data in one call
    swiglu    the input is [M, 2 C], gate first, and what is quantized is [M, C]
    native    the layouts that the GEMMs read ("rows", "panels"); False: plain ones
    goal      least ratio of predicted to measured time on an H200; None: reported, not judged
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
    goal: float | None = None

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
        """How often the input has to be read: a scale that covers more than a tile needs its amax first."""
        if self.kind in ("dequantize", "plan"):
            return 1
        wide = self.recipe in ("current", "nvfp4") or (self.recipe == "row" and self.has_columns)
        return 2 if wide else 1

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
        made = {"row": "row", "both": "row+col", "column": "col"}[self.outputs]
        text = f"{'swiglu + ' if self.swiglu else ''}{' '.join(words)} {made}"
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


def _pair(recipe: Scaling, row: float | None, both: float | None, *, swiglu: bool = False) -> list[Case]:
    return [
        Case("quantize", recipe, "row", swiglu=swiglu, goal=row),
        Case("quantize", recipe, "both", swiglu=swiglu, goal=both),
    ]


CASES: tuple[Case, ...] = (
    Case("plan"),
    *_pair("delayed", 0.95, 0.90),
    *_pair("current", 0.90, 0.90),
    *_pair("row", None, None),
    *_pair("block", 0.95, 0.90),
    Case("quantize", "block", "both", native=False),
    *_pair("block", 0.90, 0.90, swiglu=True),
    Case("weights", "block", "both", operand="w", square=True),
    Case("dequantize", "block", "column"),
    *_pair("mxfp8", 0.95, 0.90),
    *_pair("mxfp8", 0.90, 0.90, swiglu=True),
    Case("dequantize", "mxfp8", "column"),
    *_pair("nvfp4", 0.80, None),
    Case("quantize", "nvfp4", "row", operand="dy", stochastic=True, goal=0.60),
    Case("quantize", "nvfp4", "both", operand="dy", stochastic=True, goal=0.40),
    Case("quantize", "nvfp4", "both", hadamard=True),
    Case("quantize", "nvfp4", "both", operand="dy", stochastic=True, hadamard=True),
    Case("dequantize", "nvfp4", "column"),
)
"""The whole table, in its order. Goals: the kernels' design page, for an H200."""


def chosen_cases(recipes: str) -> tuple[Case, ...]:
    """The cases of `block,mxfp8`, or all for ""; the plan is always there. `InputError` for unknown names."""
    names = [part.strip() for part in recipes.split(",") if part.strip()]
    for name in names:
        if name not in RECIPES:
            raise InputError(f"--recipes names {name!r}; known names are {', '.join(RECIPES)}")
        if names.count(name) > 1:
            raise InputError(f"--recipes names {name!r} twice; give each recipe once")
    return tuple(case for case in CASES if not names or case.recipe is None or case.recipe in names)


def parse_shapes(text: str) -> tuple[tuple[int, int], ...]:
    """(rows, columns) pairs of `32768x7168,65536x4096`; `InputError` says which part does not fit."""
    shapes = []
    for part in (part.strip() for part in text.split(",")):
        sides = part.split("x")
        if len(sides) != 2 or not all(side.isdecimal() for side in sides):
            raise InputError(f"--shapes holds {part!r}; give ROWSxCOLUMNS with commas between, such as 32768x7168")
        rows, cols = int(sides[0]), int(sides[1])
        if not (1 <= rows <= 1 << 30 and 16 <= cols <= 1 << 20 and cols % 16 == 0):
            raise InputError(f"--shapes holds {part!r}; rows are 1 to 2^30, columns a multiple of 16 up to 2^20")
        shapes.append((rows, cols))
    repeated = next((shape for shape in shapes if shapes.count(shape) > 1), None)
    if repeated is not None:
        raise InputError(f"--shapes names {repeated[0]}x{repeated[1]} twice; give each shape once")
    return tuple(shapes)


@dataclass(frozen=True, slots=True)
class Grouping:
    """Group sizes of one table; they sum to the rows, so every row that is allocated is worked on."""

    name: Literal["even", "ragged"]
    sizes: tuple[int, ...]

    @property
    def label(self) -> str:
        """Such as "8 even"."""
        return f"{len(self.sizes)} {self.name}"


def even(rows: int, groups: int) -> Grouping:
    """`groups` sizes that differ by one row at most."""
    return Grouping("even", tuple(rows // groups + (index < rows % groups) for index in range(groups)))


def ragged(rows: int, groups: int, seed: int) -> Grouping:
    """Sizes in proportion to one Dirichlet(0.5, ...) draw, the middle group empty: what a skewed router gives."""
    import numpy as np

    share = np.random.default_rng(seed).dirichlet([0.5] * groups)
    share[groups // 2] = 0.0
    ends = np.rint(np.cumsum(share) / share.sum() * rows).astype(np.int64)
    return Grouping("ragged", tuple(int(size) for size in np.diff(ends, prepend=0)))


def check_counts(**counts: int) -> None:
    """`InputError` for a count below 1, named as the option is."""
    for name, value in counts.items():
        if value < 1:
            raise InputError(f"--{name.replace('_', '-')} is {value}; it is at least 1")
