"""The operations "quantize", codes and scales of rows or of matrices in the planes and layouts of the request, and
"dequantize", the values of one plane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol

from octavo.quantizer import Direction, Operand
from octavo_registry.contract.arrays import A, A_co, A_contra, GroupOffset, GroupSizes, Q, Q_co, Q_contra
from octavo_registry.contract.bound import Bound
from octavo_registry.contract.cards import Weight
from octavo_registry.contract.request import QuantizeRequest


class Quantize(Protocol[A_contra, Q_co]):
    """The bits are those of `octavo_numerics.quantize`, whoever computes them."""

    def __call__(
        self,
        x: A_contra,
        group_sizes: GroupSizes | None = None,
        /,
        *,
        seed: int | A_contra | None = None,
        operand: Operand | None = None,
        group_offset: GroupOffset = 0,
        scale: A_contra | None = None,
    ) -> Q_co:
        """The quantized operand, in the planes of the request's quantizer and in its layouts.

        x             [M, K] rows, or [G, N, K] matrices where the request is stacked; the request's in_dtype
        group_sizes   of rows; None: matrices, or rows of one group
        seed          of stochastic rounding: an integer or an int64 array []; ignored by other quantizers
        operand       "x", "w" or "dy", which decides the random bits; None: the role of the quantizer
        group_offset  number of the first group, which decides the random bits
        scale         fp32 [G], encode scales of delayed scaling; None for other recipes
        """


class QuantizeWithAmax(Protocol[A, Q_co]):
    """Quantizes and measures in one pass, for delayed scaling."""

    def __call__(
        self,
        x: A,
        group_sizes: GroupSizes | None = None,
        /,
        *,
        seed: int | A | None = None,
        operand: Operand | None = None,
        group_offset: GroupOffset = 0,
        scale: A | None = None,
    ) -> tuple[Q_co, A]:
        """As `Quantize`, and fp32 [G], max |x| of each group: NaN where the group holds one, 0 where it is empty."""


class QuantizeInto(Protocol[A_contra, Q_contra]):
    """Quantizes into the arrays of an earlier result, at their addresses."""

    def __call__(
        self,
        x: A_contra,
        group_sizes: GroupSizes | None = None,
        /,
        *,
        out: Q_contra,
        amax: A_contra | None = None,
        unchanged: A_contra | None = None,
        seed: int | A_contra | None = None,
        operand: Operand | None = None,
        group_offset: GroupOffset = 0,
        scale: A_contra | None = None,
    ) -> None:
        """As `Quantize`, with these arguments in addition.

        out        what `Quantize` returned for an operand of this shape
        amax       fp32 [G], written as `QuantizeWithAmax` returns it; None: it is not wanted
        unchanged  int32 [1] on x's device: where it is not 0, `out` and `amax` are left as they are. It is not read
                   back, so a captured graph may hold the call
        """


class QuantizeTokens(Protocol[A, Q_co]):
    """Quantizes the rows of a router's choices from the tokens, so that nobody writes these rows."""

    def __call__(
        self,
        x: A,
        group_sizes: GroupSizes,
        order: A,
        position: A,
        routed: A,
        /,
        *,
        amax: bool = False,
        seed: int | A | None = None,
        operand: Operand | None = None,
        group_offset: GroupOffset = 0,
        scale: A | None = None,
    ) -> tuple[Q_co, A | None]:
        """Bit for bit what `Quantize` makes of the rows that `PermuteRows` makes of x without weights.

        x                        [T, K] tokens
        group_sizes              that `Route` returned
        order, position, routed  the other results of `Route`
        amax                     the second result is wanted, too: fp32 [G], as `QuantizeWithAmax` returns it

        The other arguments are those of `Quantize`.
        """


class QuantizeMXFP4(Protocol[A_contra, Q_co]):
    """Quantizes weights that an MXFP4 file holds, from its bytes."""

    def __call__(self, blocks: A_contra, scales: A_contra, /, only: Direction | None = None) -> Q_co:
        """Bit for bit what `Quantize` makes of the values, each E2M1 times a power of two, in the request's in_dtype.

        blocks  uint8 [G, N, K / 2], two E2M1 codes per byte, the first of them in the low nibble
        scales  uint8 [G, N, K / 32], E8M0: 2^(scale - 127)
        only    the direction that will be read; the other's plane is there, but may hold anything. None: both are read
        """


class RoundFirst(Protocol[A, Q]):
    """Answers requests whose quantizer rounds to MXFP4's values first, in the kernels that quantize."""

    def __call__(self, request: QuantizeRequest, /) -> BoundQuantize[A, Q] | None:
        """Of `octavo_numerics.quantize`'s bits, as the front end's `rounding_first` composes them; None: not served.

        request  its quantizer's `mxfp4` says along which axis, and in_dtype may be any. Without the rounding it is what
                 was bound: blocks of E4M3, of bf16, which holds the values
        """


