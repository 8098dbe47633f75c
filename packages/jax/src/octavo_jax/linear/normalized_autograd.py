"""The differentiable normalization and linear layer behind `octavo_jax.layernorm_dense`."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
from jax import Array

from octavo_jax.dispatch.fused import Run, norm_run
from octavo_jax.dispatch.layer import Layer
from octavo_jax.functions.norms import NormSpec, octavo_normalization
from octavo_jax.linear.computed_operands import ComputedOperand, NormSaved, normalized_operand, wgrad_x_if_quantized
from octavo_jax.linear.operands import Context, GemmOperand, dgrad_weight, quantize_operand, stored_weight
from octavo_jax.linear.probed_arguments import ProbedArguments
from octavo_jax.linear.products import bias_gradient, forward_product, input_gradient, kernel_gradient
from octavo_jax.linear.two_forms import Quantized
from octavo_jax.memo import Identities, Memo
from octavo_jax.scaling.delayed_state import DelayedState, merged


@dataclass(frozen=True, eq=False)
class NormLayer:
    """A layer and the normalization before it.

    run   normalizes and quantizes x; None if x is not quantized
    """

    layer: Layer
    norm: NormSpec
    run: Run | None

    def for_training(self) -> NormLayer:
        """The same with the layer's gradients planned; itself if they are."""
        return self if self.layer.request.training else norm_layer_of(self.layer.for_training(), self.norm)


_known: Memo[NormLayer] = Memo()
_layers: Identities[NormLayer] = Identities()


def norm_layer_of(layer: Layer, norm: NormSpec) -> NormLayer:
    """The NormLayer of these: the same object as long as the registry chooses the same functions."""

    def build() -> NormLayer:
        x = layer.plan.quantize_x
        run = None if x is None else norm_run(x, norm, layer.options.backend, layer)
        return _layers.of((layer, norm, run), lambda: NormLayer(layer, norm, run))

    return _known.get((layer, norm), build)


class Arrays(NamedTuple):
    """What has a gradient: x [M, K], gamma and beta [K], the kernel as a stack of one, bias [1, N]."""

    x: Array
    gamma: Array
    beta: Array | None
    kernel: Array
    bias: Array | None


class Results(NamedTuple):
    """y [M, N], the normalized rows [M, K] where they were asked for, and the state after the call."""

    y: Array
    normalized: Array | None
    state: DelayedState | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Residuals:
    """What the backward pass reads.

    x   what wgrad reads of the normalized rows; None if that is not quantized: then the rows are computed again
    """

    norm_layer: NormLayer = field(metadata={"static": True})
    norm: NormSaved
    x: GemmOperand | None
    w: GemmOperand
    bias: Array | None
    context: Context
    state: DelayedState | None


def _forward(
    norm_layer: NormLayer, a: Arrays, state: DelayedState | None, context: Context, wants_normalized: bool
) -> tuple[Results, tuple[ComputedOperand, NormSaved, Quantized | None]]:
    layer, seen = norm_layer.layer, ProbedArguments.of(norm_layer.layer)
    w, bias, context = stored_weight(layer, seen.kernel(a.kernel)), seen.bias(a.bias), seen.context(context)
    arrays = seen.x(a.x), seen.whole("gamma", a.gamma), seen.whole("beta", a.beta)
    histories = (None, None) if state is None else (state.x, state.kernel)
    x, saved = normalized_operand(norm_layer.run, layer, norm_layer.norm, arrays, context, histories[0])
    wq, of_kernel = quantize_operand(layer.plan.quantize_w, layer, w, "w", context, histories[1])
    y = forward_product(layer, x.array, x.q, w, wq, bias, context)
    if state is not None and x.history is not None and of_kernel is not None:
        state = DelayedState(x.history, of_kernel, state.grad)
    return Results(y, x.array if wants_normalized else None, state), (x, saved, wq)


@partial(jax.custom_vjp, nondiff_argnums=(0, 4))
def _normalized_dense(
    norm_layer: NormLayer, arrays: Arrays, state: DelayedState | None, context: Context, wants_normalized: bool
) -> Results:
    return _forward(norm_layer, arrays, state, context, wants_normalized)[0]


def _differentiated(
    norm_layer: NormLayer, arrays: Arrays, state: DelayedState | None, context: Context, wants_normalized: bool
) -> tuple[Results, Residuals]:
    norm_layer = norm_layer.for_training()
    result, (x, norm, wq) = _forward(norm_layer, arrays, state, context, wants_normalized)
    w = dgrad_weight(norm_layer.layer, arrays.kernel, wq)
    norm = norm._replace(x=arrays.x, gamma=arrays.gamma, beta=arrays.beta)
    x_operand = wgrad_x_if_quantized(norm_layer.layer, x)
    saved = Residuals(norm_layer, norm, x_operand, w, arrays.bias, context, result.state)
    return result, saved


def _backward(_: NormLayer, __: bool, r: Residuals, cotangents: Results) -> tuple[Arrays, DelayedState | None, None]:
    layer, context, state = r.norm_layer.layer, r.context, r.state
    seen, later = ProbedArguments.of(layer), cotangents.state
    dy, w, context = seen.dy(cotangents.y), seen.kernel(r.w), seen.context(context)
    dyq, of_dy = quantize_operand(
        layer.plan.quantize_dy, layer, dy, "dy", context, None if state is None else state.grad
    )
    normalized_gradient = input_gradient(layer, dy, dyq, w, context)
    x = octavo_normalization(*r.norm[:3], spec=r.norm_layer.norm).y if r.x is None else r.x
    dw = kernel_gradient(layer, x, dy, dyq, context)
    if cotangents.normalized is not None:
        normalized_gradient = normalized_gradient + cotangents.normalized
    dx, dgamma, dbeta = r.norm.gradients(normalized_gradient)
    if state is not None and of_dy is not None and later is not None:
        state = merged(DelayedState(state.x, state.kernel, of_dy), later)
    return Arrays(dx, dgamma, dbeta, dw, bias_gradient(layer, dy, r.bias, context)), state, None


_normalized_dense.defvjp(_differentiated, _backward)


# One compiled call for eager users; inside their own jit it is a nested one of the same name.
@partial(jax.jit, static_argnums=(0, 4))
def octavo_layernorm_dense(
    norm_layer: NormLayer, arrays: Arrays, state: DelayedState | None, context: Context, wants_normalized: bool
) -> Results:
    """The differentiable call with everything static in `norm_layer`."""
    return _normalized_dense(norm_layer, arrays, state, context, wants_normalized)
