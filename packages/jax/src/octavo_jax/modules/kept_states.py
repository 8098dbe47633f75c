"""Delayed scaling's state from one call of a module to the next: two differentiated calls may not take the same one.

JAX adds up the "gradients" of what is used twice, and a state's is its new value (see `DelayedState`): history and
scale would be sums. So the second call takes what the first one recorded, and where it cannot, a derivative is refused.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import jax
from jax.custom_derivatives import custom_vjp_primal_tree_values
from jax.extend.core import get_opaque_trace_state

from octavo_jax.arrays.varying import varying_axes, varying_over
from octavo_jax.modules.states import State
from octavo_jax.scaling.delayed_state import DelayedState, largest_of_shards, merged
from octavo_jax.scaling.state_gradients import instantiated, is_differentiated


def recorded(before: State, after: State) -> State:
    """The state that a module keeps of a call that took `before` and gave `after`.

    It is `after` where the call is differentiated with respect to its state, else `before`: evaluation records nothing.
    Whatever batch or shards share the state, it has the type of `before`, for they share what is kept, too.
    """
    result: State = jax.tree.map(_recorded, before, after, is_leaf=_is_state)
    return result


def _is_state(leaf: Any) -> bool:
    return isinstance(leaf, DelayedState)


def _recorded(before: DelayedState, after: DelayedState) -> DelayedState:
    result: DelayedState = _kept(before, after, varying_axes(after))
    return result


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _kept(before: DelayedState, after: DelayedState, axes: frozenset[str]) -> DelayedState:
    return before


def _kept_forward(before: Any, after: Any, axes: frozenset[str]) -> tuple[DelayedState, None]:
    differentiated = is_differentiated(before)
    before, after = custom_vjp_primal_tree_values((before, after))  # type: ignore[no-untyped-call]
    return merged(before, largest_of_shards(axes, before, after)) if differentiated else before, None


def _kept_backward(axes: frozenset[str], _: None, later: Any) -> tuple[None, DelayedState]:
    return None, varying_over(instantiated(later), axes)


_kept.defvjp(_kept_forward, _kept_backward, symbolic_zeros=True)


def undifferentiated_state(state: State, sentence: str) -> State:
    """`state`; ValueError with this sentence where a derivative is taken with respect to it."""
    result: State = _undifferentiated(state, sentence)
    return result


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _undifferentiated(state: State, sentence: str) -> State:
    return state


def _refused(state: Any, sentence: str) -> tuple[State, None]:
    if is_differentiated(state):
        raise ValueError(sentence)
    values: State = custom_vjp_primal_tree_values(state)  # type: ignore[no-untyped-call]
    return values, None


_undifferentiated.defvjp(_refused, lambda sentence, _, later: (instantiated(later),), symbolic_zeros=True)

_taken: dict[int, tuple[weakref.ref[Any], list[Any]]] = {}
"""Traced arrays that calls took, by id, and the traces that these were in; gone with the array."""


def is_traced(state: State) -> bool:
    """Whether a derivative may be taken with respect to it, as far as is known before."""
    return isinstance(_array_of(state), jax.core.Tracer)


def taken_before(state: State) -> bool:
    """Whether another call took this traced state, in this trace; two branches of a `jax.lax.cond` may."""
    array = _array_of(state)
    if not isinstance(array, jax.core.Tracer):
        return False
    key, trace = id(array), get_opaque_trace_state()  # type: ignore[no-untyped-call]
    if key not in _taken:
        _taken[key] = weakref.ref(array, lambda _: _taken.pop(key, None)), []
    traces = _taken[key][1]
    if trace in traces:
        return True
    traces.append(trace)
    return False


def _array_of(state: State) -> Any:
    return jax.tree.leaves(state)[0]
