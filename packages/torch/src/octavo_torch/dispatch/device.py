"""What a request says about a device, and what every CUDA kernel asks of a layer's sides."""

from __future__ import annotations

import torch

CUDA_MULTIPLE = 16
"""CUDA kernels multiply matrices whose sides are multiples of it, in every recipe."""


def arch_of(device: torch.device) -> tuple[int, int] | None:
    """The compute capability that a request names; None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None
