"""Octavo for JAX: grouped quantization and grouped GEMM in low precision, differentiable and jit-able.

Importing this package imports no JAX: a registry that only reads the backend's card (`octavo_jax.plugin`) pays nothing
for it. The first use of a public name does; it starts no JAX backend, loads no plugin and reads no environment
variable. The Flax modules are in `octavo_jax.linen` and `octavo_jax.nnx`, which need the extra `octavo-jax[flax]`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo_jax import policies
    from octavo_jax.checkpoint_names import name_bits, name_planes
    from octavo_jax.delayed import DelayedState, ScalingHistory, init_delayed, record_amax, update_delayed
    from octavo_jax.dense import grouped_dense
    from octavo_jax.grouped_tensor import GroupedTensor
    from octavo_jax.quantizers import Quantizer, QuantizerSet, quantizer_set, with_state
    from octavo_jax.quantizing import dequantize, quantize
    from octavo_jax.ragged import ragged_dot

__version__ = "0.1.0"

__all__ = [
    "DelayedState",
    "GroupedTensor",
    "Quantizer",
    "QuantizerSet",
    "ScalingHistory",
    "dequantize",
    "grouped_dense",
    "init_delayed",
    "name_bits",
    "name_planes",
    "policies",
    "quantize",
    "quantizer_set",
    "ragged_dot",
    "record_amax",
    "update_delayed",
    "with_state",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "policies":  # `from octavo_jax import policies` would ask here again
        return importlib.import_module("octavo_jax.policies")
    from octavo_jax import checkpoint_names, delayed, dense, grouped_tensor, quantizers, quantizing, ragged

    for place in (checkpoint_names, delayed, dense, grouped_tensor, quantizers, quantizing, ragged):
        globals().update({public: value for public, value in vars(place).items() if public in __all__})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
