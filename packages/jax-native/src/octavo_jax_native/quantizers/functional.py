"""Fused functions: an activation, its gradient, or a normalization, and the quantizer, in one pass over memory.

Each is computed in fp32 and rounded once to the input's dtype; the quantizer of that rounded array has the bits that
`octavo_jax.quantize` gives it. None of them is differentiable: they are what a custom_vjp is made of.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from octavo import QuantizerSpec
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Operand
from octavo_jax import GroupedTensor
from octavo_jax.arrays.sizes import GroupSizes, as_group_sizes, one_group
from octavo_jax.functions.activations import check_activation, features
from octavo_jax.functions.composed import Extras
from octavo_jax.functions.norms import check_norm
from octavo_jax.quantizers.functional import check_group_offset, check_scale
from octavo_jax_native.arrays.planes import array, tensor_of
from octavo_jax_native.ffi import arguments, targets
from octavo_jax_native.quantizers.quantizer import planes_of, tensor_spec
from octavo_registry.contract import Activation, Norm

Layouts = tuple[str, str]


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
    layouts: Layouts = (PLAIN, PLAIN),
    activated: bool = False,
    amax: bool = False,
    dequantized: bool = False,
) -> tuple[GroupedTensor, Extras]:
    """activation(x), times `probs` row by row, quantized.

    x            [M, F], or [M, 2 F] with the gate first where the activation is gated; bf16, fp16 or fp32
    probs        [M] float32, or None
    layouts      of the rowwise ("plain", "rows") and the columnwise plane ("plain", "panels")
    activated, amax, dequantized   ask for these extras

    The other arguments are `octavo_jax.quantize`'s. ValueError for shapes, dtypes or a seed that do not fit.
    """
    check_activation(activation)
    arguments.check_input(x, "x", (2,))
    operands = {"x": x}
    if probs is not None:
        arguments.check_array(probs, "probs", (x.shape[0],), jnp.float32)
        operands["probs"] = probs
    columns = _features(x, activation)
    asked = _asked(activated=activated, amax=amax, dequantized=dequantized)
    run = _fused(spec, layouts, "activation", activation, "rms", 0.0, asked)
    return run(operands, columns, group_sizes, seed, operand, group_offset, scale)


def dact_quantize(
    dy: Array,
    x: Array,
    spec: QuantizerSpec,
    group_sizes: GroupSizes | None = None,
    *,
    activation: Activation,
    probs: Array | None = None,
    seed: int | Array | None = None,
    operand: Operand | None = "dy",
    group_offset: int | Array = 0,
    scale: Array | None = None,
    layouts: Layouts = (PLAIN, PLAIN),
    dbias: bool = True,
    activated: bool = False,
    amax: bool = False,
    dequantized: bool = False,
) -> tuple[GroupedTensor, Extras]:
    """The gradient of `act_quantize`'s input x, quantized, and its column sums by group.

    dy   [M, F], gradient of the activation's result, in x's dtype
    x    as in `act_quantize`; what is quantized has its shape

    The other arguments are those of `act_quantize`.
    """
    check_activation(activation)
    arguments.check_input(x, "x", (2,))
    arguments.check_input(dy, "dy", (2,))
    arguments.check_array(dy, "dy", (x.shape[0], _features(x, activation)), x.dtype)
    operands = {"x": x, "dy": dy}
    if probs is not None:
        arguments.check_array(probs, "probs", (x.shape[0],), jnp.float32)
        operands["probs"] = probs
    asked = _asked(activated=activated, amax=amax, dequantized=dequantized, dbias=dbias)
    run = _fused(spec, layouts, "activation_grad", activation, "rms", 0.0, asked)
    return run(operands, x.shape[1], group_sizes, seed, operand, group_offset, scale)


def norm_quantize(
    x: Array,
    spec: QuantizerSpec,
    group_sizes: GroupSizes | None = None,
    *,
    norm: Norm = "rms",
    gamma: Array,
    beta: Array | None = None,
    epsilon: float = 1e-6,
    seed: int | Array | None = None,
    operand: Operand | None = None,
    group_offset: int | Array = 0,
    scale: Array | None = None,
    layouts: Layouts = (PLAIN, PLAIN),
    activated: bool = False,
    amax: bool = False,
    dequantized: bool = False,
) -> tuple[GroupedTensor, Extras]:
    """(x - mean) * rstd * gamma + beta, quantized; the extras hold rstd, and mean for "layer".

    x            [M, C]; RMSNorm ("rms") subtracts no mean and takes no beta
    gamma, beta  [C] in x's dtype
    epsilon      added to the mean square before the root; more than 0

    The other arguments are those of `act_quantize`.
    """
    arguments.check_input(x, "x", (2,))
    check_norm(norm, epsilon, x, gamma, beta)
    operands = {"x": x, "gamma": gamma} | ({} if beta is None else {"beta": beta})
    asked = _asked(activated=activated, amax=amax, dequantized=dequantized, rstd=True, mean=norm == "layer")
    run = _fused(spec, layouts, "norm", "silu", norm, float(epsilon), asked)
    return run(operands, x.shape[1], group_sizes, seed, operand, group_offset, scale)


def _features(x: Array, activation: Activation) -> int:
    """F, the columns of the activation's result."""
    return features(int(x.shape[1]), activation, f"x {list(x.shape)}")


