"""Plans from the registry, at trace time, and kept for eager calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

import octavo_jax.dispatch.preference  # noqa: F401 (a preference is part of what JAX's caches are keyed by)
import octavo_registry
from octavo import HighPrecision, QuantizerSpec, Recipe
from octavo.formats import DType
from octavo.grouped_tensor import PLAIN
from octavo_jax.sharding.placement import Placement
from octavo_registry import (
    DequantizeRequest,
    GemmRequest,
    LayerPlan,
    Plan,
    QuantizeRequest,
    Weight,
    state_token,
)
from octavo_registry.dispatch.layer_plan import QuantizePlan

Names = str | Sequence[str] | None
Run = Callable[..., Any]

_DTYPES: dict[Any, DType] = {
    jnp.dtype(jnp.bfloat16): "bfloat16",
    jnp.dtype(jnp.float16): "float16",
    jnp.dtype(jnp.float32): "float32",
}
_CACHE_LIMIT = 512
HIGH_PRECISION = HighPrecision()


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


class Asked(NamedTuple):
    """What a layer was asked for, by values that stay what they are.

    dtype, kernel_dtype  of x and the kernel
    shape                of the kernel
    weight               how it lies: "kn" as [G, K, N], "nk" as [G, N, K]
    placement            of blocks and shards; None: rows [M, K] and a kernel on one device
    """

    recipe: Recipe
    dtype: Any
    kernel_dtype: Any
    shape: tuple[int, ...]
    weight: Weight
    preferred_element_type: DTypeLike | None
    checkpoint_name: str | None
    output_checkpoint_name: str | None
    device: tuple[str, tuple[int, int] | None]
    backend: str | tuple[str, ...] | None
    training: bool
    placement: Placement | None = None


@dataclass(frozen=True, eq=False)
class Layer:
    """What one grouped linear layer runs. Compared by identity, so it is a cheap static argument of `jax.jit`.

    plan                     the registry's answer
    asked                    to what
    x_dtype, kernel_dtype    dtypes of the arguments, which their gradients have
    y_dtype                  of the result; where it is summed over shards, the plan's GEMM gives float32
    product_dtype            dtype in which a GEMM multiplies operands that its slot does not quantize: the arguments',
                             fp32 where these differ; dy is cast to it
    checkpoint_name          of quantized operands; None names nothing
    output_checkpoint_name   of y
    """

    plan: LayerPlan
    asked: Asked
    x_dtype: Any
    kernel_dtype: Any
    y_dtype: Any
    product_dtype: Any
    checkpoint_name: str | None
    output_checkpoint_name: str | None

    @property
    def placement(self) -> Placement | None:
        """Of blocks and shards; None: rows [M, K] and a kernel on one device."""
        return self.asked.placement

    def trained(self) -> Layer:
        """The layer with its gradients' GEMMs planned, too; itself where they are. NoBackendError as `layer_for`."""
        return self if self.asked.training else _layer(self.asked._replace(training=True))


class Cache:
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


class Same:
    """One object for equal keys, until there are too many: whatever is compared by identity is traced once."""

    def __init__(self) -> None:
        self._values: dict[Any, Any] = {}

    def of(self, key: Any, make: Callable[[], Any]) -> Any:
        """The object of `key`, made where there is none."""
        if key not in self._values:
            if len(self._values) >= _CACHE_LIMIT:
                self._values.clear()
            self._values[key] = make()
        return self._values[key]


_layers_seen = Cache()
_layers = Same()
_quantizers_seen = Cache()


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
    weight: Weight = "kn",
    x_dtype: DTypeLike | None = None,
    training: bool = True,
    placement: Placement | None = None,
) -> Layer:
    """The layer for x [M, K] and kernel [G, K, N], or [G, N, K] with weight "nk"; NoBackendError where nothing serves
    it. dx and dw have the dtypes of x and the kernel.

    x_dtype   of an x that is not there yet, such as an activation's result: then `x` tells the device alone
    training  False: the forward pass alone is planned, and `Layer.trained` plans the rest where it is differentiated
    placement of blocks and shards: x is [*B, M, K], the kernel [E * G, ...], and the plans are for one block's GEMMs

    Equal arguments give the same object as long as the registry chooses the same functions, so nothing is traced twice.
    """
    recipe = HIGH_PRECISION if recipe is None else recipe
    asked = Asked(
        recipe,
        jnp.dtype(x.dtype if x_dtype is None else x_dtype),
        kernel.dtype,
        kernel.shape,
        weight,
        preferred_element_type,
        checkpoint_name,
        output_checkpoint_name,
        device_of(x),
        _hashable(backend),
        training,
        placement,
    )
    seen_key = (id(recipe), asked[1:])  # the hash of a recipe is 2 microseconds
    seen: tuple[Recipe, Layer] | None = _layers_seen.get(seen_key)
    if seen is not None:
        return seen[1]
    layer = _layer(asked)
    _layers_seen.put(seen_key, (recipe, layer))
    return layer


