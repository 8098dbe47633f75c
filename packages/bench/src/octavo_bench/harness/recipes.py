"""What `octavo bench gemm` times: one `GemmCase` a row, and the recipe that it stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo import (
    MXFP8,
    NVFP4,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    HighPrecision,
    Recipe,
    RowScaling,
)
from octavo.formats import DType
from octavo.recipe_base import GEMMS, Gemm

KINDS: tuple[str, ...] = ("bf16", "delayed", "current", "row", "block", "mxfp8", "nvfp4")
"""What `--kinds` chooses from: bf16 is high precision."""

FAST = frozenset({"delayed", "current", "row"})
"""Kinds that have a variant with fast accumulation: one scale along the whole sum."""

ACCUMULATED = frozenset({"bf16", "delayed", "current", "row", "block"})
"""Kinds whose wgrad is also timed into an fp32 accumulator."""

_RECIPES: dict[str, type[Recipe]] = {
    "bf16": HighPrecision,
    "delayed": DelayedScaling,
    "current": CurrentScaling,
    "row": RowScaling,
    "block": BlockScaling,
    "mxfp8": MXFP8,
    "nvfp4": NVFP4,
}


def recipe_of(kind: str, *, fast: bool = False) -> Recipe:
    """The recipe of a kind; with `fast` its three GEMMs leave promotion out."""
    fields: dict[str, Any] = {"fast_accumulation": frozenset(GEMMS)} if fast else {}
    return _RECIPES[kind](**fields)


@dataclass(frozen=True, slots=True)
class GemmCase:
    """One GEMM of one kind.

    fast        without promotion of partial sums to fp32
    accumulate  wgrad added to an fp32 main_grad; else stored in bf16
    """

    kind: str
    gemm: Gemm
    fast: bool = False
    accumulate: bool = False

    @property
    def label(self) -> str:
        """The row's name, the same in every run."""
        return f"{self.kind}{' fast' if self.fast else ''}{' += fp32' if self.accumulate else ''}"

    @property
    def recipe(self) -> Recipe:
        """The recipe of its layer."""
        return recipe_of(self.kind, fast=self.fast)

    @property
    def out_dtype(self) -> DType:
        """Of the result."""
        return "float32" if self.accumulate else "bfloat16"

    @property
    def peers(self) -> tuple[str, ...]:
        """Names of the peers that do this work, or work like it, the closest first."""
        if self.kind in ("bf16", "mxfp8", "nvfp4"):
            return ("grouped_mm", "dense bf16", "ragged_dot")
        how = "fast" if self.fast else "exact"
        return (f"scaled_grouped_mm {how}", f"dense fp8 {how}", "grouped_mm", "ragged_dot")


def chosen_cases(kinds: tuple[str, ...], gemms: tuple[Gemm, ...], *, fast: bool, accumulate: bool) -> list[GemmCase]:
    """The rows of a table: every kind, its fast variant after it, and the accumulating wgrads last of each."""
    cases = []
    for kind in kinds:
        for quick in (False, True) if fast and kind in FAST else (False,):
            cases += [GemmCase(kind, gemm, quick) for gemm in gemms]
            if accumulate and "wgrad" in gemms and kind in ACCUMULATED and not quick:
                cases.append(GemmCase(kind, "wgrad", accumulate=True))
    return cases
