"""Modes of the processor and of its libraries in which this folder's arithmetic would be another one."""

from __future__ import annotations

import sys

import torch

_LEAST_NORMAL = sys.float_info.min


def check_subnormals() -> None:
    """RuntimeError where the calling thread flushes subnormal numbers, as torch.set_flush_denormal makes it do.

    Python's own floats tell: the mode is the processor's, for every format. torch's worker threads may have it from
    the thread that created them, so it cannot be turned off around an operation.
    """
    if _LEAST_NORMAL * 0.5 == 0.0:
        raise RuntimeError(
            "this thread flushes subnormal numbers to zero, and codes and scales need them; call "
            "torch.set_flush_denormal(False), or use a backend that sets the mode itself, such as torch-native"
        )


def multiplies_in_fp32() -> bool:
    """False where torch.set_float32_matmul_precision lets products of fp32 matrices on a CPU be computed in less."""
    return torch.backends.mkldnn.matmul.fp32_precision in ("ieee", "none")  # type: ignore[attr-defined]
