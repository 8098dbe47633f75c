"""grouped_mlp: fc1, activation and fc2 as one differentiable function, with the quantizers between them fused."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from octavo import Recipe
from octavo_registry.contract.cards import Activation
from octavo_torch.arrays.checks import backend_names
from octavo_torch.arrays.interleaving import check_interleave
from octavo_torch.arrays.leading import LeadingAxes, has_other_rank
from octavo_torch.arrays.per_group import Weights, as_one, leaves_of
from octavo_torch.arrays.sizes import GroupSizes, as_sizes
from octavo_torch.compiler.refused_derivatives import check_no_tangent
from octavo_torch.dispatch.recipes import recipe_of
from octavo_torch.dispatch.room import Room
from octavo_torch.linear import contexts
from octavo_torch.linear.grouped import InputRows
from octavo_torch.linear.parameters import mark_written, parameters_of
from octavo_torch.linear.quantized_input import QUANTIZED, check_codes, rows_of
from octavo_torch.linear.weights import QuantizedWeight
from octavo_torch.mlp.arguments import check_mlp, check_operands
from octavo_torch.mlp.autograd import grouped_mlp_function, run_forward
from octavo_torch.mlp.call import MlpCall, Operands
from octavo_torch.mlp.plan import MlpPlan, RequiredGradients, mlp_plan_for
from octavo_torch.scaling.delayed_state import DelayedState
from octavo_torch.scaling.seeds import for_backward
from octavo_torch.wgrad.graph_route import graph_route
from octavo_torch.wgrad.postponed import DelayedWgrad

_is_compiling = torch.compiler.is_compiling


class OptionalOperands(NamedTuple):
    """The operands of grouped_mlp that a call may leave out."""

    probs: Tensor | None = None
    bias1: Weights | None = None
    bias2: Weights | None = None
    bias2_scales: Tensor | None = None

    def flattened(self, axes: LeadingAxes) -> OptionalOperands:
        """With one axis of rows in place of x's leading axes."""
        return self._replace(
            probs=axes.of_rows("probs", self.probs), bias2_scales=axes.of_rows("bias2_scales", self.bias2_scales)
        )


def apply(
    x: InputRows,
    w1: Weights | QuantizedWeight,
    w2: Weights | QuantizedWeight,
    group_sizes: GroupSizes | None,
    optional: OptionalOperands,
    call: MlpCall,
) -> Tensor:
    """`grouped_mlp`, eagerly, where a seed may also be a SeedCounter; stores what it resolves in `call`."""
    if contexts.any_active() and contexts.concerns(x):
        operands = {"x": x, "w1": w1, "w2": w2, "group_sizes": group_sizes, **optional._asdict()}
        call.unwrap_states()
        return contexts.run(
            lambda x, w1, w2, group_sizes, **rest: apply(x, w1, w2, group_sizes, OptionalOperands(**rest), copy(call)),
            operands,
        )
    if has_other_rank(x):
        return _with_leading_axes(x, w1, w2, group_sizes, optional, call)
    recipe = call.recipe
    first = parameters_of(w1, optional.bias1, ("w1", "bias1"))
    second = parameters_of(w2, optional.bias2, ("w2", "bias2"))
    rows_or_codes, x_codes = x, None
    if isinstance(x, QUANTIZED):
        x, x_codes, group_sizes = rows_of(x, first.weight, group_sizes, recipe)
    if forward_ad._current_level >= 0:
        check_no_tangent(x, *leaves_of(first.leaves), *leaves_of(second.leaves), *optional)
    name = check_operands(x, first.weight, second.weight, call.activation)
    arrays = Operands(x, first.weight, second.weight, optional.probs, first.bias, second.bias, optional.bias2_scales)
    enabled = torch.is_grad_enabled()
    needs = [enabled and isinstance(value, Tensor) and value.requires_grad for value in arrays]
    need_da = needs[0] or needs[1] or needs[3] or needs[4]
    needed = RequiredGradients(needs[0], needs[1], needs[2], need_da, call.delayed_wgrad is not None)
    sizes, at_host = as_sizes(group_sizes, x.shape[0], first.weight.shape[0], x)
    plan = mlp_plan_for(recipe, name, x, first.weight, second.weight, at_host, needed, call.backend)
    check_mlp(call, plan, arrays)
    if any(needs) and (plan.fc1.needs_seed or plan.fc2.needs_seed):
        call.seed = for_backward(call.seed)
    if call.room is not None:
        plan = plan.leaving(call.room.gemms)
    if x_codes is not None:
        check_codes(plan.fc1, recipe, rows_or_codes, x_codes)
    block = check_interleave(call.interleave, name, first.weight)
    plan = plan.interleaved(block)
    call.set_layers(plan, block)
    call.fc1.sizes = call.fc2.sizes = sizes
    call.fc1.x_codes = x_codes
    w1_leaf, w2_leaf = call.resolve_weights(first, second, needs[1], needs[2])
    # detached so that the caller's tensor stays a plain buffer, for the next call
    out = call.fc2.out = None if call.out is None else call.out.detach()
    if any(needs):
        return grouped_mlp_function(call, out, x, w1_leaf, w2_leaf, *arrays[3:], call.anchor)
    (y, *_), _ = run_forward(call, arrays)
    mark_written(out)
    return y


def _with_leading_axes(
    x: Tensor,
    w1: Weights | QuantizedWeight,
    w2: Weights | QuantizedWeight,
    group_sizes: GroupSizes | None,
    optional: OptionalOperands,
    call: MlpCall,
) -> Tensor:
    """`apply` on the rows of an x [..., K]."""
    axes = LeadingAxes(x)
    call.out, call.grad_input = axes.buffer("out", call.out), axes.buffer("grad_input", call.grad_input)
    return axes.restored(apply(axes.flat(x), w1, w2, group_sizes, optional.flattened(axes), call))


