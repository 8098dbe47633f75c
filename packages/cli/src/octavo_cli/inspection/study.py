"""What recipes would do to the matrices of a tensor, by octavo_numerics.tensor_stats."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo import Recipe
from octavo.health import FIELDS, WINDOW, numbers_of
from octavo_cli.errors import InputError
from octavo_cli.inspection.files import matrices
from octavo_cli.own_scales import own_scales
from octavo_numerics import TensorStats, tensor_stats
from octavo_registry.cli.recipes import find_recipe

Array = NDArray[Any]


def recipes_of(text: str) -> dict[str, Recipe]:
    """Recipes by name from names and files with commas; InputError where there is none, or one quantizes nothing."""
    names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise InputError("--recipes is empty; give names with commas between them, such as mxfp8,nvfp4")
    found = {name: find_recipe(name) for name in names}
    for name, recipe in found.items():
        if recipe.quantizer("w") is None:
            raise InputError(f"--recipes: {name} quantizes no weights; leave it out")
    return found


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one recipe would do to a tensor: numbers_of all experts together and of each, and scales' exponents."""

    total: dict[str, float]
    experts: list[dict[str, float]]
    exponents: dict[int, int]

    @property
    def worst_sqnr(self) -> float:
        """SQNR of the expert that loses most, in dB; NaN where nothing has one."""
        known = [numbers["sqnr_db"] for numbers in self.experts if "sqnr_db" in numbers]
        return min(known) if known else math.nan

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "total": _plain(self.total),
            "experts": [_plain(numbers) for numbers in self.experts],
            "scale_exponents": {str(exponent): count for exponent, count in self.exponents.items()},
        }


@dataclass(frozen=True, slots=True)
class Study:
    """A tensor of a checkpoint.

    amax         [G] of all its values, NaN winning
    non_finite   values that are not finite, and first_non_finite the index of the first one, None where all are
    skipped      why no recipe was tried, or ""
    looked_at    rows of each expert that recipes were tried on
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    amax: list[float]
    non_finite: int
    first_non_finite: tuple[int, ...] | None
    verdicts: Mapping[str, Verdict]
    skipped: str = ""
    looked_at: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        first = self.first_non_finite
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "experts": len(self.amax),
            "amax": [_finite(value) for value in self.amax],
            "non_finite": self.non_finite,
            "first_non_finite": None if first is None else list(first),
            "rows_looked_at": self.looked_at,
            "skipped": self.skipped,
            "recipes": {name: verdict.as_dict() for name, verdict in self.verdicts.items()},
        }


def _plain(numbers: Mapping[str, float]) -> dict[str, float | None]:
    return {name: _finite(value) for name, value in numbers.items()}


def _finite(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def study(
    name: str, values: Array, skipped: str, recipes: Mapping[str, Recipe], rows: int, weight: str = "nk"
) -> Study:
    """Everything about one tensor.

    skipped  why no recipe would quantize it, or ""
    rows   of each expert that recipes are tried on, evenly spaced windows of 128 and the one with the amax; 0: all
    weight   how matrices are stored: "nk" as [N, K], "kn" as [K, N]
    """
    dtype, shape = str(values.dtype), tuple(int(side) for side in values.shape)
    if skipped:
        amax, bad, first = _extent(values.reshape(1, -1), shape)
        return Study(name, shape, dtype, amax, bad, first, {}, skipped)
    experts = matrices(values)
    amax, bad, first = _extent(experts.reshape(len(experts), -1), shape)
    sample = sample_of(matrices(values, weight), rows)
    verdicts = {key: verdict(sample, recipe) for key, recipe in recipes.items()}
    return Study(name, shape, dtype, amax, bad, first, verdicts, looked_at=sample.shape[1])


def _extent(flat: Array, shape: tuple[int, ...]) -> tuple[list[float], int, tuple[int, ...] | None]:
    """amax of each row of `flat`, how many values are not finite, and the first one's index in `shape`."""
    if flat.dtype.kind not in "fV" and "float" not in str(flat.dtype):
        return [float(np.abs(part.astype(np.float64)).max(initial=0)) for part in flat], 0, None
    amax, bad, first = [], 0, None
    for number, part in enumerate(flat):
        wide = part.astype(np.float32) if part.dtype.itemsize < 4 else part
        finite = np.isfinite(wide)
        amax.append(float(np.abs(wide).max(initial=0)))
        wrong = int(finite.size - finite.sum())
        if wrong and first is None:
            at = number * flat.shape[1] + int((~finite).argmax())
            first = tuple(int(index) for index in np.unravel_index(at, shape))
        bad += wrong
    return amax, bad, first


def sample_of(experts: Array, rows: int) -> Array:
    """Up to `rows` rows of each matrix: windows of WINDOW rows, evenly spaced, the one with the largest magnitude among
    them, so that scales over whole experts are those of all rows. 0: all rows.
    """
    count = experts.shape[1]
    if not rows or rows >= count:
        return experts
    windows, whole = max(2, rows // WINDOW), -(-count // WINDOW)
    if windows >= whole:
        return experts
    parts = []
    for matrix in experts:
        largest = np.abs(matrix.astype(np.float32)).max(axis=1).argmax() // WINDOW
        # the last window may be short, and all experts' samples have one shape
        chosen = {min(int(largest), whole - 1)}
        for turn in range(whole):
            if len(chosen) < windows:
                chosen.add(turn * (whole - 1) // windows)
        places = [np.arange(at * WINDOW, (at + 1) * WINDOW) for at in sorted(chosen)]
        index = np.concatenate(places)
        part = matrix[np.minimum(index, count - 1)].copy()
        part[index >= count] = 0
        parts.append(part)
    shortest = min(len(part) for part in parts)
    return np.stack([part[:shortest] for part in parts])


def verdict(experts: Array, recipe: Recipe) -> Verdict:
    """What the recipe's quantizer of weights does to experts [G, N, K]."""
    spec = recipe.quantizer("w")
    assert spec is not None  # recipes_of has checked it
    scale = own_scales(experts, spec)
    stats = tensor_stats(experts, spec, scale=scale, seed=0 if spec.stochastic else None)
    return Verdict(_numbers(stats.total(), 0), [_numbers(stats, at) for at in range(len(experts))], stats.exponents())


def _numbers(stats: TensorStats, at: int) -> dict[str, float]:
    return numbers_of([float(getattr(stats, field)[at]) for field in FIELDS])


def worst(studies: Iterable[Study], recipe: str) -> float:
    """The smallest SQNR of any expert of any tensor under a recipe, in dB; NaN where there is none."""
    known = [item.verdicts[recipe].worst_sqnr for item in studies if recipe in item.verdicts]
    known = [value for value in known if not math.isnan(value)]
    return min(known) if known else math.nan
