"""grouped_dense: the differentiable grouped linear layer."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from octavo import Recipe
from octavo.quantizer import DEFAULT_CHECKPOINT_NAME, Direction, Operand
from octavo_jax.checkpoint_names import name_array, name_planes
from octavo_jax.delayed import DelayedState, amax_of, record_amax
from octavo_jax.dispatch import Layer, Names, layer_for
from octavo_jax.grouped_tensor import GroupedTensor
from octavo_jax.quantizing import check_group_offset
from octavo_jax.reference.gemm import group_sums
from octavo_jax.seeds import seed_words
from octavo_jax.sizes import GroupSizes, as_group_sizes, status
from octavo_registry import Plan

GemmOperand = GroupedTensor | Array


class Context(NamedTuple):
    """Arguments that have no gradient: sizes [G], seed words [2] or None, number of the first group."""

    group_sizes: Array
    seed: Array | None
    group_offset: Array | np.uint32


class Residuals(NamedTuple):
    """What the backward pass reads: wgrad's x, dgrad's kernel, and dtypes' carriers."""

    x: GemmOperand
    w: GemmOperand
    context: Context
    state: DelayedState | None
    bias: Array | None


def _quantized(
    plan: Plan | None, layer: Layer, x: Array, operand: Operand, context: Context, scale: Array | None
) -> GroupedTensor | None:
    if plan is None:
        return None
    spec = plan.request.quantizer
    assert spec is not None
    q: GroupedTensor = plan.run(
        x,
        None if operand == "w" else context.group_sizes,
        seed=context.seed if spec.stochastic else None,
        operand=operand,
        group_offset=context.group_offset,
        scale=scale if spec.scaling == "delayed" else None,
    )
    # Naming comes before the first use; dy has no name, because nothing recomputes a backward pass.
    return q if operand == "dy" else name_planes(q, layer.checkpoint_name)


def _operand(q: GroupedTensor | None, array: Array, wanted: bool) -> GemmOperand:
    """What a GEMM multiplies: the quantized operand where its slot wants it, else the array."""
    return q if wanted and q is not None else array


def _kept(operand: GemmOperand, direction: Direction) -> GemmOperand:
    """The operand with the one plane that the backward pass reads."""
    if not isinstance(operand, GroupedTensor):
        return operand
    payload, scale, second = operand.plane(direction)
    if direction == "rowwise":
        return GroupedTensor(operand.spec, operand.group_sizes, payload, scale, second)
    sizes = operand.group_sizes
    return GroupedTensor(operand.spec, sizes, columnwise=payload, columnwise_scale=scale, columnwise_global=second)


def _forward(
    layer: Layer, x: Array, kernel: Array, bias: Array | None, state: DelayedState | None, context: Context
) -> tuple[tuple[Array, DelayedState | None], Residuals]:
    plan, recipe = layer.plan, layer.plan.recipe
    w = jnp.swapaxes(kernel, 1, 2)
    x_scale = None if state is None else state.x.scale
    w_scale = None if state is None else state.kernel.scale
    xq = _quantized(plan.quantize_x, layer, x, "x", context, x_scale)
    wq = _quantized(plan.quantize_w, layer, w, "w", context, w_scale)
    quantized = recipe.quantizes("fprop")
    y = plan.fprop.run(_operand(xq, x, quantized), _operand(wq, w, quantized), context.group_sizes, bias=bias)
    if layer.output_checkpoint_name is not None:
        y = name_array(y, layer.output_checkpoint_name)
    recorded = state
    if state is not None:
        recorded = DelayedState(
            state.x if xq is None else record_amax(state.x, amax_of(x, context.group_sizes)),
            state.kernel if wq is None else record_amax(state.kernel, amax_of(w, None)),
            state.grad,
        )
    saved = Residuals(
        _kept(_operand(xq, x, recipe.quantizes("wgrad")), "columnwise"),
        _kept(_operand(wq, kernel, recipe.quantizes("dgrad")), "columnwise"),
        context,
        recorded,
        bias,
    )
    return (y, recorded), saved


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dense(
    layer: Layer, x: Array, kernel: Array, bias: Array | None, state: DelayedState | None, context: Context
) -> tuple[Array, DelayedState | None]:
    return _forward(layer, x, kernel, bias, state, context)[0]


