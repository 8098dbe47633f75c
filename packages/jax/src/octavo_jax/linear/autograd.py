"""The differentiable grouped linear layer behind `octavo_jax.grouped_dense`."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array

from octavo_jax.arrays.gemm_operands import GemmOperand
from octavo_jax.dispatch.layer import Layer
from octavo_jax.linear.gemms import bias_gradient, dgrad, fprop, wgrad
from octavo_jax.linear.operands import Context, dgrad_weight, quantize_operand, stored_weight, wgrad_x
from octavo_jax.linear.probed_arguments import ProbedArguments
from octavo_jax.linear.two_forms import Quantized
from octavo_jax.quantizers.derivatives import call_reverse_mode_only
from octavo_jax.scaling.delayed_state import DelayedState, merged


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Residuals:
    """What the backward pass reads.

    layer   the layer whose planes were saved; the registry might choose other backends now
    x       what wgrad reads of x: one plane, or the array
    w       what dgrad reads of the kernel, likewise
    state   with the forward's amaxes
    bias    read for the dtype of its gradient
    """

    layer: Layer = field(metadata={"static": True})
    x: GemmOperand
    w: GemmOperand
    context: Context
    state: DelayedState | None
    bias: Array | None


class Forward(NamedTuple):
    """What the forward pass computes: y, the state with the amaxes of x and the kernel, and the two quantized."""

    y: Array
    state: DelayedState | None
    xq: Quantized | None
    wq: Quantized | None


def _forward(
    layer: Layer, x: Array, kernel: Array, bias: Array | None, state: DelayedState | None, context: Context
) -> Forward:
    probed = ProbedArguments.of(layer)
    x, bias, context = probed.x(x), probed.bias(bias), probed.context(context)
    w = stored_weight(layer, probed.kernel(kernel))
    x_history, w_history = (None, None) if state is None else (state.x, state.kernel)
    xq, x_history = quantize_operand(layer, x, "x", context, x_history)
    wq, w_history = quantize_operand(layer, w, "w", context, w_history)
    y = fprop(layer, x, xq, w, wq, bias, context)
    if state is not None and x_history is not None and w_history is not None:
        state = DelayedState(x_history, w_history, state.grad)
    return Forward(y, state, xq, wq)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(
    layer: Layer, x: Array, kernel: Array, bias: Array | None, state: DelayedState | None, context: Context
) -> tuple[Array, DelayedState | None]:
    return _forward(layer, x, kernel, bias, state, context)[:2]


def _grouped_fwd(
    layer: Layer, x: Array, kernel: Array, bias: Array | None, state: DelayedState | None, context: Context
) -> tuple[tuple[Array, DelayedState | None], Residuals]:
    layer = layer.for_training()
    y, state, xq, wq = _forward(layer, x, kernel, bias, state, context)
    return (y, state), Residuals(layer, wgrad_x(layer, x, xq), dgrad_weight(layer, kernel, wq), context, state, bias)


def _grouped_bwd(_: Layer, residuals: Residuals, cotangents: tuple[Array, DelayedState | None]) -> tuple[Any, ...]:
    # The layer of the residuals, whose planes were saved: a preference may have changed since.
    dy, later_state = cotangents
    layer, context, state = residuals.layer, residuals.context, residuals.state
    probed = ProbedArguments.of(layer)
    # These get probes again: where nothing reads y, XLA has removed the forward pass with its probes.
    dy, x, w = probed.dy(dy), probed.x(residuals.x), probed.kernel(residuals.w)
    context = probed.context(context)
    dy_history = None if state is None else state.grad
    dyq, dy_history = quantize_operand(layer, dy, "dy", context, dy_history)
    dx = dgrad(layer, dy, dyq, w, context)
    dw = wgrad(layer, x, dy, dyq, context)
    if state is not None and dy_history is not None and later_state is not None:
        state = merged(DelayedState(state.x, state.kernel, dy_history), later_state)
    return dx, dw, bias_gradient(layer, dy, residuals.bias, context), state, None


_grouped.defvjp(_grouped_fwd, _grouped_bwd)


# One compiled call for eager users; inside their own jit it is a nested one of the same name.
@partial(jax.jit, static_argnums=0)
def octavo_grouped_dense(
    layer: Layer, x: Array, kernel: Array, bias: Array | None, state: DelayedState | None, context: Context
) -> tuple[Array, DelayedState | None]:
    """The differentiable call of x [M, K] with everything static in `layer`."""
    return _grouped(layer, x, kernel, bias, state, context)


def run_layer(
    name: str,
    layer: Layer,
    x: Array,
    kernel: Array,
    bias: Array | None,
    state: DelayedState | None,
    context: Context,
) -> tuple[Array, DelayedState | None]:
    """`octavo_grouped_dense` for the public function called `name`, which a TypeError names where `jax.jvp`
    differentiates it."""
    result: tuple[Array, DelayedState | None] = call_reverse_mode_only(
        name, octavo_grouped_dense, layer, x, kernel, bias, state, context
    )
    return result
