"""Functions of plans that take a weight as it lies in memory, for callers to whom it is [G, N, K].

A weight that is a view of matrices [G, K, N] is read in place where the backend takes that: its plans see those, and
return dw as such, of which the caller gets a view.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar, cast

from torch import Tensor

from octavo_registry.contract.moves import TokenRows
from octavo_torch.arrays.grouped_tensor import GroupedTensor
from octavo_torch.arrays.sizes import Sizes

Operand = Tensor | GroupedTensor | TokenRows[Tensor]
GemmFunction = TypeVar("GemmFunction", bound=Callable[..., Tensor])
QuantizerFunction = TypeVar("QuantizerFunction", bound=Callable[..., object])


def reading_transposed(run: GemmFunction) -> GemmFunction:
    """`run`, fprop or dgrad of a weight [G, K, N], of one [G, N, K]; codes are those of the matrices in memory."""

    @wraps(run)
    def transposed(rows: Operand, w: Operand, sizes: Sizes, /, **how: object) -> Tensor:
        return run(rows, w.mT if isinstance(w, Tensor) else w, sizes, **how)

    return cast(GemmFunction, transposed)


def writing_transposed(run: GemmFunction) -> GemmFunction:
    """`run`, wgrad to [G, K, N], to [G, N, K]: a view of what it returns, or the caller's `out`."""

    @wraps(run)
    def transposed(
        x: Operand, dy: Operand, sizes: Sizes, /, *, out: Tensor | None = None, accumulate: bool = False
    ) -> Tensor:
        if out is None:
            return run(x, dy, sizes).mT
        run(x, dy, sizes, out=out.mT, accumulate=accumulate)
        return out

    return cast(GemmFunction, transposed)


def quantizing_transposed(run: QuantizerFunction) -> QuantizerFunction:
    """`run`, a quantizer of matrices [G, K, N] in any of its forms, of a weight [G, N, K]."""

    @wraps(run)
    def transposed(w: Tensor, sizes: None = None, /, **how: object) -> object:
        return run(w.mT, sizes, **how)

    return cast(QuantizerFunction, transposed)
