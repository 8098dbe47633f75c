"""Do the frameworks quantize the trained expert weights to the same bytes?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import octavo_numerics
import octavo_registry
from octavo import QuantizerSpec, Recipe
from octavo.health import FIELDS, numbers_of
from octavo_cli.own_scales import own_scales
from octavo_registry.contract.frameworks import PLANES

DEFINITION = "definition"
"""The name under which `octavo_numerics` stands in a report."""


@dataclass(frozen=True, slots=True)
class RecipeBits:
    """One recipe's verdict over all its expert weights.

    compared    bytes of payload and scales that each party produced
    differing   bytes in which a party differs from the definition, by party
    parties     the frameworks; the definition is what they are compared with
    skipped     why nothing was compared, or empty
    """

    recipe: str
    parties: tuple[str, ...]
    compared: int
    differing: Mapping[str, int]
    skipped: str = ""

    @property
    def agree(self) -> bool:
        """Every byte of every party equals the definition's."""
        return not self.skipped and not any(self.differing.values())

    @property
    def sentence(self) -> str:
        """The verdict for people."""
        if self.skipped:
            return self.skipped
        if self.agree:
            return f"{' = '.join([*self.parties, DEFINITION])} ({self.compared:,} bytes)"
        wrong = ", ".join(f"{name} in {count:,}" for name, count in self.differing.items() if count)
        return f"differ from the definition: {wrong} of {self.compared:,} bytes"


@dataclass(frozen=True, slots=True)
class BitsReport:
    """The verdicts of a run, one per recipe."""

    frameworks: tuple[str, ...]
    recipes: tuple[RecipeBits, ...]

    @property
    def agree(self) -> bool:
        """No comparison showed a difference."""
        return all(item.agree or item.skipped for item in self.recipes)

    def of(self, recipe: str) -> RecipeBits:
        """The verdict on one recipe."""
        return next(item for item in self.recipes if item.recipe == recipe)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "frameworks": list(self.frameworks),
            "agree": self.agree,
            "recipes": {
                item.recipe: {
                    "agree": None if item.skipped else item.agree,
                    "compared_bytes": item.compared,
                    "differing_bytes": dict(item.differing),
                    "note": item.sentence,
                }
                for item in self.recipes
            },
        }


def compare_bits(
    recipes: Mapping[str, Recipe], weights: Mapping[str, Mapping[str, NDArray[np.float32]]], frameworks: tuple[str, ...]
) -> BitsReport:
    """Quantize each recipe's own trained weights, rounded to bf16, in every framework and by the definition."""
    return BitsReport(
        frameworks, tuple(_compare(name, recipe, weights[name], frameworks) for name, recipe in recipes.items())
    )


def weight_numbers(
    recipes: Mapping[str, Recipe], weights: Mapping[str, Mapping[str, NDArray[np.float32]]]
) -> dict[str, dict[str, dict[str, float]]]:
    """What each recipe's quantizer does to its own trained weights, rounded to bf16, by recipe and weight."""
    numbers: dict[str, dict[str, dict[str, float]]] = {}
    for name, recipe in recipes.items():
        spec = recipe.quantizer("w")
        if spec is None:
            continue
        numbers[name] = {}
        for weight, values in weights[name].items():
            array = values.astype(ml_dtypes.bfloat16)
            total = octavo_numerics.tensor_stats(array, spec, scale=own_scales(array, spec)).total()
            numbers[name][weight] = numbers_of([float(getattr(total, field)[0]) for field in FIELDS])
    return numbers


def _compare(
    name: str, recipe: Recipe, weights: Mapping[str, NDArray[np.float32]], frameworks: tuple[str, ...]
) -> RecipeBits:
    spec = recipe.quantizer("w")
    if spec is None:
        return RecipeBits(name, frameworks, 0, {}, "not quantized")
    compared, differing = 0, dict.fromkeys(frameworks, 0)
    for weight in weights.values():
        array = weight.astype(ml_dtypes.bfloat16)
        scale = own_scales(array, spec)
        expected = octavo_numerics.quantize(array, spec, scale=scale)
        expected_planes = {
            plane: _bytes(getattr(expected, plane)) for plane in PLANES if getattr(expected, plane) is not None
        }
        compared += sum(len(content) for content in expected_planes.values())
        for framework in frameworks:
            planes = _quantized_planes(framework, array, spec, scale)
            differing[framework] += sum(
                _differing(planes.get(plane), content) for plane, content in expected_planes.items()
            )
    return RecipeBits(name, frameworks, compared, differing)


def _quantized_planes(
    framework: str, array: NDArray[Any], spec: QuantizerSpec, scale: NDArray[np.float32] | None
) -> dict[str, NDArray[np.uint8]]:
    bridge = octavo_registry.framework(framework)
    encode_scale = None if scale is None else bridge.from_numpy(scale)
    quantized = bridge.quantize(bridge.from_numpy(array), spec, scale=encode_scale)
    planes = {plane: getattr(quantized, plane) for plane in PLANES}
    return {plane: _bytes(bridge.to_numpy(value)) for plane, value in planes.items() if value is not None}


def _bytes(array: Any) -> NDArray[np.uint8]:
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)


def _differing(actual: NDArray[np.uint8] | None, expected: NDArray[np.uint8]) -> int:
    if actual is None or len(actual) != len(expected):
        return len(expected)
    return int((actual != expected).sum())
