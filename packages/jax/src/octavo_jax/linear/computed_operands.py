"""Operands of a layer that a normalization, an activation or its gradient computes before they are quantized."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax import Array

from octavo.quantizer import Operand
from octavo_jax.arithmetic.norm import Normalized, NormGradients
from octavo_jax.arrays.gemm_operands import GemmOperand
from octavo_jax.dispatch.fused import FusedQuantizer, ValuesFunction
from octavo_jax.dispatch.layer import Layer
from octavo_jax.functions.activations import (
    octavo_activation,
    octavo_activation_gradient,
    octavo_probs_gradient,
    once_differentiated,
)
from octavo_jax.functions.composed import Extras
from octavo_jax.functions.norms import NormSpec, octavo_normalization, octavo_normalization_gradient
from octavo_jax.linear.gemms import bias_gradient
from octavo_jax.linear.operands import Context, has_local_rows, quantize_operand, wgrad_x
from octavo_jax.linear.two_forms import Quantized, name_operand
from octavo_jax.quantizers.derivatives import undifferentiated
from octavo_jax.remat.never_recomputed import never_recomputed
from octavo_jax.scaling.delayed_state import ScalingHistory, amax_of, with_amax
from octavo_jax.sharding.fused_quantizers import FusedInputs, fused_rows
from octavo_jax.sharding.placement import Letter
from octavo_registry.contract.cards import Activation


class ComputedOperand(NamedTuple):
    """An operand of a GEMM.

    array    its values in high precision, rounded once
    q        the quantized operand, its planes named; None if no GEMM reads it quantized
    history  of delayed scaling, with the operand's amax recorded; else None
    """

    array: Array
    q: Quantized | None
    history: ScalingHistory | None


class NormResiduals(NamedTuple):
    """What a normalization's gradient reads: its arguments, and the statistics [M] of its rows; RMSNorm has no mean."""

    x: Array
    gamma: Array
    beta: Array | None
    mean: Array | None
    rstd: Array

    def gradients(self, dy: Array) -> NormGradients:
        """Of x, gamma and beta, from the gradient of the normalized rows."""
        gradients: NormGradients = octavo_normalization_gradient(dy, self.x, self.gamma, self.mean, self.rstd)
        return gradients if self.beta is not None else gradients._replace(dbeta=None)


class ActivationQuantizer(NamedTuple):
    """An activation, or its gradient, and the functions that compute it.

    run      computes and quantizes it in one call; None if nothing is quantized
    values   computes it without quantizing; None: JAX's operations do
    probs    [M], by which the activation's result is multiplied; or None
    """

    run: FusedQuantizer | None
    values: ValuesFunction | None
    activation: Activation
    probs: Array | None


class GradientOperand(NamedTuple):
    """What the backward pass of an activation returns.

    operand   fc1's dy
    dbias     the gradient of fc1's bias; None without a bias
    dprobs    the gradient of the probabilities; None without any
    forward   the activation's result, which is fc2's x, if the same function has computed it; else None
    """

    operand: ComputedOperand
    dbias: Array | None
    dprobs: Array | None
    forward: Array | None


class _FusedOperand(NamedTuple):
    """A fused function, and the operand of the layer that it computes."""

    run: FusedQuantizer
    layer: Layer
    operand: Operand


def _quantized(
    fused: _FusedOperand,
    inputs: FusedInputs,
    context: Context,
    history: ScalingHistory | None,
    extra_results: tuple[str, ...] = (),
) -> tuple[ComputedOperand, Extras]:
    """What a fused function computes of `inputs`: the operand, and those of its Extras that are named."""
    run, layer, operand = fused
    plan = layer.quantizer(operand)
    assert plan is not None  # the fused function has it
    arguments = context.quantizer_arguments(plan, operand, history)
    inputs = undifferentiated(inputs)
    if layer.placement is None:
        options = arguments.keywords() | ({} if inputs.probs is None else {"probs": inputs.probs})
        q, extras = run(*inputs.tokens, *inputs.whole, context.group_sizes, **options)
    else:
        names = ("activated", *extra_results)
        q, extras = fused_rows(layer.placement, run, plan, inputs, context.group_sizes, names, arguments)
    array = extras.activated
    assert array is not None
    if history is not None:
        amax = amax_of(array, context.group_sizes) if extras.amax is None else extras.amax
        history = with_amax(history, never_recomputed(amax))
    return ComputedOperand(array, name_operand(layer, q, operand), history), extras


def _is_cut(layer: Layer, letter: Letter) -> bool:
    """Whether a mesh cuts the features. Then nothing is fused: only an unfused quantizer combines amaxes of shards."""
    return layer.placement is not None and layer.placement.is_cut(letter)


