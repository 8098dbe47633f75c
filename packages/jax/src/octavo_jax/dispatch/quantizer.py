"""Plans of quantizers and dequantizers that are called alone."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

import octavo_registry
from octavo import QuantizerSpec
from octavo.grouped_tensor import PLAIN
from octavo_jax.arrays.dtypes import dtype_name
from octavo_jax.dispatch.backends import BackendNames, hashable
from octavo_jax.dispatch.device import device_of
from octavo_jax.memo import Memo
from octavo_registry import DequantizeRequest, Plan, QuantizePlan, QuantizeRequest

_plans: Memo[QuantizePlan] = Memo()


def in_plain_layouts(plan: QuantizePlan, backend: BackendNames) -> QuantizePlan:
    """The plan of the same quantizer whose planes are in the plain layout; itself where they are."""
    if plan.request.layouts == (PLAIN, PLAIN):
        return plan
    return octavo_registry.plan(replace(plan.request, layouts=(PLAIN, PLAIN)), backend=backend)


def quantizer_for(
    spec: QuantizerSpec, x: Array, groups: int, stacked: bool, backend: BackendNames, *, columns: int | None = None
) -> QuantizePlan:
    """The plan that quantizes x by `spec`; NoBackendError where nothing serves it.

    columns   of what is quantized, where that is computed from x first; None: x's
    """
    kind, arch = device = device_of(x)
    columns = x.shape[-1] if columns is None else columns
    rows = x.shape[-2] if stacked else None

    def build() -> QuantizePlan:
        dtype = dtype_name(x.dtype, "x")
        request = QuantizeRequest(
            op="quantize",
            framework="jax",
            device=kind,
            arch=arch,
            in_dtype=dtype,
            out_dtype=dtype,
            quantizer=spec,
            k=columns,
            n=rows,
            groups=groups,
            stacked=stacked,
        )
        return octavo_registry.plan(request, backend=backend)

    key = (id(spec), rows, columns, x.dtype, groups, stacked, device, hashable(backend))
    return _plans.get(key, build, spec)


def dequantizer_for(
    spec: QuantizerSpec, payload: Array, layouts: tuple[str, str], backend: BackendNames, dtype: DTypeLike = jnp.float32
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
