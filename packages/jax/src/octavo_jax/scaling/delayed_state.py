"""The state of delayed scaling: amax histories and scales of a layer's three operands, as a value.

The amax of dy exists in the backward pass alone. So `grouped_dense` treats the state as a differentiable argument
whose cotangent is not a derivative but the state after this call, amaxes of x, the kernel and dy recorded:

    (loss, aux), (grads, new_state) = jax.value_and_grad(loss_fn, argnums=(0, 1), has_aux=True)(params, state)
    state = octavo_jax.update_delayed(new_state, recipe)      # once per step

Overwrite the state with that "gradient", as Flax does for its collection `_overwrite_with_gradient`. With several
microbatches per step, overwrite after each and update once after the last: recording takes a maximum, so order and
number do not matter, while *summing* these gradients would be wrong. Within one differentiated function, thread the
second result of `grouped_dense` from call to call: JAX sums the "gradients" of a state that several calls take, and
such a sum comes back as NaN (`octavo_jax.scaling.summed_states`). A state that no executed call took, in the branch
of a `jax.lax.cond` that did not run, comes back as it was; one that nothing in the function uses comes back as JAX's
gradient of what is unused, zeros, which layers and updates refuse.

Inside `jax.shard_map`, a state that shards share comes back with the largest of their amaxes. With check_vma=False JAX
adds up what shards share where the gradient is taken outside of the shard_map, which is NaN, too: take it inside then,
or give each shard a state of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from octavo import DelayedScaling
from octavo.formats import FORMAT_MAX, Format
from octavo_jax.arithmetic import bits as fp32
from octavo_jax.arithmetic.quantize import group_amax
from octavo_jax.arithmetic.rows import RaggedRows, Rows, StackedRows
from octavo_jax.arrays.checks import as_count
from octavo_jax.arrays.exportable import exportable
from octavo_jax.arrays.flax_serialization import known_to_flax
from octavo_jax.arrays.host import is_on_host
from octavo_jax.arrays.numpy_arrays import as_jax
from octavo_jax.arrays.recipes import as_delayed
from octavo_jax.arrays.varying import varying_axes, varying_over
from octavo_jax.scaling.summed_states import SUMMED, UNUSED, is_argument_of_gradient, is_unused, refusing_sums


@exportable
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScalingHistory:
    """What delayed scaling knows of one operand, by group.

    history  [H, G] float32   amaxes: slot 0 collects that of the current step, and the last slot has that of the latest
                              finished one
    scale    [G] float32      encode scales, by which the operand is multiplied before it is rounded to codes
    """

    history: Array
    scale: Array


@exportable
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DelayedState:
    """Delayed scaling's state of one layer: histories of its input, its kernel, and the gradient of its output.

    A state is checked where `jax.grad` differentiates with respect to it, whether JAX or the user's code has made it
    from the arguments: where several calls take one state and JAX adds up what they record, the "gradient" is NaN, or
    a ValueError.
    """

    x: ScalingHistory
    kernel: ScalingHistory
    grad: ScalingHistory

    def __post_init__(self) -> None:
        histories = self.x, self.kernel, self.grad
        if any(isinstance(one, ScalingHistory) and is_argument_of_gradient(one.scale) for one in histories):
            for name, one in zip(("x", "kernel", "grad"), refusing_sums(histories), strict=True):
                object.__setattr__(self, name, one)


def init_delayed(recipe: DelayedScaling | str, groups: int) -> DelayedState:
    """The state before the first step: history 0, scale 1."""
    recipe = as_delayed(recipe)
    groups = as_count("groups", groups)
    known_to_flax(DelayedState, ScalingHistory)

    def fresh() -> ScalingHistory:
        return ScalingHistory(jnp.zeros((recipe.history, groups), jnp.float32), jnp.ones(groups, jnp.float32))

    return DelayedState(fresh(), fresh(), fresh())


def check_state_arrays(state: object) -> None:
    """ValueError unless `state` is a DelayedState of float32 histories [H, G] and scales [G], whose bits are read.

    Scales that are NaN, which a sum of states has, or 0, which the gradient of an unused state has, are refused where
    their values lie on a CPU.
    """
    if not isinstance(state, DelayedState):
        raise ValueError(f"state is a {type(state).__name__}; give a DelayedState (octavo_jax.init_delayed makes one)")
    for operand in ("x", "kernel", "grad"):
        one = getattr(state, operand)
        if not isinstance(one, ScalingHistory):
            raise ValueError(f"state.{operand} is a {type(one).__name__}; give a ScalingHistory, as init_delayed does")
        for name, array in (("history", one.history), ("scale", one.scale)):
            if array.dtype != jnp.float32:
                raise ValueError(
                    f"state.{operand}.{name} has dtype {array.dtype}; it stays float32 where parameters are cast, so "
                    "leave states out of such a cast"
                )
        if one.history.ndim != 2 or one.history.shape[1:] != one.scale.shape:
            raise ValueError(
                f"state.{operand} has a history of shape {list(one.history.shape)} and a scale of shape "
                f"{list(one.scale.shape)}; they are [H, G] and [G]"
            )
        if is_on_host(one.scale):
            if bool(np.isnan(one.scale).any()):
                raise ValueError(f"state.{operand}.scale holds NaN: {SUMMED}")
            if bool(is_unused(np.asarray(one.history), np.asarray(one.scale)).any()):
                raise ValueError(f"state.{operand}.scale holds 0, which no scale is: {UNUSED}")


def check_history(state: DelayedState, recipe: DelayedScaling) -> None:
    """ValueError unless all three operands of `state` remember as many steps as `recipe` asks for."""
    for operand in ("x", "kernel", "grad"):
        steps = getattr(state, operand).history.shape[0]
        if steps != recipe.history:
            raise ValueError(
                f"state.{operand} remembers {steps} steps and the recipe has history={recipe.history}; make the state "
                "with octavo_jax.init_delayed(recipe, groups), or give the recipe that it was made for"
            )


def amax_of(x: Array, group_sizes: Array | None) -> Array:
    """float32 [G]: max |x| of each group of ragged rows, or of stacked matrices; NaN where a group holds one."""
    rows: Rows = StackedRows(*x.shape[:2]) if group_sizes is None else RaggedRows(group_sizes, x.shape[0])
    return fp32.as_float(group_amax(rows.masked(fp32.widened(x)) & fp32.MAGNITUDE, rows))


def _ordered(amax: Array) -> Array:
    """uint32 bits that compare as amaxes do, which no device flushes; NaN counts as not recorded."""
    bits = fp32.as_bits(amax) & fp32.MAGNITUDE
    return jnp.where(bits > fp32.INFINITY, np.uint32(0), bits)


@jax.custom_batching.custom_vmap
def _larger(a: Array, b: Array) -> Array:
    """max of amaxes."""
    return fp32.as_float(jnp.maximum(_ordered(a), _ordered(b)))


@_larger.def_vmap
def _larger_of_a_batch(size: int, batched: list[bool], a: Array, b: Array) -> tuple[Array, bool]:
    """Of a state that a whole batch shares, one maximum: JAX would sum the batch's states, history and scale too."""
    del size
    if not batched[0]:
        b = fp32.as_float(jnp.max(_ordered(b), axis=0))
    elif not batched[1]:
        b = b[None]
    return _larger(a, b), batched[0]  # itself again, for a vmap around this one


