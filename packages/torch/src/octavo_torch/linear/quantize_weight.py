"""quantize_weight: weights quantized once, for as many calls as read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from octavo import Recipe
from octavo_torch.arithmetic import operators
from octavo_torch.arrays.checks import BackendNames, backend_names, check_flag
from octavo_torch.arrays.grouped_tensor import PLANES, GroupedTensor
from octavo_torch.arrays.interleaving import check_interleave
from octavo_torch.arrays.operands import check_weight
from octavo_torch.arrays.per_group import Weights, are_same, as_one, leaves_of, version_of
from octavo_torch.compiler.autocast import without_autocast
from octavo_torch.compiler.graphs import wants_graph
from octavo_torch.compiler.tracing import is_plain
from octavo_torch.compiler.transforms import GROUPS, Subject, without_derivative
from octavo_torch.dispatch.layer import Layer
from octavo_torch.dispatch.layers import layer_for
from octavo_torch.dispatch.recipes import recipe_of
from octavo_torch.linear import arguments, contexts
from octavo_torch.linear.coded_weight import CodedWeight
from octavo_torch.linear.weights import QuantizedWeight, WeightCodes, layouts_of
from octavo_torch.quantizers.arguments import NEEDS_SEED, check_unchanged
from octavo_torch.quantizers.writing import mark_rewritten, replace_unless
from octavo_torch.scaling.delayed_state import DelayedState
from octavo_torch.scaling.recipe_module import RecipeModule
from octavo_torch.scaling.seeds import DrawnSeed, check_seed
from octavo_torch.uncounted_steps import watch

_is_compiling = torch.compiler.is_compiling


class History(NamedTuple):
    """A state of delayed scaling, and whether a call records its amax there."""

    state: DelayedState
    record: bool


def history_of(state: DelayedState | None, record: bool) -> History | None:
    """A History for a call that has a state; else None."""
    return None if state is None else History(state, record)


def quantize_weight(
    w: Weights,
    recipe: Recipe | str,
    *,
    seed: int | Tensor | None = None,
    state: DelayedState | None = None,
    backend: BackendNames = None,
    interleave: int | None = None,
    out: QuantizedWeight | None = None,
    unchanged: Tensor | None = None,
    record: bool = True,
) -> QuantizedWeight:
    """`w` quantized for `recipe` (or the one of that name), to be given to `grouped_linear` in the weight's place.

    w          [G, N, K], or a sequence of G tensors [N, K]
    state      of delayed scaling: w's amax is recorded in it, unless record is False
    interleave where w is the first weight of a `grouped_mlp` with that argument
    out        what an earlier call returned for this weight: its codes are written again, at their addresses
    unchanged  int32 [1] on w's device: where it is not 0, `out`'s codes are left as they are. Nobody reads it back, so
               a captured graph may hold the call: set it to 0 before a step's first microbatch, to 1 before the others

    Do it once per optimizer step and every microbatch reuses the codes. Both directions are computed where w requires
    a gradient. Inside of torch.autocast w is cast to autocast's dtype first, as calls inside cast it: do both there.
    Raises ValueError for arguments that do not fit, NoBackendError where no installed backend serves them.
    """
    recipe = recipe_of(recipe)
    check_flag("record", record)
    result = _weight_codes(
        w, recipe, seed=seed, history=history_of(state, record), backend=backend, interleave=interleave, out=out,
        unchanged=unchanged,
    )  # fmt: skip
    own: Weights = w if isinstance(w, Tensor) else tuple(w)
    version = None
    if not _is_compiling():
        version = version_of(own)
        watch(filter(is_plain, leaves_of(own)))
    if out is not None:
        out.version = version
        return out
    layouts = None if result.codes is None else layouts_of(result.codes)
    block = check_interleave(interleave, "swiglu", leaves_of(own)[0])
    return QuantizedWeight(
        own, result.codes, recipe, layouts, version, result.amax, block, result.order, result.values_dtype
    )


def quantize_own_values(
    w: Tensor, recipe: Recipe, *, backend: BackendNames = None, interleave: int | None = None
) -> tuple[GroupedTensor, int]:
    """Codes of `w` [G, N, K] as it is, inside of torch.autocast, too, and the rows of a block, see `quantize_weight`.

    For codes that take the place of their values.
    """
    with without_autocast(w.device.type):
        weight = quantize_weight(w, recipe, backend=backend, interleave=interleave)
    assert weight.codes is not None  # of recipes whose products read codes
    return weight.codes, weight.interleave


@without_derivative(Subject("quantize_weight", GROUPS))
def _weight_codes(
    w: Weights,
    recipe: Recipe,
    *,
    seed: int | Tensor | None = None,
    history: History | None = None,
    backend: BackendNames = None,
    interleave: int | None = None,
    out: QuantizedWeight | None = None,
    unchanged: Tensor | None = None,
) -> WeightCodes:
    """What `quantize_weight` computes; without codes if no GEMM reads any, or if they are written into `out`."""
    state, record = (None, False) if history is None else history
    whole = as_one("w", w)
    check_weight(whole)
    dtype = contexts.autocast_dtype(whole.device)
    if dtype is not None:
        whole = whole.to(dtype)
    arguments.check_state(recipe, state, whole)
    state = contexts.unwrapped_state(state)
    need = any(leaf.requires_grad for leaf in leaves_of(w))
    layer = layer_for(recipe, whole, whole, whole.is_cpu, need, need, backend_names(backend), wants_graph(whole))
    if layer.stochastic_forward and layer.quantize_w is not None and seed is None:
        raise ValueError(NEEDS_SEED)
    check_seed(seed)
    block = check_interleave(interleave, "swiglu", whole)
    layer = layer.interleaved(block)
    if out is not None:
        _check_out(w, whole.dtype, recipe, layer, block, out)
    check_unchanged(unchanged, out, whole)
    if layer.quantize_w is None:
        return WeightCodes()
    if out is not None:
        _write(layer, whole, seed, state, out, unchanged)
        if record and state is not None and out.amax is not None:
            state.record("w", out.amax)
        return WeightCodes()
    result = _quantized(layer, whole, seed, state)
    if record and state is not None and result.amax is not None:
        state.record("w", result.amax)
    return result


def _quantized(layer: Layer, w: Tensor, seed: DrawnSeed, state: DelayedState | None) -> WeightCodes:
    assert layer.quantize_w is not None  # the caller has asked
    order = layer.w_order
    if state is None:
        return WeightCodes(layer.quantize_w(w, None, seed=seed, operand="w"), None, order, w.dtype)
    scale = state.encode_scale("w")
    with_amax = layer.with_amax.get("w")
    if with_amax is not None:
        return WeightCodes(*with_amax(w, None, seed=seed, operand="w", scale=scale), order, w.dtype)
    codes = layer.quantize_w(w, None, seed=seed, operand="w", scale=scale)
    return WeightCodes(codes, operators.group_amax_of(w, None), order, w.dtype)


def _write(
    layer: Layer,
    w: Tensor,
    seed: DrawnSeed,
    state: DelayedState | None,
    out: QuantizedWeight,
    unchanged: Tensor | None,
) -> None:
    """Writes new codes and amax into `out`'s tensors, unless `unchanged` says that they are up to date."""
    if layer.w_into is not None:
        assert out.codes is not None  # _check_out has asked for the layer's planes
        scale = None if state is None else state.encode_scale("w")
        layer.w_into(w, None, out=out.codes, amax=out.amax, unchanged=unchanged, seed=seed, operand="w", scale=scale)
        mark_rewritten([out.amax, *(getattr(out.codes, name) for name in PLANES)], unchanged)
        return
    result = _quantized(layer, w, seed, state)
    for name in PLANES:
        replace_unless(unchanged, getattr(out.codes, name), getattr(result.codes, name))
    replace_unless(unchanged, out.amax, result.amax)


