"""A grouped linear layer resolved through the registry: bound functions and the conditions they hold under."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

import octavo_registry as registry
from octavo import Recipe
from octavo.formats import DType
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Direction, Operand, Orientation
from octavo.recipe_base import Gemm
from octavo_registry.contract.cards import Weight
from octavo_registry.contract.gemm import Dgrad, Fprop, InterleaveHalves, Wgrad
from octavo_registry.contract.layer import DelayedScales, WholeLayer
from octavo_registry.contract.moves import TokenRows
from octavo_registry.contract.quantize import AnyBoundQuantize, Quantize, QuantizeInto, QuantizeWithAmax
from octavo_registry.contract.request import GemmRequest, QuantizeRequest
from octavo_registry.contract.weights import readers
from octavo_registry.dispatch.layer_plan import GemmPlan, LayerPlan, QuantizePlan, WgradPlan
from octavo_torch.arrays.checks import BackendNames
from octavo_torch.arrays.dtypes import DTYPE_NAMES, DTYPES
from octavo_torch.arrays.grouped_tensor import PLANES, GroupedTensor
from octavo_torch.arrays.weight_order import order_of
from octavo_torch.compiler.tracing import register_constants
from octavo_torch.dispatch.device import arch_of
from octavo_torch.dispatch.interleaved_weight import Turns, quantizer_in_turns, wgrad_in_turns
from octavo_torch.dispatch.prepared_sizes import shared_prepare
from octavo_torch.dispatch.room import within
from octavo_torch.dispatch.rounded import is_composed
from octavo_torch.dispatch.transposed_weight import (
    QuantizerFunction,
    quantizing_transposed,
    reading_transposed,
    writing_transposed,
)

OPERANDS: tuple[Operand, ...] = ("x", "w", "dy")


class WeightPlanes(NamedTuple):
    """The fields of a weight's codes that each of its GEMMs reads."""

    fprop: tuple[str, ...]
    dgrad: tuple[str, ...]


PLANES_OF: Mapping[Direction, tuple[str, ...]] = {"rowwise": PLANES[:3], "columnwise": PLANES[3:]}
"""The fields of a GroupedTensor that belong to each plane: codes, scales, second level."""

Matrix = Tensor | GroupedTensor
"""An operand of a GEMM: a quantized one, or a plain tensor where its slot is high precision."""

Rows = Matrix | TokenRows[Tensor]
"""A ragged operand of a GEMM, which may be rows of tokens where `Layer.gathers` says so."""

FpropFunction = Fprop[Tensor, Rows]
DgradFunction = Dgrad[Tensor, Rows]
WgradFunction = Wgrad[Tensor, Rows]
QuantizeFunction = Quantize[Tensor, GroupedTensor]


