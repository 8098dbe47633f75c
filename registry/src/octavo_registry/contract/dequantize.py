"""The operation "dequantize": the values of one plane."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Protocol

from octavo.quantizer import Direction
from octavo_registry.contract.arrays import A, A_co, Q, Q_contra
from octavo_registry.contract.bound import Bound


class Dequantize(Protocol[Q_contra, A_co]):
    """Each code times its scales, exact in fp32, rounded once to the request's out_dtype."""

    def __call__(self, q: Q_contra, direction: Direction = "rowwise", /) -> A_co:
        """The values of a plane that `q` has, in its logical shape; zeros in rows past the sum of the sizes.

        Columnwise data in the Hadamard domain stay there: [block_bound(M, G, 16) * 16, K], each group padded to 16.
        """


@dataclass(frozen=True, slots=True)
class BoundDequantize(Bound[Dequantize[Q, A]], Generic[Q, A]):
    """The answer to a request for "dequantize": the function alone."""


AnyBoundDequantize = BoundDequantize[Any, Any]
