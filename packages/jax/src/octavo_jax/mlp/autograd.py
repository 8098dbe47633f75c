"""The differentiable MLP: normalization (or none), fc1, activation, fc2, each quantizer fused with what is before it.

Forward:   x (normalized) quantized -> fc1 -> y1 -> activation + quantize -> fc2 -> y
Backward:  dy quantized -> dgrad and wgrad of fc2 -> dact + dbias + quantize -> dgrad and wgrad of fc1 -> dnorm
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
from jax import Array

from octavo_jax.functions.norms import octavo_normalization
from octavo_jax.linear.computed_operands import (
    ComputedOperand,
    NormSaved,
    activated_operand,
    activation_gradient_operand,
    normalized_operand,
    plain_activation,
    wgrad_x_if_quantized,
)
from octavo_jax.linear.operands import (
    Context,
    GemmOperand,
    Rows,
    dgrad_weight,
    quantize_operand,
    stored_weight,
    wgrad_x,
)
from octavo_jax.linear.probed_arguments import ProbedArguments
from octavo_jax.linear.products import (
    bias_gradient,
    bias_scales_gradient,
    forward_product,
    input_gradient,
    kernel_gradient,
)
from octavo_jax.linear.two_forms import Quantized
from octavo_jax.mlp.plan import Mlp
from octavo_jax.scaling.delayed_state import DelayedState, ScalingHistory, merged
from octavo_jax.scaling.seeds import second_stream
from octavo_registry.contract.moves import TokenRows

States = tuple[DelayedState, DelayedState] | None


class Arrays(NamedTuple):
    """The arrays of a call that have a gradient; or, returned by `backward`, their gradients.

    x             [M, K]
    gamma, beta   [K], of the normalization
    wi, wo        [G, K, C] and [G, F, N]
    bi, bo        [G, C] and [G, N]
    probs         fp32 [M]
    bo_scales     fp32 [M]
    """

    x: Array
    gamma: Array | None
    beta: Array | None
    wi: Array
    wo: Array
    bi: Array | None
    bo: Array | None
    probs: Array | None
    bo_scales: Array | None = None


class Intermediates(NamedTuple):
    """What the forward pass computes on the way to y: the operands of both layers, and fc1's result y1."""

    x1: ComputedOperand
    norm: NormSaved | None
    w1: Quantized | None
    y1: Array
    x2: ComputedOperand
    w2: Quantized | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Residuals:
    """What the backward pass reads.

    mlp           the MLP whose planes were saved; the registry might choose another one now
    norm          what the normalization's gradient reads
    x1, w1        the operands of fc1's wgrad and dgrad: one plane each, or the array for a high-precision slot
    y1            fc1's result
    x2, w2        those of fc2. x2, and x1 after a normalization, are None if they would be arrays: then they are
                  computed again
    bi, bo        read for the dtypes of their gradients, and bo for that of bo_scales
    bo_scales     None if bo is added as it is
    states        with the forward's amaxes
    """

    mlp: Mlp = field(metadata={"static": True})
    norm: NormSaved | None
    x1: Rows | None
    w1: GemmOperand
    y1: Array
    x2: GemmOperand | None
    w2: GemmOperand
    bi: Array | None
    bo: Array | None
    probs: Array | None
    context: Context
    states: States
    bo_scales: Array | None = None


def second_context(context: Context) -> Context:
    """The Context of fc2: that of fc1 with the second layer's seed."""
    return context._replace(seed=None if context.seed is None else second_stream(context.seed))


def history_of(state: DelayedState | None, operand: str) -> ScalingHistory | None:
    """The state's history of "x", "kernel" or "grad"; None without a state."""
    return None if state is None else getattr(state, operand)


def _states(*histories: tuple[ScalingHistory | None, ...]) -> tuple[DelayedState, DelayedState]:
    first, second = (DelayedState(*layer) for layer in histories)  # type: ignore[arg-type]
    return first, second


