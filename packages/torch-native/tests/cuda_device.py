"""What the CUDA tests share: when they are skipped, sizes, and a guard against waits. Not tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import octavo_native
from octavo_torch.compiler.graphs import no_waiting

SPLITS = ([33, 0, 150, 70, 1, 129], [0, 700, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6], [0] * 6, [128, 128, 128, 128, 128, 60])
"""Sizes of six groups of at most 700 rows."""


def _reason() -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.cuda.get_device_capability() != (9, 0):
        return "the kernels are for sm_90a and this device is another"
    return None if octavo_native.HAS_CUDA else "this octavo-native was built without CUDA kernels"


MARKS = [
    pytest.mark.skipif(_reason() is not None, reason=_reason() or ""),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@contextmanager
def no_sync() -> Iterator[None]:
    """Any wait for the device raises."""
    torch.cuda.synchronize()
    with no_waiting():
        yield