class Interleaved(Protocol[A, Q]):
    """Answers for weights whose gate and up rows take turns, quantized where they lie."""

    def __call__(self, block: int, weight: Weight, /) -> BoundQuantize[A, Q] | None:
        """The same quantizer of such matrices, in the planes and layouts of the request; None: not served.

        block   rows that stay together, a divisor of F: `block` rows of the gate, `block` of the up projection, and so
                on; less than F
        weight  which axis of a matrix has the 2 F rows: the first where it is "nk", [G, 2 F, K], the last where it is
                "kn", [G, K, 2 F]

        Of the answer `run`, and where it has them `with_amax` and `into`, take the matrices as they lie. Codes, scales
        and amax are bit for bit those of the two halves, the gate first, as if the rows had been moved in front;
        random bits are those of the places in the halves. Its other parts are not asked for.
        """


class UpdateScales(Protocol[A_contra]):
    """Ends a step of delayed scaling in place, as `octavo_numerics.update_delayed` does for each operand."""

    def __call__(
        self,
        history: A_contra,
        scale: A_contra,
        maxima: Sequence[float],
        /,
        *,
        most_recent: bool,
        reduced: A_contra | None,
    ) -> None:
        """Rolls the histories, and writes the next step's encode scales.

        history      fp32 [operands, slots, G], contiguous; slot 0 collects the amax of the step
        scale        fp32 [operands, G], contiguous
        maxima       of each operand, the largest value of its format times 2^-margin
        most_recent  scales follow the amax of the step; else the largest of the history
        reduced      fp32 [operands, G], the amax of the step over all ranks; None: what slot 0 collected
        """


class TwoForms(NamedTuple, Generic[Q]):
    """A quantized operand in two forms, of each plane of which a compiler makes the one that is read.

    codes       as `Quantize` returns them: to be kept, named or moved
    multiplied  the same planes as the backend's GEMMs multiply them, which read them in the place of codes with the
                same bits. Their layouts are the backend's own, and nobody keeps them
    multiply    makes `multiplied` of codes with these planes, or with one of them: of codes that were kept
    """

    codes: Q
    multiplied: Q
    multiply: Callable[[Q], Q]


class RecordAmax(Protocol[A_contra]):
    """Notes the amax of an operand in delayed scaling's state, in place."""

    def __call__(self, amax: A_contra, history: A_contra, /) -> None:
        """Raises slot 0 of the operand's history, fp32 [slots, G], to amax, fp32 [G], where that is larger and no NaN.

        Both are contiguous.
        """


@dataclass(frozen=True, slots=True)
class BoundQuantize(Bound[Quantize[A, Q]], Generic[A, Q]):
    """The answer to a request for "quantize". Every part except `run` is optional: None where the backend has none.

    with_amax      quantizes and measures in one pass; None: the front end reads the operand once more
    into           writes over an earlier result; None: the front end quantizes anew and copies
    from_plain     plain planes in the layouts of the request, codes and scales unchanged. FSDP2 gathers plain planes
                   and checkpoints hold them; None: weights are gathered as values, and a checkpoint's codes are refused
    to_plain       the way back; None: weights in another layout are not written to a checkpoint
    update_scales  ends a step of delayed scaling; None: the front end's own operations
    record_amax    notes an amax of the step, likewise
    of_tokens      quantizes the rows of a router's choices from the tokens; None: the front end permutes them first
    of_mxfp4       quantizes weights from MXFP4 bytes; None: the front end makes values of them first
    round_first    quantizes weights that are rounded to MXFP4 first; None: the front end rounds by its own operations
    interleaved    quantizes weights whose gate and up rows take turns where they lie; None: the front end takes halves
                   apart first
    in_two_forms   answers with the same quantizer, of which `run` and `of_tokens` return `TwoForms`, the same answer
                   each time; None: the backend's GEMMs multiply codes
    multiplied     for programs that run as they are written: answers with the same quantizer, of which `run` and
                   `of_tokens` return the planes of these directions as `TwoForms.multiplied` has them, where the
                   kernels write them so, and the others as codes. A plane of values has no scale. None likewise
    """

    with_amax: QuantizeWithAmax[A, Q] | None = field(default=None, kw_only=True)
    into: QuantizeInto[A, Q] | None = field(default=None, kw_only=True)
    from_plain: Callable[[Q], Q] | None = field(default=None, kw_only=True)
    to_plain: Callable[[Q], Q] | None = field(default=None, kw_only=True)
    update_scales: UpdateScales[A] | None = field(default=None, kw_only=True)
    record_amax: RecordAmax[A] | None = field(default=None, kw_only=True)
    of_tokens: QuantizeTokens[A, Q] | None = field(default=None, kw_only=True)
    of_mxfp4: QuantizeMXFP4[A, Q] | None = field(default=None, kw_only=True)
    round_first: RoundFirst[A, Q] | None = field(default=None, kw_only=True)
    interleaved: Interleaved[A, Q] | None = field(default=None, kw_only=True)
    in_two_forms: Callable[[], BoundQuantize[A, TwoForms[Q]]] | None = field(default=None, kw_only=True)
    multiplied: Callable[[frozenset[Direction]], BoundQuantize[A, Q]] | None = field(default=None, kw_only=True)


AnyBoundQuantize = BoundQuantize[Any, Any]


# ---- and back


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
