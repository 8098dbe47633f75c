"""The high-precision dtypes and their names in requests, and the dtypes of codes and scales."""

from __future__ import annotations

import torch

from octavo.formats import DType, Format, ScaleFormat

DTYPE_NAMES: dict[torch.dtype, DType] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}
DTYPES: dict[DType, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}

PAYLOAD_DTYPE: dict[Format, torch.dtype] = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e2m1": torch.uint8,
}
"""The dtype of codes; torch has no arithmetic for E2M1."""
SCALE_DTYPE: dict[ScaleFormat, torch.dtype] = {
    "fp32": torch.float32,
    "e8m0": torch.uint8,
    "e4m3": torch.float8_e4m3fn,
}
"""The dtype of decode scales."""


ONE_DTYPE = (
    "cast one to the other's dtype: create a module with dtype=, or call it inside torch.autocast, which casts both"
)
"""What to do where x and a weight differ."""


def name_of(dtype: torch.dtype) -> str:
    """A dtype's name without the prefix "torch.", for messages."""
    return str(dtype).removeprefix("torch.")
