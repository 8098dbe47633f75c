"""How packages that import no framework reach JAX: `octavo_registry.contract.frameworks.Framework`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from octavo import GroupedTensorSpec, QuantizerSpec, Recipe
from octavo_jax.arrays.grouped_tensor import GroupedTensor
from octavo_jax.dispatch.device import device_holding, device_kind
from octavo_jax.linear.grouped import grouped_dense
from octavo_jax.quantizers.functional import quantize
from octavo_jax.quantizers.rounded import rounding_first
from octavo_jax.scaling.delayed_state import DelayedState, ScalingHistory
from octavo_jax.sharding.axes import MeshAxes
from octavo_registry.contract.frameworks import PLANES, Device, LayerResult
from octavo_registry.contract.quantize import BoundQuantize

_HOST_PRIMITIVES = ("pure_callback", "io_callback", "debug_callback", "infeed", "outfeed")


class JaxFramework:
    """The bridge. Stateless; importing it starts no JAX backend."""

    name = "jax"

    def version(self) -> str:
        """JAX's version."""
        return str(jax.__version__)

    def devices(self) -> Sequence[Device]:
        """Devices of this process, one row for each distinct kind and capability, the CPU's included."""
        labels: dict[tuple[str, tuple[int, int] | None], str] = {}
        for device in [*jax.devices(), *jax.devices("cpu")]:
            labels.setdefault(device_kind(device), str(device.device_kind))
        return tuple(Device(kind, arch, label) for (kind, arch), label in labels.items())

    def from_numpy(self, array: np.ndarray, device: str = "cpu") -> Array:
        """An array with the same bits on the first device of that kind; int64 becomes int32 unless JAX has x64 on."""
        placed: Array = jax.device_put(np.ascontiguousarray(array), jax.devices(device)[0])
        return placed

    def to_numpy(self, array: Any) -> np.ndarray:
        """The same bits as a numpy array."""
        return np.asarray(array)

    def grouped_tensor(self, spec: GroupedTensorSpec, group_sizes: Any, arrays: Mapping[str, Any]) -> GroupedTensor:
        """A GroupedTensor of these planes; ValueError for an unknown name."""
        unknown = sorted(set(arrays) - set(PLANES))
        if unknown:
            raise ValueError(f"arrays names {', '.join(unknown)}; a GroupedTensor has {', '.join(PLANES)}")
        planes = {name: None if value is None else jnp.asarray(value) for name, value in arrays.items()}
        return GroupedTensor(spec, None if group_sizes is None else jnp.asarray(group_sizes), **planes)

    def quantize(
        self,
        x: Any,
        spec: QuantizerSpec,
        group_sizes: Any = None,
        *,
        seed: int | None = None,
        operand: str | None = None,
        group_offset: int = 0,
        scale: Any = None,
        backend: str | Sequence[str] | None = None,
    ) -> GroupedTensor:
        """`octavo_jax.quantize`."""
        return quantize(
            x,
            spec,
            group_sizes,
            seed=seed,
            operand=operand,  # type: ignore[arg-type]
            group_offset=group_offset,
            scale=scale,
            backend=backend,
        )

    def grouped_linear(
        self,
        x: Any,
        w: Any,
        group_sizes: Any,
        dy: Any = None,
        *,
        recipe: Recipe,
        bias: Any = None,
        seed: int | None = None,
        scales: Mapping[str, Any] | None = None,
        group_offset: int = 0,
        backend: str | Sequence[str] | None = None,
        compiled: bool = False,
    ) -> LayerResult:
        """`octavo_jax.grouped_dense` with w [G, N, K], and its gradients where `dy` is given."""
        state = None if scales is None else _state(recipe, scales)
        host_sizes = None if isinstance(group_sizes, jax.Array) else group_sizes

        def layer(x: Array, w: Array, bias: Array | None, state: DelayedState | None, sizes: Any) -> Array:
            result = grouped_dense(
                x,
                jnp.swapaxes(w, 1, 2),
                sizes if host_sizes is None else host_sizes,
                recipe=recipe,
                bias=bias,
                seed=seed,
                state=state,
                group_offset=group_offset,
                backend=backend,
            )
            return result if state is None else result[0]  # type: ignore[no-any-return]

        def both(x: Array, w: Array, bias: Array | None, sizes: Any, dy: Array | None) -> LayerResult:
            if dy is None:
                return LayerResult(layer(x, w, bias, state, sizes))
            y, pull = jax.vjp(lambda x, w, bias, state: layer(x, w, bias, state, sizes), x, w, bias, state)
            return LayerResult(y, *pull(dy)[:3])

        def arrays(*args: Any) -> tuple[Any, ...]:
            result = both(*args)
            return result.y, result.dx, result.dw, result.db

        run = jax.jit(arrays) if compiled else arrays
        # a traced array says nothing of its device, so that layers are planned for the default one
        with jax.default_device(device_holding(x)):
            return LayerResult(*run(x, w, bias, None if host_sizes is not None else group_sizes, dy))

    def shards(self, device: str) -> int:
        """Devices of that kind; XLA_FLAGS=--xla_force_host_platform_device_count makes several of a CPU."""
        return len(_of_kind(device))

    def sharded_linear(
        self,
        x: Any,
        w: Any,
        group_sizes: Any,
        dy: Any,
        *,
        device: str,
        recipe: Recipe,
        backend: str | Sequence[str] | None = None,
    ) -> LayerResult:
        """`octavo_jax.grouped_dense` with w [E * G, N, K] over a mesh of E x F devices, and its gradients."""
        experts, data = x.shape[:2]
        devices = np.asarray(_of_kind(device)[: experts * data]).reshape(experts, data)
        mesh = Mesh(devices, ("experts", "data"))
        tokens, kernel = P("experts", "data"), P("experts", None, "data")  # type: ignore[no-untyped-call]
        axes = MeshAxes(ep="experts", fsdp="data")

        def step(x: Array, w: Array, sizes: Array, dy: Array) -> tuple[Array, ...]:
            def layer(x: Array, w: Array) -> Any:
                dims = ((-1,), (2,))
                return grouped_dense(x, w, sizes, recipe=recipe, contracting_dims=dims, sharding=axes, backend=backend)

            y, pull = jax.vjp(layer, x, w)
            return (y, *pull(dy))

        arrays = zip((x, w, group_sizes, dy), (tokens, kernel, tokens, tokens), strict=True)
        return LayerResult(*jax.jit(step)(*(jax.device_put(one, NamedSharding(mesh, spec)) for one, spec in arrays)))

    def rounding_first(
        self, bound: BoundQuantize[Array, GroupedTensor], spec: QuantizerSpec
    ) -> BoundQuantize[Array, GroupedTensor]:
        """A quantizer of weights by `spec`, over a backend's by `spec.held_by`."""
        return rounding_first(bound, spec)

    def host_reads(self, function: Callable[..., Any], *arrays: Any) -> Sequence[str]:
        """What would make `function(*arrays)` wait for a value: the error that tracing it meets, or its callbacks.

        Tracing replaces the arrays by abstract ones, so a read of a value raises, whatever the device.
        """
        reads = (
            jax.errors.ConcretizationTypeError,
            jax.errors.TracerArrayConversionError,
            jax.errors.TracerIntegerConversionError,
            jax.errors.TracerBoolConversionError,
            jax.errors.NonConcreteBooleanIndexError,
        )
        try:
            closed = jax.make_jaxpr(lambda *traced: jax.tree.leaves(function(*traced)))(*arrays)
        except reads as error:
            return (type(error).__name__,)
        return tuple(name for name in _primitives(closed.jaxpr) if name in _HOST_PRIMITIVES)


def _of_kind(kind: str) -> list[Any]:
    return [
        device for device in (jax.devices("cpu") if kind == "cpu" else jax.devices()) if device_kind(device)[0] == kind
    ]


def _primitives(jaxpr: Any) -> Iterator[str]:
    """Names of the primitives of a jaxpr and of every jaxpr inside it."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                yield from _primitives(getattr(value, "jaxpr", value))


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def _state(recipe: Recipe, scales: Mapping[str, Any]) -> DelayedState:
    """A state with these scales and an empty history."""

    def one(operand: str) -> ScalingHistory:
        scale = jnp.asarray(scales[operand])
        slots = getattr(recipe, "history", 2)
        return ScalingHistory(jnp.zeros((slots, scale.shape[0]), jnp.float32), scale)

    return DelayedState(one("x"), one("w"), one("dy"))


BRIDGE = JaxFramework()
