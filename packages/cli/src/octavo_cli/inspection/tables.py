"""What `octavo inspect` prints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from octavo import Recipe
from octavo_cli.inspection.study import Study, worst
from octavo_registry.cli.output import print_line, print_table


def print_studies(studies: Sequence[Study], recipes: Mapping[str, Recipe], named: Mapping[str, str]) -> None:
    """The tensors, what each recipe would do to each, and the recipes in one line each."""
    if named:
        print_table("Recipes in the checkpoint", ("layer", "recipe"), list(named.items()))
    rows = [
        (
            item.name,
            "x".join(map(str, item.shape)) or "scalar",
            item.dtype,
            f"{max(item.amax):.4g}" if item.amax else "-",
            f"{item.non_finite}, first at {list(item.first_non_finite or ())}" if item.non_finite else "none",
            item.skipped or "tried",
        )
        for item in studies
    ]
    print_table("Tensors", ("tensor", "shape", "dtype", "amax", "not finite", "recipes"), rows)
    tried = [item for item in studies if item.verdicts]
    if not tried:
        return
    cells = []
    for item in tried:
        for name, verdict in item.verdicts.items():
            total = verdict.total
            cells.append((
                item.name,
                name,
                _decibels(total.get("sqnr_db", math.nan)),
                _decibels(verdict.worst_sqnr),
                f"{100 * total.get('underflow', 0.0):.3g} %",
                f"{100 * total.get('saturated', 0.0):.3g} %",
                _span(verdict.exponents),
            ))  # fmt: skip
    header = ("tensor", "recipe", "SQNR", "worst expert", "underflow", "saturated", "scales")
    print_table("What each recipe would do", header, cells)
    for item in tried:
        for name, verdict in item.verdicts.items():
            if inexact := verdict.total.get("inexact"):
                print_line(f"{item.name}: E4M3 does not hold {inexact:.0f} of the values that {name} rounds to.")
    looked = {item.looked_at for item in tried}
    print_line(f"SQNR: signal over quantization noise; recipes were tried on up to {max(looked)} rows of each expert.")
    print_line(", ".join(f"{name} {_decibels(worst(tried, name))}" for name in recipes) + " at worst.")


def _decibels(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f} dB"


def _span(exponents: Mapping[int, int]) -> str:
    return f"2^{min(exponents)} to 2^{max(exponents)}" if exponents else "none"