def _merged(state: DelayedState, later: DelayedState) -> DelayedState:
    """Both states' running amaxes: `later` is what calls that took this call's second result recorded."""
    return DelayedState(
        record_amax(state.x, later.x.history[0]),
        record_amax(state.kernel, later.kernel.history[0]),
        record_amax(state.grad, later.grad.history[0]),
    )


def _backward(layer: Layer, saved: Residuals, cotangents: tuple[Array, DelayedState | None]) -> tuple[Any, ...]:
    plan, recipe = layer.plan, layer.plan.recipe
    dy, later = cotangents
    context, state = saved.context, saved.state
    assert plan.dgrad is not None
    assert plan.wgrad is not None
    dyq = _quantized(plan.quantize_dy, layer, dy, "dy", context, None if state is None else state.grad.scale)
    w = saved.w if isinstance(saved.w, GroupedTensor) else jnp.swapaxes(saved.w, 1, 2)
    dx = plan.dgrad.run(_operand(dyq, dy, recipe.quantizes("dgrad")), w, context.group_sizes)
    dw = plan.wgrad.run(saved.x, _operand(dyq, dy, recipe.quantizes("wgrad")), context.group_sizes)
    db = None if saved.bias is None else group_sums(dy, context.group_sizes).astype(saved.bias.dtype)
    if state is not None and later is not None:
        state = _merged(state, later)
        if dyq is not None:
            grad = record_amax(state.grad, amax_of(dy, context.group_sizes))
            state = DelayedState(state.x, state.kernel, grad)
    return dx.astype(layer.x_dtype), jnp.swapaxes(dw, 1, 2).astype(layer.kernel_dtype), db, state, None


_dense.defvjp(_forward, _backward)


# One compiled call for eager users; inside their own jit it is a nested one of the same name.
@partial(jax.jit, static_argnums=0)
def octavo_grouped_dense(
    layer: Layer, x: Array, kernel: Array, bias: Array | None, state: DelayedState | None, context: Context
) -> tuple[Array, DelayedState | None]:
    """The differentiable call with everything static in `layer`."""
    return _dense(layer, x, kernel, bias, state, context)


def _array(x: Array | np.ndarray) -> Array:
    # jnp.asarray of an array costs 10 microseconds.
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def _check_arrays(x: Array, kernel: Array, group_sizes: Array, bias: Array | None) -> None:
    if x.ndim != 2 or kernel.ndim != 3:
        raise ValueError(f"x has shape {list(x.shape)} and kernel {list(kernel.shape)}; they are [M, K] and [G, K, N]")
    groups, k, n = kernel.shape
    if x.shape[1] != k:
        raise ValueError(
            f"x has {x.shape[1]} features and kernel [G, K, N] = {list(kernel.shape)} takes K = {k}; "
            "a kernel in [G, N, K] needs jnp.swapaxes(kernel, 1, 2)"
        )
    if group_sizes.shape[0] != groups:
        raise ValueError(
            f"group_sizes has {group_sizes.shape[0]} entries and kernel {groups} matrices; give one a matrix"
        )
    if 0 in (groups, k, n):
        raise ValueError(f"kernel has shape {list(kernel.shape)}; every axis is one or more")
    if bias is not None and bias.shape != (groups, n):
        raise ValueError(
            f"bias has shape {list(bias.shape)}; kernel {list(kernel.shape)} needs [G, N] = [{groups}, {n}]"
        )


