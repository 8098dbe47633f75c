"""Octavo for PyTorch: low-precision grouped linear layers, their autograd, and the reference backend.

Modules     `GroupedLinear`, `GroupedMLP` and `MoE`; `Linear` has one matrix; `Sequential` and `Activation`
Functions   `grouped_linear`, `grouped_mlp`, `moe_mlp`: the same from tensors; `grouped_mm` is torch's with a recipe
Tokens      `permute` and `unpermute` sort them by expert and back; `choose_experts` is a router
Training    `update_scales` after each step with DelayedScaling; `quantize_weight` once for all microbatches; `AdamW`
Questions   `layer.explain(x, group_sizes)`: which backend runs what; `observe`: what quantization loses

Importing this package imports no torch: a registry that only reads the backend's card (`octavo_torch.plugin`) pays
nothing for it. The first use of a public name does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo_torch.arrays.grouped_tensor import GroupedTensor
    from octavo_torch.checkpoint.distributed import load_distributed, save_distributed
    from octavo_torch.checkpoint.experts import stack_experts, unstack_experts
    from octavo_torch.checkpoint.export import expert_tensors, export_experts
    from octavo_torch.checkpoint.files import load_checkpoint, save_checkpoint
    from octavo_torch.checkpoint.load import load_experts
    from octavo_torch.checkpoint.recipes import check_recipe_state, recipe_state
    from octavo_torch.compiler.status import DeviceSizesError, ExchangeError, RowsLeftOutError, check_errors
    from octavo_torch.conversion import convert
    from octavo_torch.dense.conversion import convert_linears
    from octavo_torch.dense.module import Linear
    from octavo_torch.dispatch.room import Room
    from octavo_torch.distributed.fsdp.api import explain_gather, quantize_before_gather, unchanged_weights
    from octavo_torch.distributed.parallel import GroupedColumnParallel, GroupedMLPParallel, GroupedRowParallel
    from octavo_torch.linear.coded_weight import CodedWeight
    from octavo_torch.linear.functional import grouped_linear, grouped_mm
    from octavo_torch.linear.module import GroupedLinear
    from octavo_torch.linear.quantize_input import quantize_input
    from octavo_torch.linear.quantize_weight import quantize_weight
    from octavo_torch.linear.quantized_input import QuantizedInput
    from octavo_torch.linear.quantized_output import grouped_linear_quantized
    from octavo_torch.linear.weights import QuantizedWeight
    from octavo_torch.lora.attach import add_lora, merge_lora
    from octavo_torch.lora.module import GroupedLoRA
    from octavo_torch.master_weights import MasterWeights
    from octavo_torch.mlp.activation_module import Activation, activate
    from octavo_torch.mlp.mlp import explain_mlp, grouped_mlp
    from octavo_torch.mlp.module import GroupedMLP
    from octavo_torch.mlp.packed_weight import PackedWeight
    from octavo_torch.mlp.sequential import Sequential
    from octavo_torch.moe.bytes_kept import KeptBytes, MoeShape, bytes_kept
    from octavo_torch.moe.exchange import ExpertExchange
    from octavo_torch.moe.module import MoE
    from octavo_torch.moe.moe import moe_mlp
    from octavo_torch.moe.parallel.explain import ExchangePlan, explain_exchange
    from octavo_torch.moe.parallel.options import Exchange
    from octavo_torch.moe.parallel.traffic import ExchangedBytes, bytes_exchanged
    from octavo_torch.moe.router.choosing import Choice, choose_experts
    from octavo_torch.moe.router.losses import RouterLosses, router_losses
    from octavo_torch.moe.rows.permutation import Routing, permute, unpermute
    from octavo_torch.observer import Observation, Observer, observe
    from octavo_torch.optimizers.adamw import AdamW
    from octavo_torch.quantizers.extras import Extras
    from octavo_torch.quantizers.functional import convert_layout, dequantize, group_amax, quantize
    from octavo_torch.quantizers.fused_functional import act_quantize, dact_quantize, norm_quantize
    from octavo_torch.quantizers.stats import TensorStats, tensor_stats
    from octavo_torch.scaling.delayed_state import DelayedState
    from octavo_torch.scaling.quantized_parameters import quantized_parameters
    from octavo_torch.scaling.recipe_module import update_scales
    from octavo_torch.wgrad.postponed import DelayedWgrad

__version__ = "0.2.0"

__all__ = [
    "Activation",
    "AdamW",
    "Choice",
    "CodedWeight",
    "DelayedState",
    "DelayedWgrad",
    "DeviceSizesError",
    "Exchange",
    "ExchangeError",
    "ExchangePlan",
    "ExchangedBytes",
    "ExpertExchange",
    "Extras",
    "GroupedColumnParallel",
    "GroupedLinear",
    "GroupedLoRA",
    "GroupedMLP",
    "GroupedMLPParallel",
    "GroupedRowParallel",
    "GroupedTensor",
    "KeptBytes",
    "Linear",
    "MasterWeights",
    "MoE",
    "MoeShape",
    "Observation",
    "Observer",
    "PackedWeight",
    "QuantizedInput",
    "QuantizedWeight",
    "Room",
    "RouterLosses",
    "Routing",
    "RowsLeftOutError",
    "Sequential",
    "TensorStats",
    "act_quantize",
    "activate",
    "add_lora",
    "bytes_exchanged",
    "bytes_kept",
    "check_errors",
    "check_recipe_state",
    "choose_experts",
    "convert",
    "convert_layout",
    "convert_linears",
    "dact_quantize",
    "dequantize",
    "expert_tensors",
    "explain_exchange",
    "explain_gather",
    "explain_mlp",
    "export_experts",
    "group_amax",
    "grouped_linear",
    "grouped_linear_quantized",
    "grouped_mlp",
    "grouped_mm",
    "load_checkpoint",
    "load_distributed",
    "load_experts",
    "merge_lora",
    "moe_mlp",
    "norm_quantize",
    "observe",
    "permute",
    "quantize",
    "quantize_before_gather",
    "quantize_input",
    "quantize_weight",
    "quantized_parameters",
    "recipe_state",
    "router_losses",
    "save_checkpoint",
    "save_distributed",
    "stack_experts",
    "tensor_stats",
    "unchanged_weights",
    "unpermute",
    "unstack_experts",
    "update_scales",
]


_DEFINING_MODULES = (
    "mlp.activation_module",
    "checkpoint.files",
    "checkpoint.distributed",
    "checkpoint.experts",
    "checkpoint.export",
    "checkpoint.load",
    "checkpoint.recipes",
    "linear.coded_weight",
    "master_weights",
    "scaling.quantized_parameters",
    "conversion",
    "dense.conversion",
    "dense.module",
    "scaling.delayed_state",
    "wgrad.postponed",
    "moe.exchange",
    "dispatch.room",
    "distributed.fsdp.api",
    "linear.functional",
    "arrays.grouped_tensor",
    "mlp.mlp",
    "mlp.module",
    "mlp.packed_weight",
    "linear.module",
    "distributed.parallel",
    "lora.attach",
    "lora.module",
    "moe.bytes_kept",
    "moe.moe",
    "moe.module",
    "moe.parallel.explain",
    "moe.parallel.options",
    "moe.parallel.traffic",
    "moe.rows.permutation",
    "moe.router.choosing",
    "moe.router.losses",
    "linear.quantized_input",
    "linear.quantize_input",
    "linear.quantize_weight",
    "linear.quantized_output",
    "quantizers.extras",
    "quantizers.functional",
    "quantizers.fused_functional",
    "quantizers.stats",
    "observer",
    "optimizers.adamw",
    "scaling.recipe_module",
    "mlp.sequential",
    "compiler.status",
    "linear.weights",
)
"""The modules that define the public names."""


_SOUGHT_HERE = {
    "grouped_dense": "grouped_linear",
    "ragged_dot": "grouped_mm",
    "routed_mlp": "moe_mlp",
}
"""Names that octavo_jax has, and what they are here."""


if not TYPE_CHECKING:  # a type checker would take any name, misspelt ones too, for one of this module's

    def __getattr__(name: str) -> object:
        if name not in __all__:
            place = f"; take octavo_torch.{_SOUGHT_HERE[name]}" if name in _SOUGHT_HERE else ""
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{place}")
        # all names together: afterwards each is a plain global, which a compiler can trace
        for module in _DEFINING_MODULES:
            public = vars(importlib.import_module(f"octavo_torch.{module}"))
            globals().update({public_name: value for public_name, value in public.items() if public_name in __all__})
        return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
