"""A grouped linear layer resolved through the registry: bound functions and the conditions they hold under."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import NamedTuple, TypeVar

from torch import Tensor

import octavo_registry as registry
from octavo import Recipe
from octavo.quantizer import Direction, Operand
from octavo.recipe_base import Gemm
from octavo_registry.contract.cards import Weight
from octavo_registry.contract.gemm import InterleaveHalves
from octavo_registry.contract.layer import DelayedScales, WholeLayer
from octavo_registry.contract.plan import Plan
from octavo_registry.contract.quantize import QuantizeInto, QuantizeTokens, QuantizeWithAmax
from octavo_registry.contract.request import GemmRequest
from octavo_registry.contract.weights import readers
from octavo_registry.dispatch.layer_plan import GemmPlan, QuantizePlan
from octavo_torch.arrays.checks import BackendNames
from octavo_torch.arrays.dtypes import DTYPE_NAMES, DTYPES
from octavo_torch.arrays.grouped_tensor import PLANES_OF, GroupedTensor
from octavo_torch.arrays.weight_order import order_of
from octavo_torch.compiler.tracing import register_constants
from octavo_torch.dispatch.device import arch_of
from octavo_torch.dispatch.layer_functions import (
    DgradFunction,
    FpropFunction,
    LayerFunctions,
    QuantizeFunction,
    QuantizerFunctions,
    WgradFunction,
)
from octavo_torch.dispatch.prepared_sizes import shared_prepare
from octavo_torch.dispatch.quantizer_plans import computed_layouts, of_planes
from octavo_torch.dispatch.rounded import is_composed, plan_layer

OPERANDS: tuple[Operand, ...] = ("x", "w", "dy")

Planes = tuple[bool, bool]
"""Something about an operand's row data and its column data; of w, about what fprop and what dgrad reads."""

AnyPlan = TypeVar("AnyPlan", bound=Plan)


class WeightPlanes(NamedTuple):
    """The fields of a weight's codes that each of its GEMMs reads."""

    fprop: tuple[str, ...]
    dgrad: tuple[str, ...]


