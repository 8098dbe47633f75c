"""Octavo for PyTorch: low-precision grouped linear layers, their autograd, and the reference backend.

Importing this package imports no torch: a registry that only reads the backend's card (`octavo_torch.plugin`) pays
nothing for it. The first use of a public name does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo_torch.activation_module import Activation, activate
    from octavo_torch.delayed import DelayedState
    from octavo_torch.functional import dequantize, grouped_linear, grouped_mm, quantize, quantize_weight
    from octavo_torch.grouped_tensor import GroupedTensor
    from octavo_torch.mlp import explain_mlp, grouped_mlp
    from octavo_torch.mlp_module import GroupedMLP
    from octavo_torch.module import GroupedLinear
    from octavo_torch.permutation import Routing, permute, unpermute
    from octavo_torch.recipe_module import update_scales
    from octavo_torch.sequential import Sequential
    from octavo_torch.status import DeviceSizesError, check_errors
    from octavo_torch.weights import QuantizedWeight

__version__ = "0.1.0"

__all__ = [
    "Activation",
    "DelayedState",
    "DeviceSizesError",
    "GroupedLinear",
    "GroupedMLP",
    "GroupedTensor",
    "QuantizedWeight",
    "Routing",
    "Sequential",
    "activate",
    "check_errors",
    "dequantize",
    "explain_mlp",
    "grouped_linear",
    "grouped_mlp",
    "grouped_mm",
    "permute",
    "quantize",
    "quantize_weight",
    "unpermute",
    "update_scales",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from octavo_torch import (
        activation_module,
        delayed,
        functional,
        grouped_tensor,
        mlp,
        mlp_module,
        module,
        permutation,
        recipe_module,
        sequential,
        status,
        weights,
    )

    # all at once: afterwards every name is a plain global, which a compiler can trace
    places = (
        activation_module, delayed, functional, grouped_tensor, mlp, mlp_module, module, permutation, recipe_module,
        sequential, status, weights,
    )  # fmt: skip
    for place in places:
        globals().update({public: value for public, value in vars(place).items() if public in __all__})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
