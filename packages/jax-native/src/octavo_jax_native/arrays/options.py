"""A quantizer's seed, group offset and scales: checked, and as operands of a call."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import Array

from octavo import QuantizerSpec
from octavo_jax.plugin_api import encode_scale, random_key


def random_operands(
    spec: QuantizerSpec, seed: int | Array | None, group_offset: int | Array
) -> dict[str, Array | np.ndarray]:
    """The operands of stochastic rounding; none where the quantizer rounds to nearest: no bit depends on them."""
    key = random_key(spec, seed, group_offset)
    return {} if key is None else {"seed": key[0], "group_offset": key[1]}


def scale_operand(spec: QuantizerSpec, scale: Any, groups: int) -> dict[str, Array]:
    """The encode scales of delayed scaling as an operand; none for other scalings, which make their own."""
    encode = encode_scale(spec, scale, groups)
    return {} if encode is None else {"encode_scales": encode}
