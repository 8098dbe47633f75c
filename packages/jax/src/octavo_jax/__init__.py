"""Octavo for JAX: grouped quantization and grouped GEMM in low precision, differentiable and jit-able.

Importing this package imports no JAX: a registry that only reads the backend's card (`octavo_jax.plugin`) pays nothing
for it. The first use of a public name does; it starts no JAX backend, loads no plugin and reads no environment
variable. The Flax modules are in `octavo_jax.linen` and `octavo_jax.nnx`, which need the extra `octavo-jax[flax]`, and
AdamW is in `octavo_jax.optimizers`, which needs `octavo-jax[optax]`.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo_jax import adapters, counting, moe, policies, traffic
    from octavo_jax import linen as linen  # with flax alone, and so not in __all__
    from octavo_jax import nnx as nnx
    from octavo_jax.array_moves.moves import Move, MoveWarning
    from octavo_jax.arrays.grouped_tensor import GroupedTensor
    from octavo_jax.dispatch.room import Room
    from octavo_jax.functions.activations import activate
    from octavo_jax.functions.norms import normalize
    from octavo_jax.layer_report import LayerReport, explain
    from octavo_jax.linear.dense import dense
    from octavo_jax.linear.grouped import grouped_dense
    from octavo_jax.linear.normalized_dense import layernorm_dense
    from octavo_jax.linear.ragged import ragged_dot
    from octavo_jax.mlp.mlp import grouped_mlp, layernorm_mlp
    from octavo_jax.moe.block import moe_mlp
    from octavo_jax.moe.experts import routed_mlp
    from octavo_jax.moe.layer.bytes_kept import KeptBytes, MoeShape, bytes_kept
    from octavo_jax.moe.router.choosing import Choice, choose_experts
    from octavo_jax.moe.router.losses import RouterLosses, router_losses
    from octavo_jax.observer import Tap, new_tap, observations, observed
    from octavo_jax.quantizers.functional import dequantize, quantize
    from octavo_jax.quantizers.fused import Extras, act_quantize, dact_quantize, norm_quantize
    from octavo_jax.quantizers.quantizer_set import Quantizer, QuantizerSet, quantizer_set, with_state
    from octavo_jax.quantizers.stats import TensorStats, tensor_stats
    from octavo_jax.remat.checkpoint_names import name_bits, name_planes
    from octavo_jax.scaling.delayed_state import DelayedState, ScalingHistory, init_delayed, record_amax, update_delayed
    from octavo_jax.sharding.axes import MeshAxes, current_roles, mesh_roles

__version__ = "0.2.0"

__all__ = [
    "Choice",
    "DelayedState",
    "Extras",
    "GroupedTensor",
    "KeptBytes",
    "LayerReport",
    "MeshAxes",
    "MoeShape",
    "Move",
    "MoveWarning",
    "Quantizer",
    "QuantizerSet",
    "Room",
    "RouterLosses",
    "ScalingHistory",
    "Tap",
    "TensorStats",
    "act_quantize",
    "activate",
    "adapters",
    "bytes_kept",
    "choose_experts",
    "counting",
    "current_roles",
    "dact_quantize",
    "dense",
    "dequantize",
    "explain",
    "grouped_dense",
    "grouped_mlp",
    "init_delayed",
    "layernorm_dense",
    "layernorm_mlp",
    "mesh_roles",
    "moe",
    "moe_mlp",
    "name_bits",
    "name_planes",
    "new_tap",
    "norm_quantize",
    "normalize",
    "observations",
    "observed",
    "policies",
    "quantize",
    "quantizer_set",
    "ragged_dot",
    "record_amax",
    "routed_mlp",
    "router_losses",
    "tensor_stats",
    "traffic",
    "update_delayed",
    "with_state",
]

_MODULES = ("adapters", "counting", "moe", "policies", "traffic")
_WITH_EXTRAS = ("linen", "nnx", "optimizers")
"""Modules that need Flax or optax: attributes as the others are, and no part of `from octavo_jax import *`."""
_SOUGHT_HERE = {
    "AdamW": "optimizers.AdamW",
    "GroupedDense": "linen.GroupedDense",
    "GroupedLinear": "nnx.GroupedLinear",
    "GroupedMLP": "linen.GroupedMLP or octavo_jax.nnx.GroupedMLP",
    "Linear": "nnx.Linear",
    "MoE": "linen.MoE or octavo_jax.nnx.MoE",
    "grouped_linear": "grouped_dense",
}
"""Names that octavo_torch has at its top, or that modules of Flax have, and what they are here."""
_PLACES = (
    "functions.activations",
    "remat.checkpoint_names",
    "scaling.delayed_state",
    "layer_report",
    "array_moves.moves",
    "quantizers.fused",
    "linear.grouped",
    "arrays.grouped_tensor",
    "mlp.mlp",
    "moe.block",
    "moe.experts",
    "moe.layer.bytes_kept",
    "moe.router.choosing",
    "moe.router.losses",
    "linear.normalized_dense",
    "functions.norms",
    "linear.dense",
    "quantizers.quantizer_set",
    "quantizers.functional",
    "quantizers.stats",
    "observer",
    "linear.ragged",
    "dispatch.room",
    "sharding.axes",
)

if "jax" in sys.modules:
    for place in ("dispatch.preference", "sharding.axes"):  # preference.py says why so early
        importlib.import_module(f"octavo_jax.{place}")
    # In JAX 0.12 it makes settings, which are part of the key of what is traced: inside of a first trace it would be
    # traced, and compiled, a second time.
    importlib.import_module("jax.extend.core")


if not TYPE_CHECKING:  # a type checker would take any name, misspelt ones too, for one of this module's

    def __getattr__(name: str) -> object:
        if name in _WITH_EXTRAS:
            return importlib.import_module(f"octavo_jax.{name}")
        if name not in __all__:
            place = f"; take octavo_jax.{_SOUGHT_HERE[name]}" if name in _SOUGHT_HERE else ""
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{place}")
        if name in _MODULES:  # `from octavo_jax import policies` would ask here again
            return importlib.import_module(f"octavo_jax.{name}")
        for place in _PLACES:
            public = vars(importlib.import_module(f"octavo_jax.{place}"))
            globals().update({public_name: value for public_name, value in public.items() if public_name in __all__})
        return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
