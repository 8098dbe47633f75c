"""The 16-point Hadamard transform along rows that NVFP4 puts before its column data.

Source: NVIDIA, arXiv 2509.25149, section 4.2 (random Hadamard transform, fixed signs).
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.quantizer import HADAMARD_SIZE

_NEGATIVE = 0b1101_0111_1110_1000  # bit i: row i of each run changes its sign


def hadamard_rows(x: Tensor) -> Tensor:
    """fp32 [R, K] with R a multiple of 16: each run of 16 rows transformed, rounded to bf16 before and after.

    Butterflies of stride 1, 2, 4, 8 in fp32, then times 0.25.
    """
    rows, columns = x.shape
    # built on the device: a copy from the host would wait
    signs = 1.0 - 2.0 * ((_NEGATIVE >> torch.arange(HADAMARD_SIZE, device=x.device)) & 1).to(torch.float32)
    runs = rows // HADAMARD_SIZE
    value = round_to_bf16(x).view(runs, HADAMARD_SIZE, columns) * signs[:, None]
    for stride in (1, 2, 4, 8):
        pairs = value.view(runs, HADAMARD_SIZE // (2 * stride), 2, stride, columns)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        value = torch.stack((low + high, low - high), dim=2)
    return round_to_bf16(value.view(rows, columns) * 0.25)


def round_to_bf16(x: Tensor) -> Tensor:
    """fp32 rounded to the nearest bf16 (ties to even, subnormals kept), as fp32."""
    return x.to(torch.bfloat16).to(torch.float32)
