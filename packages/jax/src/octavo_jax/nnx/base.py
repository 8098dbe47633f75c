"""What every nnx module has: recipe, parameters with logical axes, its own seeds, delayed scaling's state."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, Required, TypedDict

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from octavo import DelayedScaling
from octavo.quantizer import DEFAULT_CHECKPOINT_NAME
from octavo.unsaid import UNSAID, Unsaid
from octavo_jax.arrays.optional_packages import absent
from octavo_jax.arrays.recipes import RecipeLike, as_recipe
from octavo_jax.dispatch.backends import BackendNames, check_known
from octavo_jax.dispatch.room import Room
from octavo_jax.modules.default_recipe import recipe_or_default
from octavo_jax.modules.initializers import Initializer
from octavo_jax.modules.kept_states import is_traced, recorded, undifferentiated_state
from octavo_jax.modules.states import State, fresh_state, next_seed, update_states
from octavo_jax.nnx.whole_signature import all_parameters
from octavo_jax.sharding.axes import MeshAxes

try:
    from flax import nnx
    from flax.errors import TraceContextError
except ModuleNotFoundError as error:
    raise absent(error, "flax", "octavo_jax.nnx") from error

Axes = tuple[str | None, ...]
"""Logical axis names of a parameter, as `nnx.with_partitioning` takes them; empty: not partitioned."""


_LOST = (
    "a module with delayed scaling was called inside a transformation that it is no argument of, where it cannot keep "
    "the state that the call records, and JAX would add up the states of several calls: give the module to nnx's "
    "transformation as an argument, as in nnx.remat(lambda module, x: module(x))(module, x)"
)


_UNCOUNTED = (
    "a module whose recipe rounds stochastically was called inside a transformation that it is no argument of, where "
    "it cannot count the call, and the next one would round by the same random bits: give the module to nnx's "
    "transformation as an argument, as in nnx.jit(lambda module, x: module(x))(module, x), or give the call a seed"
)


class ScalingState(nnx.Variable[Any]):
    """Delayed scaling's state: differentiate with respect to it and overwrite it with the result."""


class SeedState(nnx.Variable[Any]):
    """uint32 words of stochastic rounding: a base seed, or the number of calls so far."""


class Common(TypedDict, total=False):
    """Keyword arguments that every module takes and passes on.

    recipe                         a Recipe, or the name of one; None: HighPrecision. Left out: the same, and a warning
    dtype                          x, kernels and biases are cast to it first; None: they stay as they are
    param_dtype                    dtype of the parameters; float32 by default
    quantization_checkpoint_name   the name for `octavo_jax.policies` of all that is quantized and that the backward
                                   pass reads; None: no name
    sharding                       the parts of mesh axes, an `octavo_jax.MeshAxes`; None: one device.
                                   The parameters' logical axes must place them as it says
    backend                        the name of a backend, or a closed list of names
    room                           multiprocessors that GEMMs leave to kernels that run beside them; None: they take all
    rngs                           streams "params" and, for a stochastic recipe, "quantization" (or the default one)
    """

    recipe: RecipeLike
    dtype: DTypeLike | None
    param_dtype: DTypeLike
    quantization_checkpoint_name: str | None
    sharding: MeshAxes | None
    backend: BackendNames
    room: Room | None
    rngs: Required[nnx.Rngs]


