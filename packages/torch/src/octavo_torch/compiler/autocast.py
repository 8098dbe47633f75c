"""torch.autocast: whether it is on for a device, and running without it, or in the one of an earlier moment."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

autocast_anywhere: Callable[[], bool] = torch._C._is_any_autocast_enabled


def autocast_on(device: str) -> bool:
    """Whether calls on this kind of device are inside torch.autocast. "meta" has none, and torch raises if asked."""
    return autocast_anywhere() and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def without_autocast(device: str) -> AbstractContextManager[object]:
    """Turns autocast off for this kind of device, where it is on."""
    return torch.autocast(device, enabled=False) if autocast_on(device) else nullcontext()


def autocast_now(device: str) -> Callable[[], AbstractContextManager[object]]:
    """What brings back, later, the autocast that this kind of device is in now, or that it is in none."""
    if not torch.amp.is_autocast_available(device):
        return nullcontext
    return partial(
        torch.autocast,
        device,
        torch.get_autocast_dtype(device),
        torch.is_autocast_enabled(device),
        torch.is_autocast_cache_enabled(),
    )
