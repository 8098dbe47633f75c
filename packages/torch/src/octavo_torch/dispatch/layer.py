"""A grouped linear layer resolved through the registry: bound functions and the conditions they hold under."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

import octavo_registry as registry
from octavo import QuantizerSpec, Recipe
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Operand
from octavo_registry.contract.request import Plan, Request
from octavo_torch.arrays.checks import check_recipe
from octavo_torch.arrays.dtypes import DTYPE_NAMES, DTYPES
from octavo_torch.compiler.tracing import register_constants
from octavo_torch.dispatch.device import arch_of
from octavo_torch.memo import Bounded, Memo

if TYPE_CHECKING:
    from octavo_torch.dispatch.whole_layer import WholeLayer

OPERANDS: tuple[Operand, ...] = ("x", "w", "dy")

Run = Callable[..., Any]
Names = str | Sequence[str] | None


class Layer:
    """What one call of a grouped linear runs, for one dtype, device, weight shape and set of wanted gradients.

    token       the registry's state when it was resolved
    wants_more  a seed or a state has to come with each call
    graph_safe  only plans that a CUDA graph may hold were asked for
    quantize_*  bound quantizers making just the planes that the wanted GEMMs read; None: that operand stays as it is
    quantizers  the plans of those, by operand
    with_amax   those operands' quantizers that return the groups' amax beside the codes, where the backend has one
    whole       the two passes as one call each, where one backend serves the whole layer and offers them
    """

    __slots__ = (
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
        "w_layouts",
        "wants_more",
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
        backend: Names,
        graph_safe: bool,
    ) -> None:
        register_constants()
        self.token = registry.state_token()
        self.recipe, self.dtype, self.device, self.weight_shape = recipe, x.dtype, x.device, w.shape
        self.need_dx, self.need_dw, self.backend = need_dx, need_dw, backend
        self.groups, self.columns = int(w.shape[0]), int(w.shape[2])
        self.at_host, self.graph_safe = at_host, graph_safe
        self.on_cpu = x.device.type == "cpu"
        self.stateful = recipe.stateful
        name = DTYPE_NAMES[x.dtype]
        request = Request(
            op="fprop",
            framework="torch",
            device=x.device.type,
            in_dtype=name,
            out_dtype=recipe.output_dtype or name,
            recipe=recipe,
            arch=arch_of(x.device),
            k=self.columns,
            n=int(w.shape[1]),
            groups=self.groups,
            sizes="host" if at_host else "device",
            graph_safe=graph_safe,
            training=need_dx or need_dw,
        )
        plan = self.plan = registry.plan_layer(request, backend=backend, wgrad_dtype=recipe.wgrad_dtype or name)
        self.row_dtype = DTYPES[request.out_dtype]
        self.fprop: Run = plan.fprop.run
        self.dgrad: Run | None = plan.dgrad.run if need_dx and plan.dgrad else None
        self.wgrad: Run | None = plan.wgrad.run if need_dw and plan.wgrad else None
        self.w_layouts = _read_layouts(plan.quantize_w)
        self.x_layouts = plan.quantize_x.request.layouts if plan.quantize_x else None
        self.quantized_fprop, self.quantized_dgrad = recipe.quantizes("fprop"), recipe.quantizes("dgrad")
        self.quantized_wgrad = recipe.quantizes("wgrad")
        row_dy, column = need_dx and self.quantized_dgrad, need_dw and self.quantized_wgrad
        parts: dict[Operand, Plan | None] = {
            "x": self._quantizer(plan.quantize_x, self.quantized_fprop, column),
            "w": self._quantizer(plan.quantize_w, self.quantized_fprop, row_dy),
            "dy": self._quantizer(plan.quantize_dy, row_dy, column),
        }
        self.quantizers = {name: part for name, part in parts.items() if part}
        self.quantize_x, self.quantize_w, self.quantize_dy = (self._run(operand) for operand in OPERANDS)
        self.with_amax = {name: part.run_with_amax for name, part in self.quantizers.items() if part.run_with_amax}
        gemms = (plan.fprop, plan.dgrad if need_dx else None, plan.wgrad if need_dw else None)
        prepares = [part.prepare for part in (*gemms, parts["x"], parts["dy"]) if part is not None]
        # sizes that one backend prepared are nothing to another
        self.prepare: Run | None = prepares[0] if prepares.count(prepares[0]) == len(prepares) else None
        self.stochastic_forward = any(
            part is not None and part.request.quantizer is not None and part.request.quantizer.stochastic
            for part in (plan.quantize_x, plan.quantize_w)
        )
        self.needs_seed = self.stochastic_forward or (self.quantize_dy is not None and recipe.stochastic)
        self.wants_more = self.needs_seed or self.stateful
        self.whole = self._whole()

    def _run(self, operand: Operand) -> Run | None:
        plan = self.quantizers.get(operand)
        return None if plan is None else plan.run

    def _whole(self) -> WholeLayer | None:
        fprop, dgrad, wgrad = self.plan.fprop, self.plan.dgrad, self.plan.wgrad
        gemms = {"fprop": fprop, "dgrad": dgrad if self.need_dx else None, "wgrad": wgrad if self.need_dw else None}
        wanted = {gemm: plan for gemm, plan in gemms.items() if plan is not None}
        if {plan.backend for plan in (*wanted.values(), *self.quantizers.values())} != {fprop.backend}:
            return None
        whole: WholeLayer | None = None if fprop.whole_layer is None else fprop.whole_layer(wanted, self.quantizers)
        return whole

    def _quantizer(self, plan: Plan | None, row: bool, column: bool) -> Plan | None:
        """`plan` for fewer planes where fewer are read: codes that nobody reads are not made."""
        if plan is None or not (row or column):
            return None
        spec = plan.request.quantizer
        assert spec is not None
        orientation = "both" if row and column else "rowwise" if row else "columnwise"
        if spec.orientation == orientation:
            return plan
        narrow = QuantizerSpec(**{**dict(spec), "orientation": orientation})
        return registry.plan(replace(plan.request, quantizer=narrow), backend=self.backend)


def _read_layouts(plan: Plan | None) -> tuple[str | None, str | None] | None:
    """The layouts that a quantizer's plan makes, None for a plane that it does not."""
    if plan is None or plan.request.quantizer is None:
        return None
    row, column = plan.request.layouts
    made = plan.request.quantizer.directions
    return row if "rowwise" in made else None, column if "columnwise" in made else None


