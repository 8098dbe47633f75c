"""What a layer is made of: what it was asked for, and the plans that serve it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

import octavo_registry as registry
from octavo import Recipe
from octavo.quantizer import Direction, Operand
from octavo.recipe_base import Gemm
from octavo_registry.contract.cards import Weight
from octavo_registry.contract.request import GemmRequest
from octavo_registry.contract.weights import readers
from octavo_registry.dispatch.layer_plan import GemmPlan, LayerPlan, QuantizePlan
from octavo_torch.arrays.checks import BackendNames
from octavo_torch.arrays.dtypes import DTYPE_NAMES
from octavo_torch.arrays.weight_order import order_of
from octavo_torch.compiler.tracing import register_constants
from octavo_torch.dispatch.device import arch_of
from octavo_torch.dispatch.quantizer_plans import of_planes
from octavo_torch.dispatch.rounded import plan_layer

Planes = tuple[bool, bool]
"""Something about an operand's row data and its column data; of w, about what fprop and what dgrad reads."""


class LayerRequest(NamedTuple):
    """What a layer is planned for.

    dtype, device  of x
    weight_shape   [G, N, K]
    stored_order   the order of w's axes in memory: "nk" for [G, N, K], "kn" for a view of [G, K, N]
    at_host        group sizes are a tensor on the CPU
    graph_safe     every plan has to be one that a CUDA graph may hold
    """

    recipe: Recipe
    dtype: torch.dtype
    device: torch.device
    weight_shape: tuple[int, ...]
    stored_order: Weight
    at_host: bool
    need_dx: bool
    need_dw: bool
    backend: BackendNames
    graph_safe: bool

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        x: Tensor,
        w: Tensor,
        at_host: bool,
        need_dx: bool,
        need_dw: bool,
        backend: BackendNames,
        graph_safe: bool,
    ) -> LayerRequest:
        """For x [M, K] and w [G, N, K]."""
        # under torch.compile(dynamic=True) sizes are symbols
        shape = tuple(map(int, w.shape))
        return cls(recipe, x.dtype, x.device, shape, order_of(w), at_host, need_dx, need_dw, backend, graph_safe)

    @property
    def fprop(self) -> GemmRequest:
        """Its first GEMM's, by which the registry plans the others."""
        name = DTYPE_NAMES[self.dtype]
        groups, n, k = self.weight_shape
        return GemmRequest(
            op="fprop",
            framework="torch",
            device=self.device.type,
            in_dtype=name,
            out_dtype=self.recipe.output_dtype or name,
            recipe=self.recipe,
            arch=arch_of(self.device),
            k=k,
            n=n,
            groups=groups,
            sizes="host" if self.at_host else "device",
            graph_safe=self.graph_safe,
            training=self.need_dx or self.need_dw,
            weight=self.stored_order,
        )


@dataclass(frozen=True)
class LayerSpec:
    """What a `Layer` is made of. A layer that differs in one of these has a spec of its own.

    token       the registry's state when the layer was planned
    plan        of all GEMMs and quantizers that the recipe has
    quantizers  the plans of exactly the planes that the layer's GEMMs read, by operand
    at_once     the directions of each operand's planes that the pass reads which quantizes them, and that nobody keeps
    block       how many gate rows, and how many up rows, follow each other in w; 0: they do not take turns
    left_free   multiprocessors that the GEMMs do not use
    may_be_whole  a backend's own functions may run the two passes as one call each: nothing below the plan was changed
    """

    request: LayerRequest
    token: object
    plan: LayerPlan
    quantizers: Mapping[Operand, QuantizePlan]
    at_once: Mapping[Operand, frozenset[Direction]] = field(default_factory=dict)
    block: int = 0
    left_free: int = 0
    may_be_whole: bool = True

    @classmethod
    def planned(cls, request: LayerRequest) -> LayerSpec:
        """The spec of the layer that serves `request`; NoBackendError where nothing does."""
        register_constants()
        token, recipe, fprop = registry.state_token(), request.recipe, request.fprop
        plan = plan_layer(fprop, request.backend, recipe.wgrad_dtype or fprop.in_dtype)
        of_fprop = recipe.quantizes("fprop")
        of_dgrad = request.need_dx and recipe.quantizes("dgrad")
        of_wgrad = request.need_dw and recipe.quantizes("wgrad")
        parts: dict[Operand, QuantizePlan | None] = {
            "x": of_planes(plan.quantize_x, of_fprop, of_wgrad, request.backend),
            "w": of_planes(plan.quantize_w, *_as_it_lies(plan, (of_fprop, of_dgrad)), request.backend),
            "dy": of_planes(plan.quantize_dy, of_dgrad, of_wgrad, request.backend),
        }
        return cls(request, token, plan, {operand: part for operand, part in parts.items() if part is not None})

    @property
    def needed(self) -> dict[Gemm, GemmPlan]:
        """The GEMMs that the layer runs."""
        gemms: dict[Gemm, GemmPlan | None] = {
            "fprop": self.plan.fprop,
            "dgrad": self.plan.dgrad if self.request.need_dx else None,
            "wgrad": self.plan.wgrad if self.request.need_dw else None,
        }
        return {gemm: plan for gemm, plan in gemms.items() if plan is not None}

    def directions(self, operand: Operand, planes: Planes) -> frozenset[Direction]:
        """The directions of the planes of which `planes` says True."""
        row, column = _as_it_lies(self.plan, planes) if operand == "w" else planes
        named: tuple[tuple[Direction, bool], ...] = (("rowwise", row), ("columnwise", column))
        return frozenset(direction for direction, said in named if said)

    def with_planes(self, planes: Mapping[Operand, Planes]) -> LayerSpec:
        """The spec of a layer that quantizes only those planes of these operands that `planes` says."""
        quantizers = dict(self.quantizers)
        for operand, computed in planes.items():
            plan = quantizers.pop(operand, None)
            directions = self.directions(operand, computed)
            directions &= frozenset(() if plan is None else plan.request.quantizer.directions)
            plan = of_planes(plan, "rowwise" in directions, "columnwise" in directions, self.request.backend)
            if plan is not None:
                quantizers[operand] = plan
        return replace(self, quantizers=quantizers, may_be_whole=False)


def _as_it_lies(plan: LayerPlan, planes: Planes) -> Planes:
    """What is said of the planes of w that fprop and dgrad read, as said of its rowwise and columnwise planes."""
    of_fprop, of_dgrad = planes
    return planes if readers("w", plan.fprop.request.weight)[0] == "fprop" else (of_dgrad, of_fprop)
