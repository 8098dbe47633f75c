"""Quantizers of weights that are rounded to MXFP4 first, over any backend's quantizer of blocks."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from jax import Array

from octavo import GroupedTensorSpec, QuantizerSpec
from octavo_jax.arithmetic.mxfp4 import octavo_mxfp4_values
from octavo_jax.arrays.grouped_tensor import GroupedTensor
from octavo_jax.arrays.sizes import one_group
from octavo_registry.contract.quantize import BoundQuantize, Quantize

Bound = BoundQuantize[Array, GroupedTensor]
Run = Quantize[Array, GroupedTensor]


def rounding_first(bound: Bound, spec: QuantizerSpec) -> Bound:
    """`bound`, a quantizer by `spec.held_by` of bf16, as one by `spec`: see octavo_registry.contract.frameworks."""
    run: Run = _run(bound.run, spec)  # type: ignore[arg-type]  # a protocol of functions says nothing of their hash
    return BoundQuantize(run, layouts=bound.layouts, note=bound.note, prepare=bound.prepare)


# One function for each of a backend's: layers whose functions are the same are traced once.
@lru_cache(maxsize=512)
def _run(run: Run, spec: QuantizerSpec) -> Run:
    direction = spec.mxfp4
    assert direction is not None  # the registry rounds for no other spec

    def quantize(x: Array, group_sizes: Array | None = None, /, **how: Any) -> GroupedTensor:
        sizes = one_group(x.shape[0]) if group_sizes is None and x.ndim == 2 else group_sizes
        q = run(octavo_mxfp4_values(x, sizes, direction=direction), group_sizes, **how)
        return replace(q, spec=_with(q.spec, spec))

    return quantize


@lru_cache(maxsize=512)
def _with(tensor: GroupedTensorSpec, quantizer: QuantizerSpec) -> GroupedTensorSpec:
    return GroupedTensorSpec(**{**dict(tensor), "quantizer": quantizer})
