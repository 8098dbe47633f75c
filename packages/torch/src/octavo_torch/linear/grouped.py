"""One call of grouped_linear: arguments checked, the layer resolved, forward run, with autograd where it is needed.

A call takes one of three routes. Eager calls on plain tensors, of a layer that one backend serves whole, are one call
of that backend each way (`whole`). All others are composed of the layer's bound functions (`autograd`). Under
torch.compile a call is one node of the graph (`graph`), below which it is composed.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

import octavo_registry as registry
from octavo_torch.arrays.grouped_tensor import GroupedTensor
from octavo_torch.arrays.leading import LeadingAxes, has_other_rank
from octavo_torch.arrays.operands import check_layout, check_operands
from octavo_torch.arrays.per_group import Weights, leaves_of
from octavo_torch.arrays.sizes import GroupSizes, as_sizes
from octavo_torch.arrays.weight_order import order_of
from octavo_torch.compiler.autocast import autocast_anywhere
from octavo_torch.compiler.graphs import wants_graph
from octavo_torch.compiler.recorders import dispatch_modes, is_jit_tracing
from octavo_torch.compiler.refused_derivatives import check_no_tangent
from octavo_torch.compiler.transforms import transforms_active
from octavo_torch.dispatch.layers import Layers, layer_for
from octavo_torch.dispatch.recipes import with_output_dtype
from octavo_torch.dispatch.room import check_room
from octavo_torch.linear import arguments, contexts
from octavo_torch.linear.autograd import forward_seed, grouped_linear_function, run_forward
from octavo_torch.linear.call import Call
from octavo_torch.linear.parameters import Parameters, anchor_of, mark_written, parameters_of, resolve_weight
from octavo_torch.linear.quantized_input import QUANTIZED, QuantizedInput, check_codes, rows_of
from octavo_torch.linear.weights import QuantizedWeight
from octavo_torch.linear.whole import whole_forward, whole_layer_function, whole_passes_for
from octavo_torch.scaling.seeds import for_backward
from octavo_torch.wgrad.graph_route import graph_route

_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_autocast_anywhere, _transforms_active = autocast_anywhere, transforms_active
_is_jit_tracing, _dispatch_modes = is_jit_tracing, dispatch_modes
_grad_enabled = torch.is_grad_enabled
_STRIDED = torch.strided
_state_token = registry.state_token

InputRows = Tensor | GroupedTensor | QuantizedInput
"""What a grouped layer takes as x: values, codes, or values together with their codes."""

_layers: Layers = Layers()
"""The layers that functional calls have resolved; a module keeps its own."""

_FIRST = 0
"""The default of group_offset. CPython has one object for it; any other offset is checked."""


def apply(
    x: InputRows,
    weight: Weights | QuantizedWeight,
    group_sizes: GroupSizes | None,
    bias: Weights | None,
    bias_scales: Tensor | None,
    call: Call,
) -> Tensor:
    """`grouped_linear`, eagerly, where a seed may also be a SeedCounter; stores what it resolves in `call`.

    The path of every call: no model of pydantic's is built, compared or hashed here, and no plugin is asked.
    """
    # contexts.any_active, without the call
    in_context = _autocast_anywhere() or _transforms_active() or _is_jit_tracing() or _dispatch_modes()
    if in_context and contexts.concerns(x):
        return _in_context(x, weight, group_sizes, bias, bias_scales, call)
    recipe, layers, backend, state = call.recipe, call.layers, call.backend, call.state
    if call.output_dtype is not None:
        recipe = with_output_dtype(recipe, None if call.output_dtype == "x" else call.output_dtype)
    leaves: Weights
    w: Tensor
    b: Tensor | None
    if type(weight) in _PLAIN and (bias is None or type(bias) in _PLAIN):
        # as parameters_of would return them; typing.cast would be a call
        source, leaves, w, b, uncast = weight, weight, weight, bias, None  # type: ignore[assignment]
    else:
        source, leaves, w, b, uncast = parameters_of(weight, bias)
    rows_or_codes, x_codes = x, None
    if isinstance(x, QUANTIZED):
        x, x_codes, group_sizes = rows_of(x, w, group_sizes, call.recipe)
        call.x_codes = x_codes
    need_dx = need_dw = need_any = False
    try:
        shape, w_shape, dtype = x.shape, w.shape, x.dtype
        rows, columns = shape
        if _grad_enabled():
            need_dx, need_dw = x.requires_grad, w.requires_grad
            need_any = need_dx or need_dw or _bias_wants_grad(b, bias_scales)
        sizes, at_host = as_sizes(group_sizes, rows, w_shape[0], x)
        graph_safe = wants_graph(x)
    except (AttributeError, ValueError, IndexError, RuntimeError):  # a nested tensor has no shape
        if has_other_rank(x):
            return _with_leading_axes(x, weight, group_sizes, bias, bias_scales, call)
        check_operands(x, w)
        arguments.check_biases(b, bias_scales, (w.shape[0], w.shape[1]), x)
        raise
    if layers is None:
        layers = _layers
    key = (id(recipe), need_dx, need_dw, graph_safe)
    layer = layers.get(key)
    if (
        layer is None
        or layer.token is not _state_token()
        or layer.recipe is not recipe
        or layer.weight_shape != w_shape
        or layer.columns != columns
        or layer.dtype is not dtype
        or w.dtype is not dtype
        or layer.at_host is not at_host
        or x.layout is not _STRIDED
        or w.layout is not _STRIDED
        or ((not w.is_contiguous() or layer.stored_order != "nk") and order_of(w) != layer.stored_order)
        or layer.backend != backend
        or not (x.is_cpu and w.is_cpu if layer.on_cpu else x.device == layer.device == w.device)
    ):
        check_operands(x, w)
        layer = layers[key] = layer_for(recipe, x, w, at_host, need_dx, need_dw, backend, graph_safe)
    if forward_ad._current_level >= 0:
        check_no_tangent(x, *leaves_of(leaves), b, bias_scales)
    if call.room is not None:
        check_room(call.room, of_mlp=False)
        layer = layer.leaving(call.room.gemms)
    call.layer, call.sizes = layer, sizes
    plain = call.out is None and call.grad_input is None and bias_scales is None and call.probe is None
    more = call.seed is not None or state is not None or b is not None or call.group_offset is not _FIRST
    if more or not plain or layer.needs_more:
        arguments.check_call(call, x, w, b, bias_scales)
        if need_any and layer.needs_seed:
            call.seed = for_backward(call.seed)
    autograds = source is leaves and call.main_grad is None and call.delayed_wgrad is None
    seen = w  # by autograd
    if not autograds or uncast is not None:
        seen = resolve_weight(call, Parameters(source, leaves, w, b, uncast), need_dw)
    if (plain and autograds and x_codes is None) and (whole := whole_passes_for(layer, x, w, b, state)) is not None:
        call.whole = whole
        return whole_layer_function(call, x, seen, b) if need_any else whole_forward(call, x, w, b)[0]
    if x_codes is not None:
        check_codes(layer, recipe, rows_or_codes, x_codes)
    elif type(x) not in _PLAIN:
        check_layout("x", x)
    if layer.prepare is not None:
        call.sizes = layer.prepare(sizes, rows, x)
    # detached so that the caller's tensor stays a plain buffer, for the next call
    out = call.out = None if call.out is None else call.out.detach()
    if need_any:
        return grouped_linear_function(call, out, x, seen, b, bias_scales, anchor_of(call))
    y = run_forward(call, forward_seed(call), x, w, b, bias_scales)[0]
    if out is not None:
        mark_written(out)
    return y


def _in_context(
    x: InputRows,
    weight: Weights | QuantizedWeight,
    group_sizes: GroupSizes | None,
    bias: Weights | None,
    bias_scales: Tensor | None,
    call: Call,
) -> Tensor:
    """`apply` inside of autocast or a transform, which may run it more than once."""
    named = {"x": x, "weight": weight, "group_sizes": group_sizes, "bias": bias, "bias_scales": bias_scales}
    call.state = contexts.unwrapped_state(call.state)
    return contexts.run(lambda **cast: apply(call=copy(call), **cast), named)


def _with_leading_axes(
    x: Tensor,
    weight: Weights | QuantizedWeight,
    group_sizes: GroupSizes | None,
    bias: Weights | None,
    bias_scales: Tensor | None,
    call: Call,
) -> Tensor:
    """`apply` on the rows of an x [..., K]."""
    axes = LeadingAxes(x)
    call.out, call.grad_input = axes.buffer("out", call.out), axes.buffer("grad_input", call.grad_input)
    scales = axes.of_rows("bias_scales", bias_scales)
    return axes.restored(apply(axes.flat(x), weight, group_sizes, bias, scales, call))


def _bias_wants_grad(bias: Tensor | None, bias_scales: Tensor | None) -> bool:
    return bias is not None and (bias.requires_grad or (bias_scales is not None and bias_scales.requires_grad))


def _apply_options(
    x: InputRows,
    weight: Weights | QuantizedWeight,
    *,
    group_sizes: GroupSizes | None = None,
    bias: Weights | None = None,
    bias_scales: Tensor | None = None,
    **options: Any,
) -> Tensor:
    return apply(x, weight, group_sizes, bias, bias_scales, Call(**options))


_in_graph = graph_route(_apply_options)


def traced(
    x: InputRows,
    weight: Weights | QuantizedWeight,
    group_sizes: GroupSizes | None,
    bias: Weights | None,
    bias_scales: Tensor | None,
    call: Call,
) -> Tensor:
    """`apply` under torch.compile, below which a module's layers are those of functional calls."""
    call.layers = None
    return _in_graph(x, weight, group_sizes=group_sizes, bias=bias, bias_scales=bias_scales, **call.present())