def _check_state(recipe: Recipe | None, state: DelayedState | None, groups: int) -> None:
    stateful = recipe is not None and recipe.stateful
    if stateful and state is None:
        raise ValueError("state is None and the recipe scales by history; give octavo_jax.init_delayed(recipe, groups)")
    if state is not None and not stateful:
        kind = "high_precision" if recipe is None else recipe.kind
        raise ValueError(f"state was given and the recipe {kind!r} keeps none; leave it out")
    if state is not None and state.x.scale.shape != (groups,):
        raise ValueError(f"state is for {state.x.scale.shape[0]} groups and kernel has {groups}; make it for {groups}")


def grouped_dense(
    x: Array | np.ndarray,
    kernel: Array | np.ndarray,
    group_sizes: GroupSizes,
    *,
    recipe: Recipe | None,
    bias: Array | np.ndarray | None = None,
    seed: int | Array | None = None,
    state: DelayedState | None = None,
    group_offset: int | Array = 0,
    checkpoint_name: str | None = DEFAULT_CHECKPOINT_NAME,
    output_checkpoint_name: str | None = None,
    preferred_element_type: DTypeLike | None = None,
    sharding: None = None,
    return_status: bool = False,
    backend: Names = None,
) -> Any:
    """y[r] = x[r] @ kernel[g] + bias[g] for every row r of group g.

    x                        [M, K] bf16, fp16 or fp32; rows of one group stand together, in group order
    kernel                   [G, K, N]
    group_sizes              [G] integers on the host (checked) or a jax.Array (clamped, never read back); sum <= M
    recipe                   None: HighPrecision
    bias                     [G, N]
    seed                     of stochastic rounding: an int, an integer scalar array, or uint32 [2] words
    state                    delayed scaling's `DelayedState`; see `octavo_jax.delayed` for how the backward updates it
    group_offset             number of the first group, in stochastic rounding's counter
    checkpoint_name          what `jax.checkpoint` policies call the quantized x and kernel; None: no name
    output_checkpoint_name   what they call y; None: no name
    preferred_element_type   dtype of y; None: recipe.output_dtype, else x's
    sharding                 None; partitioning across a mesh comes with its own release of octavo-jax
    return_status            also return an int32 status word: 0, or 1 (a size was negative) + 2 (sum past M)
    backend                  a name or a closed list of names

    Returns y [M, N], rows past the sum zero and x not read there; then, where asked for, the new state and the
    status word: y, (y, state), (y, status) or (y, state, status).

    Reverse-mode differentiable once in x, kernel and bias; JAX refuses jvp of it. Raises ValueError for arguments
    that do not fit, NoBackendError when no installed backend serves them (`octavo why` prints the same table).
    """
    if sharding is not None:
        raise ValueError(
            f"sharding is {sharding!r}; this octavo-jax computes on one device's arrays and takes None: partitioning "
            "needs its own release, so shard outside with jax.shard_map and call this on the local arrays"
        )
    x, kernel = _array(x), _array(kernel)
    bias = None if bias is None else _array(bias)
    if x.ndim != 2:
        _check_arrays(x, kernel, jnp.zeros(0, jnp.int32), bias)
    sizes = as_group_sizes(group_sizes, x.shape[0])
    _check_arrays(x, kernel, sizes, bias)
    _check_state(recipe, state, kernel.shape[0])
    words = None
    if recipe is not None and recipe.stochastic:
        if seed is None:
            raise ValueError(
                "seed is None and the recipe rounds stochastically; give an integer seed, another each step"
            )
        words = seed_words(seed)
    layer = layer_for(
        recipe,
        x,
        kernel,
        preferred_element_type=preferred_element_type,
        checkpoint_name=checkpoint_name,
        output_checkpoint_name=output_checkpoint_name,
        backend=backend,
    )
    offset = check_group_offset(group_offset, kernel.shape[0])
    context = Context(sizes, words, np.uint32(offset) if isinstance(offset, int) else offset.astype(jnp.uint32))
    y, new_state = octavo_grouped_dense(layer, x, kernel, bias, state, context)
    results = [y]
    if state is not None:
        results.append(new_state)
    if return_status:
        results.append(status(sizes, x.shape[0]))
    return results[0] if len(results) == 1 else tuple(results)
