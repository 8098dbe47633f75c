"""The differentiable normalization and linear layer behind `octavo_jax.layernorm_dense`."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
from jax import Array

from octavo_jax.arrays.grouped_tensor import GroupedTensor
from octavo_jax.dispatch.fused import Run, norm_run
from octavo_jax.dispatch.layer import Layer
from octavo_jax.functions.norms import NormSpec, octavo_normalization
from octavo_jax.linear.computed_operands import ComputedOperand, NormSaved, normalized_operand, wgrad_x_if_quantized
from octavo_jax.linear.observed import Observed
from octavo_jax.linear.operands import Context, GemmOperand, dgrad_weight, quantize_operand, stored_weight
from octavo_jax.linear.products import bias_gradient, forward_product, input_gradient, kernel_gradient
from octavo_jax.memo import Identities, Memo
from octavo_jax.scaling.delayed_state import DelayedState, merged


@dataclass(frozen=True, eq=False)
class NormLayer:
    """A layer, the normalization before it, and the fused function; `run` is None where x is not quantized."""

    layer: Layer
    norm: NormSpec
    run: Run | None

    def trained(self) -> NormLayer:
        """The layer with its gradients planned, too; itself where they are."""
        return self if self.layer.request.training else norm_layer(self.layer.trained(), self.norm)


_known: Memo[NormLayer] = Memo()
_layers: Identities[NormLayer] = Identities()


def norm_layer(layer: Layer, norm: NormSpec) -> NormLayer:
    """The same object as long as the registry chooses the same functions."""

    def build() -> NormLayer:
        x = layer.plan.quantize_x
        run = None if x is None else norm_run(x, norm, layer.options.backend)
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
    """What the backward pass reads; `x` is None where its slot would keep an array, which is computed again."""

    of: NormLayer = field(metadata={"static": True})
    norm: NormSaved
    x: GemmOperand | None
    w: GemmOperand
    bias: Array | None
    context: Context
    state: DelayedState | None


def _forward(
    of: NormLayer, a: Arrays, state: DelayedState | None, context: Context, wants_normalized: bool
) -> tuple[Results, tuple[ComputedOperand, NormSaved, GroupedTensor | None]]:
    layer, seen = of.layer, Observed.of(of.layer)
    w, bias, context = stored_weight(layer, seen.kernel(a.kernel)), seen.bias(a.bias), seen.context(context)
    arrays = seen.x(a.x), seen.whole("gamma", a.gamma), seen.whole("beta", a.beta)
    histories = (None, None) if state is None else (state.x, state.kernel)
    x, saved = normalized_operand(of.run, layer, of.norm, arrays, context, histories[0])
    wq, of_kernel = quantize_operand(layer.plan.quantize_w, layer, w, "w", context, histories[1])
    y = forward_product(layer, x.array, x.q, w, wq, bias, context)
    if state is not None and x.history is not None and of_kernel is not None:
        state = DelayedState(x.history, of_kernel, state.grad)
    return Results(y, x.array if wants_normalized else None, state), (x, saved, wq)


@partial(jax.custom_vjp, nondiff_argnums=(0, 4))
def _normalized_dense(
    of: NormLayer, arrays: Arrays, state: DelayedState | None, context: Context, wants_normalized: bool
) -> Results:
    return _forward(of, arrays, state, context, wants_normalized)[0]


def _differentiated(
    of: NormLayer, arrays: Arrays, state: DelayedState | None, context: Context, wants_normalized: bool
) -> tuple[Results, Residuals]:
    of = of.trained()
    result, (x, norm, wq) = _forward(of, arrays, state, context, wants_normalized)
    w = dgrad_weight(of.layer, arrays.kernel, wq)
    norm = norm._replace(x=arrays.x, gamma=arrays.gamma, beta=arrays.beta)
    saved = Residuals(of, norm, wgrad_x_if_quantized(of.layer, x), w, arrays.bias, context, result.state)
    return result, saved


def _backward(_: NormLayer, __: bool, r: Residuals, cotangents: Results) -> tuple[Arrays, DelayedState | None, None]:
    layer, context, state = r.of.layer, r.context, r.state
    seen, later = Observed.of(layer), cotangents.state
    dy, w, context = seen.dy(cotangents.y), seen.kernel(r.w), seen.context(context)
    dyq, of_dy = quantize_operand(
        layer.plan.quantize_dy, layer, dy, "dy", context, None if state is None else state.grad
    )
    normalized_gradient = input_gradient(layer, dy, dyq, w, context)
    x = octavo_normalization(*r.norm[:3], spec=r.of.norm).y if r.x is None else r.x
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
    of: NormLayer, arrays: Arrays, state: DelayedState | None, context: Context, wants_normalized: bool
) -> Results:
    """The differentiable call with everything static in `of`."""
    return _normalized_dense(of, arrays, state, context, wants_normalized)
