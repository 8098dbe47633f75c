"""The public functions grouped_linear and grouped_mm, and explain_linear, which returns the plan of a call."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from octavo import Recipe
from octavo_registry.dispatch.layer_plan import LayerPlan
from octavo_torch.arrays.checks import BackendNames, HashableNames, backend_names
from octavo_torch.arrays.dtypes import DTYPE_NAMES
from octavo_torch.arrays.operands import check_operands
from octavo_torch.arrays.per_group import Weights
from octavo_torch.arrays.sizes import GroupSizes, as_sizes
from octavo_torch.compiler.graphs import wants_graph
from octavo_torch.dispatch.layers import layer_for
from octavo_torch.dispatch.recipes import recipe_of
from octavo_torch.dispatch.room import Room
from octavo_torch.linear import arguments
from octavo_torch.linear.call import Call
from octavo_torch.linear.grouped import InputRows, apply, traced
from octavo_torch.linear.parameters import parameters_of
from octavo_torch.linear.weights import QuantizedWeight
from octavo_torch.scaling.delayed_state import DelayedState
from octavo_torch.wgrad.postponed import DelayedWgrad

_is_compiling = torch.compiler.is_compiling


def grouped_linear(
    x: InputRows,
    weight: Weights | QuantizedWeight,
    group_sizes: GroupSizes | None,
    *,
    recipe: Recipe | str | None,
    bias: Weights | None = None,
    bias_scales: Tensor | None = None,
    seed: int | Tensor | None = None,
    state: DelayedState | None = None,
    group_offset: int = 0,
    backend: BackendNames = None,
    out: Tensor | None = None,
    grad_input: Tensor | None = None,
    main_grad: Literal["accumulate", "overwrite"] | None = None,
    delayed_wgrad: DelayedWgrad | None = None,
    room: Room | None = None,
) -> Tensor:
    """y[r] = x[r] @ weight[g].T + bias[g] for every row r of group g.

    x             [M, K]     bf16, fp16 or fp32; the rows of each group stand together, in group order. Or [..., K]:
                             then y, bias_scales and the buffers have the same leading axes in place of M. Or quantized
                             rows: what `quantize_input` returned, or a GroupedTensor, which gets no gradient
    weight        [G, N, K]  x's dtype; or G tensors [N, K], which are copied unless they are evenly spaced in one
                             allocation; or what `quantize_weight` returned for either
    group_sizes   [G]        integers: a list, numpy or a CPU tensor (checked), or a tensor on x's device (never read);
                             None where x is quantized
    recipe                   a Recipe or its name; None: HighPrecision
    bias          [G, N]     optional, or G tensors [N]; bias_scales [M] multiplies it row by row
    seed                     of stochastic rounding: an integer or an integer scalar tensor, another one each step
    state                    of delayed scaling: the forward records the amax of x and w in it, the backward that of dy
    group_offset             number of the first group, for a call that computes only some of the groups
    out, grad_input          buffers for y [M, N] and for dx [M, K], in any strides without overlap. They may not share
                             memory with what the call reads, nor grad_input with y's gradient
    main_grad                "accumulate" adds the weight's gradient to `weight.main_grad` [G, N, K] in backward,
                             "overwrite" stores it there; autograd gets zeros for the weight. See below
    delayed_wgrad            backward leaves the weight's gradient to this object's `backward_dw`
    room                     multiprocessors that the GEMMs leave to what runs beside them; None: they take all
    Returns       [M, N]     rows past the sum are zero and x is not read there

    Differentiable in x, weight, bias and bias_scales, once. Raises ValueError for shapes, dtypes or host sizes that do
    not fit; NoBackendError when no installed backend serves the request. Device sizes whose sum passes M write
    nothing out of bounds and set the flag that `check_errors()` reads.

    With `main_grad`, the buffer is `weight.main_grad`, or what `weight.get_main_grad()` returns in backward if the
    weight has that method. A true `weight.overwrite_main_grad` makes this backward overwrite it. Once the work is
    enqueued, `weight.grad_added_to_main_grad` is True. The buffer is float32, bfloat16 or float16, whatever the
    recipe's `wgrad_dtype`, and on the weight's device. It is written in place: its rows of K are contiguous, but there
    may be gaps between rows and between groups. If the weight is G tensors, each has its own buffer [N, K]; buffers
    that are not evenly spaced in one allocation are copied together and back. The weight has to be a leaf. If its
    gradient is not needed, nothing is read or written. torch.autograd.grad writes the buffer, too, and returns the
    zeros.
    torch.compile leaves a call with main_grad or delayed_wgrad out of its graph, and refuses it under fullgraph=True.
    """
    if recipe is None or type(recipe) is str:
        recipe = recipe_of(recipe)
    if backend is not None and type(backend) is not str:
        backend = backend_names(backend)
    call = Call(recipe, backend, group_offset)  # type: ignore[arg-type]  # a str is its recipe by now
    call.seed, call.state = seed, state
    call.out, call.grad_input = out, grad_input
    call.main_grad, call.delayed_wgrad, call.room = main_grad, delayed_wgrad, room
    run = traced if _is_compiling() else apply
    return run(x, weight, group_sizes, bias, bias_scales, call)


def explain_linear(
    x: Tensor, weight: Weights, group_sizes: GroupSizes, recipe: Recipe, backend: HashableNames
) -> LayerPlan:
    """The plan of `grouped_linear` for these operands and the gradients that they require."""
    w = parameters_of(weight, None).weight
    check_operands(x, w)
    _, at_host = as_sizes(group_sizes, x.shape[0], w.shape[0], x)
    return layer_for(recipe, x, w, at_host, x.requires_grad, w.requires_grad, backend, wants_graph(x)).plan


def grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    *,
    recipe: Recipe | str | None = None,
    bias: Tensor | None = None,
    seed: int | Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """torch's grouped_mm with a recipe: rows of `a` between offs[g - 1] and offs[g] times b[g].

    a      [M, K]
    b      [G, K, N], any strides
    offs   [G] int32 cumulative ends, on the host or on a's device; rows past the last one are zero in the result
    bias   [G, N], optional
    recipe a Recipe or its name, but for DelayedScaling; None: HighPrecision
    seed   of stochastic rounding, as grouped_linear's
    out_dtype   of the result; None: the recipe's output_dtype, else a's

    Differentiable in a, b and bias, once. Raises as `grouped_linear` does, and ValueError for a recipe with a state.
    """
    recipe = recipe_of(recipe)
    if recipe.stateful:
        raise ValueError(
            f"recipe is {type(recipe).__name__}, which takes its scales from history, and grouped_mm has no place for "
            "a state; give CurrentScaling, or call grouped_linear, which takes state="
        )
    arguments.check_grouped_mm(a, b, offs, out_dtype)
    # the operands are checked first: a transposed view of something else would be blamed in other words
    sizes = torch.diff(offs, prepend=offs.new_zeros(1))
    call = Call(recipe)
    call.seed = seed
    if out_dtype is not None:
        call.output_dtype = DTYPE_NAMES[out_dtype]
    run = traced if _is_compiling() else apply
    return run(a, b.transpose(1, 2), sizes, bias, None, call)
