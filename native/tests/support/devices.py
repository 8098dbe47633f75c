"""Where a test runs: on numpy arrays, and on a GPU where there is one. Not tests."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

import octavo_native as native


def no_device() -> bool:
    """True where no kernel can run on a GPU; torch holds the memory there."""
    if not native.HAS_CUDA or find_spec("torch") is None:
        return True
    import torch

    return not torch.cuda.is_available()


needs_device = pytest.mark.skipif(no_device(), reason="no CUDA kernels in this build, no torch or no CUDA device")

PLACES = ("cpu", pytest.param("cuda", marks=needs_device))
