"""What a front end asks for, and what a backend answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol

from octavo import OctavoError, QuantizerSpec, Recipe
from octavo.formats import DType
from octavo.grouped_tensor import PLAIN
from octavo_registry.contract.cards import Activation, Capability, Norm, Op, Weight

Verdict = Literal["chosen", "eligible", "refused", "broken"]


class Refused(OctavoError):
    """A backend cannot serve a request that its card admits; the message is a sentence with both values."""


@dataclass(frozen=True, slots=True)
class Request:
    """One operation that somebody wants to run, with everything a backend needs to accept or refuse it.

    recipe      of a GEMM; `HighPrecision` where the recipe's slot for this GEMM is high precision
    quantizer   of "quantize", "dequantize" and the fused quantizers
    in_dtype    dtype of the unquantized operand; out_dtype of the result (of dequantize's output, too)
    other_dtype dtype of a GEMM's w, or of wgrad's dy, where it is unquantized and not of in_dtype; None: it is
    arch        compute capability of a CUDA device, (9, 0) for Hopper; None elsewhere
    k, n        in-features and out-features; a quantizer sees the columns of what it quantizes as k; None: any
    groups      number of groups; None: any
    stacked     "quantize" of [G, N, K] matrices rather than ragged [M, K] rows
    sizes       where group sizes live: "host" or "device"
    graph_safe  no host sync, no data-dependent allocation, pointer-stable: may be captured
    sharding    mesh-axis roles over which operands are sharded: subset of {"dp", "fsdp", "tp", "ep"}
    layouts     the (rowwise, columnwise) layouts that a quantizer must produce
    weight      of a GEMM: how w and dw lie in memory. "nk": as [G, N, K], fprop reads w's rowwise plane and dgrad its
                columnwise one. "kn": as [G, K, N], quantized as it lies, so fprop reads w's columnwise plane
    activation  of "act_quantize" and "dact_quantize"
    norm        of "norm_quantize"
    """

    op: Op
    framework: str
    device: str
    in_dtype: DType
    out_dtype: DType
    recipe: Recipe | None = None
    quantizer: QuantizerSpec | None = None
    arch: tuple[int, int] | None = None
    k: int | None = None
    n: int | None = None
    groups: int | None = None
    stacked: bool = False
    sizes: Literal["host", "device"] = "device"
    graph_safe: bool = False
    sharding: frozenset[str] = frozenset()
    training: bool = True
    layouts: tuple[str, str] = (PLAIN, PLAIN)
    other_dtype: DType | None = None
    weight: Weight = "nk"
    activation: Activation | None = None
    norm: Norm | None = None

    @property
    def kind(self) -> str:
        """The recipe kind that a capability row is matched with."""
        if self.recipe is not None:
            return self.recipe.kind
        return self.quantizer.scaling if self.quantizer is not None else "high_precision"


@dataclass(frozen=True, slots=True)
class Bound:
    """A backend's answer: the function to call on the hot path, and what it expects.

    run              by op, arrays of the framework:
                     quantize(x, group_sizes, *, seed, operand, group_offset, scale, out) -> GroupedTensor
                     dequantize(q) -> array
                     fprop(x, w, group_sizes, *, bias, bias_scales, out) -> y
                     dgrad(dy, w, group_sizes, *, out) -> dx
                     wgrad(x, dy, group_sizes, *, out, accumulate) -> dw
                     act_quantize(x, group_sizes, *, probs, ...) -> (GroupedTensor, Extras)
                     dact_quantize(dy, x, group_sizes, *, probs, ...) -> (GroupedTensor, Extras)
                     norm_quantize(x, gamma, beta, group_sizes, *, epsilon, ...) -> (GroupedTensor, Extras)
                     route(expert_index, groups) -> (group_sizes, order, position, routed)
                     permute_rows(x, order, position, routed, weights) -> rows
                     combine_rows(rows, position, routed, weights) -> y
                     dot_rows(rows, dy, position, routed) -> products
                     where ... is seed, operand, group_offset, scale, as "quantize" has them.
                     An operand is a GroupedTensor, or a plain array where the recipe is high precision.
                     `operand` is "x", "w" or "dy"; every keyword has a default that means "not given" (epsilon: 1e-6).
                     Extras has fields `activated` [M, C] (what was quantized, rounded once to x's dtype; rows past the
                     sum mean nothing), `amax` fp32 [G] or None, `dbias` fp32 [G, C] of "dact_quantize" (column sums of
                     `activated`, the same each time), `rstd` fp32 [M] of "norm_quantize" and `mean` fp32 [M] of
                     "layer". A fused function may take one keyword more, `wanted`: names of the Extras that the
                     caller reads; others may then be None.
                     T tokens with k choices are T k rows. `route` sorts expert_index [T, k] stably by group, numbers
                     outside 0 to groups - 1 last, routed nowhere: int64 group_sizes [G], int64 order [T k] (the choice
                     of each row), its inverse position [T, k] and bool routed [T, k]. rows[position[t, j]] is
                     weights[t, j] x[t] rounded once, or x[t], and zero where routed nowhere; y[t] sums weights[t, j]
                     rows[position[t, j]] in fp32 in the order of j, without those, rounded once; fp32 products [T, k]
                     are rows[position[t, j]] . dy[t], the gradient of weights, and zero there. weights are fp32 [T, k]
                     or None; results have the dtype of rows, and no order of threads shows in them.
    layouts          layout in which each quantized operand ("x", "w", "dy") must arrive; absent: plain
    workspace_bytes  scratch that the caller provides
    note             one clause for people, such as "emulated: bf16 products of dequantized operands"
    prepare          (group_sizes, rows, like) -> what `run` may be given in the sizes' place; its `group_sizes` are
                     int64 [G] on `like`'s device, cut to `rows`, in memory of their own. A front end calls it once for
                     a layer's call where all operations on rows have an equal one. None: sizes as they are
    run_with_amax    of "quantize": as `run` without `out`, returning the GroupedTensor and fp32 [G] max |x| of each
                     group: NaN where it holds one, 0 where it is empty. Delayed scaling records it. None: the front
                     end reads the operand once more for it
    whole_layer      of "fprop": (gemms, quantizers) -> the layer's forward and its backward as one call each, in the
                     front end's form (octavo_torch.linear.whole.WholeLayer), or None; the plans, by "fprop" and "x",
                     are those that the layer runs, all of them this backend's. None: the front end calls them
    update_scales    of "quantize" with delayed scaling: (history, scale, maxima, *, most_recent, reduced) ends a step
                     in place, as octavo_numerics.update_delayed does for each of the operands: history
                     [operands, slots, G] and scale [operands, G], contiguous fp32, maxima numbers, reduced
                     [operands, G] or None. None: the front end's own operations
    """

    run: Callable[..., Any]
    layouts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    workspace_bytes: int = 0
    note: str = ""
    prepare: Callable[..., Any] | None = None
    run_with_amax: Callable[..., Any] | None = None
    whole_layer: Callable[..., Any] | None = None
    update_scales: Callable[..., Any] | None = None


class Backend(Protocol):
    """What `octavo_load` returns.

    Optional, since API level 2: `kernels(request, rows) -> tuple[KernelChoice, ...]`, as
    `octavo_registry.contract.kernels.KernelModel` has it, for `octavo why --kernels`.
    """

    def refuses(self, request: Request) -> str | None:
        """The reason why this machine cannot serve `request`, or None; the card has admitted it already."""

    def bind(self, request: Request) -> Bound:
        """The function that serves `request`; may raise `Refused`."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One backend's verdict on a request."""

    backend: str
    distribution: str
    version: str
    verdict: Verdict
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """A request bound to the backend that serves it. `run` is the hot path; nothing else here is. Printable.

    capability   the row of the backend's card that admitted the request: how it accumulates, what it emulates
    prepare      the Bound's: makes of group sizes what `run` takes in their place, for a whole call of a layer
    run_with_amax  the Bound's: quantizes and returns the groups' amax, too
    whole_layer  the Bound's: a layer of such plans in one call each way
    update_scales  the Bound's: delayed scaling's next scales in one call
    """

    request: Request
    backend: str
    run: Callable[..., Any]
    layouts: Mapping[str, str]
    workspace_bytes: int
    note: str
    decisions: tuple[Decision, ...]
    capability: Capability | None = None
    prepare: Callable[..., Any] | None = None
    run_with_amax: Callable[..., Any] | None = None
    whole_layer: Callable[..., Any] | None = None
    update_scales: Callable[..., Any] | None = None

    def __str__(self) -> str:
        from octavo_registry.dispatch.report import describe_plan

        return describe_plan(self)
