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

from octavo_jax.arrays.gemm_operands import GemmOperand, RowOperand
from octavo_jax.functions.norms import octavo_normalization
from octavo_jax.linear.computed_operands import (
    ComputedOperand,
    NormResiduals,
    activated_operand,
    activation_gradient_operand,
    normalized_operand,
    plain_activation,
    wgrad_x_if_quantized,
)
from octavo_jax.linear.gemms import (
    bias_gradient,
    bias_scales_gradient,
    dgrad,
    fprop,
    wgrad,
)
from octavo_jax.linear.operands import (
    Context,
    QuantizedOperand,
    dgrad_weight,
    quantize_operand,
    stored_weight,
    wgrad_x,
)
from octavo_jax.linear.probed_arguments import ProbedArguments
from octavo_jax.linear.two_forms import Quantized
from octavo_jax.mlp.plan import Mlp
from octavo_jax.scaling.delayed_state import DelayedState, ScalingHistory, merged
from octavo_jax.scaling.seeds import second_stream
from octavo_registry.contract.moves import TokenRows

States = tuple[DelayedState, DelayedState]
"""Delayed scaling's states of fc1 and fc2."""


class MlpArrays(NamedTuple):
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
    norm: NormResiduals | None
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
    norm: NormResiduals | None
    x1: RowOperand | None
    w1: GemmOperand
    y1: Array
    x2: GemmOperand | None
    w2: GemmOperand
    bi: Array | None
    bo: Array | None
    probs: Array | None
    context: Context
    states: States | None
    bo_scales: Array | None = None


def fc2_context_of(context: Context) -> Context:
    """The Context of fc2: that of fc1 with the second layer's seed."""
    return context._replace(seed=None if context.seed is None else second_stream(context.seed))


def history_of(state: DelayedState | None, operand: str) -> ScalingHistory | None:
    """The state's history of "x", "kernel" or "grad"; None without a state."""
    return None if state is None else getattr(state, operand)


_Histories = tuple[ScalingHistory | None, ScalingHistory | None, ScalingHistory | None]


def _states(fc1: _Histories, fc2: _Histories) -> tuple[DelayedState, DelayedState]:
    """The states of both layers, from their histories of x, the kernel and dy."""
    return DelayedState(*fc1), DelayedState(*fc2)  # type: ignore[arg-type]


class DyOperands(NamedTuple):
    """What fc2's GEMMs read of dy in a MoE layer, where they read the tokens' dy; None for what is read of its rows.

    quantized                    the rows quantized from the tokens, or without codes if both GEMMs gather; None: they
                                 are quantized from the rows
    dgrad_tokens, wgrad_tokens   the tokens from which these GEMMs gather their rows; None: they read the rows
    """

    quantized: QuantizedOperand | None = None
    dgrad_tokens: TokenRows[Array] | None = None
    wgrad_tokens: TokenRows[Array] | None = None


def forward(
    mlp: Mlp,
    a: MlpArrays,
    states: States | None,
    context: Context,
    x1: ComputedOperand | None = None,
    x1_tokens: TokenRows[Array] | None = None,
) -> tuple[tuple[Array, States | None], Intermediates]:
    """((y, the states with the forward's amaxes), the intermediate arrays).

    x1          fc1's x, if the caller has quantized it
    x1_tokens   what fc1 multiplies instead of x1, if it gathers its rows from tokens
    """
    fc1, fc2, norm = mlp.fc1, mlp.fc2, None
    a, context = _probed(mlp, a), ProbedArguments.of(fc1).context(context)
    s1, s2 = states or (None, None)
    if x1 is None and mlp.norm is None:
        x_quantized = quantize_operand(fc1, a.x, "x", context, history_of(s1, "x"))
        x1 = ComputedOperand(a.x, *x_quantized)
    elif x1 is None:
        assert a.gamma is not None
        assert mlp.norm is not None
        arrays = (a.x, a.gamma, a.beta)
        x1, norm = normalized_operand(mlp.quantize_normalized, fc1, mlp.norm, arrays, context, history_of(s1, "x"))
    wi = stored_weight(fc1, a.wi)
    w1, w1_history = quantize_operand(fc1, wi, "w", context, history_of(s1, "kernel"))
    y1 = fprop(fc1, x1.array if x1_tokens is None else x1_tokens, x1.q, wi, w1, a.bi, context)
    fc2_context = fc2_context_of(context)
    x2 = activated_operand(mlp.activation_quantizer(a.probs), fc2, y1, fc2_context, history_of(s2, "x"))
    wo = stored_weight(fc2, a.wo)
    w2, w2_history = quantize_operand(fc2, wo, "w", fc2_context, history_of(s2, "kernel"))
    y = fprop(fc2, x2.array, x2.q, wo, w2, a.bo, fc2_context, a.bo_scales)
    if s1 is not None and s2 is not None:
        states = _states((x1.history, w1_history, s1.grad), (x2.history, w2_history, s2.grad))
    return (y, states), Intermediates(x1, norm, w1, y1, x2, w2)