def _layer(asked: Asked) -> Layer:
    recipe = asked.recipe
    groups, k, n = asked.shape if asked.weight == "kn" else (asked.shape[0], asked.shape[2], asked.shape[1])
    in_dtype, kernel_dtype = dtype_name(asked.dtype, "x"), dtype_name(asked.kernel_dtype, "kernel")
    if asked.preferred_element_type is not None:
        out_dtype = dtype_name(asked.preferred_element_type, "preferred_element_type")
    else:
        out_dtype = recipe.output_dtype or in_dtype
    product_dtype: DType = in_dtype if in_dtype == kernel_dtype else "float32"
    y_dtype, dx_dtype, dw_dtype = out_dtype, in_dtype, recipe.wgrad_dtype or kernel_dtype
    placement = asked.placement
    if placement is not None:
        groups = placement.gemm_size("g", groups) // placement.count("e")
        k, n = placement.gemm_size("k", k), placement.gemm_size("n", n)
        y_dtype = "float32" if placement.sums("i") else y_dtype
        dx_dtype = "float32" if placement.sums("o") else dx_dtype
        dw_dtype = "float32" if placement.sums_blocks else dw_dtype
    kind, arch = asked.device
    request = GemmRequest(
        op="fprop",
        framework="jax",
        device=kind,
        in_dtype=in_dtype,
        out_dtype=y_dtype,
        recipe=recipe,
        arch=arch,
        k=k,
        n=n,
        groups=groups,
        training=asked.training,
        weight=asked.weight,
    )
    plan = octavo_registry.plan_layer(
        request,
        backend=asked.backend,
        wgrad_dtype=dw_dtype,
        dgrad_dtype=dx_dtype,
        w_dtype=kernel_dtype,
        product_dtype=product_dtype,
    )
    key = (recipe.fingerprint, asked[1:], tuple(part.run for part in plan.plans))
    names = asked.checkpoint_name, asked.output_checkpoint_name
    dtypes = asked.dtype, asked.kernel_dtype, jnp.dtype(out_dtype), jnp.dtype(product_dtype)
    layer: Layer = _layers.of(key, lambda: Layer(plan, asked, *dtypes, *names))
    return layer


def in_plain_layouts(plan: QuantizePlan, backend: Names) -> QuantizePlan:
    """The plan of the same quantizer whose planes are in the plain layout; itself where they are."""
    if plan.request.layouts == (PLAIN, PLAIN):
        return plan
    return octavo_registry.plan(replace(plan.request, layouts=(PLAIN, PLAIN)), backend=backend)


def quantizer_for(
    spec: QuantizerSpec, x: Array, groups: int, stacked: bool, backend: Names, *, columns: int | None = None
) -> QuantizePlan:
    """The plan that quantizes x by `spec`; NoBackendError where nothing serves it.

    columns   of what is quantized, where that is computed from x on the way; None: x's
    """
    device = device_of(x)
    columns = x.shape[-1] if columns is None else columns
    rows = x.shape[-2] if stacked else None
    key = (id(spec), rows, columns, x.dtype, groups, stacked, device, _hashable(backend))
    seen: tuple[QuantizerSpec, QuantizePlan] | None = _quantizers_seen.get(key)
    if seen is not None:
        return seen[1]
    dtype = dtype_name(x.dtype, "x")
    request = QuantizeRequest(
        op="quantize",
        framework="jax",
        device=device[0],
        arch=device[1],
        in_dtype=dtype,
        out_dtype=dtype,
        quantizer=spec,
        k=columns,
        n=rows,
        groups=groups,
        stacked=stacked,
    )
    plan = octavo_registry.plan(request, backend=backend)
    _quantizers_seen.put(key, (spec, plan))
    return plan


def dequantizer_for(
    spec: QuantizerSpec, payload: Array, layouts: tuple[str, str], backend: Names, dtype: DTypeLike = jnp.float32
) -> Plan:
    """The plan that dequantizes to `dtype`; NoBackendError where nothing serves it."""
    kind, arch = device_of(payload)
    request = DequantizeRequest(
        op="dequantize",
        framework="jax",
        device=kind,
        arch=arch,
        in_dtype="float32",
        out_dtype=dtype_name(dtype, "the result"),
        quantizer=spec,
        layouts=layouts,
    )
    return octavo_registry.plan(request, backend=backend)
