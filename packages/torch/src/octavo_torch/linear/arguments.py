"""Checks of arguments: ValueError sentences that say what was given, what is needed and what to do."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from octavo import Recipe
from octavo_torch.arrays.checks import brief, check_recipe, on_another_device
from octavo_torch.arrays.dtypes import DTYPE_NAMES, name_of
from octavo_torch.arrays.operands import check_layout, check_tensor
from octavo_torch.arrays.strides import overlaps_itself, share_memory
from octavo_torch.compiler.tracing import is_plain
from octavo_torch.compiler.transforms import transforms_active
from octavo_torch.linear.call import Adapter, Call, Options
from octavo_torch.linear.quantized_input import QUANTIZED
from octavo_torch.quantizers.arguments import NEEDS_SEED, check_group_offset
from octavo_torch.scaling.delayed_state import DelayedState
from octavo_torch.scaling.seeds import check_seed

_OF_SCALES = ("forward_format", "gradient_format", "history", "algorithm", "margin")
"""The fields of DelayedScaling that the next scales depend on."""


def check_call(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, bias_scales: Tensor | None) -> None:
    """ValueError unless the options and the bias fit x, the weight and the recipe."""
    layer = call.layer
    groups, rows = layer.groups, x.shape[0]
    width = int(layer.weight_shape[1])
    check_biases(bias, bias_scales, (groups, width), x)
    if call.seed is not None:
        check_seed(call.seed)
    elif layer.needs_seed:
        raise ValueError(NEEDS_SEED)
    if layer.stateful or call.state is not None:
        check_state(layer.recipe, call.state, x, groups)
    check_group_offset(call.group_offset, groups)
    read = {"x": x, "weight": weight, "bias": bias, "bias_scales": bias_scales}
    out, grad_input = call.out, call.grad_input
    if out is not None:
        check_buffer("out", out, (rows, width), layer.row_dtype, read)
    if grad_input is not None:
        check_buffer("grad_input", grad_input, tuple(x.shape), x.dtype, {**read, "out": out})


def check_biases(bias: object, bias_scales: object, shape: tuple[int, int], x: Tensor) -> None:
    """ValueError unless the bias, of this shape, and its scales, one for each row of x, fit, or are None."""
    if bias is not None:
        check_like("bias", bias, shape, x)
    if bias_scales is not None:
        if bias is None:
            raise ValueError("bias_scales was given without a bias; give both or neither")
        check_like("bias_scales", bias_scales, (x.shape[0],), x)


def check_adaptable(x: object, options: Options, adapters: object) -> None:
    """ValueError where adapters cannot be added: to codes of x, whose values they read, and to a caller's buffers.

    adapters   one per weight, or None, in a tuple
    """
    for adapter in adapters if isinstance(adapters, tuple | list) else (adapters,):
        if adapter is not None and not isinstance(adapter, Adapter):
            raise ValueError(f"lora has {brief(adapter)}; give what has delta: a GroupedLoRA, or None, per weight")
    if isinstance(x, QUANTIZED):
        raise ValueError(f"x is {brief(x)} and the layer has adapters, which read values; give a tensor [M, K]")
    for name, buffer in (("out", options.out), ("grad_input", options.grad_input)):
        if buffer is not None:
            raise ValueError(f"{name} was given and the layer has adapters, which add to that result; leave it out")


def check_state(recipe: Recipe, state: object, like: Tensor, groups: int | None = None) -> None:
    """ValueError unless `state` is what the recipe needs: one that fits it, or None."""
    check_recipe(recipe)
    if not recipe.stateful:
        if state is not None:
            raise ValueError(f"state was given and {type(recipe).__name__} keeps none; leave it out")
        return
    if state is None:
        raise ValueError(
            f"state is None and {type(recipe).__name__} takes its scales from history; "
            "give a DelayedState, DelayedState.create(recipe, num_groups, device) makes one"
        )
    if not isinstance(state, DelayedState):
        raise ValueError(f"state is {brief(state)}; give a DelayedState, DelayedState.create makes one")
    state.check_tensors()
    needed = like.shape[0] if groups is None else groups
    if state.groups != needed:
        raise ValueError(f"state holds {state.groups} groups and the weight {needed}; give one made for {needed}")
    if state.recipe is not recipe:
        _check_same_scales(recipe, state.recipe)
    if state.scale.device != like.device:
        raise on_another_device("state", state.scale.device, "the tensors", like.device)


def _check_same_scales(recipe: Recipe, own: Recipe) -> None:
    """ValueError unless both recipes make the same scales; the fields that do not matter for these may differ."""
    for field in _OF_SCALES:
        ours, theirs = getattr(own, field), getattr(recipe, field, None)
        if ours != theirs:
            raise ValueError(
                f"state was made for a recipe with {field}={ours!r} and the call's recipe has {theirs!r}; "
                "give DelayedState.create(recipe, num_groups) of the call's recipe"
            )


def check_like(name: str, value: object, shape: tuple[int, ...], x: Tensor) -> None:
    """ValueError unless `value` is a high-precision tensor of this shape on x's device."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is {brief(value)}; give a tensor {list(shape)}")
    check_layout(name, value)
    if tuple(value.shape) != shape:
        raise ValueError(f"{name} has shape {list(value.shape)}; give {list(shape)}")
    if value.dtype not in DTYPE_NAMES:
        raise ValueError(f"{name} has dtype {name_of(value.dtype)}; give bfloat16, float16 or float32")
    if value.device != x.device:
        raise on_another_device(name, value.device, "x", x.device)


