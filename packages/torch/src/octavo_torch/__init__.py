"""Octavo for PyTorch: low-precision grouped linear layers, their autograd, and the reference backend.

Importing this package imports no torch: a registry that only reads the backend's card (`octavo_torch.plugin`) pays
nothing for it. The first use of a public name does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo_torch.activation_module import Activation, activate
    from octavo_torch.checkpoint import load_checkpoint, save_checkpoint
    from octavo_torch.checkpoint_distributed import load_distributed, save_distributed
    from octavo_torch.checkpoint_recipes import check_recipe_state, recipe_state
    from octavo_torch.coded_weight import CodedWeight
    from octavo_torch.conversion import convert
    from octavo_torch.delayed import DelayedState
    from octavo_torch.delayed_wgrad import DelayedWgrad
    from octavo_torch.expert_parallel import ExpertExchange
    from octavo_torch.fsdp import explain_gather, quantize_before_gather, unchanged_weights
    from octavo_torch.functional import dequantize, grouped_linear, grouped_mm, quantize
    from octavo_torch.grouped_tensor import GroupedTensor
    from octavo_torch.mlp import explain_mlp, grouped_mlp
    from octavo_torch.mlp_module import GroupedMLP
    from octavo_torch.module import GroupedLinear
    from octavo_torch.parallel import GroupedColumnParallel, GroupedMLPParallel, GroupedRowParallel
    from octavo_torch.permutation import Routing, permute, unpermute
    from octavo_torch.quantized_input import QuantizedInput
    from octavo_torch.quantized_operands import quantize_input, quantize_weight
    from octavo_torch.quantized_output import grouped_linear_quantized
    from octavo_torch.recipe_module import update_scales
    from octavo_torch.sequential import Sequential
    from octavo_torch.status import DeviceSizesError, check_errors
    from octavo_torch.weights import QuantizedWeight

__version__ = "0.1.0"

__all__ = [
    "Activation",
    "CodedWeight",
    "DelayedState",
    "DelayedWgrad",
    "DeviceSizesError",
    "ExpertExchange",
    "GroupedColumnParallel",
    "GroupedLinear",
    "GroupedMLP",
    "GroupedMLPParallel",
    "GroupedRowParallel",
    "GroupedTensor",
    "QuantizedInput",
    "QuantizedWeight",
    "Routing",
    "Sequential",
    "activate",
    "check_errors",
    "check_recipe_state",
    "convert",
    "dequantize",
    "explain_gather",
    "explain_mlp",
    "grouped_linear",
    "grouped_linear_quantized",
    "grouped_mlp",
    "grouped_mm",
    "load_checkpoint",
    "load_distributed",
    "permute",
    "quantize",
    "quantize_before_gather",
    "quantize_input",
    "quantize_weight",
    "recipe_state",
    "save_checkpoint",
    "save_distributed",
    "unchanged_weights",
    "unpermute",
    "update_scales",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from octavo_torch import (
        activation_module,
        checkpoint,
        checkpoint_distributed,
        checkpoint_recipes,
        coded_weight,
        conversion,
        delayed,
        delayed_wgrad,
        expert_parallel,
        fsdp,
        functional,
        grouped_tensor,
        mlp,
        mlp_module,
        module,
        parallel,
        permutation,
        quantized_input,
        quantized_operands,
        quantized_output,
        recipe_module,
        sequential,
        status,
        weights,
    )

    # all at once: afterwards every name is a plain global, which a compiler can trace
    places = (
        activation_module, checkpoint, checkpoint_distributed, checkpoint_recipes, coded_weight, conversion, delayed,
        delayed_wgrad, expert_parallel, fsdp, functional, grouped_tensor, mlp, mlp_module, module, parallel,
        permutation, quantized_input, quantized_operands, quantized_output, recipe_module, sequential, status, weights,
    )  # fmt: skip
    for place in places:
        globals().update({public: value for public, value in vars(place).items() if public in __all__})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
