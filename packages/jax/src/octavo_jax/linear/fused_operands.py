"""Operands of a layer that something is computed on the way to: what custom_vjps of fused layers are made of."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax import Array

from octavo.quantizer import Operand
from octavo_jax.arithmetic.norm import Normalized, NormGradients
from octavo_jax.arrays.grouped_tensor import GroupedTensor
from octavo_jax.dispatch.fused import Run
from octavo_jax.dispatch.layer import Layer
from octavo_jax.functions.activations import octavo_activation, octavo_activation_gradient
from octavo_jax.functions.composed import Extras
from octavo_jax.functions.norms import NormSpec, octavo_normalization, octavo_normalization_gradient
from octavo_jax.linear.autograd import Context, GemmOperand, bias_gradient, kept_x, named, quantize_operand
from octavo_jax.quantizers.derivatives import undifferentiated
from octavo_jax.remat.never_recomputed import never_recomputed
from octavo_jax.scaling.delayed import ScalingHistory, amax_of, record_amax
from octavo_jax.sharding.fused import fused_rows
from octavo_jax.sharding.placement import Letter
from octavo_registry.contract.cards import Activation
from octavo_registry.dispatch.layer_plan import QuantizePlan


class Made(NamedTuple):
    """An operand of a GEMM.

    array    as it is before it is quantized, rounded once
    q        its planes, named; None where no GEMM reads it quantized
    history  of delayed scaling with its amax recorded, else None
    """

    array: Array
    q: GroupedTensor | None
    history: ScalingHistory | None


class NormSaved(NamedTuple):
    """What a normalization's gradient reads: its arguments, and the statistics [M] of its rows; RMSNorm has no mean."""

    x: Array
    gamma: Array
    beta: Array | None
    mean: Array | None
    rstd: Array

    def gradients(self, dy: Array) -> NormGradients:
        """Of x, gamma and beta, from the gradient of the normalized rows."""
        made: NormGradients = octavo_normalization_gradient(dy, self.x, self.gamma, self.mean, self.rstd)
        return made if self.beta is not None else made._replace(dbeta=None)


def _run(
    run: Run,
    plan: QuantizePlan | None,
    layer: Layer,
    operand: Operand,
    context: Context,
    history: ScalingHistory | None,
    tokens: tuple[Array, ...],
    whole: tuple[Array | None, ...] = (),
    *,
    wanted: tuple[str, ...] = (),
    **what: Any,
) -> tuple[Made, Extras]:
    assert plan is not None
    assert plan.request.quantizer is not None
    tokens = tuple(undifferentiated(array) for array in tokens)
    whole = tuple(None if array is None else undifferentiated(array) for array in whole)
    how: dict[str, Any] = {
        "seed": context.seed if plan.request.quantizer.stochastic else None,
        "operand": operand,
        "group_offset": context.group_offset,
        "scale": None if history is None else history.scale,
        **what,
    }
    if layer.placement is None:
        q, extras = run(*tokens, *whole, context.group_sizes, **how)
    else:
        names = ("activated", *wanted)
        q, extras = fused_rows(layer.placement, run, plan, tokens, whole, context.group_sizes, names, **how)
    made = extras.activated
    assert made is not None
    if history is not None:
        amax = amax_of(made, context.group_sizes) if extras.amax is None else extras.amax
        history = record_amax(history, never_recomputed(amax))
    return Made(made, named(layer, q, operand), history), extras


def _is_cut(layer: Layer, letter: Letter) -> bool:
    """Whether features lie on several shards: then nothing is fused, and quantizers see to their scales."""
    return layer.placement is not None and layer.placement.cuts(letter)


def normalized_operand(
    run: Run | None,
    layer: Layer,
    spec: NormSpec,
    arrays: tuple[Array, Array, Array | None],
    context: Context,
    history: ScalingHistory | None,
) -> tuple[Made, NormSaved]:
    """The layer's x from x [M, C], gamma and beta; `run` is None where nothing is quantized."""
    if run is None:
        plain: Normalized = octavo_normalization(*arrays, spec=spec)
        return Made(plain.y, None, history), NormSaved(*arrays, plain.mean, plain.rstd)
    wanted = ("rstd", "mean") if spec.norm == "layer" else ("rstd",)
    made, extras = _run(run, layer.plan.quantize_x, layer, "x", context, history, arrays[:1], arrays[1:], wanted=wanted)
    assert extras.rstd is not None
    # Computed again, statistics would quantize again, although a policy saved the planes; they are 4 bytes a row.
    mean = None if extras.mean is None else never_recomputed(extras.mean)
    return made, NormSaved(*arrays, mean, never_recomputed(extras.rstd))


def kept_quantized(layer: Layer, operand: Made) -> GemmOperand | None:
    """What the weight gradient reads of an operand that is cheap to compute again: None where its slot would keep an
    array."""
    return kept_x(layer, operand.array, operand.q) if layer.plan.recipe.quantizes("wgrad") else None


def activated_operand(
    run: Run | None,
    layer: Layer,
    activation: Activation,
    x: Array,
    probs: Array | None,
    context: Context,
    history: ScalingHistory | None,
) -> Made:
    """The layer's x, activation(x) times probs; `run` is None where nothing is quantized."""
    if run is None or _is_cut(layer, "i"):
        plain: Array = octavo_activation(x, probs, activation=activation)
        return Made(plain, *quantize_operand(layer.plan.quantize_x, layer, plain, "x", context, history))
    return _run(run, layer.plan.quantize_x, layer, "x", context, history, (x,), probs=probs)[0]


def activation_gradient_operand(
    run: Run | None,
    layer: Layer,
    activation: Activation,
    dy: Array,
    x: Array,
    probs: Array | None,
    bias: Array | None,
    context: Context,
    history: ScalingHistory | None,
) -> tuple[Made, Array | None]:
    """(the layer's dy from the activation's dy and input x, the gradient of the layer's bias or None)."""
    if run is None or _is_cut(layer, "o"):
        plain: Array = octavo_activation_gradient(dy, x, probs, activation=activation)
        operand = Made(plain, *quantize_operand(layer.plan.quantize_dy, layer, plain, "dy", context, history))
        return operand, bias_gradient(layer, plain, bias, context)
    wanted = () if bias is None else ("dbias",)
    made, extras = _run(run, layer.plan.quantize_dy, layer, "dy", context, history, (dy, x), wanted=wanted, probs=probs)
    if bias is None:
        return made, None
    assert extras.dbias is not None
    return made, extras.dbias.astype(bias.dtype)
