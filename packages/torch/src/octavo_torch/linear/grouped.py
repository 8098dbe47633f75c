"""One call of grouped_linear: arguments checked, the layer found, forward run, with autograd where it is wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import octavo_registry as registry
from octavo import Recipe
from octavo_torch.arrays.grouped_tensor import GroupedTensor
from octavo_torch.arrays.operands import check_operands
from octavo_torch.arrays.per_group import Weights, as_one
from octavo_torch.arrays.sizes import as_sizes
from octavo_torch.compiler.graphs import wants_graph
from octavo_torch.compiler.tracing import is_plain
from octavo_torch.dispatch.layer import Layer, layer_for
from octavo_torch.linear import arguments, contexts
from octavo_torch.linear.autograd import Call, grouped_linear_function, run_forward
from octavo_torch.linear.coded_weight import operands_of
from octavo_torch.linear.quantized_input import QUANTIZED, QuantizedInput, check_codes, rows_of
from octavo_torch.linear.weights import QuantizedWeight
from octavo_torch.linear.whole import WholeCall, runs_whole, whole_layer_function
from octavo_torch.scaling.delayed_state import DelayedState
from octavo_torch.scaling.seeds import Seed
from octavo_torch.wgrad.main_grad import MainGrad
from octavo_torch.wgrad.postponed import DelayedWgrad
from octavo_torch.wgrad.target import OUTSIDE_GRAPH, target_for

_Parameter = torch.nn.Parameter
_autocast_anywhere, _transforms_active = contexts.autocast_anywhere, contexts.transforms_active
_grad_enabled = torch.is_grad_enabled
_STRIDED = torch.strided
_state_token = registry.state_token

Held = dict[tuple[Any, ...], Layer]
"""The layers that served a caller last, by whose they are: a module's own, or one for functional calls."""

Rows = Tensor | GroupedTensor | QuantizedInput
"""What a grouped layer takes as x."""

_held: Held = {}
_MOST_HELD = 1024


