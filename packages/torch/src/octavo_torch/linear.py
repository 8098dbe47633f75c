"""One call of grouped_linear: arguments checked, the layer found, forward run, with autograd where it is wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import octavo_registry as registry
from octavo import Recipe
from octavo_torch import arguments
from octavo_torch.autograd import Call, grouped_linear_function, run_forward
from octavo_torch.delayed import DelayedState
from octavo_torch.graphs import wants_graph
from octavo_torch.layer import Layer, layer_for
from octavo_torch.main_grad import MainGrad, check_main_grad, check_mode
from octavo_torch.operands import check_operands
from octavo_torch.seeds import Seed
from octavo_torch.sizes import as_sizes
from octavo_torch.weights import QuantizedWeight

_grad_enabled = torch.is_grad_enabled
_state_token = registry.state_token

Held = dict[tuple[Any, ...], Layer]
"""The layers that served a caller last, by whose they are: a module's own, or one for functional calls."""

_held: Held = {}
_MOST_HELD = 1024


def apply(
    x: Tensor,
    weight: Tensor | QuantizedWeight,
    group_sizes: Any,
    recipe: Recipe,
    backend: str | tuple[str, ...] | None = None,
    bias: Tensor | None = None,
    bias_scales: Tensor | None = None,
    seed: Seed = None,
    state: DelayedState | None = None,
    record: bool = True,
    group_offset: int = 0,
    out: Tensor | None = None,
    grad_input: Tensor | None = None,
    held: Held | None = None,
    main_grad: MainGrad | None = None,
) -> Tensor:
    """`grouped_linear`, where a seed may also be a SeedCounter; `record` False leaves the state's amax alone.

    held   where this caller keeps its layers; None: with all functional calls

    The path of every call: no model of pydantic's is built, compared or hashed here, and no plugin is asked.
    """
    # typing.cast would be a call
    w: Tensor = weight.weight if type(weight) is QuantizedWeight else weight  # type: ignore[assignment]
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
        or layer.backend != backend
        or not (x.is_cpu and w.is_cpu if layer.on_cpu else x.device == layer.device == w.device)
    ):
        if len(held) >= _MOST_HELD:
            held.clear()
        check_operands(x, w)
        layer = held[key] = layer_for(recipe, x, w, at_host, need_dx, need_dw, backend, graph_safe)
    extra = bias_scales is not None or seed is not None or state is not None
    if extra or layer.wants_more or bias is not None or out is not None or grad_input is not None:
        arguments.check_call(layer, x, bias, bias_scales, seed, state, out, grad_input)
    if layer.prepare is not None:
        sizes = layer.prepare(sizes, rows, x)
    if main_grad is not None:
        check_mode(main_grad)
        if need_dw:
            check_main_grad(w)
    codes = None
    if w is not weight:
        assert isinstance(weight, QuantizedWeight)
        weight.check(recipe, layer.w_layouts)
        codes = weight.codes
    if need_any:
        call = Call(layer, sizes, seed, state, record, group_offset, grad_input)
        if main_grad is not None and need_dw:
            call.main_grad, call.weight = main_grad, w
        return grouped_linear_function(call, codes, out, x, w, bias, bias_scales)
    return run_forward(layer, sizes, x, w, codes, bias, bias_scales, seed, state, record, group_offset, out)[0]


def _bias_wants_grad(bias: Tensor | None, bias_scales: Tensor | None) -> bool:
    return bias is not None and (bias.requires_grad or (bias_scales is not None and bias_scales.requires_grad))


# dynamo sees one call; what happens inside is traced below it, where registry, caches and autograd are plain Python
_apply_in_graph = torch._dynamo.nonstrict_trace(apply)

_apply_beside_graph: Callable[..., Tensor] = torch.compiler.disable(  # type: ignore[no-untyped-call]
    apply,
    reason="main_grad was given, and a traced backward cannot write into a parameter's attribute; leave it out under "
    "torch.compile(fullgraph=True), or compile with fullgraph=False, which runs this call beside the graph",
)

_NAMES = (
    "backend", "bias", "bias_scales", "seed", "state", "record", "group_offset", "out", "grad_input", "held",
    "main_grad",
)  # fmt: skip


def traced(x: Tensor, weight: Tensor | QuantizedWeight, group_sizes: Any, recipe: Recipe, *rest: Any) -> Tensor:
    """`apply` under torch.compile, where a call out of the traced code takes no None."""
    if len(rest) == len(_NAMES) and rest[-1] is not None:
        return _apply_beside_graph(x, weight, group_sizes, recipe, *rest)
    given = {name: value for name, value in zip(_NAMES, rest, strict=False) if value is not None and name != "held"}
    return _apply_in_graph(x, weight, group_sizes, recipe, **given)
