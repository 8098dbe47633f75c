"""The backend's quantizer and the definition's, called with the same arguments."""

from __future__ import annotations

from typing import Any

import numpy as np

import octavo_numerics
from octavo import QuantizerSpec
from octavo.quantizer import Direction
from octavo_conformance.oracles.checks import read_back
from octavo_conformance.problems.case import Case
from octavo_conformance.problems.inputs import Array, Rng, draw_sizes
from octavo_conformance.problems.operands import SEED
from octavo_numerics import QuantizedArray

ROWS, COLUMNS, GROUPS = 400, 272, 6
"""Shape of most quantizer tests; 272 is two blocks of 128 and a tail, and a whole number of 16s."""


def arguments_for(spec: QuantizerSpec, rng: Rng, groups: int) -> dict[str, Any]:
    """A seed where the spec is stochastic, encode scales where it is delayed."""
    if spec.stochastic:
        return {"seed": int(rng.integers(2**63)) * 2 + 1}
    if spec.scaling == "delayed":
        return {"scale": np.exp2(rng.uniform(-3.0, 6.0, groups)).astype(np.float32)}
    return {}


def as_given(case: Case, arguments: dict[str, Any]) -> dict[str, Any]:
    """`arguments_for` with scales in the framework's array."""
    return arguments | {"scale": case.array(arguments["scale"])} if "scale" in arguments else arguments


def pair(case: Case, x: Array, sizes: Array | None, **arguments: Any) -> tuple[Any, QuantizedArray]:
    """(the framework's GroupedTensor, the definition's tensor)."""
    spec = arguments.pop("spec", case.spec)
    if spec.stochastic:
        arguments.setdefault("seed", SEED)
    expected = octavo_numerics.quantize(x, spec, sizes, **arguments)
    return case.quantize(x, sizes, spec=spec, **arguments), expected


def quantized(case: Case, x: Array, sizes: Array, **arguments: Any) -> QuantizedArray:
    """The backend's tensor as numpy planes; the definition lends the spec alone."""
    tensor, expected = pair(case, x, sizes, **arguments)
    return read_back(case, tensor, expected)


def decoded(q: QuantizedArray) -> dict[Direction, Array]:
    """Dequantized values of each plane that is there."""
    directions: tuple[Direction, ...] = q.spec.quantizer.directions
    return {direction: octavo_numerics.dequantize(q, direction) for direction in directions}


def sizes_for(rng: Rng) -> Array:
    """Drawn sizes for the usual shape."""
    return draw_sizes(rng, GROUPS, ROWS)