LayerKey = tuple[int, bool, bool, bool]
"""The id of a recipe, whether dx and dw are needed, whether plans have to be graph-safe."""

Layers = Bounded[LayerKey, Layer]
"""The layers that one caller used last. The caller checks the layer's fields: these are not part of the key."""

_state_token = registry.state_token
_layers: Bounded[tuple[Any, ...], Layer] = Bounded()


def layer_for(
    recipe: Recipe,
    x: Tensor,
    w: Tensor,
    at_host: bool,
    need_dx: bool,
    need_dw: bool,
    backend: str | tuple[str, ...] | None,
    graph_safe: bool = False,
) -> Layer:
    """The resolved layer for operands that fit together, kept by the recipe's identity: a recipe does not change."""
    dtype, shape = x.dtype, w.shape
    key = (id(recipe), dtype, shape, at_host, need_dx, need_dw, backend, graph_safe)
    layer = _layers.get(key)
    if layer is not None and layer.token is _state_token() and layer.recipe is recipe and x.device == layer.device:
        return layer
    check_recipe(recipe)
    layer = _layers[key] = Layer(recipe, x, w, at_host, need_dx, need_dw, backend, graph_safe)
    return layer


_quantizers: Memo[Run] = Memo()


def quantizer_for(
    spec: QuantizerSpec,
    x: Tensor,
    groups: int,
    at_host: bool,
    backend: Names,
    layouts: tuple[str, str] = (PLAIN, PLAIN),
    graph_safe: bool = False,
) -> Run:
    """The bound function that quantizes tensors like `x` by `spec` to the (rowwise, columnwise) `layouts`."""

    def planned() -> Run:
        name = DTYPE_NAMES[x.dtype]
        request = Request(
            op="quantize",
            framework="torch",
            device=x.device.type,
            in_dtype=name,
            out_dtype=name,
            quantizer=spec,
            arch=arch_of(x.device),
            k=int(x.shape[-1]),
            n=int(x.shape[1]) if x.dim() == 3 else None,
            groups=groups,
            stacked=x.dim() == 3,
            sizes="host" if at_host else "device",
            graph_safe=graph_safe,
            layouts=layouts,
        )
        return registry.plan(request, backend=backend).run

    key = (id(spec), x.dtype, x.device, x.dim(), x.shape[-1], groups, at_host, backend, layouts, graph_safe)
    return _quantizers.get(key, planned, spec)