def check_buffer(
    name: str, value: object, shape: tuple[int, ...], dtype: torch.dtype, read: Mapping[str, Tensor | None]
) -> None:
    """ValueError unless the call may write `value`: a plain tensor of this shape and dtype, in any strides without
    overlap, on x's device, that shares no memory with what the call reads.

    read   what the call reads, by name, x first
    """
    x = next(iter(read.values()))
    assert x is not None  # every call reads an x
    device = x.device
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is a {type(value).__name__}; give {name_of(dtype)} {list(shape)} on {device}")
    if tuple(value.shape) != shape or value.dtype is not dtype or value.device != device:
        raise ValueError(
            f"{name} is {name_of(value.dtype)} {list(value.shape)} on {value.device}; "
            f"give {name_of(dtype)} {list(shape)} on {device}"
        )
    if value.requires_grad:
        raise ValueError(f"{name} requires a gradient; give a plain buffer that the call may overwrite")
    if overlaps_itself(value):
        raise ValueError(
            f"{name} has shape {list(shape)} and strides {list(value.stride())}, where elements share memory; give a "
            "buffer whose elements stand apart"
        )
    for other, tensor in read.items():
        if isinstance(tensor, Tensor) and share_memory(value, tensor):
            raise ValueError(f"{name} shares memory with {other}, which the call reads; give a buffer of its own")


def check_grouped_mm(a: Tensor, b: Tensor, offs: object, out_dtype: object) -> None:
    """ValueError unless these are a [M, K], b [G, K, N], ends [G] as torch's grouped_mm takes them, and a dtype."""
    check_tensor("a", a, "[M, K]")
    check_tensor("b", b, "[G, K, N]")
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"a has {a.shape[1]} columns and b has shape {list(b.shape)}; give [G, K, N] with that K")
    if not isinstance(offs, Tensor) or offs.dim() != 1 or offs.dtype not in (torch.int32, torch.int64):
        given = f"{name_of(offs.dtype)} {list(offs.shape)}" if isinstance(offs, Tensor) else type(offs).__name__
        raise ValueError(f"offs is {given}; give int32 [G], the cumulative end of each group")
    check_layout("offs", offs)
    _check_ends(offs, a, b.shape[0])
    if out_dtype is not None and (not isinstance(out_dtype, torch.dtype) or out_dtype not in DTYPE_NAMES):
        raise ValueError(f"out_dtype is {brief(out_dtype)}; give torch.bfloat16, torch.float16 or torch.float32")


def _check_ends(offs: Tensor, a: Tensor, matrices: int) -> None:
    """ValueError unless `offs` has an end for each matrix and, where its values can be read, ends of rows of `a`."""
    if offs.shape[0] != matrices:
        raise ValueError(f"offs has shape {list(offs.shape)} and b {matrices} matrices; give one end per matrix")
    if not offs.is_cpu and offs.device != a.device:
        raise ValueError(f"offs is on {offs.device} and a on {a.device}; move offs to {a.device}, or to the CPU")
    if torch.compiler.is_compiling() or transforms_active() or not offs.is_cpu or not is_plain(offs):
        return
    before = 0
    for group, end in enumerate(offs.tolist()):
        if end < before:
            needed = "; give the cumulative end of each group, such as group_sizes.cumsum(0)"
            where = f", before offs[{group - 1}], which is {before}" if group else ""
            raise ValueError(f"offs[{group}] is {end}{where}{needed}")
        before = end
    if before > a.shape[0]:
        raise ValueError(f"offs ends at row {before} and a has {a.shape[0]} rows; give ends of a's rows")
