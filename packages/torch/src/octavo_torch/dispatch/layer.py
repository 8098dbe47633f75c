"""A grouped linear layer resolved through the registry: bound functions and the conditions they hold under."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple, TypeVar

from torch import Tensor

from octavo.quantizer import Operand
from octavo.recipe_base import Gemm
from octavo_registry.contract.cards import Weight
from octavo_registry.contract.gemm import InterleaveHalves
from octavo_registry.contract.layer import DelayedScales, WholeLayer
from octavo_registry.contract.plan import Plan
from octavo_registry.contract.quantize import QuantizeInto, QuantizeTokens, QuantizeWithAmax
from octavo_registry.contract.weights import readers
from octavo_registry.dispatch.layer_plan import GemmPlan
from octavo_torch.arrays.dtypes import DTYPES
from octavo_torch.arrays.grouped_tensor import PLANES_OF, GroupedTensor
from octavo_torch.dispatch.layer_functions import (
    DgradFunction,
    FpropFunction,
    LayerFunctions,
    QuantizeFunction,
    QuantizerFunctions,
    WgradFunction,
)
from octavo_torch.dispatch.layer_spec import LayerSpec, Planes
from octavo_torch.dispatch.prepared_sizes import PrepareFunction, shared_prepare
from octavo_torch.dispatch.quantizer_plans import computed_layouts
from octavo_torch.dispatch.rounded import is_composed

AnyPlan = TypeVar("AnyPlan", bound=Plan)


class WeightPlanes(NamedTuple):
    """The fields of a weight's codes that each of its GEMMs reads."""

    fprop: tuple[str, ...]
    dgrad: tuple[str, ...]


