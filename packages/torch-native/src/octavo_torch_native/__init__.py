"""Octavo's native backend for PyTorch: quantizers, alone and fused, GEMMs and moved rows on octavo-native's kernels.

Its functions are reached through the registry: `octavo_torch.quantize`, `octavo_torch.grouped_linear` and the others
choose them where they serve the request, or take `backend="torch-native"`. Whoever calls the bound functions of plans
can compute the `GroupIndex` of sizes once, with `index_groups`, and give it to all of them.

Importing this package imports no torch: a registry that only reads the backend's card (`octavo_torch_native.plugin`)
pays nothing for it. The first use of a public name does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo_torch_native.arrays.group_index import GroupIndex, index_groups

__version__ = "0.2.0"

__all__ = ["GroupIndex", "index_groups"]


if not TYPE_CHECKING:  # a type checker would take any name, misspelt ones too, for one of this module's

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from octavo_torch_native.arrays import group_index

        return getattr(group_index, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
