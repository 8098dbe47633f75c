"""How far a router's kernels may be from the definition. Not tests."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

import octavo_numerics as numerics
from octavo.router import RouterRule

Array = npt.NDArray[Any]

ROUNDED = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""What rounding a normal value costs, relative."""
SUBNORMAL = {"float32": 2.0**-149, "float16": 2.0**-25, "bfloat16": 2.0**-133}
"""What rounding a subnormal value may cost."""


def weights_are_bound(weights: Array, logits: Array, choice: numerics.Choice, rule: RouterRule) -> bool:
    """Whether fp32 weights [T, k] are within the definition's bound."""
    bound = numerics.choice_weights_bound(logits, choice, rule)
    return bool((np.abs(weights - choice.weights) <= bound).all())


def gradient_is_bound(gradient: Array, logits: Array, choices: Array, dweights: Array, rule: RouterRule) -> bool:
    """Whether a gradient of the logits [T, E], in their dtype, is within the definition's bound and its rounding.

    Values that its dtype does not hold are not judged.
    """
    wanted = numerics.choose_gradient(logits, choices, dweights, rule)
    dtype = gradient.dtype.name
    bound = numerics.choose_gradient_bound(logits, choices, dweights, rule)
    bound = bound * (1 + ROUNDED[dtype]) + np.abs(wanted) * ROUNDED[dtype] + SUBNORMAL[dtype]
    error = np.abs(gradient.astype(np.float64) - wanted)
    return bool((error <= bound)[np.abs(wanted) < float(ml_dtypes.finfo(dtype).max)].all())
