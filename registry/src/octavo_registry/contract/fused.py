"""The operations "act_quantize", "dact_quantize" and "norm_quantize": quantizers that compute what they quantize.

What they compute is within 4 ulp of float64 in fp32, and is rounded once to x's dtype; codes are the definition's of
that, whatever its last bits are. Gated activations take [M, 2 F], the gate first, and give [M, F].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeAlias

from octavo.quantizer import Direction, Operand
from octavo_registry.contract.arrays import A, A_co, A_contra, GroupOffset, GroupSizes, Q, Q_co
from octavo_registry.contract.bound import Bound
from octavo_registry.contract.quantize import TwoForms

Extra = Literal["activated", "amax", "dequantized", "dbias", "dprobs", "mean", "rstd"]
Wanted: TypeAlias = tuple[Extra, ...] | None
"""Names of the `Extras` that the caller reads; the others may be None. None: all that the function has."""

WantedOfGradient: TypeAlias = tuple[Extra | Literal["forward"], ...] | None
"""Names of the `GradientExtras` that the caller reads, likewise."""


class Extras(Protocol[A_co]):
    """What a fused quantizer returns in addition to codes and scales; None where it is not wanted or not computed."""

    @property
    def activated(self) -> A_co | None:
        """[M, C], what was quantized, rounded to x's dtype; rows past the sum of the sizes mean nothing."""

    @property
    def amax(self) -> A_co | None:
        """fp32 [G]: max of the magnitudes of `activated` in each group. Optional where the scaling is not delayed."""

    @property
    def dequantized(self) -> A_co | None:
        """bf16 [M, C]: row codes times their scales, rounded once.

        Optional: where it is wanted and None, the front end computes it.
        """

    @property
    def dbias(self) -> A_co | None:
        """fp32 [G, C], of dact_quantize: column sums of `activated` by group, the same bits each time."""

    @property
    def dprobs(self) -> A_co | None:
        """fp32 [M], of dact_quantize: the gradient of probs, 0 past the sum, the same bits each time.

        Optional: where it is wanted and None, the front end computes it.
        """

    @property
    def mean(self) -> A_co | None:
        """fp32 [M], of norm_quantize by LayerNorm."""

    @property
    def rstd(self) -> A_co | None:
        """fp32 [M], of norm_quantize."""


class ActQuantize(Protocol[A_contra, Q_co]):
    """Quantizes act(x), times `probs` row by row."""

    def __call__(
        self,
        x: A_contra,
        group_sizes: GroupSizes | None = None,
        /,
        *,
        probs: A_contra | None = None,
        seed: int | A_contra | None = None,
        operand: Operand | None = None,
        group_offset: GroupOffset = 0,
        scale: A_contra | None = None,
        wanted: Wanted = None,
    ) -> tuple[Q_co, Extras[Any]]:
        """Codes of [M, F].

        x      [M, F], or [M, 2 F] of a gated activation
        probs  fp32 [M]

        The other arguments are those of `Quantize`.
        """


class DactQuantize(Protocol[A_contra, Q_co]):
    """Quantizes the gradient of x of "act_quantize"."""

    def __call__(
        self,
        dy: A_contra,
        x: A_contra,
        group_sizes: GroupSizes | None = None,
        /,
        *,
        probs: A_contra | None = None,
        seed: int | A_contra | None = None,
        operand: Operand | None = None,
        group_offset: GroupOffset = 0,
        scale: A_contra | None = None,
        wanted: Wanted = None,
    ) -> tuple[Q_co, Extras[Any]]:
        """Codes of x's shape.

        dy     [M, F], the gradient of the result, in x's dtype; multiplied by probs
        x      [M, F], or [M, 2 F] of a gated activation
        probs  fp32 [M]

        The other arguments are those of `Quantize`.
        """


class ActValues(Protocol[A_contra]):
    """act(x), times `probs` row by row, of which nobody reads codes."""

    def __call__(
        self,
        x: A_contra,
        group_sizes: GroupSizes | None = None,
        /,
        *,
        probs: A_contra | None = None,
        wanted: Wanted = None,
    ) -> Extras[Any]:
        """`activated` [M, F], of x and probs as "act_quantize" takes them, and with its bits."""


class GradientExtras(Extras[A_co], Protocol[A_co]):
    """What the gradient's function for values returns: Extras, and the activation that it is the gradient of."""

    @property
    def forward(self) -> A_co | None:
        """[M, F], act(x) times probs: the bits of the activation's function for values.

        Optional: where it is wanted and None, because no one pass makes both, the front end asks for the activation.
        """


class DactValues(Protocol[A_contra]):
    """The gradient of x of "act_quantize", of which nobody reads codes."""

    def __call__(
        self,
        dy: A_contra,
        x: A_contra,
        group_sizes: GroupSizes | None = None,
        /,
        *,
        probs: A_contra | None = None,
        wanted: WantedOfGradient = None,
    ) -> GradientExtras[Any]:
        """`activated` of x's shape, with "dact_quantize"'s bits; `dbias`, `dprobs` and `forward` where wanted."""


class NormQuantize(Protocol[A_contra, Q_co]):
    """Quantizes normalized rows of x."""

    def __call__(
        self,
        x: A_contra,
        gamma: A_contra,
        beta: A_contra | None = None,
        group_sizes: GroupSizes | None = None,
        /,
        *,
        epsilon: float = 1e-6,
        seed: int | A_contra | None = None,
        operand: Operand | None = None,
        group_offset: GroupOffset = 0,
        scale: A_contra | None = None,
        wanted: Wanted = None,
    ) -> tuple[Q_co, Extras[Any]]:
        """Codes of [M, C].

        x        [M, C]
        gamma    [C]
        beta     [C], of LayerNorm
        epsilon  added to the variance

        The other arguments are those of `Quantize`.
        """


@dataclass(frozen=True, slots=True)
class BoundActQuantize(Bound[ActQuantize[A, Q]], Generic[A, Q]):
    """The answer to a request for "act_quantize".

    values        the activation without the quantizer, for callers that read no codes; None: they pass them over
    in_two_forms, multiplied   as `BoundQuantize` has them
    """

    values: ActValues[A] | None = field(default=None, kw_only=True)
    in_two_forms: Callable[[], BoundActQuantize[A, TwoForms[Q]]] | None = field(default=None, kw_only=True)
    multiplied: Callable[[frozenset[Direction]], BoundActQuantize[A, Q]] | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class BoundDactQuantize(Bound[DactQuantize[A, Q]], Generic[A, Q]):
    """The answer to a request for "dact_quantize".

    values        the gradient without the quantizer, which also gives `forward`; None likewise
    in_two_forms, multiplied   as `BoundQuantize` has them
    """

    values: DactValues[A] | None = field(default=None, kw_only=True)
    in_two_forms: Callable[[], BoundDactQuantize[A, TwoForms[Q]]] | None = field(default=None, kw_only=True)
    multiplied: Callable[[frozenset[Direction]], BoundDactQuantize[A, Q]] | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class BoundNormQuantize(Bound[NormQuantize[A, Q]], Generic[A, Q]):
    """The answer to a request for "norm_quantize".

    in_two_forms  as `BoundQuantize` has it
    """

    in_two_forms: Callable[[], BoundNormQuantize[A, TwoForms[Q]]] | None = field(default=None, kw_only=True)


AnyBoundActQuantize = BoundActQuantize[Any, Any]
AnyBoundDactQuantize = BoundDactQuantize[Any, Any]
AnyBoundNormQuantize = BoundNormQuantize[Any, Any]
