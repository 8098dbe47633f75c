"""The differentiable grouped linear layer behind `octavo_jax.grouped_dense`."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from jax import Array

from octavo_jax.dispatch.layer import Layer
from octavo_jax.linear.operands import Context, GemmOperand, dgrad_weight, quantize_operand, stored_weight, wgrad_x
from octavo_jax.linear.probed_arguments import ProbedArguments
from octavo_jax.linear.products import bias_gradient, forward_product, input_gradient, kernel_gradient
from octavo_jax.linear.two_forms import Quantized
from octavo_jax.quantizers.derivatives import in_reverse
from octavo_jax.scaling.delayed_state import DelayedState, merged


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Residuals:
    """What the backward pass reads: wgrad's x, dgrad's kernel, sizes and seed, scales and amaxes, and bias's dtype."""

    layer: Layer = field(metadata={"static": True})
    x: GemmOperand
    w: GemmOperand
    context: Context
    state: DelayedState | None
    bias: Array | None


def _forward(
    layer: Layer, x: Array, kernel: Array, bias: Array | None, state: DelayedState | None, context: Context
) -> tuple[Array, DelayedState | None, Quantized | None, Quantized | None]:
    """y, the state with the amaxes of x and the kernel, and the two quantized."""
    seen = ProbedArguments.of(layer)
    x, bias, context = seen.x(x), seen.bias(bias), seen.context(context)
    plan, w = layer.plan, stored_weight(layer, seen.kernel(kernel))
    histories = (None, None) if state is None else (state.x, state.kernel)
    xq, of_x = quantize_operand(plan.quantize_x, layer, x, "x", context, histories[0])
    wq, of_kernel = quantize_operand(plan.quantize_w, layer, w, "w", context, histories[1])
    y = forward_product(layer, x, xq, w, wq, bias, context)
    if state is not None and of_x is not None and of_kernel is not None:
        state = DelayedState(of_x, of_kernel, state.grad)
    return y, state, xq, wq


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(
    layer: Layer, x: Array, kernel: Array, bias: Array | None, state: DelayedState | None, context: Context
) -> tuple[Array, DelayedState | None]:
    return _forward(layer, x, kernel, bias, state, context)[:2]


def _differentiated(
    layer: Layer, x: Array, kernel: Array, bias: Array | None, state: DelayedState | None, context: Context
) -> tuple[tuple[Array, DelayedState | None], Residuals]:
    layer = layer.for_training()
    y, state, xq, wq = _forward(layer, x, kernel, bias, state, context)
    return (y, state), Residuals(layer, wgrad_x(layer, x, xq), dgrad_weight(layer, kernel, wq), context, state, bias)


def _backward(_: Layer, saved: Residuals, cotangents: tuple[Array, DelayedState | None]) -> tuple[Any, ...]:
    # The residuals' layer is the one whose planes were saved; a preference may have changed since.
    dy, later = cotangents
    layer, context, state = saved.layer, saved.context, saved.state
    seen = ProbedArguments.of(layer)
    # The forward pass may be unread and gone, so that nobody has looked at these yet.
    dy, x, w, context = seen.dy(dy), seen.x(saved.x), seen.kernel(saved.w), seen.context(context)
    history = None if state is None else state.grad
    dyq, of_dy = quantize_operand(layer.plan.quantize_dy, layer, dy, "dy", context, history)
    dx = input_gradient(layer, dy, dyq, w, context)
    dw = kernel_gradient(layer, x, dy, dyq, context)
    if state is not None and of_dy is not None and later is not None:
        state = merged(DelayedState(state.x, state.kernel, of_dy), later)
    return dx, dw, bias_gradient(layer, dy, saved.bias, context), state, None


_grouped.defvjp(_differentiated, _backward)


# One compiled call for eager users; inside their own jit it is a nested one of the same name.
@partial(jax.jit, static_argnums=0)
def octavo_grouped_dense(
    layer: Layer, x: Array, kernel: Array, bias: Array | None, state: DelayedState | None, context: Context
) -> tuple[Array, DelayedState | None]:
    """The differentiable call of x [M, K] with everything static in `layer`."""
    return _grouped(layer, x, kernel, bias, state, context)


def run_layer(name: str, *arguments: Any) -> tuple[Array, DelayedState | None]:
    """`octavo_grouped_dense`, with a sentence where `jax.jvp` differentiates the function called `name`."""
    result: tuple[Array, DelayedState | None] = in_reverse(name, octavo_grouped_dense, *arguments)
    return result