def code_weights(module: RecipeModule, interleaves: Mapping[str, int | None]) -> None:
    """Replaces the named parameters by their codes, if the module was created inside of `quantized_parameters`.

    interleaves   for each weight: b, if b gate rows and b up rows alternate in it; else None
    """
    if not module.weights_as_codes:
        return
    for name, interleave in interleaves.items():
        if module.is_per_group(name):
            raise ValueError(
                "per_group_parameters is on for weights, and codes are of all groups; create the module with "
                "per_group_parameters=False or {'bias'}, or outside of quantized_parameters"
            )
        values = module._parameters[name]
        assert values is not None
        if values.is_meta:
            raise ValueError(
                "device is meta, where values cannot be quantized; create the module on its own device inside of "
                "quantized_parameters"
            )
        codes, block = quantize_own_values(values, module.recipe, backend=module.backend, interleave=interleave)
        module._parameters[name] = nn.Parameter(CodedWeight(codes, module.recipe, values.dtype, block))


def _check_out(w: Weights, dtype: torch.dtype, recipe: Recipe, layer: Layer, block: int, out: object) -> None:
    if not isinstance(out, QuantizedWeight):
        raise ValueError(f"out is a {type(out).__name__}; give what quantize_weight returned for this weight")
    if not are_same(w, out.weight):
        raise ValueError("out was made of another weight; give what quantize_weight returned for this one")
    out.check_made_for(recipe, None, layer.w_order)
    out.check_values("out", dtype)
    if out.interleave != block:
        raise ValueError(f"out was made with interleave={out.interleave or None}; give the call the same")
    if out.codes is not None:
        spec = layer.quantizers["w"].request.quantizer
        if out.codes.spec.orientation != spec.orientation:
            raise ValueError(
                f"out holds {out.codes.spec.orientation} data and the call makes {spec.orientation}: the weight's "
                "gradient is needed now and was not before, or vice versa; omit out="
            )
    out.check_made_for(recipe, layer.w_layouts, layer.w_order)