class DyRead(NamedTuple):
    """What a MoE layer has made of the tokens of dy, so that no rows of it are read; None for what reads the rows.

    codes                codes of the rows, None if both GEMMs gather, and the history, as `quantize_operand` returns
                         them
    of_dgrad, of_wgrad   the tokens from which these GEMMs gather
    """

    codes: tuple[Quantized | None, ScalingHistory | None] | None = None
    of_dgrad: TokenRows[Array] | None = None
    of_wgrad: TokenRows[Array] | None = None


def forward(
    mlp: Mlp,
    a: Arrays,
    states: States,
    context: Context,
    x1: ComputedOperand | None = None,
    gathered: TokenRows[Array] | None = None,
) -> tuple[tuple[Array, States], Intermediates]:
    """((y, the states with the forward's amaxes), the intermediate arrays).

    x1         fc1's x, if the caller has quantized it
    gathered   what fc1 multiplies instead of x1, if it gathers its rows from tokens
    """
    fc1, fc2, norm = mlp.fc1, mlp.fc2, None
    a, context = _probed(mlp, a), ProbedArguments.of(fc1).context(context)
    s1, s2 = states or (None, None)
    if x1 is None and mlp.norm is None:
        q, of_x = quantize_operand(fc1.plan.quantize_x, fc1, a.x, "x", context, history_of(s1, "x"))
        x1 = ComputedOperand(a.x, q, of_x)
    elif x1 is None:
        assert a.gamma is not None
        assert mlp.norm is not None
        arrays = (a.x, a.gamma, a.beta)
        x1, norm = normalized_operand(mlp.quantize_normalized, fc1, mlp.norm, arrays, context, history_of(s1, "x"))
    wi = stored_weight(fc1, a.wi)
    w1, of_w1 = quantize_operand(fc1.plan.quantize_w, fc1, wi, "w", context, history_of(s1, "kernel"))
    y1 = forward_product(fc1, x1.array if gathered is None else gathered, x1.q, wi, w1, a.bi, context)
    later = second_context(context)
    x2 = activated_operand(mlp.activated(a.probs), fc2, y1, later, history_of(s2, "x"))
    wo = stored_weight(fc2, a.wo)
    w2, of_w2 = quantize_operand(fc2.plan.quantize_w, fc2, wo, "w", later, history_of(s2, "kernel"))
    y = forward_product(fc2, x2.array, x2.q, wo, w2, a.bo, later, a.bo_scales)
    if s1 is not None and s2 is not None:
        states = _states((x1.history, of_w1, s1.grad), (x2.history, of_w2, s2.grad))
    return (y, states), Intermediates(x1, norm, w1, y1, x2, w2)