def _probed(mlp: Mlp, a: MlpArrays) -> MlpArrays:
    probed1, probed2 = ProbedArguments.of(mlp.fc1), ProbedArguments.of(mlp.fc2)
    return MlpArrays(
        x=probed1.x(a.x),
        gamma=probed1.whole("gamma", a.gamma),
        beta=probed1.whole("beta", a.beta),
        wi=probed1.kernel(a.wi),
        wo=probed2.kernel(a.wo),
        bi=probed1.bias(a.bi),
        bo=probed2.bias(a.bo),
        probs=probed1.per_row("probs", a.probs),
        bo_scales=probed2.per_row("bo_scales", a.bo_scales),
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(mlp: Mlp, arrays: MlpArrays, states: States | None, context: Context) -> tuple[Array, States | None]:
    return forward(mlp, arrays, states, context)[0]


def _mlp_fwd(
    mlp: Mlp, arrays: MlpArrays, states: States | None, context: Context
) -> tuple[tuple[Array, States | None], Residuals]:
    mlp = mlp.for_training()
    result, intermediates = forward(mlp, arrays, states, context)
    norm = intermediates.norm
    if norm is not None and arrays.gamma is not None:
        norm = norm._replace(x=arrays.x, gamma=arrays.gamma, beta=arrays.beta)
    x1 = (
        wgrad_x(mlp.fc1, arrays.x, intermediates.x1.q)
        if norm is None
        else wgrad_x_if_quantized(mlp.fc1, intermediates.x1)
    )
    return result, Residuals(
        mlp=mlp,
        norm=norm,
        x1=x1,
        w1=dgrad_weight(mlp.fc1, arrays.wi, intermediates.w1),
        y1=intermediates.y1,
        x2=wgrad_x_if_quantized(mlp.fc2, intermediates.x2),
        w2=dgrad_weight(mlp.fc2, arrays.wo, intermediates.w2),
        bi=arrays.bi,
        bo=arrays.bo,
        probs=arrays.probs,
        context=context,
        states=result[1],
        bo_scales=arrays.bo_scales,
    )


def backward(
    r: Residuals, cotangents: tuple[Array, States | None], dy_operands: DyOperands | None = None
) -> tuple[MlpArrays, States | None]:
    """The gradients, and the states with the amaxes of this backward and of calls that took the forward's states.

    dy_operands   what a MoE layer reads in the place of rows of dy; None: the rows
    """
    mlp, fc1, fc2 = r.mlp, r.mlp.fc1, r.mlp.fc2
    probed1, probed2, later_states = ProbedArguments.of(fc1), ProbedArguments.of(fc2), cotangents[1]
    dy, w1, w2 = probed2.dy(cotangents[0]), probed1.kernel(r.w1), probed2.kernel(r.w2)
    s1, s2 = r.states or (None, None)
    context = probed1.context(r.context)
    fc2_context = fc2_context_of(context)
    quantized, dgrad_tokens, wgrad_tokens = dy_operands or DyOperands()
    if quantized is None:
        quantized = quantize_operand(fc2, dy, "dy", fc2_context, history_of(s2, "grad"))
    dyq, dy_history = quantized
    da = dgrad(fc2, dy if dgrad_tokens is None else dgrad_tokens, dyq, w2, fc2_context)
    dy1, dbi, dprobs, activated = activation_gradient_operand(
        mlp.gradient_quantizer(r.probs), fc1, da, r.y1, r.bi, context, history_of(s1, "grad"), r.x2 is None
    )
    x2 = activated if r.x2 is None else r.x2
    if x2 is None:
        x2 = plain_activation(mlp.activation_quantizer(r.probs), fc2, r.y1, fc2_context)
    dwo = wgrad(fc2, x2, dy if wgrad_tokens is None else wgrad_tokens, dyq, fc2_context)
    dx = dgrad(fc1, dy1.array, dy1.q, w1, context)
    x1, dgamma, dbeta = r.x1 if isinstance(r.x1, TokenRows) else probed1.x(r.x1), None, None
    if r.norm is not None:
        assert mlp.norm is not None
        if x1 is None:
            x1 = octavo_normalization(*r.norm[:3], spec=mlp.norm).y
        dx, dgamma, dbeta = r.norm.gradients(dx)
    assert x1 is not None
    dwi = wgrad(fc1, x1, dy1.array, dy1.q, context)
    dbo, dbo_scales = bias_gradient(fc2, dy, r.bo, fc2_context, r.bo_scales), None
    if r.bo_scales is not None:
        assert r.bo is not None  # scales without a bias are refused
        dbo_scales = bias_scales_gradient(fc2, dy, r.bo, fc2_context)
    states = r.states
    if s1 is not None and s2 is not None and later_states is not None:
        now = _states((s1.x, s1.kernel, dy1.history), (s2.x, s2.kernel, dy_history))
        states = (merged(now[0], later_states[0]), merged(now[1], later_states[1]))
    return MlpArrays(dx, dgamma, dbeta, dwi, dwo, dbi, dbo, dprobs, dbo_scales), states


def _mlp_bwd(_: Mlp, r: Residuals, cotangents: tuple[Array, States | None]) -> tuple[MlpArrays, States | None, None]:
    return *backward(r, cotangents), None


_mlp.defvjp(_mlp_fwd, _mlp_bwd)


# One compiled call for eager users; inside their own jit it is a nested one of the same name.
@partial(jax.jit, static_argnums=0)
def octavo_mlp(mlp: Mlp, arrays: MlpArrays, states: States | None, context: Context) -> tuple[Array, States | None]:
    """The differentiable call with everything static in `mlp`."""
    return _mlp(mlp, arrays, states, context)
