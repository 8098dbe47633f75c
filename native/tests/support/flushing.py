"""A caller that flushes subnormals, as threads of XLA and of PyTorch may. Not tests."""

from __future__ import annotations

import ctypes
import ctypes.util
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

sets_mode = pytest.mark.skipif(
    platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc", reason="sets MXCSR through glibc on x86-64"
)

FLUSH = 0x8040
"""FTZ and DAZ of MXCSR."""


@contextmanager
def flushed_subnormals() -> Iterator[Any]:
    """This thread flushes subnormals; yields a function that reads MXCSR. glibc's fenv_t ends with it."""
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    environment = (ctypes.c_uint32 * 8)()

    def mxcsr() -> int:
        now = (ctypes.c_uint32 * 8)()
        libm.fegetenv(now)
        return int(now[7])

    libm.fegetenv(environment)
    flushing = (ctypes.c_uint32 * 8)(*environment)
    flushing[7] |= FLUSH
    libm.fesetenv(flushing)
    try:
        yield mxcsr
    finally:
        libm.fesetenv(environment)
