"""What every linen module has: fields, parameters with logical axes, a seed stream, state in Flax's collection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from octavo import DelayedScaling, Recipe
from octavo.quantizer import DEFAULT_CHECKPOINT_NAME
from octavo.unsaid import UNSAID, Unsaid
from octavo_jax.arrays.flax_serialization import known_to_flax
from octavo_jax.arrays.optional_packages import absent
from octavo_jax.arrays.recipes import RecipeLike, as_recipe
from octavo_jax.dispatch.backends import BackendNames, check_known
from octavo_jax.dispatch.room import Room
from octavo_jax.modules.default_recipe import recipe_or_default
from octavo_jax.modules.initializers import Initializer, zeros_init
from octavo_jax.modules.kept_states import taken_before, undifferentiated_state
from octavo_jax.modules.states import State, fresh_state, update_states
from octavo_jax.scaling.delayed_state import DelayedState, ScalingHistory
from octavo_jax.sharding.axes import MeshAxes
from octavo_registry.contract.cards import Norm

try:
    import flax.linen.module
    from flax import linen as nn
    from flax.errors import InvalidRngError, ScopeCollectionNotFound
except ModuleNotFoundError as error:
    raise absent(error, "flax", "octavo_jax.linen") from error

STATE_COLLECTION = "_overwrite_with_gradient"
"""Where delayed scaling's state lives: Flax's name for variables whose gradient is their new value."""

RNG = "quantization"
"""The random number stream that stochastic rounding draws a seed from."""

Axes = tuple[str | None, ...]
"""Logical axis names of a parameter, as `nn.with_logical_partitioning` takes them; empty: not partitioned."""

known_to_flax(DelayedState, ScalingHistory)  # a program may restore variables before it makes any

_TWICE = (
    f"two calls in one differentiated function took one state of the collection {STATE_COLLECTION!r}, and JAX would "
    "add up the states that they record: make the collection mutable, so that the second call takes what the first "
    "one recorded, and give the second of two applies the collection that the first one returned; a call that shall "
    "record nothing takes jax.lax.stop_gradient of the collection"
)


class QuantizedModule(nn.Module, kw_only=True):
    """What every linen module is, with the fields that every module has.

    recipe                         a Recipe, or the name of one; None: HighPrecision. Left out: the same, and a warning
    dtype                          x, kernels and biases are cast to it first; None: they stay as they are
    param_dtype                    dtype of the parameters
    quantization_checkpoint_name   the name for `octavo_jax.policies` of all that is quantized and that the backward
                                   pass reads; None: no name
    sharding                       the parts of mesh axes, an `octavo_jax.MeshAxes`; None: one device.
                                   Logical axes and Flax's rules must place the parameters as it says
    backend                        the name of a backend, or a closed list of names
    room                           multiprocessors that GEMMs leave to kernels that run beside them; None: they take all
    """

    recipe: RecipeLike | Unsaid = UNSAID
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    quantization_checkpoint_name: str | None = DEFAULT_CHECKPOINT_NAME
    sharding: MeshAxes | None = None
    backend: BackendNames = None
    room: Room | None = None

    def __post_init__(self) -> None:
        """Raises UnknownBackendError for a name that no backend has."""
        check_known(self.backend)
        # as frozen dataclasses set a field, which Flax never refuses
        object.__setattr__(self, "recipe", recipe_or_default(self, self.recipe))
        super().__post_init__()

    @nn.nowrap
    def _parameter(self, name: str, init: Initializer, shape: tuple[int, ...], axes: Axes) -> Array:
        if axes:
            init = nn.with_logical_partitioning(init, axes)
        parameter: Array = self.param(name, init, shape, self.param_dtype)
        return parameter

    @nn.nowrap
    def _norm_parameters(self, x: Array, norm: Norm, init: Initializer, axes: Axes) -> tuple[Array, Array | None]:
        """scale, and with norm="layer" norm_bias, both [K] in x's dtype."""
        gamma = self._parameter("scale", init, x.shape[-1:], axes).astype(x.dtype)
        if norm != "layer":
            return gamma, None
        return gamma, self._parameter("norm_bias", zeros_init, x.shape[-1:], axes).astype(x.dtype)

    @nn.nowrap
    def _stream(self, recipe: Recipe) -> Array:
        """A key for stochastic rounding, from the stream of that name, or from "params" as Flax does without a stream.

        InvalidRngError where there is neither, and where a transformation did not pass on a stream that was given: keys
        from "params" would be the same at each step. It says what to do, which Flax's own error does not.
        """
        try:
            if self.has_rng(RNG) or self.is_initializing() or not _is_given_outside(RNG):
                return self.make_rng(RNG)
            raise InvalidRngError(RNG)  # type: ignore[no-untyped-call]
        except InvalidRngError:
            raise InvalidRngError(  # type: ignore[no-untyped-call]
                f"{type(self).__name__} has the recipe {recipe.kind}, which rounds stochastically, and no stream "
                f"{RNG!r}: give apply(..., rngs={{{RNG!r}: key}}), another key at each step; nn.scan and nn.vmap pass "
                f"on the streams that they are told of, split_rngs={{{RNG!r}: True}}"
            ) from None

    @nn.nowrap
    def _scaling(self, fresh: Callable[[], State | None]) -> nn.Variable[State | None]:
        """Delayed scaling's state; ValueError where it was not given, because Flax's own does not say what to do."""
        try:
            return self.variable(STATE_COLLECTION, "state", fresh)
        except ScopeCollectionNotFound:
            raise ValueError(
                f"{type(self).__name__} has the recipe delayed, whose state is the collection {STATE_COLLECTION!r} "
                "beside the parameters, and was given none: call apply({'params': params, linen.STATE_COLLECTION: "
                "state}, ...) with what init returned"
            ) from None

    @nn.nowrap
    def _run(
        self, call: Callable[..., Any], seed: int | Array | None, *, groups: int = 1, layers: int = 1
    ) -> tuple[Any, ...]:
        """The results of `call`, which gets the module's options, a seed and the state; without the new state, which a
        mutable collection keeps."""
        recipe = as_recipe(self.recipe)
        if seed is None and recipe is not None and recipe.stochastic:
            seed = jax.random.bits(self._stream(recipe), (2,), jnp.uint32)
        fresh: Callable[[], State | None] = lambda: fresh_state(recipe, groups, layers)  # noqa: E731
        state = self._scaling(fresh) if isinstance(recipe, DelayedScaling) else None
        before: State | None = None if state is None else state.value
        if before is not None and taken_before(before):
            before = undifferentiated_state(before, _TWICE)
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
        if state is None:
            return results
        if self.is_mutable_collection(STATE_COLLECTION) and not self.is_initializing():
            state.value = results[-1]
        return results[:-1]


def _is_given_outside(stream: str) -> bool:
    """Whether any module around this call has the stream, also outside of the transformations between.

    Flax keeps the modules that are being called in a private attribute. In a version without it the answer is False.
    """
    context = getattr(flax.linen.module, "_context", None)
    modules = (module for module in getattr(context, "module_stack", ()) if module is not None)
    return any(module.scope is not None and module.scope.has_rng(stream) for module in modules)


def update_state(collection: Any, recipe: DelayedScaling | str, *, axis_name: str | tuple[str, ...] = ()) -> Any:
    """The collection at the end of a step: `octavo_jax.update_delayed` of every state, stacked ones layer by layer.

    Apply it once per step to the collection's gradient, after the last microbatch's has overwritten the others.
    """
    return update_states(collection, recipe, axis_name=axis_name)
