"""The measure of kept memory sees a leak of one small thing in each call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from memory_kept import heap_bytes, keeps_nothing


@pytest.mark.parametrize(
    "make", [object, lambda: bytes(600), lambda: torch.empty(1)], ids=["object", "bytes", "tensor"]
)
def test_a_leak_is_seen(make: Callable[[], Any]) -> None:
    """One small object, one above CPython's own blocks or one tensor kept by each call is seen in every window."""
    kept: list[Any] = []
    assert keeps_nothing(make)
    assert not keeps_nothing(lambda: kept.append(make()))


def test_a_leak_in_c_is_seen() -> None:
    """A piece of malloc's that no Python object knows of is seen, too."""
    if not heap_bytes():
        pytest.skip("this C library has no mallinfo2")
    malloc, free = ctypes.CDLL(None).malloc, ctypes.CDLL(None).free
    malloc.restype, free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    lost = (ctypes.c_void_p * 2000)()  # which holds addresses without Python objects
    count = iter(range(len(lost)))
    assert keeps_nothing(lambda: free(malloc(1)))

    def leak() -> None:
        lost[next(count)] = malloc(1)

    assert not keeps_nothing(leak)
    for piece in lost:
        free(piece)
