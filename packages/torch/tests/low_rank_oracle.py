"""What tests of adapters share: float64 values with bounds of their error, and a record of every adapter's call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import octavo_numerics
from octavo import HighPrecision
from octavo.recipe_base import Gemm
from octavo_torch.arrays.dtypes import DTYPE_NAMES
from octavo_torch.arrays.interleaving import to_halves
from octavo_torch.lora.low_rank import LowRank


class Near(NamedTuple):
    """Exact values in float64, and by how much what is compared with them may differ, element by element."""

    value: Any
    error: Any

    @property
    def T(self) -> Near:  # noqa: N802  # as numpy names it
        return Near(self.value.T, self.error.T)

    def __getitem__(self, rows: slice) -> Near:
        return Near(self.value[rows], self.error[rows])


def exact(tensor: Tensor) -> Near:
    value = tensor.detach().double().cpu().numpy()
    return Near(value, np.zeros_like(value))


def product(left: Near, right: Near, gemm: Gemm, dtype: torch.dtype) -> Near:
    """left [R, k] times right [C, k], transposed, as a GEMM in `dtype` computes it: T1 of octavo_numerics.error_bound,
    and what the errors of both operands come to."""
    bound = octavo_numerics.error_bound(HighPrecision(), left.value.shape[1], gemm=gemm, out_dtype=DTYPE_NAMES[dtype])
    value, size = left.value @ right.value.T, np.abs(left.value) @ np.abs(right.value).T
    carried = left.error @ np.abs(right.value).T + np.abs(left.value) @ right.error.T + left.error @ right.error.T
    error = carried + bound.unit * (np.abs(value) + carried) + bound.c * (size + carried)
    return Near(value, error + float(torch.finfo(dtype).smallest_normal) * (size + carried > 0))


def rounded(near: Near, dtype: torch.dtype) -> Near:
    """Rounded once more."""
    return Near(near.value, near.error + torch.finfo(dtype).eps / 2 * (np.abs(near.value) + near.error))


def scaled(near: Near, scale: float, dtype: torch.dtype) -> Near:
    """A product with a number, rounded once."""
    return near if scale == 1 else rounded(Near(near.value * scale, near.error * scale), dtype)


class Gradients(NamedTuple):
    """What an adapter computes."""

    delta: Near
    a: Near
    b: Near
    x: Near


def oracle(x: Tensor, sizes: list[int], a: Tensor, b: Tensor, scale: float, dy: Tensor) -> Gradients:
    """delta, and the gradients of A, B and x for delta's gradient `dy`, group by group in float64."""
    dtype = x.dtype
    rows, grads, starts = exact(x), exact(dy), np.cumsum([0, *sizes])
    parts: list[list[Near]] = [[], [], [], []]
    for group, start in enumerate(starts[:-1]):
        here = slice(start, starts[group + 1])
        one_x, one_dy = rows[here], grads[here]
        one_a, one_b = exact(a[group].to(dtype)), exact(b[group].to(dtype))
        low = scaled(product(one_x, one_a, "fprop", dtype), scale, dtype)
        d_low = scaled(product(one_dy, one_b.T, "dgrad", dtype), scale, dtype)
        parts[0].append(product(low, one_b, "fprop", dtype))
        parts[1].append(product(d_low.T, one_x.T, "wgrad", dtype))
        parts[2].append(product(one_dy.T, low.T, "wgrad", dtype))
        parts[3].append(product(d_low, one_a.T, "dgrad", dtype))
    stacked = [Near(np.stack([p.value for p in part]), np.stack([p.error for p in part])) for part in parts[1:3]]
    joined = [
        Near(np.concatenate([p.value for p in part]), np.concatenate([p.error for p in part])) for part in parts[::3]
    ]
    return Gradients(joined[0], stacked[0], stacked[1], joined[1])


def assert_near(actual: Tensor, near: Near) -> None:
    """Every element within its bound."""
    worst = np.abs(actual.detach().double().cpu().numpy() - near.value) - near.error
    assert worst.size == 0 or worst.max() <= 0, f"an element is {worst.max()} past its bound"


@dataclass
class Seen:
    """One call of an adapter: its factors, what it read, and after a backward the gradients."""

    factors: LowRank
    x: Tensor
    sizes: Tensor
    interleave: int
    delta: Tensor
    grads: dict[str, Tensor] = field(default_factory=dict)

    def check(self) -> None:
        """delta and both gradients, not zero, are float64's within the bounds."""
        sizes, a, b = self.sizes.tolist(), self.factors.a.detach(), self.factors.b.detach()
        assert self.factors.dropped == 0
        db = self.grads["b"]
        if self.interleave:  # delta's columns are in another order than the rows of b
            b, db = to_halves(b, self.interleave), to_halves(db, self.interleave)
        wanted = oracle(self.x, sizes, a, b, self.factors.scale, self.grads["delta"])
        assert_near(self.delta[: sum(sizes)], wanted.delta)
        for grad, near in ((self.grads["a"], wanted.a), (db, wanted.b)):
            assert_near(grad, near)
            assert bool(grad.any())


@contextmanager
def watched() -> Iterator[list[Seen]]:
    """Records the adapters' calls inside."""
    seen: list[Seen] = []
    compute = LowRank.delta

    def delta(self: LowRank, x: Tensor, group_sizes: Any, interleave: int = 0) -> Tensor:
        # factors of their own, so that their gradients come here
        own = LowRank(self.a * 1, self.b * 1, self.scale, self.dropped, self.backend)
        value = compute(own, x, group_sizes, interleave)
        one = Seen(own, x.detach(), torch.as_tensor(group_sizes), interleave, value.detach())
        if value.requires_grad:
            for name, tensor in (("a", own.a), ("b", own.b), ("delta", value)):
                if tensor.requires_grad:
                    tensor.register_hook(lambda grad, name=name: one.grads.__setitem__(name, grad.detach()))
        seen.append(one)
        return value

    with mock.patch.object(LowRank, "delta", delta):
        yield seen