def _probed(mlp: Mlp, a: Arrays) -> Arrays:
    first, second = ProbedArguments.of(mlp.fc1), ProbedArguments.of(mlp.fc2)
    return Arrays(
        first.x(a.x),
        first.whole("gamma", a.gamma),
        first.whole("beta", a.beta),
        first.kernel(a.wi),
        second.kernel(a.wo),
        first.bias(a.bi),
        second.bias(a.bo),
        first.per_row("probs", a.probs),
        second.per_row("bo_scales", a.bo_scales),
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(mlp: Mlp, arrays: Arrays, states: States, context: Context) -> tuple[Array, States]:
    return forward(mlp, arrays, states, context)[0]


def _differentiated(
    mlp: Mlp, arrays: Arrays, states: States, context: Context
) -> tuple[tuple[Array, States], Residuals]:
    mlp = mlp.for_training()
    result, inner = forward(mlp, arrays, states, context)
    norm = inner.norm
    if norm is not None and arrays.gamma is not None:
        norm = norm._replace(x=arrays.x, gamma=arrays.gamma, beta=arrays.beta)
    x1 = wgrad_x(mlp.fc1, arrays.x, inner.x1.q) if norm is None else wgrad_x_if_quantized(mlp.fc1, inner.x1)
    return result, Residuals(
        mlp=mlp,
        norm=norm,
        x1=x1,
        w1=dgrad_weight(mlp.fc1, arrays.wi, inner.w1),
        y1=inner.y1,
        x2=wgrad_x_if_quantized(mlp.fc2, inner.x2),
        w2=dgrad_weight(mlp.fc2, arrays.wo, inner.w2),
        bi=arrays.bi,
        bo=arrays.bo,
        probs=arrays.probs,
        context=context,
        states=result[1],
        bo_scales=arrays.bo_scales,
    )


def backward(r: Residuals, cotangents: tuple[Array, States], read: DyRead | None = None) -> tuple[Arrays, States]:
    """The gradients, and the states with the amaxes of this backward and of calls that took the forward's states."""
    mlp, fc1, fc2 = r.mlp, r.mlp.fc1, r.mlp.fc2
    first, second, later_states = ProbedArguments.of(fc1), ProbedArguments.of(fc2), cotangents[1]
    dy, w1, w2 = second.dy(cotangents[0]), first.kernel(r.w1), second.kernel(r.w2)
    s1, s2 = r.states or (None, None)
    context = first.context(r.context)
    later = second_context(context)
    codes, of_dgrad, of_wgrad = read or DyRead()
    dyq, of_dy = codes or quantize_operand(fc2.plan.quantize_dy, fc2, dy, "dy", later, history_of(s2, "grad"))
    da = input_gradient(fc2, dy if of_dgrad is None else of_dgrad, dyq, w2, later)
    dy1, dbi, dprobs, activated = activation_gradient_operand(
        mlp.gradient(r.probs), fc1, da, r.y1, r.bi, context, history_of(s1, "grad"), forward=r.x2 is None
    )
    x2 = activated if r.x2 is None else r.x2
    if x2 is None:
        x2 = plain_activation(mlp.activated(r.probs), fc2, r.y1, later)
    dwo = kernel_gradient(fc2, x2, dy if of_wgrad is None else of_wgrad, dyq, later)
    dx = input_gradient(fc1, dy1.array, dy1.q, w1, context)
    x1, dgamma, dbeta = r.x1 if isinstance(r.x1, TokenRows) else first.x(r.x1), None, None
    if r.norm is not None:
        assert mlp.norm is not None
        if x1 is None:
            x1 = octavo_normalization(*r.norm[:3], spec=mlp.norm).y
        dx, dgamma, dbeta = r.norm.gradients(dx)
    assert x1 is not None
    dwi = kernel_gradient(fc1, x1, dy1.array, dy1.q, context)
    dbo, dbo_scales = bias_gradient(fc2, dy, r.bo, later, r.bo_scales), None
    if r.bo_scales is not None:
        assert r.bo is not None  # scales without a bias are refused
        dbo_scales = bias_scales_gradient(fc2, dy, r.bo, later)
    states = r.states
    if s1 is not None and s2 is not None and later_states is not None:
        now = _states((s1.x, s1.kernel, dy1.history), (s2.x, s2.kernel, of_dy))
        states = (merged(now[0], later_states[0]), merged(now[1], later_states[1]))
    return Arrays(dx, dgamma, dbeta, dwi, dwo, dbi, dbo, dprobs, dbo_scales), states


def _backward(_: Mlp, r: Residuals, cotangents: tuple[Array, States]) -> tuple[Arrays, States, None]:
    return *backward(r, cotangents), None


_mlp.defvjp(_differentiated, _backward)


# One compiled call for eager users; inside their own jit it is a nested one of the same name.
@partial(jax.jit, static_argnums=0)
def octavo_mlp(mlp: Mlp, arrays: Arrays, states: States, context: Context) -> tuple[Array, States]:
    """The differentiable call with everything static in `mlp`."""
    return _mlp(mlp, arrays, states, context)