class Layer:
    """What one call of a grouped linear runs, for one dtype, device, weight shape and set of needed gradients.

    A layer is made of its spec and does not change; what its spec and its spec's request say is not said again here.

    needs_more  whether each call has to come with a seed or a state
    quantize_*  bound quantizers of exactly the planes that the GEMMs read; None: that operand stays as it is
    of_tokens   the quantizers of rows that a router's choices make of tokens, by operand, where the backend has them
    with_amax   the quantizers that also return the amax of each group, by operand, where the backend has them
    w_into      writes w's codes over an earlier result's, where the backend has that
    whole       the two passes as one call each, where one backend serves the whole layer and offers them
    w_order     the order in which the plans take w, and of which its codes are. The functions here take [G, N, K]
                whatever the orders are
    w_planes    the fields of w's codes that fprop and dgrad read
    """

    __slots__ = (
        "_functions",
        "_interleaved",
        "_leaving",
        "at_host",
        "backend",
        "columns",
        "device",
        "dgrad",
        "dtype",
        "fprop",
        "graph_safe",
        "groups",
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
        "spec",
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

    def __init__(self, spec: LayerSpec) -> None:
        request, plan = spec.request, spec.plan
        recipe = request.recipe
        self.spec, self.token, self.plan, self.quantizers = spec, spec.token, plan, spec.quantizers
        self.recipe, self.dtype, self.device = recipe, request.dtype, request.device
        self.weight_shape, self.stored_order = request.weight_shape, request.stored_order
        self.need_dx, self.need_dw, self.backend = request.need_dx, request.need_dw, request.backend
        self.at_host, self.graph_safe = request.at_host, request.graph_safe
        self.groups, _, self.columns = request.weight_shape
        self.on_cpu = request.device.type == "cpu"
        self.stateful = recipe.stateful
        self.row_dtype = DTYPES[plan.fprop.request.out_dtype]
        self.w_order: Weight = plan.fprop.request.weight
        directions = dict(zip(readers("w", self.w_order), PLANES_OF.values(), strict=True))
        self.w_planes = WeightPlanes(directions["fprop"], directions["dgrad"])
        self.w_layouts = computed_layouts(plan.quantize_w)
        self.x_layouts = plan.quantize_x.request.layouts if plan.quantize_x else None
        self.quantized_fprop, self.quantized_dgrad = recipe.quantizes("fprop"), recipe.quantizes("dgrad")
        self.quantized_wgrad = recipe.quantizes("wgrad")
        self._functions = LayerFunctions(self.w_order, spec.block, self.interleave_halves, self.device, spec.left_free)
        self._set_gemms()
        self._set_quantizers()
        self.prepare = self._shared_prepare()
        self.stochastic_forward = any(
            part is not None and part.request.quantizer.stochastic for part in (plan.quantize_x, plan.quantize_w)
        )
        self.needs_seed = self.stochastic_forward or (recipe.stochastic and self._quantizes_dy())
        self.needs_more = self.needs_seed or self.stateful
        self.whole = self._whole()
        self._leaving: dict[int, Layer] = {}
        self._interleaved: dict[int, Layer] = {}

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
        runs = {operand: functions.run for operand, functions in found.items()}
        self.quantize_x: QuantizeFunction | None = runs.get("x")
        self.quantize_w: QuantizeFunction | None = runs.get("w")
        self.quantize_dy: QuantizeFunction | None = runs.get("dy")
        self.of_tokens: dict[Operand, QuantizeTokens[Tensor, GroupedTensor]] = {
            operand: plan.bound.of_tokens for operand, plan in plans.items() if plan.bound.of_tokens is not None
        }
        self.with_amax: dict[Operand, QuantizeWithAmax[Tensor, GroupedTensor]] = {
            operand: functions.with_amax for operand, functions in found.items() if functions.with_amax is not None
        }
        self.w_into: QuantizeInto[Tensor, GroupedTensor] | None = found["w"].into if "w" in found else None

    def _shared_prepare(self) -> PrepareFunction | None:
        of_rows = [plan for operand, plan in self.quantizers.items() if operand != "w"]
        return shared_prepare(part.prepare for part in (*self.needed.values(), *of_rows))

    def _quantizes_dy(self) -> bool:
        read = (self.need_dx and self.quantized_dgrad) or (self.need_dw and self.quantized_wgrad)
        return read and self.plan.quantize_dy is not None

    def multiplied(self, operand: Operand, plan: AnyPlan) -> AnyPlan:
        """`plan`, a quantizer's of this operand, with the answer that writes the planes that are read at once as GEMMs
        multiply them; as it is where its backend has none, or does not run all GEMMs."""
        quantizer = plan.request.quantizer
        assert quantizer is not None  # of a quantizer
        directions = self.spec.at_once.get(operand, frozenset()) & frozenset(quantizer.directions)
        make = getattr(plan.bound, "multiplied", None)
        if not directions or make is None or any(gemm.backend != plan.backend for gemm in self.needed.values()):
            return plan
        return replace(plan, bound=make(directions))

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
        return self.spec.needed

    def _whole(self) -> WholeLayer[Tensor, DelayedScales[Tensor]] | None:
        if not self.spec.may_be_whole or self.w_order == "kn":
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
        """A layer whose GEMMs leave so many multiprocessors free, see Room; self on a CPU, and for 0."""
        if not multiprocessors or self.device.type != "cuda":
            return self
        layer = self._leaving.get(multiprocessors)
        if layer is None:
            layer = Layer(replace(self.spec, left_free=multiprocessors, may_be_whole=False))
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
            layer = self._interleaved[block] = Layer(replace(self.spec, block=block, may_be_whole=False))
        return layer

    def with_planes(self, planes: Mapping[Operand, Planes]) -> Layer:
        """This layer where `planes` says which planes are computed, of those that a GEMM reads.

        Such a layer is one of a pair, which quantizes an operand once for fprop and once more for its gradients, so
        that no codes are kept in between.
        """
        return Layer(self.spec.with_planes(planes))

    def reading_at_once(self, planes: Mapping[Operand, Planes]) -> Layer:
        """This layer where `planes` says which planes are read in the pass that quantizes them, and kept by nobody."""
        at_once = {operand: self.spec.directions(operand, read) for operand, read in planes.items()}
        return self if at_once == self.spec.at_once else Layer(replace(self.spec, at_once=at_once, may_be_whole=False))
