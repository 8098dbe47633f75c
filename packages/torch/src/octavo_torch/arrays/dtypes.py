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


def name_of(dtype: torch.dtype) -> str:
    """A dtype's name without the prefix "torch.", for messages."""
    return str(dtype).removeprefix("torch.")
