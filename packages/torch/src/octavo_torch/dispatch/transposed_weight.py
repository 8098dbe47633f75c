"""Adapts a plan's functions of a weight [G, K, N] to callers that have it as [G, N, K], a view of the same memory.

Where the backend takes such weights, its functions read the matrices [G, K, N] in place, and return dw as [G, K, N], of
which the caller gets a view.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar, cast

from torch import Tensor

from octavo_torch.arrays.grouped_tensor import Matrix, Rows
from octavo_torch.arrays.sizes import Sizes

GemmFunction = TypeVar("GemmFunction", bound=Callable[..., Tensor])
QuantizerFunction = TypeVar("QuantizerFunction", bound=Callable[..., object])


def reading_transposed(run: GemmFunction) -> GemmFunction:
    """fprop or dgrad of a weight [G, N, K], by `run` of [G, K, N]; codes are of the matrices [G, K, N] already."""

    @wraps(run)
    def transposed(rows: Rows, w: Matrix, sizes: Sizes, /, **how: object) -> Tensor:
        return run(rows, w.mT if isinstance(w, Tensor) else w, sizes, **how)

    return cast(GemmFunction, transposed)


def writing_transposed(run: GemmFunction) -> GemmFunction:
    """wgrad that returns [G, N, K], by `run` that returns [G, K, N]: a view of its result, or the caller's `out`."""

    @wraps(run)
    def transposed(
        x: Rows, dy: Rows, sizes: Sizes, /, *, out: Tensor | None = None, accumulate: bool = False
    ) -> Tensor:
        if out is None:
            return run(x, dy, sizes).mT
        run(x, dy, sizes, out=out.mT, accumulate=accumulate)
        return out

    return cast(GemmFunction, transposed)


def quantizing_transposed(run: QuantizerFunction) -> QuantizerFunction:
    """A quantizer of a weight [G, N, K], by `run` of [G, K, N], which is any function of a BoundQuantize."""

    @wraps(run)
    def transposed(w: Tensor, sizes: None = None, /, **how: object) -> object:
        return run(w.mT, sizes, **how)

    return cast(QuantizerFunction, transposed)