@jax.jit
def with_amax(state: ScalingHistory, amax: Array) -> ScalingHistory:
    """`record_amax` of arguments that fit, inside a rule of differentiation."""
    return ScalingHistory(state.history.at[0].set(_larger(state.history[0], amax)), state.scale)


_recorded = jax.custom_vjp(with_amax)


def _recording(state: ScalingHistory, amax: Array) -> tuple[ScalingHistory, tuple[ScalingHistory, ScalingHistory]]:
    recorded = with_amax(state, amax)
    return recorded, (state, recorded)


def _after_recording(
    saved: tuple[ScalingHistory, ScalingHistory], later: ScalingHistory
) -> tuple[ScalingHistory, None]:
    """The state's "gradient" is what it became, here and later, as a layer's is; the amax has none."""
    state, recorded = saved
    after = with_amax(recorded, later.history[0])
    return _largest(varying_axes(after), state, after), None


_recorded.defvjp(_recording, _after_recording)


def record_amax(state: ScalingHistory, amax: Array) -> ScalingHistory:
    """The state after one more tensor of this step with these amaxes, float32 [G]; ValueError for others.

    Where it is differentiated, no gradient flows into the amax, and the state's is its new value.
    """
    amax = jnp.asarray(amax)
    if amax.dtype != jnp.float32 or amax.shape != state.scale.shape:
        raise ValueError(
            f"amax has shape {list(amax.shape)} and dtype {amax.dtype}; give one float32 per group, "
            f"{list(state.scale.shape)}"
        )
    result: ScalingHistory = _recorded(*as_jax((state, amax)))
    return result


