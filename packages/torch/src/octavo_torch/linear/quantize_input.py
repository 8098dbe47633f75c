"""quantize_input: rows quantized once, for as many layers as read them."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo import Recipe
from octavo_torch.arrays.checks import BackendNames, backend_names, check_flag
from octavo_torch.arrays.dtypes import DTYPE_NAMES
from octavo_torch.arrays.grouped_tensor import GroupedTensor
from octavo_torch.arrays.operands import check_operands
from octavo_torch.arrays.per_group import Weights, as_one, leaves_of, version_of
from octavo_torch.arrays.sizes import GroupSizes, as_sizes
from octavo_torch.compiler.graphs import wants_graph
from octavo_torch.compiler.transforms import GROUPS, Subject, without_derivative
from octavo_torch.dispatch.layers import layer_for
from octavo_torch.dispatch.recipes import recipe_of
from octavo_torch.linear import arguments, contexts
from octavo_torch.linear.autograd import quantize_operand
from octavo_torch.linear.call import Call
from octavo_torch.linear.quantize_weight import History, history_of
from octavo_torch.linear.quantized_input import QuantizedInput
from octavo_torch.linear.weights import QuantizedWeight
from octavo_torch.quantizers.arguments import NEEDS_SEED, check_group_offset
from octavo_torch.scaling.delayed_state import DelayedState
from octavo_torch.scaling.seeds import check_seed

_is_compiling = torch.compiler.is_compiling


def quantize_input(
    x: Tensor,
    weight: Weights | QuantizedWeight,
    group_sizes: GroupSizes,
    recipe: Recipe | str,
    *,
    seed: int | Tensor | None = None,
    state: DelayedState | None = None,
    group_offset: int = 0,
    backend: BackendNames = None,
    record: bool = True,
) -> QuantizedInput:
    """`x` quantized for layers with weights like `weight`: give it to `grouped_linear` in x's place, None for sizes.

    The arguments are those of the calls that will read it; of `weight` the shape, the dtype and whether it requires a
    gradient count. Several layers that read one x (a gate and an up projection) share the codes, and each adds to x's
    gradient. With delayed scaling x's amax is recorded in `state`, unless record is False. Inside of torch.autocast x
    is cast to autocast's dtype first, as calls inside cast it: do both there. Raises as `grouped_linear` does.
    """
    recipe = recipe_of(recipe)
    check_flag("record", record)
    dtype = contexts.autocast_dtype(x.device) if isinstance(x, Tensor) else None
    if dtype is not None and x.dtype in DTYPE_NAMES:
        x = x.to(dtype)  # differentiably: the codes' gradient is x's
    result = _input_codes(
        x, weight, group_sizes, recipe, seed=seed, history=history_of(state, record), group_offset=group_offset,
        backend=backend,
    )  # fmt: skip
    version = None if _is_compiling() else version_of(x)
    return QuantizedInput(x, result[1] if len(result) == 2 else None, result[0], recipe, version)


@without_derivative(Subject("quantize_input", GROUPS))
def _input_codes(
    x: Tensor,
    weight: Weights | QuantizedWeight,
    group_sizes: GroupSizes,
    recipe: Recipe,
    *,
    seed: int | Tensor | None = None,
    history: History | None = None,
    group_offset: int = 0,
    backend: BackendNames = None,
) -> tuple[Tensor] | tuple[Tensor, GroupedTensor]:
    """What `quantize_input` computes: the sizes, and codes if a GEMM reads any."""
    state, record = (None, False) if history is None else history
    own = weight.weight if isinstance(weight, QuantizedWeight) else weight
    w = as_one("weight", own)
    dtype = contexts.autocast_dtype(w.device) if isinstance(w, Tensor) else None
    if dtype is not None:  # what the call will cast w to counts, and none of its values
        w = w.new_empty((), dtype=dtype).expand(w.shape)
    check_operands(x, w)
    sizes, at_host = as_sizes(group_sizes, x.shape[0], w.shape[0], x)
    check_group_offset(group_offset, w.shape[0])
    arguments.check_state(recipe, state, x, w.shape[0])
    state = contexts.unwrapped_state(state)
    need = any(leaf.requires_grad for leaf in leaves_of(own))
    layer = layer_for(recipe, x, w, at_host, x.requires_grad, need, backend_names(backend), wants_graph(x))
    if layer.quantize_x is None:
        return (sizes,)
    if layer.stochastic_forward and seed is None:
        raise ValueError(NEEDS_SEED)
    check_seed(seed)
    call = Call(recipe, group_offset=group_offset, state=state, record=record)
    call.layer, call.sizes = layer, sizes
    codes = quantize_operand(call, layer.quantize_x, "x", x, seed)
    assert codes.group_sizes is not None  # rows have sizes
    return codes.group_sizes, codes
