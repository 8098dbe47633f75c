"""Weights that are rounded to MXFP4 before they are quantized in blocks: the quantizer, and the plan of a layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import octavo_registry as registry
from octavo import GroupedTensorSpec, QuantizerSpec
from octavo.formats import DType
from octavo_registry.contract.quantize import BoundQuantize
from octavo_registry.contract.request import GemmRequest
from octavo_registry.dispatch.layer_plan import LayerPlan
from octavo_torch.arithmetic import operators
from octavo_torch.arrays.checks import BackendNames
from octavo_torch.arrays.grouped_tensor import GroupedTensor
from octavo_torch.arrays.sizes import Sizes, group_sizes_of
from octavo_torch.memo import Bounded

Bound = BoundQuantize[Tensor, GroupedTensor]


def rounding_first(bound: Bound, spec: QuantizerSpec) -> Bound:
    """A quantizer by `spec`, which rounds to MXFP4 and gives the values in bf16 to `bound`, one by `spec.held_by`.

    See octavo_registry.contract.frameworks.
    """
    first = _RoundingFirst(bound, spec)
    return BoundQuantize(
        first,
        layouts=bound.layouts,
        note=bound.note,
        prepare=bound.prepare,
        into=None if bound.into is None else first.into,
        from_plain=None if bound.from_plain is None else first.from_plain,
        to_plain=None if bound.to_plain is None else first.to_plain,
    )


def is_composed(bound: Bound) -> bool:
    """Whether `bound` is from `rounding_first`; otherwise its own kernels round, if its quantizer says so."""
    return isinstance(bound.run, _RoundingFirst)


def plan_layer(request: GemmRequest, backend: BackendNames, wgrad_dtype: DType) -> LayerPlan:
    """The registry's plan of a layer, for w in the order in which it lies in memory.

    The exception is a w [G, K, N] that this package's operations would round to MXFP4, in a dozen passes over w, where
    the backend's kernels round [G, N, K] themselves: that plan is for a transposed copy, which costs one pass.
    """
    plan = registry.plan_layer(request, backend=backend, wgrad_dtype=wgrad_dtype)
    if plan.fprop.request.weight == "nk" or not _is_rounded_here(plan):
        return plan
    transposed = registry.plan_layer(replace(request, weight="nk"), backend=backend, wgrad_dtype=wgrad_dtype)
    return plan if _is_rounded_here(transposed) else transposed


def _is_rounded_here(plan: LayerPlan) -> bool:
    return plan.quantize_w is not None and is_composed(plan.quantize_w.bound)


class _RoundingFirst:
    """The functions of a BoundQuantize. Their tensors have `spec` as quantizer, those of the backend `spec.held_by`."""

    def __init__(self, bound: Bound, spec: QuantizerSpec) -> None:
        self._bound, self._spec, self._held = bound, spec, spec.held_by
        self._renamed: Bounded[tuple[int, int], tuple[GroupedTensorSpec, GroupedTensorSpec]] = Bounded()

    def __call__(self, x: Tensor, group_sizes: Sizes | None = None, /, **how: Any) -> GroupedTensor:
        return self._with(self._spec, self._bound.run(self._values(x, group_sizes), group_sizes, **how))

    def into(self, x: Tensor, group_sizes: Sizes | None = None, /, *, out: GroupedTensor, **how: Any) -> None:
        assert self._bound.into is not None  # rounding_first has asked
        self._bound.into(self._values(x, group_sizes), group_sizes, out=self._with(self._held, out), **how)

    def from_plain(self, q: GroupedTensor) -> GroupedTensor:
        assert self._bound.from_plain is not None
        return self._with(self._spec, self._bound.from_plain(self._with(self._held, q)))

    def to_plain(self, q: GroupedTensor) -> GroupedTensor:
        assert self._bound.to_plain is not None
        return self._with(self._spec, self._bound.to_plain(self._with(self._held, q)))

    def _values(self, x: Tensor, sizes: Sizes | None) -> Tensor:
        rows = None if sizes is None else operators.bound_sizes(group_sizes_of(sizes), x.shape[0], x)
        if rows is None and x.dim() == 2:
            rows = torch.full((1,), x.shape[0], dtype=torch.int64, device=x.device)
        assert self._spec.mxfp4 is not None
        return operators.mxfp4_values(x, rows, self._spec.mxfp4)

    def _with(self, quantizer: QuantizerSpec, q: GroupedTensor) -> GroupedTensor:
        """`q` with this quantizer in its spec. A spec is found by identity: building one costs more than a launch."""
        key = id(q.spec), id(quantizer)
        known = self._renamed.get(key)
        if known is None or known[0] is not q.spec:
            renamed = GroupedTensorSpec(**{**dict(q.spec), "quantizer": quantizer})
            known = self._renamed[key] = q.spec, renamed
        return replace(q, spec=known[1])