def apply(
    x: Any,
    weight: Weights | QuantizedWeight,
    group_sizes: Any,
    recipe: Recipe,
    backend: str | tuple[str, ...] | None = None,
    bias: Weights | None = None,
    bias_scales: Tensor | None = None,
    seed: Seed = None,
    state: DelayedState | None = None,
    record: bool = True,
    group_offset: int = 0,
    out: Tensor | None = None,
    grad_input: Tensor | None = None,
    held: Held | None = None,
    main_grad: MainGrad | None = None,
    delayed_wgrad: DelayedWgrad | None = None,
) -> Tensor:
    """`grouped_linear` of Rows, where a seed may also be a SeedCounter; `record` False leaves the state's amax alone.

    held   where this caller keeps its layers; None: with all functional calls

    The path of every call: no model of pydantic's is built, compared or hashed here, and no plugin is asked.
    """
    if (_autocast_anywhere() or _transforms_active()) and contexts.matters(x):
        return contexts.run(apply, dict(locals()))
    if type(weight) is not _Parameter:
        weight, bias = operands_of(weight, bias)
    # typing.cast would be a call
    own: Weights = weight.weight if type(weight) is QuantizedWeight else weight  # type: ignore[assignment]
    w: Tensor = own if isinstance(own, Tensor) else as_one("weight", own)
    if bias is not None and not isinstance(bias, Tensor):
        bias = as_one("bias", bias)
    given, x_codes = x, None
    if type(x) in QUANTIZED:
        x, x_codes, group_sizes = rows_of(x, w, group_sizes, recipe)
    need_dx = need_dw = need_any = False
    try:
        shape, w_shape, dtype = x.shape, w.shape, x.dtype
        rows, columns = shape
        if _grad_enabled():
            need_dx, need_dw = x.requires_grad, w.requires_grad
            need_any = need_dx or need_dw or _bias_wants_grad(bias, bias_scales)
        sizes, at_host = as_sizes(group_sizes, rows, w_shape[0], x)
    except (AttributeError, ValueError, IndexError):
        check_operands(x, w)
        raise
    if held is None:
        held = _held
    graph_safe = wants_graph(x)
    key = (id(recipe), need_dx, need_dw, graph_safe)
    layer = held.get(key)
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
        or layer.backend != backend
        or not (x.is_cpu and w.is_cpu if layer.on_cpu else x.device == layer.device == w.device)
    ):
        if len(held) >= _MOST_HELD:
            held.clear()
        check_operands(x, w)
        layer = held[key] = layer_for(recipe, x, w, at_host, need_dx, need_dw, backend, graph_safe)
    extra = bias_scales is not None or seed is not None or state is not None
    if extra or layer.wants_more or bias is not None or out is not None or grad_input is not None:
        arguments.check_call(layer, x, w, bias, bias_scales, seed, state, out, grad_input)
    if (
        (x_codes is None and bias_scales is None and out is None and grad_input is None)
        and (own is weight and main_grad is None and delayed_wgrad is None)
        and (whole := runs_whole(layer, x, w, bias, state)) is not None
    ):
        in_whole = WholeCall(whole, layer, sizes, seed, state, record, group_offset)
        return whole_layer_function(in_whole, x, w, bias) if need_any else in_whole.forward(x, w, bias)[0]
    if x_codes is not None:
        check_codes(layer, recipe, given, x_codes)
    if layer.prepare is not None:
        sizes = layer.prepare(sizes, rows, x)
    target = anchor = None
    if main_grad is not None or delayed_wgrad is not None:
        target = target_for(own, need_dw, main_grad, delayed_wgrad)
        if target is not None and target.store is not None:
            w, anchor = w.detach(), target.store.anchor
    codes = None
    if own is not weight:
        assert isinstance(weight, QuantizedWeight)
        weight.check(recipe, layer.w_layouts)
        codes = weight.codes
    if out is not None:
        # so that the caller's tensor stays a plain buffer, for the next call
        out = out.detach()
    if need_any:
        call = Call(layer, sizes, seed, state, record, group_offset, grad_input, target)
        return grouped_linear_function(call, codes, x_codes, out, x, w, bias, bias_scales, anchor)
    y = run_forward(layer, sizes, x, w, codes, bias, bias_scales, seed, state, record, group_offset, out, x_codes)[0]
    if out is not None and is_plain(out):
        torch.autograd.graph.increment_version(out)
    return y


def _bias_wants_grad(bias: Tensor | None, bias_scales: Tensor | None) -> bool:
    return bias is not None and (bias.requires_grad or (bias_scales is not None and bias_scales.requires_grad))


# dynamo sees one call; what happens inside is traced below it, where registry, caches and autograd are plain Python
_apply_in_graph = torch._dynamo.nonstrict_trace(apply)


@torch._dynamo.nonstrict_trace
def _apply_with_own_sizes(x: Rows, weight: Weights | QuantizedWeight, recipe: Recipe, **given: Any) -> Tensor:
    """For rows that are quantized and have their sizes."""
    return apply(x, weight, None, recipe, **given)


_apply_beside_graph: Callable[..., Tensor] = torch.compiler.disable(  # type: ignore[no-untyped-call]
    apply, reason=OUTSIDE_GRAPH
)

_NAMES = (
    "backend", "bias", "bias_scales", "seed", "state", "record", "group_offset", "out", "grad_input", "held",
    "main_grad", "delayed_wgrad",
)  # fmt: skip


def traced(x: Rows, weight: Weights | QuantizedWeight, group_sizes: Any, recipe: Recipe, *rest: Any) -> Tensor:
    """`apply` under torch.compile, where a call out of the traced code takes no None."""
    given = {name: value for name, value in zip(_NAMES, rest, strict=False) if value is not None and name != "held"}
    if "main_grad" in given or "delayed_wgrad" in given:
        return _apply_beside_graph(x, weight, group_sizes, recipe, **given)
    if group_sizes is None:
        return _apply_with_own_sizes(x, weight, recipe, **given)
    return _apply_in_graph(x, weight, group_sizes, recipe, **given)
