"""Codes written over those of an earlier call, at their addresses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from octavo_registry.dispatch.layer_plan import QuantizePlan
from octavo_torch.arrays.grouped_tensor import PLANES, GroupedTensor
from octavo_torch.compiler.tracing import is_plain


def replace_unless(unchanged: Tensor | None, target: Tensor | None, new: Tensor | None) -> None:
    """`new` into `target`, but where the flag int32 [1] is not 0; None of either stays None."""
    if target is None or new is None:
        return
    # as bytes: torch selects among few of the narrow types
    old, made = target.view(torch.uint8), new.view(torch.uint8)
    old.copy_(made if unchanged is None else torch.where(unchanged.view(()) != 0, old, made))


def mark_rewritten(tensors: Iterable[Tensor | None], unchanged: Tensor | None) -> None:
    """Tells autograd that a kernel has written `tensors`, which a backward of earlier codes may still have to read.

    Not where the host can see that `unchanged` is not 0. A flag on a GPU is not read: whoever sets it answers for it.
    """
    if unchanged is not None and (not unchanged.is_cpu or not is_plain(unchanged) or bool(unchanged)):
        return
    there = [tensor for tensor in tensors if tensor is not None and is_plain(tensor) and not tensor.is_inference()]
    torch.autograd.graph.increment_version(there)


def quantize_into(
    plan: QuantizePlan,
    x: Tensor,
    sizes: Tensor | None,
    out: GroupedTensor,
    unchanged: Tensor | None,
    how: dict[str, Any],
) -> None:
    """`x` quantized by `plan` into the tensors of `out`, but where `unchanged` says so."""
    if plan.bound.into is not None:
        plan.bound.into(x, sizes, out=out, unchanged=unchanged, **how)
        mark_rewritten([getattr(out, name) for name in PLANES], unchanged)
        return
    codes = plan.bound.run(x, sizes, **how)
    if out.spec != codes.spec:
        raise ValueError(f"out is {out!r} and the result {codes!r}; give one of the same spec")
    for name in (*PLANES, "group_sizes"):
        replace_unless(unchanged, getattr(out, name), getattr(codes, name))
