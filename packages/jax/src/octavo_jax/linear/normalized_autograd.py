"""The differentiable normalization and linear layer behind `octavo_jax.layernorm_dense`."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
from jax import Array

from octavo_jax.arrays.gemm_operands import GemmOperand
from octavo_jax.dispatch.fused import FusedQuantizer, norm_run
from octavo_jax.dispatch.layer import Layer
from octavo_jax.functions.norms import NormSpec, octavo_normalization
from octavo_jax.linear.computed_operands import ComputedOperand, NormResiduals, normalized_operand, wgrad_x_if_quantized
from octavo_jax.linear.gemms import bias_gradient, dgrad, fprop, wgrad
from octavo_jax.linear.operands import Context, dgrad_weight, quantize_operand, stored_weight
from octavo_jax.linear.probed_arguments import ProbedArguments
from octavo_jax.linear.two_forms import Quantized
from octavo_jax.memo import Interned, Memo
from octavo_jax.scaling.delayed_state import DelayedState, merged


@dataclass(frozen=True, eq=False)
class NormLayer:
    """A layer and the normalization before it.

    run   normalizes and quantizes x; None if x is not quantized
    """

    layer: Layer
    norm: NormSpec
    run: FusedQuantizer | None

    def for_training(self) -> NormLayer:
        """The same with the layer's gradients planned; itself if they are."""
        return self if self.layer.request.training else norm_layer_of(self.layer.for_training(), self.norm)


_planned: Memo[NormLayer] = Memo()
_interned: Interned[NormLayer] = Interned()


def norm_layer_of(layer: Layer, norm: NormSpec) -> NormLayer:
    """The NormLayer of these: the same object as long as the registry chooses the same functions."""

    def build() -> NormLayer:
        x = layer.plan.quantize_x
        run = None if x is None else norm_run(x, norm, layer.options.backend, layer)
        return _interned.of((layer, norm, run), lambda: NormLayer(layer, norm, run))

    return _planned.get((layer, norm), build)


class NormalizedDenseArrays(NamedTuple):
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


class Intermediates(NamedTuple):
    """What the forward pass computes on the way to y: the normalized x, what its gradient reads, and the kernel."""

    x: ComputedOperand
    norm: NormResiduals
    wq: Quantized | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Residuals:
    """What the backward pass reads.

    x   what wgrad reads of the normalized rows; None if that is not quantized: then the rows are computed again
    """

    norm_layer: NormLayer = field(metadata={"static": True})
    norm: NormResiduals
    x: GemmOperand | None
    w: GemmOperand
    bias: Array | None
    context: Context
    state: DelayedState | None


def _forward(
    norm_layer: NormLayer,
    a: NormalizedDenseArrays,
    state: DelayedState | None,
    context: Context,
    return_normalized: bool,
) -> tuple[Results, Intermediates]:
    layer, probed = norm_layer.layer, ProbedArguments.of(norm_layer.layer)
    w, bias, context = stored_weight(layer, probed.kernel(a.kernel)), probed.bias(a.bias), probed.context(context)
    arrays = probed.x(a.x), probed.whole("gamma", a.gamma), probed.whole("beta", a.beta)
    x_history, w_history = (None, None) if state is None else (state.x, state.kernel)
    x, norm = normalized_operand(norm_layer.run, layer, norm_layer.norm, arrays, context, x_history)
    wq, w_history = quantize_operand(layer, w, "w", context, w_history)
    y = fprop(layer, x.array, x.q, w, wq, bias, context)
    if state is not None and x.history is not None and w_history is not None:
        state = DelayedState(x.history, w_history, state.grad)
    return Results(y, x.array if return_normalized else None, state), Intermediates(x, norm, wq)


@partial(jax.custom_vjp, nondiff_argnums=(0, 4))
def _normalized_dense(
    norm_layer: NormLayer,
    arrays: NormalizedDenseArrays,
    state: DelayedState | None,
    context: Context,
    return_normalized: bool,
) -> Results:
    return _forward(norm_layer, arrays, state, context, return_normalized)[0]


def _normalized_dense_fwd(
    norm_layer: NormLayer,
    arrays: NormalizedDenseArrays,
    state: DelayedState | None,
    context: Context,
    return_normalized: bool,
) -> tuple[Results, Residuals]:
    norm_layer = norm_layer.for_training()
    results, (x, norm, wq) = _forward(norm_layer, arrays, state, context, return_normalized)
    w = dgrad_weight(norm_layer.layer, arrays.kernel, wq)
    # the caller's own arrays, without probes: a scan need not stack them
    norm = norm._replace(x=arrays.x, gamma=arrays.gamma, beta=arrays.beta)
    wgrad_operand = wgrad_x_if_quantized(norm_layer.layer, x)
    return results, Residuals(norm_layer, norm, wgrad_operand, w, arrays.bias, context, results.state)


def _normalized_dense_bwd(
    _: NormLayer, __: bool, r: Residuals, cotangents: Results
) -> tuple[NormalizedDenseArrays, DelayedState | None, None]:
    layer, context, state = r.norm_layer.layer, r.context, r.state
    probed, later_state = ProbedArguments.of(layer), cotangents.state
    dy, w, context = probed.dy(cotangents.y), probed.kernel(r.w), probed.context(context)
    dy_history = None if state is None else state.grad
    dyq, dy_history = quantize_operand(layer, dy, "dy", context, dy_history)
    normalized_gradient = dgrad(layer, dy, dyq, w, context)
    x = octavo_normalization(*r.norm[:3], spec=r.norm_layer.norm).y if r.x is None else r.x
    dw = wgrad(layer, x, dy, dyq, context)
    if cotangents.normalized is not None:
        normalized_gradient = normalized_gradient + cotangents.normalized
    dx, dgamma, dbeta = r.norm.gradients(normalized_gradient)
    if state is not None and dy_history is not None and later_state is not None:
        state = merged(DelayedState(state.x, state.kernel, dy_history), later_state)
    return NormalizedDenseArrays(dx, dgamma, dbeta, dw, bias_gradient(layer, dy, r.bias, context)), state, None


_normalized_dense.defvjp(_normalized_dense_fwd, _normalized_dense_bwd)


# One compiled call for eager users; inside their own jit it is a nested one of the same name.
@partial(jax.jit, static_argnums=(0, 4))
def octavo_layernorm_dense(
    norm_layer: NormLayer,
    arrays: NormalizedDenseArrays,
    state: DelayedState | None,
    context: Context,
    return_normalized: bool,
) -> Results:
    """The differentiable call with everything static in `norm_layer`."""
    return _normalized_dense(norm_layer, arrays, state, context, return_normalized)