class Layer:
    """What one call of a grouped linear runs, for one dtype, device, weight shape and set of needed gradients.

    token       the registry's state when the layer was resolved
    needs_more  whether each call has to come with a seed or a state
    graph_safe  every plan is one that a CUDA graph may hold
    quantize_*  bound quantizers of exactly the planes that the GEMMs read; None: that operand stays as it is
    quantizers  the plans of those, by operand
    with_amax   the quantizers that also return the amax of each group, by operand, where the backend has them
    w_into      writes w's codes over an earlier result's, where the backend has that
    whole       the two passes as one call each, where one backend serves the whole layer and offers them
    weight      how w lies in memory; `w_order` how the plans take it. Everything here is given w as [G, N, K]; codes of
                it are of matrices in the plans' order
    w_planes    the fields of w's codes that fprop and dgrad read
    block       of a layer from `interleaved`: how many gate and how many up rows take turns; 0: none do
    left        of a layer from `leaving`: multiprocessors that its GEMMs leave to others; 0: none
    """

    __slots__ = (
        "_interleaved",
        "_leaving",
        "at_host",
        "backend",
        "block",
        "columns",
        "device",
        "dgrad",
        "dtype",
        "fprop",
        "graph_safe",
        "groups",
        "left",
        "need_dw",
        "need_dx",
        "needs_more",
        "needs_seed",
        "on_cpu",
        "plan",
        "prepare",
        "quantize_dy",
        "quantize_w",
        "quantize_x",
        "quantized_dgrad",
        "quantized_fprop",
        "quantized_wgrad",
        "quantizers",
        "recipe",
        "row_dtype",
        "stateful",
        "stochastic_forward",
        "token",
        "w_into",
        "w_layouts",
        "w_order",
        "w_planes",
        "weight",
        "weight_shape",
        "wgrad",
        "whole",
        "with_amax",
        "x_layouts",
    )

    def __init__(
        self,
        recipe: Recipe,
        x: Tensor,
        w: Tensor,
        at_host: bool,
        need_dx: bool,
        need_dw: bool,
        backend: BackendNames,
        graph_safe: bool,
    ) -> None:
        register_constants()
        self.token = registry.state_token()
        self.recipe, self.dtype, self.device = recipe, x.dtype, x.device
        self.weight_shape, self.weight = tuple(map(int, w.shape)), order_of(w)
        self.need_dx, self.need_dw, self.backend = need_dx, need_dw, backend
        self.groups, self.columns = int(w.shape[0]), int(w.shape[2])
        self.at_host, self.graph_safe = at_host, graph_safe
        self.on_cpu = x.device.type == "cpu"
        self.stateful = recipe.stateful
        request = self._fprop_request()
        plan = self.plan = _planned(request, backend, recipe.wgrad_dtype or request.in_dtype)
        self.row_dtype = DTYPES[request.out_dtype]
        self.w_order: Weight = plan.fprop.request.weight
        directions = dict(zip(readers("w", self.w_order), PLANES_OF.values(), strict=True))
        self.w_planes = WeightPlanes(directions["fprop"], directions["dgrad"])
        self.block = self.left = 0
        self._set_gemms()
        self.w_layouts = _read_layouts(plan.quantize_w)
        self.x_layouts = plan.quantize_x.request.layouts if plan.quantize_x else None
        self.quantized_fprop, self.quantized_dgrad = recipe.quantizes("fprop"), recipe.quantizes("dgrad")
        self.quantized_wgrad = recipe.quantizes("wgrad")
        row_dy, column = need_dx and self.quantized_dgrad, need_dw and self.quantized_wgrad
        parts: dict[Operand, QuantizePlan | None] = {
            "x": self._quantizer(plan.quantize_x, self.quantized_fprop, column),
            "w": self._quantizer(plan.quantize_w, *self._as_it_lies(self.quantized_fprop, row_dy)),
            "dy": self._quantizer(plan.quantize_dy, row_dy, column),
        }
        self.quantizers = {operand: part for operand, part in parts.items() if part}
        self._set_quantizers()
        read_sizes = (
            plan.fprop, plan.dgrad if need_dx else None, plan.wgrad if need_dw else None, parts["x"], parts["dy"]
        )  # fmt: skip
        self.prepare = shared_prepare(part.prepare for part in read_sizes if part is not None)
        self.stochastic_forward = any(
            part is not None and part.request.quantizer.stochastic for part in (plan.quantize_x, plan.quantize_w)
        )
        self.needs_seed = self.stochastic_forward or (self.quantize_dy is not None and recipe.stochastic)
        self.needs_more = self.needs_seed or self.stateful
        self.whole = self._whole()
        self._leaving: dict[int, Layer] = {}
        self._interleaved: dict[int, Layer] = {}

    def _fprop_request(self) -> GemmRequest:
        name = DTYPE_NAMES[self.dtype]
        return GemmRequest(
            op="fprop",
            framework="torch",
            device=self.device.type,
            in_dtype=name,
            out_dtype=self.recipe.output_dtype or name,
            recipe=self.recipe,
            arch=arch_of(self.device),
            k=self.columns,
            n=self.weight_shape[1],
            groups=self.groups,
            sizes="host" if self.at_host else "device",
            graph_safe=self.graph_safe,
            training=self.need_dx or self.need_dw,
            weight=self.weight,
        )

    def _set_gemms(self) -> None:
        plan = self.plan
        self.fprop: FpropFunction = self._reading(plan.fprop)
        self.dgrad: DgradFunction | None = self._reading(plan.dgrad) if self.need_dx and plan.dgrad else None
        self.wgrad: WgradFunction | None = self._writing(plan.wgrad) if self.need_dw and plan.wgrad else None

    def _reading(self, plan: GemmPlan) -> Callable[..., Tensor]:
        run = self._limited(plan)
        run = reading_transposed(run) if self.w_order == "kn" else run
        return self._turns.reading(run) if self.block else run

    def _writing(self, plan: WgradPlan) -> Callable[..., Tensor]:
        own = wgrad_in_turns(plan, self.block, self.left)
        run = self._limited(plan if own is None else own)
        run = writing_transposed(run) if self.w_order == "kn" else run
        return self._turns.writing(run) if self.block and own is None else run

    def _limited(self, plan: GemmPlan) -> Callable[..., Tensor]:
        return within(plan, self.device, self.left) if self.left else plan.run

    def _set_quantizers(self) -> None:
        own = quantizer_in_turns(self.quantizers.get("w"), self.block, self.w_order)
        self.quantize_x: QuantizeFunction | None
        self.quantize_w: QuantizeFunction | None
        self.quantize_dy: QuantizeFunction | None
        self.quantize_x, self.quantize_w, self.quantize_dy = (
            self._quantizing(operand, own, lambda bound: bound.run) for operand in OPERANDS
        )
        found = {operand: self._quantizing(operand, own, lambda bound: bound.with_amax) for operand in OPERANDS}
        self.with_amax: dict[Operand, QuantizeWithAmax[Tensor, GroupedTensor]] = {
            operand: run for operand, run in found.items() if run is not None
        }
        self.w_into: QuantizeInto[Tensor, GroupedTensor] | None = self._quantizing("w", own, lambda bound: bound.into)

    def _quantizing(
        self,
        operand: Operand,
        own: AnyBoundQuantize | None,
        part: Callable[[AnyBoundQuantize], QuantizerFunction | None],
    ) -> QuantizerFunction | None:
        """One function of the operand's quantizer, which `part` picks; None where the quantizer has none.

        For w it takes [G, N, K] as the caller has it, in whatever order the plan takes it.

        own   the backend's quantizer of interleaved weights; what that lacks is composed
        """
        plan = self.quantizers.get(operand)
        if plan is None or operand != "w":
            return None if plan is None else part(plan.bound)
        in_turns = None if own is None else part(own)
        run = part(plan.bound) if in_turns is None else in_turns
        if run is None:
            return None
        run = quantizing_transposed(run) if self.w_order == "kn" else run
        return self._turns.quantizing(run) if self.block and in_turns is None else run

    def _as_it_lies(self, of_fprop: bool, of_dgrad: bool) -> tuple[bool, bool]:
        """What is said of the planes of w that fprop and dgrad read, as said of its rowwise and columnwise planes."""
        return (of_fprop, of_dgrad) if self.w_order == "nk" else (of_dgrad, of_fprop)

    @property
    def interleave_halves(self) -> InterleaveHalves[Tensor] | None:
        """What takes apart weights whose gate and up rows take turns; None: torch's operations do."""
        return self.plan.fprop.bound.interleave_halves

    @property
    def _turns(self) -> Turns:
        return Turns(self.block, self.interleave_halves)

    def w_halves(self, w: Tensor) -> Tensor:
        """`w` as its codes are of it: with the gate half first, where rows take turns."""
        return self._turns.to_halves(w) if self.block else w

    def takes_tokens(self, operand: Operand) -> bool:
        """Whether the operand's codes are made of tokens where these stand, with no rows of them."""
        plan = self.quantizers.get(operand)
        return plan is not None and plan.bound.of_tokens is not None

    def gathers(self, operand: Operand, *gemms: Gemm) -> bool:
        """Whether these GEMMs read this operand from the tokens themselves; True for GEMMs that are not needed."""
        needed = self._needed
        return all(gemm not in needed or self.plan.reads_tokens(gemm, operand) for gemm in gemms)

    def gathers_codes(self, operand: Operand, gemm: Gemm) -> bool:
        """Whether this layer runs the GEMM, and it reads this operand from the codes of the tokens."""
        return gemm in self._needed and self.plan.reads_codes_of_tokens(gemm, operand)

    @property
    def _needed(self) -> dict[Gemm, GemmPlan]:
        """The GEMMs that this layer runs."""
        gemms: dict[Gemm, GemmPlan | None] = {
            "fprop": self.plan.fprop,
            "dgrad": self.plan.dgrad if self.need_dx else None,
            "wgrad": self.plan.wgrad if self.need_dw else None,
        }
        return {gemm: plan for gemm, plan in gemms.items() if plan is not None}

    def quantizer_of_tokens(self, operand: Operand) -> QuantizePlan:
        """The quantizer of tokens whose codes are gathered, as one matrix: along rows, in the plain layout."""
        request = replace(self.quantizers[operand].request, layouts=(PLAIN, PLAIN), stacked=True)
        return self._narrow(request, "rowwise")

    def _whole(self) -> WholeLayer[Tensor, DelayedScales[Tensor]] | None:
        if self.w_order == "kn":
            return None  # they take contiguous weights [G, N, K]
        fprop, needed = self.plan.fprop, self._needed
        quantizers = self.quantizers.values()
        if {plan.backend for plan in (*needed.values(), *quantizers)} != {fprop.backend}:
            return None
        if any(is_composed(plan.bound) for plan in quantizers):
            return None  # this package rounds to MXFP4, and a whole layer's kernels would not
        make = fprop.bound.whole_layer
        return None if make is None else make(needed, self.quantizers)

    def leaving(self, multiprocessors: int) -> Layer:
        """A copy whose GEMMs leave so many multiprocessors free, see Room; self on a CPU, and for 0."""
        if not multiprocessors or self.device.type != "cuda":
            return self
        layer = self._leaving.get(multiprocessors)
        if layer is None:
            layer = self._composed()
            layer.left = multiprocessors
            layer._set_gemms()
            self._leaving[multiprocessors] = layer
        return layer

    def interleaved(self, block: int) -> Layer:
        """This layer for a weight whose gate and up rows alternate in blocks of `block` rows; self for 0.

        Functions take and return the weight in that order. Its codes are those of the two halves, gate first.
        """
        if not block:
            return self
        layer = self._interleaved.get(block)
        if layer is None:
            layer = self._composed()
            layer.block = block
            layer._set_gemms()
            layer._set_quantizers()
            self._interleaved[block] = layer
        return layer

    def _composed(self) -> Layer:
        """A copy to be changed, which does not run whole."""
        layer = copy(self)
        layer.whole, layer._leaving, layer._interleaved = None, {}, {}
        return layer

    def with_planes(self, planes: Mapping[Operand, tuple[bool, bool]]) -> Layer:
        """This layer where `planes` says of each operand whether its row data and its column data are computed; of w,
        what fprop and what dgrad reads.

        Planes that no GEMM reads are not computed in any case. Such a layer is one of a pair, which quantizes an
        operand once for fprop and once more for its gradients, so that no codes are kept in between.
        """
        layer = self._composed()
        layer.quantizers = dict(self.quantizers)
        for operand, (row, column) in planes.items():
            if operand == "w":
                row, column = self._as_it_lies(row, column)
            plan = layer.quantizers.pop(operand, None)
            directions = () if plan is None else plan.request.quantizer.directions
            plan = self._quantizer(plan, row and "rowwise" in directions, column and "columnwise" in directions)
            if plan is not None:
                layer.quantizers[operand] = plan
                layer.prepare = shared_prepare((layer.prepare, plan.prepare))
        layer._set_quantizers()
        return layer

    def _quantizer(self, plan: QuantizePlan | None, row: bool, column: bool) -> QuantizePlan | None:
        """`plan` for fewer planes where fewer are read: codes that nobody reads are not computed."""
        if plan is None or not (row or column):
            return None
        spec = plan.request.quantizer
        orientation: Orientation = "both" if row and column else "rowwise" if row else "columnwise"
        if spec.orientation == orientation:
            return plan
        return self._narrow(plan.request, orientation)

    def _narrow(self, request: QuantizeRequest, orientation: Orientation) -> QuantizePlan:
        """The plan of the request for these planes alone."""
        quantizer = request.quantizer.with_orientation(orientation)
        return registry.plan(replace(request, quantizer=quantizer), backend=self.backend)


def _planned(request: GemmRequest, backend: BackendNames, wgrad_dtype: DType) -> LayerPlan:
    """The layer's plans, for w as it lies in memory.

    Except where the backend's own kernels round to MXFP4, but only weights [G, N, K]: then the plans are for a
    transposed copy, which costs one pass over w; rounding by this package's operations would cost a dozen.
    """
    plan = registry.plan_layer(request, backend=backend, wgrad_dtype=wgrad_dtype)
    if plan.fprop.request.weight == "nk" or not _is_rounded_here(plan):
        return plan
    transposed = registry.plan_layer(replace(request, weight="nk"), backend=backend, wgrad_dtype=wgrad_dtype)
    return plan if _is_rounded_here(transposed) else transposed


def _is_rounded_here(plan: LayerPlan) -> bool:
    return plan.quantize_w is not None and is_composed(plan.quantize_w.bound)


def _read_layouts(plan: QuantizePlan | None) -> tuple[str | None, str | None] | None:
    """The layouts of the planes that a quantizer's plan computes, None for the others."""
    if plan is None:
        return None
    row, column = plan.request.layouts
    directions = plan.request.quantizer.directions
    return row if "rowwise" in directions else None, column if "columnwise" in directions else None
