"""The operations "fprop", "dgrad" and "wgrad": the three grouped GEMMs of a linear layer.

An operand is a quantized one, or a plain array where the recipe of the request is high precision; rows of such an array
may be `TokenRows` where the answer says so. With weight "kn" in the request w and dw are [G, K, N] in memory, quantized
as they lie; shapes below are those of "nk".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol

from octavo.quantizer import Operand
from octavo_registry.contract.arrays import A, GroupSizes, Operand_contra
from octavo_registry.contract.bound import Bound
from octavo_registry.contract.layer import MakeWholeLayer
from octavo_registry.contract.recording import MakeRecorder
from octavo_registry.contract.request import GemmRequest


class Fprop(Protocol[A, Operand_contra]):
    """y[r] = x[r] @ w[g].T + bias[g] for every row r of group g."""

    def __call__(
        self,
        x: Operand_contra,
        w: Operand_contra,
        group_sizes: GroupSizes,
        /,
        *,
        bias: A | None = None,
        bias_scales: A | None = None,
        out: A | None = None,
    ) -> A:
        """y [M, N] in the request's out_dtype; rows past the sum of the sizes are zero.

        x            [M, K], read rowwise; rows past the sum are not read
        w            [G, N, K], read rowwise ("kn": columnwise)
        bias         [G, N]
        bias_scales  fp32 [M], factors of the bias row by row; given with a bias alone
        out          [M, N], written and returned; a framework whose arrays are immutable refuses it
        """


class Dgrad(Protocol[A, Operand_contra]):
    """dx[r] = dy[r] @ w[g] for every row r of group g."""

    def __call__(self, dy: Operand_contra, w: Operand_contra, group_sizes: GroupSizes, /, *, out: A | None = None) -> A:
        """dx [M, K] in the request's out_dtype; rows past the sum of the sizes are zero.

        dy   [M, N], read rowwise
        w    [G, N, K], read columnwise ("kn": rowwise)
        out  [M, K], written and returned; a framework whose arrays are immutable refuses it
        """


class Wgrad(Protocol[A, Operand_contra]):
    """dw[g] = dy_g.T @ x_g, over the rows of group g."""

    def __call__(
        self,
        x: Operand_contra,
        dy: Operand_contra,
        group_sizes: GroupSizes,
        /,
        *,
        out: A | None = None,
        accumulate: bool = False,
    ) -> A:
        """dw [G, N, K] in the dtype of `out`, or the request's out_dtype; zero for a group without rows.

        x, dy       [M, K] and [M, N], read columnwise
        out         [G, N, K], written and returned; JAX returns the sum, and takes it with `accumulate` alone
        accumulate  adds to `out`; the bits of a group without rows stay as they are
        """


class InterleaveHalves(Protocol[A]):
    """Exchanges rows in two halves, such as those of gate and up, and blocks of rows that take turns."""

    def __call__(self, value: A, block: int, interleave: bool, out: A | None = None, /) -> A:
        """The rows of `value` [R, 2 F, C] in the other order, in its dtype; copies of bits.

        value       contiguous, in any dtype
        block       rows that stay together, a divisor of F
        interleave  from halves to blocks that take turns, the first half's first; False: back
        out         contiguous [R, 2 F, C], written and returned; a framework whose arrays are immutable refuses it
        """


def token_operands(request: GemmRequest, *operands: Operand) -> tuple[Operand, ...]:
    """Those of a GEMM's rows that `takes_tokens` may name: values, and codes along rows that depend on no other row."""
    if not request.recipe.quantizes(request.op):
        return operands
    specs = {operand: request.recipe.quantizer(operand) for operand in operands if request.op != "wgrad"}
    return tuple(operand for operand, spec in specs.items() if spec is not None and spec.independent_rows)


@dataclass(frozen=True, slots=True)
class BoundFprop(Bound[Fprop[A, Operand_contra]], Generic[A, Operand_contra]):
    """The answer to a request for "fprop".

    whole_layer        makes of a layer's plans its passes as one call each way; None: the front end calls the plans
    recorder           makes what writes down the launches of a pass whose plans are all of this backend, so that the
                       front end can make them again on other arrays; None: it calls the plans each time
    limited            the same function, with the same bits, on at most so many multiprocessors of the device at once,
                       1 or more: others are left to what runs beside it. None: the backend leaves none
    takes_tokens       ("x",) where both functions also take `TokenRows` in the place of x, with the same bits as of
                       the rows, and should be given them: of tokens, or, where the recipe quantizes x, of their codes,
                       if a row's codes are its token's (`QuantizerSpec.independent_rows`). Empty: the front end
                       permutes rows, or quantizes them, first
    interleave_halves  takes apart weights whose gate and up rows take turns, and joins their gradients; None: the front
                       end copies by its framework's operations
    """

    whole_layer: MakeWholeLayer | None = field(default=None, kw_only=True)
    recorder: MakeRecorder[A] | None = field(default=None, kw_only=True)
    limited: Callable[[int], Fprop[A, Operand_contra]] | None = field(default=None, kw_only=True)
    takes_tokens: tuple[Operand, ...] = field(default=(), kw_only=True)
    interleave_halves: InterleaveHalves[A] | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class BoundDgrad(Bound[Dgrad[A, Operand_contra]], Generic[A, Operand_contra]):
    """The answer to a request for "dgrad".

    limited       as `BoundFprop` has it
    takes_tokens  likewise, ("dy",)
    """

    limited: Callable[[int], Dgrad[A, Operand_contra]] | None = field(default=None, kw_only=True)
    takes_tokens: tuple[Operand, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True, slots=True)
class BoundWgrad(Bound[Wgrad[A, Operand_contra]], Generic[A, Operand_contra]):
    """The answer to a request for "wgrad".

    limited       as `BoundFprop` has it
    takes_tokens  likewise, of "x" and "dy"; one of them at a time
    interleaved   gets the rows of a block, a divisor of F and less than it, and answers for weights whose gate and up
                  rows take turns in such blocks. Of the answer `run` and `limited` write the rows of dw, and of `out`,
                  in turns, and add to them there; the bits are those of the two halves' dw, and dy's columns are in two
                  halves, the gate first. It answers None for blocks that are not served. No function: the front end
                  joins the halves
    """

    limited: Callable[[int], Wgrad[A, Operand_contra]] | None = field(default=None, kw_only=True)
    takes_tokens: tuple[Operand, ...] = field(default=(), kw_only=True)
    interleaved: Callable[[int], BoundWgrad[A, Operand_contra] | None] | None = field(default=None, kw_only=True)


AnyBoundFprop = BoundFprop[Any, Any]
AnyBoundDgrad = BoundDgrad[Any, Any]
AnyBoundWgrad = BoundWgrad[Any, Any]
