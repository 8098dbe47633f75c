"""`device_function`: what kernels call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether Triton interprets kernels in this process: TRITON_INTERPRET was 1 when it was imported."""
COMPILED = tl.constexpr(not INTERPRETED)
"""The same for kernels: what they do in a chip's own instructions has another way in the interpreter."""


def device_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """`triton.jit` for functions that kernels call; interpreted ones stay plain functions.

    The interpreter replaces all of Triton's language again at each call of a jitted function, which takes milliseconds.
    """
    return function if INTERPRETED else triton.jit(function)
