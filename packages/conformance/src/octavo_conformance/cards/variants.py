"""What the suite tries on every backend: variants of quantizers and recipes; `selections` has which tests try which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo import (
    MXFP8,
    NVFP4,
    PRESETS,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXFP4Weights,
    QuantizerSpec,
    Recipe,
    RowScaling,
)
from octavo.formats import DType
from octavo.recipe_base import Gemm


@dataclass(frozen=True, slots=True)
class QuantizerVariant:
    """One quantizer on one input dtype; `stacked`: on [G, N, K] matrices rather than ragged rows."""

    name: str
    spec: QuantizerSpec
    dtype: DType = "float32"
    stacked: bool = False

    @property
    def id(self) -> str:
        """Stable text for test ids."""
        return f"{self.name}{'.stacked' if self.stacked else ''}-{self.dtype}"

    @property
    def kind(self) -> str:
        """The recipe kind that a capability row is matched with."""
        return self.spec.scaling


@dataclass(frozen=True, slots=True)
class FusedVariant(QuantizerVariant):
    """A quantizer and what is computed before it: `function` is an activation or a norm."""

    function: str = ""

    @property
    def id(self) -> str:
        """Stable text for test ids."""
        return f"{self.name}.{self.function}-{self.dtype}"


@dataclass(frozen=True, slots=True)
class RecipeVariant:
    """One recipe on one input dtype; `gemm`: one GEMM of it, else the whole layer."""

    name: str
    recipe: Recipe
    dtype: DType = "bfloat16"
    gemm: Gemm | None = None

    @property
    def id(self) -> str:
        """Stable text for test ids."""
        return f"{self.name}{'.' + self.gemm if self.gemm else ''}-{self.dtype}"

    @property
    def kind(self) -> str:
        """The recipe kind that a capability row is matched with."""
        return (self.recipe.for_gemm(self.gemm) if self.gemm else self.recipe.computed_as).kind


Variant = QuantizerVariant | FusedVariant | RecipeVariant


def _spec(code_format: Any, scaling: Any, **fields: Any) -> QuantizerSpec:
    return QuantizerSpec(format=code_format, scaling=scaling, **fields)


RAGGED: dict[str, QuantizerSpec] = {
    "delayed.e4m3": _spec("e4m3", "delayed"),
    "delayed.e5m2": _spec("e5m2", "delayed", role="dy"),
    "current.e4m3": _spec("e4m3", "current"),
    "current.e5m2": _spec("e5m2", "current", role="dy"),
    "current.e4m3.pow2": _spec("e4m3", "current", power_of_two=True),
    "current.e4m3.eps": _spec("e4m3", "current", amax_epsilon=0.3),
    "row.e4m3.pow2": _spec("e4m3", "row", power_of_two=True),
    "row.e4m3.fp32": _spec("e4m3", "row"),
    "row.e5m2.pow2.eps": _spec("e5m2", "row", power_of_two=True, amax_epsilon=0.3, role="dy"),
    "block.e4m3.pow2": _spec("e4m3", "block", power_of_two=True),
    "block.e4m3.fp32": _spec("e4m3", "block"),
    "block.e5m2.pow2": _spec("e5m2", "block", power_of_two=True, role="dy"),
    "block.e4m3.fp32.eps": _spec("e4m3", "block", amax_epsilon=0.3),
    "block.e4m3.square": _spec("e4m3", "block", power_of_two=True, square=True),
    "block.e4m3.square_columns": _spec("e4m3", "block", power_of_two=True, square_columns=True),
    "mxfp8.e4m3": _spec("e4m3", "mxfp8"),
    "mxfp8.e5m2": _spec("e5m2", "mxfp8", role="dy"),
    "mxfp8.e4m3.square": _spec("e4m3", "mxfp8", square=True),
    "nvfp4": _spec("e2m1", "nvfp4"),
    "nvfp4.hadamard": _spec("e2m1", "nvfp4", hadamard=True),
    "nvfp4.stochastic": _spec("e2m1", "nvfp4", rounding="stochastic", role="dy"),
    "nvfp4.stochastic.hadamard": _spec("e2m1", "nvfp4", rounding="stochastic", hadamard=True, role="dy"),
    "nvfp4.square": _spec("e2m1", "nvfp4", square=True),
}
"""Quantizers of ragged [M, K] rows."""

STACKED: dict[str, QuantizerSpec] = {
    "delayed.e4m3": _spec("e4m3", "delayed", role="w"),
    "current.e4m3": _spec("e4m3", "current", role="w"),
    "row.e4m3.pow2": _spec("e4m3", "row", power_of_two=True, role="w"),
    "block.e4m3.square": _spec("e4m3", "block", power_of_two=True, square=True, role="w"),
    "block.e4m3.square.fp32": _spec("e4m3", "block", square=True, role="w"),
    "block.e4m3.square.mxfp4": _spec("e4m3", "block", power_of_two=True, square=True, role="w", mxfp4="rowwise"),
    "mxfp8.e4m3": _spec("e4m3", "mxfp8", role="w"),
    "mxfp8.e4m3.square": _spec("e4m3", "mxfp8", square=True, role="w"),
    "nvfp4": _spec("e2m1", "nvfp4", role="w"),
    "nvfp4.square": _spec("e2m1", "nvfp4", square=True, role="w"),
}
"""Quantizers of stacked [G, N, K] weights."""

RECIPES: dict[str, Recipe] = {
    "bf16": PRESETS["bf16"],
    "delayed": DelayedScaling(),
    "current": CurrentScaling(),
    "row": RowScaling(),
    "block": BlockScaling(),
    "mxfp8": MXFP8(),
    "nvfp4": NVFP4(),
}
"""One recipe of each kind, with its defaults."""

MORE_RECIPES: dict[str, Recipe] = {
    "current.pow2": CurrentScaling(power_of_two=True),
    "row.wgrad_high_precision": RowScaling(wgrad="high_precision"),
    "block.fp32": BlockScaling(power_of_two=False),
    "block.square_columns": BlockScaling(square_columns=True),
    "mxfp4_weights": MXFP4Weights(),
    "mxfp8.forward_only": MXFP8(dgrad="high_precision", wgrad="high_precision"),
    "mxfp8.folded": MXFP8(products="folded"),
    "mxfp8.square": MXFP8(square_weights=True),
    "mxfp8.e5m2_gradients": MXFP8(gradient_format="e5m2"),
    "nvfp4.plain": NVFP4(square_weights=False, stochastic_gradients=False, hadamard=False),
    "nvfp4.wgrad_high_precision": NVFP4(wgrad="high_precision"),
    "nvfp4.backward_only": NVFP4(fprop="high_precision"),
}
"""Options and slots of the recipes."""

DTYPES: tuple[DType, ...] = ("float32", "bfloat16", "float16")
"""In which the full selection has what the quick one has in one."""
