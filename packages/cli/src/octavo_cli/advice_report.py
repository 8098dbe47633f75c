"""What `octavo advise` prints about one layer: a table with the advice under it, or JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo import Recipe
from octavo_cli.advice import Advice, Chip, Shape, best, copies_bf16
from octavo_registry.cli.output import print_line, print_table

_HOST_US = (173, 270)
"""Of a layer's forward and backward in PyTorch, bf16 to FP8: host-h200-2026-11-22.json in docs/measurements.md."""


@dataclass(frozen=True, slots=True)
class AdviceReport:
    """Recipes for one layer, and which of them is advised.

    given_shape    the shape as the command line has it
    judged_by      the weights whose SQNR it is, in words
    notes          what was found in result files
    least_sqnr     decibels that an advised recipe keeps
    recipes        by the names under which they were asked for
    advice         on each of them, in the same order
    """

    shape: Shape
    given_shape: str
    chip: Chip
    judged_by: str
    notes: Sequence[str]
    least_sqnr: float
    micro_batches: int
    recipes: Mapping[str, Recipe]
    advice: Sequence[Advice]

    @property
    def choice(self) -> Advice | None:
        """The advised recipe; None where none keeps the SQNR."""
        return best(self.advice, self.least_sqnr)

    @property
    def copied(self) -> list[str]:
        """Names of recipes whose products the chip computes from bf16 copies."""
        return [name for name, recipe in self.recipes.items() if copies_bf16(recipe, self.chip)]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        choice, copied = self.choice, self.copied
        return {
            "schema_version": 1,
            "shape": self.shape.key,
            "chip": self.chip.name,
            "judged_by": self.judged_by,
            "notes": self.notes,
            "min_sqnr_db": self.least_sqnr,
            "recommended": None if choice is None else choice.recipe,
            "recipes": [
                {
                    "recipe": one.recipe,
                    "sqnr_db": round(one.sqnr_db, 2) if math.isfinite(one.sqnr_db) else None,
                    "bytes": one.bytes,
                    "us": float(f"{one.us:.4g}"),
                    "quantizing_us": float(f"{one.quantizing_us:.4g}"),
                    "time": "measured" if one.measured else "roofline",
                    "bf16_copies": one.recipe in copied,
                }
                for one in self.advice
            ],
        }

    def show(self) -> None:
        """Print the table, what its columns mean, and the advice."""
        header = ("recipe", "SQNR of weights", "x and weights", "GEMMs", "time is", "quantizers")
        cells = [_cells(one) for one in self.advice]
        print_table(f"A layer of shape {self.given_shape} on {self.chip.name}", header, cells)
        print_line(f"SQNR of the worst expert, judged by {self.judged_by}.")
        print_line(
            "x and weights: codes and scales as forward leaves them for backward. GEMMs: fprop, dgrad and wgrad."
        )
        shared = f" (once for {self.micro_batches} micro-batches)" if self.micro_batches > 1 else ""
        print_line(f"quantizers: of x, dy and the weights{shared}, at the speed of memory.")
        for note in self.notes:
            print_line(f"results: {note}")
        if len({one.measured for one in self.advice}) > 1:
            print_line("Measured times and rooflines are not alike: a roofline is what no kernel can beat.")
        self._show_copied()
        self._show_choice()

    def _show_copied(self) -> None:
        copied = self.copied
        if not copied:
            return
        instead = ", ".join(name for name in copied if self.recipes[name].kind == "mxfp8")
        print_line(
            f"{self.chip.name} has no products of {', '.join(copied)}: it multiplies bf16 copies, which takes longer "
            "than bf16 does, so they do not pay there in time."
            + (f' For {instead}, products="folded" (mxfp8-folded) multiplies FP8.' if instead else "")
        )

    def _show_choice(self) -> None:
        choice = self.choice
        if choice is None:
            print_line(f"No recipe keeps {self.least_sqnr:g} dB; give a smaller --min-sqnr, or stay with bf16.")
            return
        print_line(f"Advice: {choice.recipe}, the fastest of those that keep {self.least_sqnr:g} dB.")
        if not choice.quantizing_us and any(one.us < choice.us for one in self.advice):
            print_line("Products of codes would take less time, but making the codes takes more than that.")
        if max(one.total_us for one in self.advice) < _HOST_US[0]:
            print_line(
                f"All of these are shorter than the host's part of a layer, {_HOST_US[0]} to {_HOST_US[1]} us in "
                "PyTorch (octavo bench host, on an H200): outside of a CUDA graph no recipe makes this layer faster."
            )


def _cells(one: Advice) -> tuple[str, ...]:
    return (
        one.recipe,
        "exact" if math.isinf(one.sqnr_db) else f"{one.sqnr_db:.1f} dB",
        _size(one.bytes),
        _time(one.us),
        "measured" if one.measured else "roofline",
        _time(one.quantizing_us) if one.quantizing_us else "none",
    )


def _size(count: float) -> str:
    """Bytes in a unit that leaves digits to compare: a small layer's are kilobytes."""
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} KB"


def _time(us: float) -> str:
    """Milliseconds, or microseconds where three decimals of a millisecond would leave little of them."""
    return f"{us / 1000:.3f} ms" if us >= 100 else f"{us:.3g} us"
