"""Plans from the registry, at trace time, and kept for eager calls.

`octavo_registry.prefer` is mirrored into a JAX user context, so that a jitted function is traced again under another
preference instead of running what an earlier one chose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

import octavo_registry
from octavo import HighPrecision, QuantizerSpec, Recipe
from octavo.formats import DType
from octavo_registry import LayerPlan, Plan, Request, state_token

Names = str | Sequence[str] | None
Run = Callable[..., Any]

_DTYPES: dict[Any, DType] = {
    jnp.dtype(jnp.bfloat16): "bfloat16",
    jnp.dtype(jnp.float16): "float16",
    jnp.dtype(jnp.float32): "float32",
}
_CACHE_LIMIT = 512
HIGH_PRECISION = HighPrecision()

_PREFERENCE = jax.make_user_context(default_value=None)  # type: ignore[no-untyped-call]
octavo_registry.mirror_preference(_PREFERENCE)


def dtype_name(dtype: DTypeLike, argument: str) -> DType:
    """Octavo's name of a high-precision dtype; ValueError for any other."""
    name = _DTYPES.get(jnp.dtype(dtype))
    if name is None:
        raise ValueError(f"{argument} has dtype {jnp.dtype(dtype)}; it must be bfloat16, float16 or float32")
    return name


def device_of(x: Array) -> tuple[str, tuple[int, int] | None]:
    """(kind, compute capability) of the device that x is on, or of the default device for a traced x."""
    if isinstance(x, jax.core.Tracer):
        chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
        device = jax.devices(chosen)[0] if isinstance(chosen, str) else chosen or jax.devices()[0]
    else:
        device = next(iter(x.devices()))
    return device_kind(device)


def device_kind(device: Any) -> tuple[str, tuple[int, int] | None]:
    """(kind, compute capability) of a JAX device: "cuda" for NVIDIA GPUs, else its platform."""
    if device.platform != "gpu":
        return device.platform, None
    capability = str(getattr(device, "compute_capability", ""))
    if "rocm" in str(getattr(device.client, "platform_version", "")).lower() or "." not in capability:
        return "rocm", None
    major, minor = capability.split(".")
    return "cuda", (int(major), int(minor))


@dataclass(frozen=True, eq=False)
class Layer:
    """What one grouped linear layer runs. Compared by identity, so it is a cheap static argument of `jax.jit`.

    plan                     the registry's answer
    x_dtype ... bias_dtype   dtypes of the arguments, which their gradients have
    checkpoint_name          of quantized operands; None names nothing
    output_checkpoint_name   of y
    """

    plan: LayerPlan
    x_dtype: Any
    kernel_dtype: Any
    checkpoint_name: str | None
    output_checkpoint_name: str | None


class _Cache:
    """Values by key, dropped when the registry's state changes and when there are too many."""

    def __init__(self) -> None:
        self._token: object = None
        self._values: dict[Any, Any] = {}

    def get(self, key: Any) -> Any:
        if self._token is not state_token():
            self._values.clear()
            self._token = state_token()
        return self._values.get(key)

    def put(self, key: Any, value: Any) -> None:
        if len(self._values) >= _CACHE_LIMIT:
            self._values.clear()
        self._values[key] = value


_layers_seen = _Cache()
_layers: dict[Any, Layer] = {}
_quantizers_seen = _Cache()


def _hashable(backend: Names) -> str | tuple[str, ...] | None:
    return backend if backend is None or isinstance(backend, str) else tuple(backend)


def layer_for(
    recipe: Recipe | None,
    x: Array,
    kernel: Array,
    *,
    preferred_element_type: DTypeLike | None,
    checkpoint_name: str | None,
    output_checkpoint_name: str | None,
    backend: Names,
) -> Layer:
    """The layer for x [M, K] and kernel [G, K, N]; NoBackendError where nothing serves it.

    Equal arguments give the same object as long as the registry chooses the same functions, so nothing is traced twice.
    """
    recipe = HIGH_PRECISION if recipe is None else recipe
    names = _hashable(backend)
    device = device_of(x)
    shape = (kernel.shape, x.dtype, kernel.dtype, preferred_element_type, checkpoint_name, output_checkpoint_name)
    seen_key = (id(recipe), shape, device, names)
    seen: tuple[Recipe, Layer] | None = _layers_seen.get(seen_key)
    if seen is not None:
        return seen[1]
    groups, k, n = kernel.shape
    x_dtype, kernel_dtype = dtype_name(x.dtype, "x"), dtype_name(kernel.dtype, "kernel")
    if preferred_element_type is not None:
        out_dtype = dtype_name(preferred_element_type, "preferred_element_type")
    else:
        out_dtype = recipe.output_dtype or x_dtype
    kind, arch = device
    request = Request(
        op="fprop",
        framework="jax",
        device=kind,
        in_dtype=x_dtype,
        out_dtype=out_dtype,
        recipe=recipe,
        arch=arch,
        k=k,
        n=n,
        groups=groups,
    )
    plan = octavo_registry.plan_layer(request, backend=backend, wgrad_dtype=recipe.wgrad_dtype or kernel_dtype)
    key = (recipe.fingerprint, shape, tuple(part.run for part in plan.plans))
    layer = _layers.get(key)
    if layer is None:
        if len(_layers) >= _CACHE_LIMIT:
            _layers.clear()
        layer = Layer(plan, x.dtype, kernel.dtype, checkpoint_name, output_checkpoint_name)
        _layers[key] = layer
    _layers_seen.put(seen_key, (recipe, layer))
    return layer


def quantizer_for(spec: QuantizerSpec, x: Array, groups: int, stacked: bool, backend: Names) -> Plan:
    """The plan that quantizes x by `spec`; NoBackendError where nothing serves it."""
    device = device_of(x)
    key = (id(spec), x.shape[-2:] if stacked else x.shape[-1], x.dtype, groups, stacked, device, _hashable(backend))
    seen: tuple[QuantizerSpec, Plan] | None = _quantizers_seen.get(key)
    if seen is not None:
        return seen[1]
    dtype = dtype_name(x.dtype, "x")
    request = Request(
        op="quantize",
        framework="jax",
        device=device[0],
        arch=device[1],
        in_dtype=dtype,
        out_dtype=dtype,
        quantizer=spec,
        k=x.shape[-1],
        n=x.shape[-2] if stacked else None,
        groups=groups,
        stacked=stacked,
    )
    plan = octavo_registry.plan(request, backend=backend)
    _quantizers_seen.put(key, (spec, plan))
    return plan


def dequantizer_for(spec: QuantizerSpec, payload: Array, layouts: tuple[str, str], backend: Names) -> Plan:
    """The plan that dequantizes to float32; NoBackendError where nothing serves it."""
    kind, arch = device_of(payload)
    request = Request(
        op="dequantize",
        framework="jax",
        device=kind,
        arch=arch,
        in_dtype="float32",
        out_dtype="float32",
        quantizer=spec,
        layouts=layouts,
    )
    return octavo_registry.plan(request, backend=backend)
