"""The keywords of a quantizer: seed, operand, group offset and scales, checked, and as operands of a call."""

from __future__ import annotations

from typing import TypedDict

import numpy as np
from jax import Array

from octavo import QuantizerSpec
from octavo.quantizer import Operand
from octavo_jax.plugin_api import encode_scale, random_key


class QuantizerKeywords(TypedDict, total=False):
    """The keywords of octavo_registry.contract.quantize.Quantize."""

    seed: int | Array | None
    operand: Operand | None
    group_offset: int | Array
    scale: Array | None


def keyword_operands(spec: QuantizerSpec, keywords: QuantizerKeywords, groups: int) -> dict[str, Array | np.ndarray]:
    """The operands of a call that the keywords give: those of stochastic rounding, and delayed scaling's encode scales.

    There are none of a quantizer that rounds to nearest and makes its own scales. ValueError for a seed or scales that
    are missing or do not fit.
    """
    operands: dict[str, Array | np.ndarray] = {}
    key = random_key(spec, keywords.get("seed"), keywords.get("group_offset", 0))
    if key is not None:
        operands = {"seed": key[0], "group_offset": key[1]}
    scales = encode_scale(spec, keywords.get("scale"), groups)
    return operands if scales is None else {**operands, "encode_scales": scales}
