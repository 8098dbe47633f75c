"""What CUDA's tests of grouped GEMMs ask for: poison where nothing is defined, and no error that is left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of the operands' arrays that no layout defines are NaN codes and NaN scales."""
    import expected_planes
    import guarded
    from device_gemms import UNWRITTEN

    for module in (expected_planes, guarded):
        monkeypatch.setattr(module, "POISON", UNWRITTEN)


@pytest.fixture
def no_errors_left() -> Iterator[None]:
    """An error of a launch that nothing waited for belongs to this test."""
    import torch

    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