class QuantizedModule(nnx.Module):
    """What every nnx module is: `octavo_jax.nnx` describes its attributes, and `Common` its keyword arguments.

    groups   of the module's kernels
    layers   how many of them have a state of delayed scaling

    Raises TypeError for an argument that the module does not have, and without `rngs`.
    """

    def __init__(
        self,
        groups: int,
        layers: int,
        *,
        recipe: RecipeLike | Unsaid = UNSAID,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        quantization_checkpoint_name: str | None = DEFAULT_CHECKPOINT_NAME,
        sharding: MeshAxes | None = None,
        backend: BackendNames = None,
        room: Room | None = None,
        rngs: nnx.Rngs | None = None,
        **unknown: object,
    ) -> None:
        _check_arguments(type(self), rngs, tuple(unknown))
        assert rngs is not None
        check_known(backend)
        recipe = as_recipe(recipe_or_default(self, recipe))
        state = fresh_state(recipe, groups, layers)
        self.delayed = nnx.data(None if state is None else ScalingState(state))
        base = calls = None
        if recipe is not None and recipe.stochastic:
            base = SeedState(jax.random.bits(rngs.quantization(), (2,), jnp.uint32))
            calls = SeedState(jnp.zeros((), jnp.uint32))
        self.base_seed = nnx.data(base)
        self.calls = nnx.data(calls)
        self.recipe = recipe
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.quantization_checkpoint_name = quantization_checkpoint_name
        self.sharding = sharding
        self.backend = backend
        self.room = room

    def _parameter(self, rngs: nnx.Rngs, init: Initializer, shape: tuple[int, ...], axes: Axes = ()) -> nnx.Param[Any]:
        """A fresh parameter; with `axes`, one that Flax partitions by them."""
        if axes:
            init = nnx.with_partitioning(init, axes)
        return nnx.Param(init(rngs.params(), shape, self.param_dtype))

    def _optional(
        self, present: bool, rngs: nnx.Rngs, init: Initializer, shape: tuple[int, ...], axes: Axes = ()
    ) -> Any:
        """A fresh parameter, or None in its place."""
        return nnx.data(self._parameter(rngs, init, shape, axes) if present else None)

    def _run(self, call: Callable[..., Any], seed: int | Array | None) -> tuple[Any, ...]:
        """The results of `call`, which gets the module's options, a seed and the state; without the new state, which
        the module keeps."""
        if seed is None and self.base_seed is not None and self.calls is not None:
            seed = _counted_seed(self.base_seed, self.calls)
        recipe, before, keeps = as_recipe(self.recipe), None, False  # it may be another than the module was made with
        if isinstance(recipe, DelayedScaling):
            before, keeps = _state_for_call(self._scaling())
        result = call(
            recipe=recipe,
            seed=seed,
            state=before,
            checkpoint_name=self.quantization_checkpoint_name,
            sharding=self.sharding,
            backend=self.backend,
            room=self.room,
        )
        results: tuple[Any, ...] = result if isinstance(result, tuple) else (result,)
        if before is None:
            return results
        if keeps:
            self._scaling().set_value(recorded(before, results[-1]))
        return results[:-1]

    def _scaling(self) -> ScalingState:
        """Delayed scaling's state; ValueError where the module was made with another recipe, and has none."""
        if self.delayed is None:
            raise ValueError(
                f"{type(self).__name__} has the recipe delayed and no state, for it was made with another recipe: set "
                "its attribute delayed = octavo_jax.nnx.ScalingState(octavo_jax.init_delayed(recipe, groups)), of a "
                "tuple with one state for each product where there are two"
            )
        return self.delayed


def _counted_seed(base_seed: SeedState, calls: SeedState) -> Array:
    """The seed words of this call, which is counted."""
    before = jnp.asarray(calls[...])
    seed = next_seed(base_seed[...], before)
    try:
        calls.set_value(before + 1)  # `calls[...] = ` would write into an array of numpy's, as a file gives it
    except TraceContextError:
        raise TraceContextError(_UNCOUNTED) from None  # type: ignore[no-untyped-call]
    return seed


def _state_for_call(variable: ScalingState) -> tuple[State, bool]:
    """The state that a call takes, and whether the variable has to keep the state that the call returns."""
    state: State = variable.get_value()
    if not is_traced(state):
        return state, False
    try:
        variable.set_value(state)
    except TraceContextError:
        return undifferentiated_state(state, _LOST), False
    return state, True


def _check_arguments(module: type, rngs: nnx.Rngs | None, unknown: tuple[str, ...]) -> None:
    if unknown:
        known = list(all_parameters(module))
        close = difflib.get_close_matches(unknown[0], known, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"its arguments are {', '.join(known)}"
        raise TypeError(f"{module.__name__} has no argument {unknown[0]!r}; {hint}")
    if rngs is None or isinstance(rngs, int | Array):
        given = "no rngs" if rngs is None else "a seed or a key as rngs"
        raise TypeError(
            f"{module.__name__} was given {given}; give rngs=nnx.Rngs(seed), which its parameters draw from"
        )


def value_of(parameter: nnx.Param[Any] | None) -> Any:
    """The parameter's array; None where there is none."""
    return None if parameter is None else parameter[...]


def update_state(module: nnx.Module, recipe: DelayedScaling | str, *, axis_name: str | tuple[str, ...] = ()) -> None:
    """End a step in place: `octavo_jax.update_delayed` of every `ScalingState` in the module.

    Call it once per step, after the last microbatch's gradient has overwritten the others; states that a vmap of
    modules stacked are updated one by one.
    """
    for _, node in nnx.iter_graph(module):
        if isinstance(node, ScalingState):
            node.set_value(update_states(node.get_value(), recipe, axis_name=axis_name))