_NAMES = frozenset(OptionalOperands._fields)


def _apply_options(
    x: InputRows,
    w1: Weights | QuantizedWeight,
    w2: Weights | QuantizedWeight,
    *,
    group_sizes: GroupSizes | None = None,
    **options: Any,
) -> Tensor:
    optional = OptionalOperands(**{name: value for name, value in options.items() if name in _NAMES})
    call = MlpCall(**{name: value for name, value in options.items() if name not in _NAMES})
    return apply(x, w1, w2, group_sizes, optional, call)


_in_graph = graph_route(_apply_options)


def run(
    x: InputRows,
    w1: Weights | QuantizedWeight,
    w2: Weights | QuantizedWeight,
    group_sizes: GroupSizes | None,
    optional: OptionalOperands,
    call: MlpCall,
) -> Tensor:
    """`apply`; under torch.compile as a part of the one graph."""
    if not _is_compiling():
        return apply(x, w1, w2, group_sizes, optional, call)
    return _in_graph(x, w1, w2, group_sizes=group_sizes, **optional._asdict(), **call.present())


def grouped_mlp(
    x: InputRows,
    w1: Weights | QuantizedWeight,
    w2: Weights | QuantizedWeight,
    group_sizes: GroupSizes | None,
    *,
    activation: Activation = "swiglu",
    probs: Tensor | None = None,
    bias1: Weights | None = None,
    bias2: Weights | None = None,
    bias2_scales: Tensor | None = None,
    recipe: Recipe | str | None,
    seed: int | Tensor | None = None,
    state: tuple[DelayedState, DelayedState] | None = None,
    group_offset: int = 0,
    backend: str | Sequence[str] | None = None,
    interleave: int | None = None,
    out: Tensor | None = None,
    grad_input: Tensor | None = None,
    main_grad: Literal["accumulate", "overwrite"] | None = None,
    delayed_wgrad: DelayedWgrad | None = None,
    room: Room | None = None,
) -> Tensor:
    """y[r] = w2[g] (probs[r] act(w1[g] x[r] + bias1[g])) + bias2[g] for every row r of group g.

    x             [M, K]            bf16, fp16 or fp32; rows of one group stand together, in group order. Or [..., K],
                                    whose leading axes y, probs, bias2_scales and buffers then have in M's place. Or
                                    quantized rows, as grouped_linear takes them
    w1            [G, 2 F, K]       gate half first, for swiglu, geglu (with erf), geglu_tanh and clamped_swiglu;
                                    [G, F, K] for silu, gelu (with erf), gelu_tanh and relu2. x's dtype; or one tensor
                                    per group; or what `quantize_weight` returned for either
    w2            [G, N, F]         likewise
    group_sizes   [G]               as grouped_linear's
    probs         [M]               fp32, multiplies the activation of each row
    bias1, bias2  [G, 2 F], [G, N]  optional; bias2_scales [M] multiplies bias2 row by row (often `probs` once more)
    recipe                          a Recipe or its name; None: HighPrecision
    seed                            of stochastic rounding; fc1 rounds with it and fc2 with seed XOR 2^63
    state                           of delayed scaling: (fc1's, fc2's)
    interleave                      b: in w1 and bias1, b rows of the gate and b of the up projection alternate (1:
                                    every other row; b divides F). Codes and results are those of the gate half first.
                                    A backend that does not read such a w1 in place reads a copy, made in each call
                                    unless w1 is quantized already
    group_offset, backend, out, grad_input, main_grad, delayed_wgrad
                                    as grouped_linear's; the last two are for both weights
    room                            multiprocessors that the call leaves to what runs beside it; None: it takes all
    Returns       [M, N]            rows past the sum are zero, and neither x nor probs are read there

    fc1's result has x's dtype. The activation and its gradient are computed in fp32, rounded once to that dtype and
    then quantized: in one pass where a backend fuses that, else one after the other; from the rounded array on the bits
    are equal. Differentiable once in x, weights, probs, biases and bias2_scales; only what is asked for is computed.
    Raises as grouped_linear does. `explain_mlp` tells what is fused.
    """
    call = MlpCall(
        recipe=recipe_of(recipe),
        backend=backend_names(backend),
        group_offset=group_offset,
        seed=seed,
        out=out,
        grad_input=grad_input,
        main_grad=main_grad,
        activation=activation,
        interleave=interleave,
        states=state,
        delayed_wgrad=delayed_wgrad,
        room=room,
    )
    return run(x, w1, w2, group_sizes, OptionalOperands(probs, bias1, bias2, bias2_scales), call)


def explain_mlp(
    x: Tensor,
    w1: Weights,
    w2: Weights,
    group_sizes: GroupSizes | None,
    *,
    activation: Activation = "swiglu",
    recipe: Recipe | str | None,
    backend: str | Sequence[str] | None = None,
) -> MlpPlan:
    """What `grouped_mlp` runs for these operands and their gradients, printable: backends, layouts, what is fused.

    Nothing is computed; tensors on the meta device are not served. Raises as `grouped_mlp` does.
    """
    first, second = as_one("w1", w1), as_one("w2", w2)
    x = LeadingAxes(x).flat(x) if has_other_rank(x) else x
    name = check_operands(x, first, second, activation)
    _, at_host = as_sizes(group_sizes, x.shape[0], first.shape[0], x)
    needs = x.requires_grad, first.requires_grad, second.requires_grad
    needed = RequiredGradients(*needs, needs[0] or needs[1])
    names = backend_names(backend)
    return mlp_plan_for(recipe_of(recipe), name, x, first, second, at_host, needed, names)
