"""The recipes that benchmarks time, by the names that `--recipes` takes, and single GEMMs of one recipe."""

from __future__ import annotations

from collections.abc import Sequence
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
    RecipeError,
    RowScaling,
)
from octavo.formats import DType
from octavo.recipe_base import GEMMS, Gemm
from octavo_bench.errors import InputError

KINDS: tuple[str, ...] = ("bf16", "delayed", "current", "row", "block", "mxfp8", "nvfp4")
"""What runs where `--recipes` names none, and what rows and goals call them: bf16 is high precision."""

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


def recipe_of(name: str, *, fast: bool = False) -> Recipe:
    """The recipe of a kind or a preset; with `fast` its three GEMMs leave promotion out."""
    fields: dict[str, Any] = {"fast_accumulation": frozenset(GEMMS)} if fast else {}
    if name in _RECIPES:
        return _RECIPES[name](**fields)
    import octavo_registry

    recipe = octavo_registry.recipe(name)
    return recipe.replace(**fields) if fields else recipe


def family_of(name: str) -> str:
    """The kind of recipe that computes a preset, bf16 for high precision."""
    if name in _RECIPES:
        return name
    kind = recipe_of(name).computed_as.kind
    return "bf16" if kind == "high_precision" else kind


def gemms_of_recipe(name: str, gemms: Sequence[Gemm]) -> tuple[Gemm, ...]:
    """Those of `gemms` that a recipe has for itself: where a slot is high precision, its GEMM is bf16's."""
    recipe = recipe_of(name)
    return tuple(gemm for gemm in gemms if name in _RECIPES or recipe.quantizes(gemm))


def names_of_recipes(option: str, text: str, default: Sequence[str] = KINDS) -> tuple[str, ...]:
    """The recipes of `a,b` by the names of rows, each once, or `default` for ""; `InputError` for others.

    Presets, kinds and the recipes of plugins are known; a preset that is a kind with its defaults gets the kind's name.
    """
    names: list[str] = []
    for given in (part.strip() for part in text.split(",") if part.strip()):
        try:
            recipe = recipe_of(given)
        except RecipeError as error:
            raise InputError(f"{option} names {given[:80]!r}: {error}") from None
        same = (name for name in _RECIPES if recipe == recipe_of(name))
        name = next(same, given)
        if name in names:
            raise InputError(f"{option} names {name!r} twice; give each once")
        names.append(name)
    return tuple(names) or tuple(default)


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
    def family(self) -> str:
        """The kind of recipe that computes it."""
        return family_of(self.kind)

    @property
    def recipe(self) -> Recipe:
        """The recipe of its layer."""
        return recipe_of(self.kind, fast=self.fast)

    @property
    def out_dtype(self) -> DType:
        """Of the result."""
        return "float32" if self.accumulate else "bfloat16"
