"""Arrays whose values are at hand."""

from __future__ import annotations

import jax
import numpy as np
from jax import Array


def is_on_host(array: Array | np.ndarray) -> bool:
    """Whether the values of this array lie on CPUs of this process: reading them waits for no accelerator."""
    if isinstance(array, np.ndarray):
        return True
    if isinstance(array, jax.core.Tracer) or not array.is_fully_addressable:
        return False
    return all(device.platform == "cpu" for device in array.devices())
