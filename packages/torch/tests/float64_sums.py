"""Sums in fp32 beside float64, with the tolerance of a GEMM's sums."""

from __future__ import annotations

from torch import Tensor

import octavo_numerics
from octavo import HighPrecision


def assert_sums(actual: Tensor, terms: Tensor) -> None:
    """`actual` is the sum of terms [..., k] in fp32, in whatever order: T1 of octavo_numerics.error_bound."""
    bound = octavo_numerics.error_bound(HighPrecision(), terms.shape[-1], out_dtype="float32")
    terms = terms.detach().double()
    exact = terms.sum(-1)
    allowed = bound.unit * exact.abs() + bound.c * terms.abs().sum(-1)
    error = (actual.detach().double() - exact).abs()
    assert bool((error <= allowed).all()), f"off by {error.max():.3g}; {allowed.max():.3g} is allowed at most"
