"""What a MoE layer keeps for its backward: its forms, and fc1's result as codes, which the lean one keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from octavo.errors import one_of
from octavo.quantizer import KEPT_ROWS
from octavo_jax.arrays.grouped_tensor import GroupedTensor
from octavo_jax.dispatch.backends import BackendNames
from octavo_jax.dispatch.quantizer import dequantizer_for, quantizer_for
from octavo_jax.quantizers.derivatives import undifferentiated

Form = Literal["keep_all", "standard", "lean", "recompute"]
WeightCodes = Literal["keep", "remake"]
WeightsOn = Literal["output", "activation"]

FORMS: tuple[Form, ...] = get_args(Form)
_WEIGHT_CODES: tuple[WeightCodes, ...] = get_args(WeightCodes)
_WEIGHTS_ON: tuple[WeightsOn, ...] = get_args(WeightsOn)


def check_form(form: object) -> Form:
    """`form`; ValueError unless it is one of FORMS."""
    return one_of("form", form, FORMS)


def check_weight_codes(weight_codes: object) -> WeightCodes:
    """`weight_codes`; ValueError unless it is "keep" or "remake"."""
    return one_of("weight_codes", weight_codes, _WEIGHT_CODES)


def check_weights_on(weights_on: object) -> WeightsOn:
    """`weights_on`; ValueError unless it is "output" or "activation"."""
    return one_of("weights_on", weights_on, _WEIGHTS_ON)


def keep_rows(rows: Array, group_sizes: Array, backend: BackendNames) -> GroupedTensor:
    """Rows [M, N] as octavo_numerics.keep_rows defines it: codes float8_e4m3fn [M, N], scales fp32 [M, ceil(N / 128)].

    NoBackendError where nothing makes such codes, or nothing reads them.
    """
    plan = quantizer_for(KEPT_ROWS, rows, group_sizes.shape[0], False, backend)
    q: GroupedTensor = plan.run(undifferentiated(rows), group_sizes)
    codes, _, _ = q.plane("rowwise")
    dequantizer_for(q.spec.quantizer, codes, _layouts(q), backend, _read_as(rows.dtype))  # backward's: refused now
    return replace(q, group_sizes=None)


def kept_rows(q: GroupedTensor, group_sizes: Array, dtype: DTypeLike, backend: BackendNames) -> Array:
    """The rows that `keep_rows` kept, rounded once to `dtype`; +0 past the sum of the sizes."""
    codes, _, _ = q.plane("rowwise")
    plan = dequantizer_for(q.spec.quantizer, codes, _layouts(q), backend, _read_as(dtype))
    rows: Array = plan.run(replace(q, group_sizes=group_sizes), "rowwise")
    if rows.dtype == dtype:
        return rows
    # A block's largest code may decode to more than fp16 holds; NaN stays.
    largest = float(np.finfo(np.float16).max)
    return jnp.clip(rows, -largest, largest).astype(dtype)


def _read_as(dtype: DTypeLike) -> DTypeLike:
    return jnp.float32 if dtype == jnp.float16 else dtype


def _layouts(q: GroupedTensor) -> tuple[str, str]:
    return q.spec.rowwise_layout, q.spec.columnwise_layout
