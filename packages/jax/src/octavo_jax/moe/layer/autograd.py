"""The differentiable MoE layer, from tokens to combined tokens.

Forward:   x by row -> fc1 -> h -> activation -> fc2 -> rows summed by token, weighted here or at the activation
Backward:  dy by row -> fc2's gradients -> activation's gradient -> fc1's gradients -> dx summed by token

What is kept in between is the plan's form: everything, or x by token and h, or h as codes, or x alone. Whatever else
the backward pass reads is computed again (`octavo_jax.moe.layer.recomputed`).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from octavo.recipe_base import Gemm
from octavo_jax.arithmetic.widening import in_dtype
from octavo_jax.arrays.gemm_operands import GemmOperand
from octavo_jax.arrays.sizes import end_of
from octavo_jax.linear.computed_operands import ComputedOperand, wgrad_x_if_quantized
from octavo_jax.linear.operands import Context, wgrad_x
from octavo_jax.linear.two_forms import kept_form
from octavo_jax.mlp import autograd as mlp_autograd
from octavo_jax.mlp.autograd import Intermediates, States
from octavo_jax.moe.layer.forms import keep_rows
from octavo_jax.moe.layer.plan import MoePlan
from octavo_jax.moe.layer.recomputed import Recomputed
from octavo_jax.moe.layer.residuals import MoeResiduals, RowOrder, kept_kernel, without_sizes
from octavo_jax.moe.layer.tokens import Tokens, gathered_rows, gathers, quantize_tokens, quantizes_tokens
from octavo_jax.moe.permutation import (
    PermutationResiduals,
    row_of,
    rows_gradient,
    sum_of_choices,
    weighted_gradients,
    weighted_sum,
    weights_by_row,
)
from octavo_jax.remat.checkpoint_names import name_planes


class MoeArrays(NamedTuple):
    """The arrays of a call that have a gradient; or, returned by the backward pass, their gradients.

    x         [T, K]
    weights   [T, k] float32
    wi, wo    [G, K, C] and [G, F, N]
    bi, bo    [G, C] and [G, N]
    """

    x: Array
    weights: Array
    wi: Array
    wo: Array
    bi: Array | None
    bo: Array | None


def _forward(
    plan: MoePlan, a: MoeArrays, row_order: RowOrder, states: States | None, context: Context
) -> tuple[tuple[Array, States | None], Intermediates, Array]:
    """((y, states), the experts' intermediate arrays, their results)."""
    tokens = Tokens(a.x, *row_order)
    rows = tokens.rows()
    probs = None if plan.weights_on == "output" else weights_by_row(a.weights, row_order.order)
    arrays = mlp_autograd.MlpArrays(rows, None, None, a.wi, a.wo, a.bi, a.bo, probs, None if a.bo is None else probs)
    x1 = _x_of_tokens(plan, rows, tokens, states, context)
    x1_tokens = gathered_rows(plan.forward_mlp.fc1, "x", "fprop", tokens, context)
    (results, states), intermediates = mlp_autograd.forward(plan.forward_mlp, arrays, states, context, x1, x1_tokens)
    end = end_of(context.group_sizes)
    if plan.weights_on == "output":
        y = weighted_sum(results, a.weights, row_order.position, end, plan.out_dtype, plan.row_functions)
    else:
        y = sum_of_choices(results, row_order.position, end, plan.out_dtype, plan.row_functions)
    return (y, states), intermediates, results


def _x_of_tokens(
    plan: MoePlan, rows: Array, tokens: Tokens, states: States | None, context: Context
) -> ComputedOperand | None:
    """fc1's x, quantized from the tokens; None if it is quantized from its rows, because something reads these."""
    fc1 = plan.forward_mlp.fc1
    gemms: tuple[Gemm, ...] = ("fprop", "wgrad") if plan.form == "keep_all" else ("fprop",)
    if not quantizes_tokens(fc1, "x", gemms):
        return None
    history = mlp_autograd.history_of(None if states is None else states[0], "x")
    return ComputedOperand(rows, *quantize_tokens(fc1, tokens, "x", context, history))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _moe(
    plan: MoePlan, a: MoeArrays, row_order: RowOrder, states: States | None, context: Context
) -> tuple[Array, States | None]:
    return _forward(plan, a, row_order, states, context)[0]


def moe_with_residuals(
    plan: MoePlan, a: MoeArrays, row_order: RowOrder, states: States | None, context: Context
) -> tuple[tuple[Array, States | None], MoeResiduals]:
    """The layer's result, and what its backward pass reads."""
    plan = plan.for_training()
    result, intermediates, results = _forward(plan, a, row_order, states, context)
    fc1, fc2, on_output = plan.mlp.fc1, plan.mlp.fc2, plan.weights_on == "output"
    keeps_all, recomputes = plan.form == "keep_all", plan.form == "recompute"
    keeps_rows = keeps_all and not gathers(fc1, "x", "wgrad")
    h: GemmOperand = intermediates.y1
    if plan.form == "lean":
        codes = keep_rows(intermediates.y1, context.group_sizes, fc1.options.backend)
        h = name_planes(codes, fc1.options.checkpoint_name)
    return result, MoeResiduals(
        plan=plan,
        forward_mlp=plan.forward_mlp,
        backward_mlp=plan.backward_mlp,
        x=None if keeps_rows else a.x,
        x1=without_sizes(wgrad_x(fc1, intermediates.x1.array, intermediates.x1.q)) if keeps_rows else None,
        x2=without_sizes(wgrad_x_if_quantized(fc2, intermediates.x2)) if keeps_all else None,
        h=None if recomputes else h,
        results=None if recomputes or not on_output else results,
        weights=a.weights,
        row_order=row_order,
        wi=kept_kernel(plan, fc1, a.wi, kept_form(intermediates.w1), recomputes),
        wo=kept_kernel(plan, fc2, a.wo, kept_form(intermediates.w2), recomputes and on_output),
        bi=a.bi,
        bo=a.bo,
        context=context,
        states=result[1],
    )


def _moe_bwd(
    _: MoePlan, kept: MoeResiduals, cotangents: tuple[Array, States | None]
) -> tuple[MoeArrays, None, States | None, None]:
    dy, later_states = cotangents
    plan = kept.plan
    if plan.form != "keep_all" or plan.weight_codes == "remake":
        # Without a barrier XLA would find equal expressions and keep the forward's values, not compute them again.
        kept, dy = lax.optimization_barrier((kept, dy))  # type: ignore[no-untyped-call]
    (order, position), end = kept.row_order, end_of(kept.context.group_sizes)
    recomputed = Recomputed(kept)
    saved = PermutationResiduals(
        order, position, end, jnp.zeros(0, plan.mlp.fc2.y_dtype), recomputed.results, kept.weights
    )
    dy_operands = None
    if plan.weights_on == "output":
        drows, dweights = weighted_gradients(saved, dy, plan.row_functions)
    else:
        drows, dweights = rows_gradient(saved, dy), None
        dy_operands = recomputed.dy_operands(Tokens(in_dtype(dy, plan.mlp.fc2.y_dtype), order, position))
    gradients, states = mlp_autograd.backward(recomputed.mlp_residuals(), (drows, later_states), dy_operands)
    if dweights is None:
        assert gradients.probs is not None
        of_rows = gradients.probs if gradients.bo_scales is None else gradients.probs + gradients.bo_scales
        dweights = row_of(of_rows, position, end)
    dx = sum_of_choices(gradients.x, position, end, gradients.x.dtype, plan.row_functions)
    return MoeArrays(dx, dweights, gradients.wi, gradients.wo, gradients.bi, gradients.bo), None, states, None


_moe.defvjp(moe_with_residuals, _moe_bwd)


# One compiled call for eager users; inside their own jit it is a nested one of the same name.
@partial(jax.jit, static_argnums=0)
def octavo_moe(
    plan: MoePlan, a: MoeArrays, row_order: RowOrder, states: States | None, context: Context
) -> tuple[Array, States | None]:
    """The differentiable call with everything static in `plan`."""
    return _moe(plan, a, row_order, states, context)
