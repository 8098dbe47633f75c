"""What requests are made with, and how long what was planned for them holds."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

import octavo_registry as registry

T = TypeVar("T")

_MOST = 1024
_state_token = registry.state_token


class Kept(Generic[T]):
    """Values made of plans, each kept until the registry's state changes."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[object, object, T]] = {}

    def get(self, key: Hashable, make: Callable[[], T], owner: object = None) -> T:
        """The value of `key`, made if there is none. `owner` is an object whose id the key holds."""
        token = _state_token()  # of before planning: what changes meanwhile makes the value stale
        known = self._known.get(key)
        if known is not None and known[0] is token and known[1] is owner:
            return known[2]
        value = make()
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[key] = token, owner, value
        return value


def arch_of(device: torch.device) -> tuple[int, int] | None:
    """The compute capability that a request has; None on a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None