class Layer:
    """What one call of a grouped linear runs, for one dtype, device, weight shape and set of needed gradients.

    token       the registry's state when the layer was resolved
    needs_more  whether each call has to come with a seed or a state
    graph_safe  every plan is one that a CUDA graph may hold
    quantize_*  bound quantizers of exactly the planes that the GEMMs read; None: that operand stays as it is
    quantizers  the plans of those, by operand
    at_once     of a layer from `reading_at_once`: the directions of each operand's planes that the pass reads which
                quantizes them, and that nobody keeps; else empty
    of_tokens   the quantizers of rows that a router's choices make of tokens, by operand, where the backend has them
    with_amax   the quantizers that also return the amax of each group, by operand, where the backend has them
    w_into      writes w's codes over an earlier result's, where the backend has that
    whole       the two passes as one call each, where one backend serves the whole layer and offers them
    stored_order  the order of w's axes in memory: "nk" for [G, N, K], "kn" for a view of [G, K, N]
    w_order     the order in which the plans take w, and of which its codes are. The functions here take [G, N, K]
                whatever the orders are
    w_planes    the fields of w's codes that fprop and dgrad read
    block       of a layer from `interleaved`: how many gate rows, and how many up rows, follow each other; else 0
    left_free   of a layer from `leaving`: multiprocessors that its GEMMs do not use; else 0
    """

    __slots__ = (
        "_interleaved",
        "_leaving",
        "at_host",
        "at_once",
        "backend",
        "block",
        "columns",
        "device",
        "dgrad",
        "dtype",
        "fprop",
        "graph_safe",
        "groups",
        "left_free",
        "need_dw",
        "need_dx",
        "needs_more",
        "needs_seed",
        "of_tokens",
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
        "stored_order",
        "token",
        "w_into",
        "w_layouts",
        "w_order",
        "w_planes",
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
        self.weight_shape, self.stored_order = tuple(map(int, w.shape)), order_of(w)
        self.need_dx, self.need_dw, self.backend = need_dx, need_dw, backend
        self.groups, self.columns = int(w.shape[0]), int(w.shape[2])
        self.at_host, self.graph_safe = at_host, graph_safe
        self.on_cpu = x.device.type == "cpu"
        self.stateful = recipe.stateful
        request = self._fprop_request()
        plan = self.plan = plan_layer(request, backend, recipe.wgrad_dtype or request.in_dtype)
        self.row_dtype = DTYPES[request.out_dtype]
        self.w_order: Weight = plan.fprop.request.weight
        directions = dict(zip(readers("w", self.w_order), PLANES_OF.values(), strict=True))
        self.w_planes = WeightPlanes(directions["fprop"], directions["dgrad"])
        self.block = self.left_free = 0
        self._set_gemms()
        self.w_layouts = computed_layouts(plan.quantize_w)
        self.x_layouts = plan.quantize_x.request.layouts if plan.quantize_x else None
        self.quantized_fprop, self.quantized_dgrad = recipe.quantizes("fprop"), recipe.quantizes("dgrad")
        self.quantized_wgrad = recipe.quantizes("wgrad")
        row_dy, column = need_dx and self.quantized_dgrad, need_dw and self.quantized_wgrad
        parts: dict[Operand, QuantizePlan | None] = {
            "x": of_planes(plan.quantize_x, self.quantized_fprop, column, backend),
            "w": of_planes(plan.quantize_w, *self._as_it_lies(self.quantized_fprop, row_dy), backend),
            "dy": of_planes(plan.quantize_dy, row_dy, column, backend),
        }
        self.quantizers = {operand: part for operand, part in parts.items() if part}
        self.at_once: dict[Operand, frozenset[Direction]] = {}
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
            weight=self.stored_order,
        )

    @property
    def _functions(self) -> LayerFunctions:
        return LayerFunctions(self.w_order, self.block, self.interleave_halves, self.device, self.left_free)

    def _set_gemms(self) -> None:
        plan, of = self.plan, self._functions
        self.fprop: FpropFunction = of.reading(plan.fprop)
        self.dgrad: DgradFunction | None = of.reading(plan.dgrad) if self.need_dx and plan.dgrad else None
        self.wgrad: WgradFunction | None = of.writing(plan.wgrad) if self.need_dw and plan.wgrad else None

    def _set_quantizers(self) -> None:
        plans = {operand: self.multiplied(operand, plan) for operand, plan in self.quantizers.items()}
        found: dict[Operand, QuantizerFunctions] = {
            operand: self._functions.quantizing(plan) if operand == "w" else QuantizerFunctions.of(plan.bound)
            for operand, plan in plans.items()
        }
        self.of_tokens: dict[Operand, QuantizeTokens[Tensor, GroupedTensor]] = {
            operand: plan.bound.of_tokens for operand, plan in plans.items() if plan.bound.of_tokens is not None
        }
        self.quantize_x: QuantizeFunction | None
        self.quantize_w: QuantizeFunction | None
        self.quantize_dy: QuantizeFunction | None
        self.quantize_x, self.quantize_w, self.quantize_dy = (
            found[operand].run if operand in found else None for operand in OPERANDS
        )
        self.with_amax: dict[Operand, QuantizeWithAmax[Tensor, GroupedTensor]] = {
            operand: functions.with_amax for operand, functions in found.items() if functions.with_amax is not None
        }
        self.w_into: QuantizeInto[Tensor, GroupedTensor] | None = found["w"].into if "w" in found else None

    def multiplied(self, operand: Operand, plan: AnyPlan) -> AnyPlan:
        """`plan`, a quantizer's of this operand, with the answer that writes the planes in `at_once` as GEMMs multiply
        them; as it is where its backend has none, or does not run all GEMMs."""
        spec = plan.request.quantizer
        assert spec is not None  # of a quantizer
        directions = self.at_once.get(operand, frozenset()) & frozenset(spec.directions)
        make = getattr(plan.bound, "multiplied", None)
        if not directions or make is None or any(gemm.backend != plan.backend for gemm in self.needed.values()):
            return plan
        return replace(plan, bound=make(directions))

    def _as_it_lies(self, of_fprop: bool, of_dgrad: bool) -> tuple[bool, bool]:
        """What is said of the planes of w that fprop and dgrad read, as said of its rowwise and columnwise planes."""
        return (of_fprop, of_dgrad) if self.w_order == "nk" else (of_dgrad, of_fprop)

    @property
    def interleave_halves(self) -> InterleaveHalves[Tensor] | None:
        """What takes apart weights whose gate and up rows take turns; None: torch's operations do."""
        return self.plan.fprop.bound.interleave_halves

    def w_halves(self, w: Tensor) -> Tensor:
        """`w` as its codes have it: with the gate half first, where gate and up rows are interleaved."""
        return self._functions.halves(w)

    @property
    def needed(self) -> dict[Gemm, GemmPlan]:
        """The GEMMs that this layer runs."""
        gemms: dict[Gemm, GemmPlan | None] = {
            "fprop": self.plan.fprop,
            "dgrad": self.plan.dgrad if self.need_dx else None,
            "wgrad": self.plan.wgrad if self.need_dw else None,
        }
        return {gemm: plan for gemm, plan in gemms.items() if plan is not None}

    def _whole(self) -> WholeLayer[Tensor, DelayedScales[Tensor]] | None:
        if self.w_order == "kn":
            return None  # they take contiguous weights [G, N, K]
        fprop, needed = self.plan.fprop, self.needed
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
            layer.left_free = multiprocessors
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

    def _directions(self, operand: Operand, planes: Planes) -> frozenset[Direction]:
        """The directions of the planes of which `planes` says True."""
        row, column = self._as_it_lies(*planes) if operand == "w" else planes
        named: tuple[tuple[Direction, bool], ...] = (("rowwise", row), ("columnwise", column))
        return frozenset(direction for direction, said in named if said)

    def with_planes(self, planes: Mapping[Operand, Planes]) -> Layer:
        """This layer where `planes` says which planes are computed, of those that a GEMM reads.

        Such a layer is one of a pair, which quantizes an operand once for fprop and once more for its gradients, so
        that no codes are kept in between.
        """
        layer = self._composed()
        layer.quantizers = dict(self.quantizers)
        for operand, computed in planes.items():
            plan = layer.quantizers.pop(operand, None)
            directions = self._directions(operand, computed)
            directions &= frozenset(() if plan is None else plan.request.quantizer.directions)
            plan = of_planes(plan, "rowwise" in directions, "columnwise" in directions, self.backend)
            if plan is not None:
                layer.quantizers[operand] = plan
                layer.prepare = shared_prepare((layer.prepare, plan.prepare))
        layer._set_quantizers()
        return layer

    def reading_at_once(self, planes: Mapping[Operand, Planes]) -> Layer:
        """This layer where `planes` says which planes are read in the pass that quantizes them, and kept by nobody."""
        at_once = {operand: self._directions(operand, read) for operand, read in planes.items()}
        if at_once == self.at_once:
            return self
        layer = self._composed()
        layer.at_once = at_once
        layer._set_quantizers()
        return layer