def normalized_operand(
    run: FusedQuantizer | None,
    layer: Layer,
    spec: NormSpec,
    arrays: tuple[Array, Array, Array | None],
    context: Context,
    history: ScalingHistory | None,
) -> tuple[ComputedOperand, NormResiduals]:
    """The layer's x from x [M, C], gamma and beta; `run` is None where nothing is quantized."""
    if run is None:
        plain: Normalized = octavo_normalization(*arrays, spec=spec)
        return ComputedOperand(plain.y, None, history), NormResiduals(*arrays, plain.mean, plain.rstd)
    statistics = ("rstd", "mean") if spec.norm == "layer" else ("rstd",)
    fused = _FusedOperand(run, layer, "x")
    operand, extras = _quantized(fused, FusedInputs(arrays[:1], arrays[1:]), context, history, statistics)
    assert extras.rstd is not None
    # Computed again, statistics would quantize again, although a policy saved the planes; they are 4 bytes per row.
    mean = None if extras.mean is None else never_recomputed(extras.mean)
    return operand, NormResiduals(*arrays, mean, never_recomputed(extras.rstd))


def wgrad_x_if_quantized(layer: Layer, operand: ComputedOperand) -> GemmOperand | None:
    """What wgrad reads of an operand that is cheap to compute again; None if it reads the array, which is then not kept
    but computed again."""
    return wgrad_x(layer, operand.array, operand.q) if layer.plan.recipe.quantizes("wgrad") else None


def activated_operand(
    quantizer: ActivationQuantizer, layer: Layer, x: Array, context: Context, history: ScalingHistory | None
) -> ComputedOperand:
    """The layer's x: activation(x) times the probabilities."""
    if quantizer.run is None or _is_cut(layer, "i"):
        plain = plain_activation(quantizer, layer, x, context)
        return ComputedOperand(plain, *quantize_operand(layer, plain, "x", context, history))
    fused = _FusedOperand(quantizer.run, layer, "x")
    return _quantized(fused, FusedInputs((x,), probs=quantizer.probs), context, history)[0]


def plain_activation(quantizer: ActivationQuantizer, layer: Layer, x: Array, context: Context) -> Array:
    """activation(x) times the probabilities, not quantized."""
    if quantizer.values is None or not has_local_rows(layer, "x"):
        plain: Array = octavo_activation(x, quantizer.probs, activation=quantizer.activation)
        return plain
    x, probs = jax.tree.map(once_differentiated, (x, quantizer.probs))
    activated = quantizer.values(x, context.group_sizes, probs=probs, wanted=("activated",)).activated
    assert activated is not None
    return activated


def activation_gradient_operand(
    quantizer: ActivationQuantizer,
    layer: Layer,
    dy: Array,
    x: Array,
    bias: Array | None,
    context: Context,
    history: ScalingHistory | None,
    wants_forward: bool = False,
) -> GradientOperand:
    """The layer's dy, and other gradients, from the gradient `dy` of the activation's result and its input `x`.

    wants_forward   whether the caller also wants the activation's result, if that costs no pass of its own
    """
    if quantizer.run is not None and not _is_cut(layer, "o"):
        run = quantizer.run if layer.placement is None else _with_dprobs(quantizer, quantizer.run)
        fused = _FusedOperand(run, layer, "dy")
        wanted = (*(() if bias is None else ("dbias",)), *(() if quantizer.probs is None else ("dprobs",)))
        operand, extras = _quantized(fused, FusedInputs((dy, x), probs=quantizer.probs), context, history, wanted)
        dbias = None if bias is None or extras.dbias is None else extras.dbias.astype(bias.dtype)
        return GradientOperand(operand, dbias, _dprobs(quantizer, dy, x, extras.dprobs), None)
    probs, activation = quantizer.probs, quantizer.activation
    if quantizer.values is not None and has_local_rows(layer, "dy"):
        wanted = ("activated", *(("dprobs",) if probs is not None else ()), *(("forward",) if wants_forward else ()))
        *arrays, probs = jax.tree.map(once_differentiated, (dy, x, probs))
        extras = quantizer.values(*arrays, context.group_sizes, probs=probs, wanted=wanted)
    else:
        extras = Extras(octavo_activation_gradient(dy, x, probs, activation=activation))
    plain = extras.activated
    assert plain is not None
    q, history = quantize_operand(layer, plain, "dy", context, history)
    dbias = bias_gradient(layer, plain, bias, context)
    dprobs = _dprobs(quantizer, dy, x, extras.dprobs)
    return GradientOperand(ComputedOperand(plain, q, history), dbias, dprobs, extras.forward)


def _with_dprobs(quantizer: ActivationQuantizer, run: FusedQuantizer) -> FusedQuantizer:
    """`run` of an activation's gradient, with dprobs in its Extras even if the backend does not compute it."""

    def with_dprobs(dy: Array, x: Array, *args: Any, **options: Any) -> tuple[Quantized, Extras]:
        q, extras = run(dy, x, *args, **options)
        return q, extras._replace(dprobs=_dprobs(quantizer, dy, x, extras.dprobs))

    return with_dprobs


def _dprobs(quantizer: ActivationQuantizer, dy: Array, x: Array, computed: Array | None) -> Array | None:
    """The gradient of the probabilities: `computed`, if the backend has computed it; None without probabilities."""
    if quantizer.probs is None:
        return None
    if computed is not None:
        return computed
    dprobs: Array = octavo_probs_gradient(dy, x, activation=quantizer.activation)
    return dprobs