def merged(state: DelayedState, later: DelayedState) -> DelayedState:
    """Both states' running amaxes: `later` is what calls that took this call's second result recorded."""
    return DelayedState(
        with_amax(state.x, later.x.history[0]),
        with_amax(state.kernel, later.kernel.history[0]),
        with_amax(state.grad, later.grad.history[0]),
    )


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def shared_state(state: DelayedState, axes: frozenset[str]) -> DelayedState:
    """`state` inside `jax.shard_map` as one whose amaxes differ over the manual `axes`.

    Its "gradient" has the state's own type: running amaxes are maxima over those of `axes` that the state did not
    differ over, where JAX would sum a derivative.
    """
    result: DelayedState = varying_over(state, axes)
    return result


def _shared(state: DelayedState, axes: frozenset[str]) -> tuple[DelayedState, DelayedState]:
    return shared_state(state, axes), state


def largest_of_shards(axes: frozenset[str], state: DelayedState, later: DelayedState) -> DelayedState:
    """`state` with the running amaxes of `later`, maxima over those of `axes` that `state` does not differ over."""
    histories = (_largest(axes, getattr(state, name), getattr(later, name)) for name in ("x", "kernel", "grad"))
    return DelayedState(*histories)


def _largest(axes: frozenset[str], before: ScalingHistory, after: ScalingHistory) -> ScalingHistory:
    missing = tuple(sorted(axes - varying_axes(before)))
    last = fp32.as_bits(after.history[0])
    if missing:
        last = lax.pmax(last, missing)  # type: ignore[no-untyped-call]
    return ScalingHistory(before.history.at[0].set(fp32.as_float(last)), before.scale)


shared_state.defvjp(_shared, lambda axes, state, later: (largest_of_shards(axes, state, later),))


@partial(jax.jit, static_argnames=("top", "most_recent", "axis_name"))
def _updated(
    state: ScalingHistory, *, top: float, most_recent: bool, axis_name: str | tuple[str, ...]
) -> ScalingHistory:
    """One operand's state at the end of a step; scales are fl(top / amax)."""
    last = fp32.as_bits(state.history[0])
    if axis_name:
        last = lax.pmax(last, axis_name)  # type: ignore[no-untyped-call]
    bits = fp32.as_bits(state.history).at[0].set(last)
    amax = last if most_recent else jnp.max(bits, axis=0)
    rolled = jnp.roll(bits, -1, axis=0).at[-1].set(last).at[0].set(0)
    scale = jnp.minimum(fp32.divide(fp32.constant(top), amax), fp32.LARGEST)
    known = fp32.is_finite(amax) & (amax != 0) & (last != 0)
    unused = is_unused(bits, fp32.as_bits(state.scale))
    before = jnp.where(unused, fp32.as_bits(jnp.float32(jnp.nan)), fp32.as_bits(state.scale))
    return ScalingHistory(
        fp32.as_float(jnp.where(last != 0, rolled, bits)), fp32.as_float(jnp.where(known, scale, before))
    )


def update_delayed(
    state: DelayedState, recipe: DelayedScaling | str, *, axis_name: str | tuple[str, ...] = ()
) -> DelayedState:
    """The state at the end of a step, equal to `octavo_numerics.update_delayed` of each operand.

    axis_name   mesh axes (inside shard_map or pmap) over which this step's amaxes are maxima; every member calls it,
                those without tokens too

    A group that recorded nothing is untouched. Else its history rolls, the recorded amax goes to the end, slot 0
    becomes 0, and scale = fl(fl(max * 2^-margin) / amax) where that amax is finite. The gradient of a state that no
    call used has scale 0 and is no state: ValueError, or NaN where values do not lie on a CPU. ValueError, too, where
    the state's history has another length than the recipe's.
    """
    recipe = as_delayed(recipe)
    check_state_arrays(state)
    check_history(state, recipe)

    def updated(history: ScalingHistory, of: Format) -> ScalingHistory:
        top = float(np.float32(np.ldexp(FORMAT_MAX[of], -recipe.margin)))
        result: ScalingHistory = _updated(
            history, top=top, most_recent=recipe.algorithm == "most_recent", axis_name=axis_name
        )
        return result

    return DelayedState(
        updated(state.x, recipe.forward_format),
        updated(state.kernel, recipe.forward_format),
        updated(state.grad, recipe.gradient_format),
    )
