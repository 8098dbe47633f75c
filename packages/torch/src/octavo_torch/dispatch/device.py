"""What a request says about a device."""

from __future__ import annotations

import torch


def arch_of(device: torch.device) -> tuple[int, int] | None:
    """The compute capability that a request names; None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None
