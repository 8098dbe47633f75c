"""act_quantize, dact_quantize, norm_quantize: what is computed before a quantizer and the quantizer, as one function.

Each is computed in fp32 and rounded once to the input's dtype; the quantizer of that rounded array has the bits that
`octavo_jax.quantize` gives it. Where no backend has the fused function it is composed. None of them is differentiable:
they are what a custom_vjp is made of.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from octavo import QuantizerSpec
from octavo.quantizer import Operand
from octavo_jax.arrays.checks import check_spec
from octavo_jax.arrays.grouped_tensor import GroupedTensor
from octavo_jax.arrays.sizes import GroupSizes
from octavo_jax.dispatch.backends import BackendNames
from octavo_jax.dispatch.fused import activation_run, gradient_run, norm_run
from octavo_jax.dispatch.quantizer import quantizer_for
from octavo_jax.functions.activations import check_activation, check_per_row, features
from octavo_jax.functions.composed import Extras
from octavo_jax.functions.norms import check_norm
from octavo_jax.quantizers.arguments import quantizer_keywords, sizes_of
from octavo_jax.quantizers.derivatives import undifferentiated
from octavo_jax.remat.checkpoint_names import name_planes
from octavo_jax.sharding.conflicts import check_whole
from octavo_registry.contract.cards import Activation, Norm

__all__ = ["Extras", "act_quantize", "dact_quantize", "norm_quantize"]


def _rows(x: Array) -> Array:
    x = jnp.asarray(x)
    if x.ndim != 2:
        raise ValueError(f"x has shape {list(x.shape)}; it is rows [M, C]")
    return x


def _sizes(group_sizes: GroupSizes | None, x: Array) -> Array:
    sizes = sizes_of(x, group_sizes)
    assert sizes is not None  # x is rows
    return sizes


def act_quantize(
    x: Array,
    spec: QuantizerSpec,
    group_sizes: GroupSizes | None = None,
    *,
    activation: Activation,
    probs: Array | None = None,
    seed: int | Array | None = None,
    operand: Operand | None = None,
    group_offset: int | Array = 0,
    scale: Array | None = None,
    backend: BackendNames = None,
) -> tuple[GroupedTensor, Extras]:
    """`octavo_jax.activate(x, activation, probs=probs)`, quantized.

    x            [M, F], or [M, 2 F] with the gate first where the activation is gated; bf16, fp16 or fp32
    probs        [M] float32, multiplied in row by row; None: 1

    The other arguments are `octavo_jax.quantize`'s, and so are errors and names. Returns the tensor of [M, F], and
    extras: `activated`, what was quantized, and delayed scaling's `amax`. Under jit, unread extras are not computed.
    """
    check_spec(spec)
    x, name = _rows(x), check_activation(activation)
    check_whole("act_quantize", x=x)
    check_per_row("probs", probs, x.shape[:1])
    sizes = _sizes(group_sizes, x)
    how = quantizer_keywords(spec, sizes.shape[0], seed, operand, group_offset, scale)
    columns = features(x.shape[1], name, f"x {list(x.shape)}")
    plan = quantizer_for(spec, x, sizes.shape[0], False, backend, columns=columns)
    x, probs = undifferentiated((x, probs))
    q, extras = activation_run(plan, name, backend)(x, sizes, probs=probs, **how)
    return name_planes(q, spec.checkpoint_name), extras


def dact_quantize(
    dy: Array,
    x: Array,
    spec: QuantizerSpec,
    group_sizes: GroupSizes | None = None,
    *,
    activation: Activation,
    probs: Array | None = None,
    seed: int | Array | None = None,
    operand: Operand | None = None,
    group_offset: int | Array = 0,
    scale: Array | None = None,
    backend: BackendNames = None,
) -> tuple[GroupedTensor, Extras]:
    """The gradient of `act_quantize`'s x, quantized, and its column sums by group, which are a bias's gradient.

    dy   [M, F], gradient of the activation's result, in x's dtype
    x    as in `act_quantize`; what is quantized has its shape

    The other arguments are those of `act_quantize`. The extras hold `dbias`, fp32 [G, C], too.
    """
    check_spec(spec)
    x, dy, name = _rows(x), jnp.asarray(dy), check_activation(activation)
    check_whole("dact_quantize", dy=dy, x=x)
    needed = (x.shape[0], features(x.shape[1], name, f"x {list(x.shape)}"))
    if dy.shape != needed or dy.dtype != x.dtype:
        raise ValueError(
            f"dy has shape {list(dy.shape)} and dtype {dy.dtype}; x {list(x.shape)} with {name} needs {list(needed)} "
            f"in x's dtype, {x.dtype}"
        )
    check_per_row("probs", probs, x.shape[:1])
    sizes = _sizes(group_sizes, x)
    how = quantizer_keywords(spec, sizes.shape[0], seed, operand, group_offset, scale)
    plan = quantizer_for(spec, x, sizes.shape[0], False, backend)
    dy, x, probs = undifferentiated((dy, x, probs))
    q, extras = gradient_run(plan, name, backend)(dy, x, sizes, probs=probs, **how)
    return name_planes(q, spec.checkpoint_name), extras


def norm_quantize(
    x: Array,
    gamma: Array,
    spec: QuantizerSpec,
    group_sizes: GroupSizes | None = None,
    *,
    beta: Array | None = None,
    norm: Norm = "rms",
    epsilon: float = 1e-6,
    seed: int | Array | None = None,
    operand: Operand | None = None,
    group_offset: int | Array = 0,
    scale: Array | None = None,
    backend: BackendNames = None,
) -> tuple[GroupedTensor, Extras]:
    """`octavo_jax.normalize(x, gamma, beta, norm=norm, epsilon=epsilon)`, quantized.

    x            [M, C]
    gamma, beta  [C] in x's dtype; RMSNorm ("rms") subtracts no mean and takes no beta
    epsilon      added to the mean square before the root; more than 0

    The other arguments are those of `act_quantize`. The extras hold `rstd`, fp32 [M], and `mean` for "layer".
    """
    check_spec(spec)
    x = _rows(x)
    check_whole("norm_quantize", x=x, gamma=gamma, beta=beta)
    normalization = check_norm(norm, epsilon, x, gamma, beta)
    sizes = _sizes(group_sizes, x)
    how = quantizer_keywords(spec, sizes.shape[0], seed, operand, group_offset, scale)
    plan = quantizer_for(spec, x, sizes.shape[0], False, backend)
    q, extras = norm_run(plan, normalization, backend)(*undifferentiated((x, gamma, beta)), sizes, **how)
    return name_planes(q, spec.checkpoint_name), extras