def _asked(**extras: bool) -> tuple[str, ...]:
    return tuple(name for name, wanted in extras.items() if wanted)


def _extra_results(asked: tuple[str, ...], x: Array, columns: int, groups: int) -> dict[str, jax.ShapeDtypeStruct]:
    rows = x.shape[0]
    every: dict[str, tuple[tuple[int, ...], Any]] = {
        "activated": ((rows, columns), x.dtype),
        "amax": ((groups,), jnp.float32),
        "dequantized": ((rows, columns), jnp.bfloat16),
        "dbias": ((groups, columns), jnp.float32),
        "mean": ((rows,), jnp.float32),
        "rstd": ((rows,), jnp.float32),
    }
    return {name: array(*every[name]) for name in asked}


@lru_cache(maxsize=512)
def _fused(
    spec: QuantizerSpec,
    layouts: Layouts,
    prologue: str,
    activation: str,
    norm: str,
    epsilon: float,
    asked: tuple[str, ...],
) -> Callable[..., tuple[GroupedTensor, Extras]]:
    """The function of one fusion, whose inner part is jitted once."""
    reason = targets.refusal()
    if reason is not None:
        raise RuntimeError(reason)
    targets.register()
    if "dequantized" in asked and "rowwise" not in spec.directions:
        raise ValueError("dequantized=True is the row data's values and orientation is 'columnwise'; use 'both'")

    def octavo_quantize(
        operands: dict[str, Array], group_sizes: Array, columns: int, operand: Operand
    ) -> tuple[dict[str, Array], ...]:
        extras = _extra_results(asked, operands["x"], columns, group_sizes.shape[0])
        how = {"prologue": prologue, "activation": activation, "norm": norm, "epsilon": epsilon}
        return planes_of(spec, layouts, operands, group_sizes, operand, columns, extras, **how)

    octavo_quantize.__name__ = octavo_quantize.__qualname__ = targets.QUANTIZE[spec.scaling]
    compiled = jax.jit(octavo_quantize, static_argnames=("columns", "operand"))

    def run(
        operands: dict[str, Array],
        columns: int,
        group_sizes: GroupSizes | None,
        seed: int | Array | None,
        operand: Operand | None,
        group_offset: int | Array,
        scale: Array | None,
    ) -> tuple[GroupedTensor, Extras]:
        rows = operands["x"].shape[0]
        sizes = one_group(rows) if group_sizes is None else as_group_sizes(group_sizes, rows)
        arguments.check_sizes(sizes)
        groups = sizes.shape[0]
        every = {
            **operands,
            **arguments.random_operands(spec, seed, check_group_offset(group_offset, groups)),
            **arguments.scale_operand(spec, check_scale(scale, spec, groups), groups),
        }
        made = compiled(every, sizes, columns=columns, operand=operand or spec.role)
        tensor = tensor_of(tensor_spec(spec, layouts, (rows, columns), groups), sizes, made)
        return tensor, Extras(**{name: made[0][name] for name in asked})

    return run
