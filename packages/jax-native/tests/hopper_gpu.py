"""What tests on a Hopper GPU share: when they are skipped, sizes of most operands, and arrays that lie there."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from jax import Array

import octavo_native
from octavo_jax.plugin_api import device_kind

BACKEND = "jax-native"
M, K, G = 700, 264, 6


def _missing() -> str | None:
    if not octavo_native.HAS_CUDA:
        return "this octavo-native was built without CUDA kernels"
    kinds = [device_kind(device) for device in jax.devices()]
    return None if ("cuda", (9, 0)) in kinds else f"needs a CUDA device of sm_90, JAX sees {kinds}"


MARKS = [
    pytest.mark.skipif(_missing() is not None, reason=str(_missing())),
    pytest.mark.filterwarnings("ignore:a layer with delayed scaling"),  # scales are given and stay
]


def on_gpu(x: Any) -> Array:
    return jax.device_put(x, jax.devices("gpu")[0])
