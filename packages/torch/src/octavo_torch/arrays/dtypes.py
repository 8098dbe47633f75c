"""The high-precision dtypes and their names in requests."""

from __future__ import annotations

import torch

from octavo.formats import DType

DTYPE_NAMES: dict[torch.dtype, DType] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}
DTYPES: dict[DType, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}


ONE_DTYPE = (
    "cast one to the other's dtype: create a module with dtype=, or call it inside torch.autocast, which casts both"
)
"""What to do where x and a weight differ."""


def name_of(dtype: torch.dtype) -> str:
    """A dtype's name without the prefix "torch.", for messages."""
    return str(dtype).removeprefix("torch.")
