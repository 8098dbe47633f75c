"""The kinds of recipe that benchmarks time, by the names that `--kinds` takes, and single GEMMs of one kind."""

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


FRAMEWORK = "framework's bf16"
"""The kind of the rows that a framework's own grouped GEMM makes, under its own autograd."""


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
