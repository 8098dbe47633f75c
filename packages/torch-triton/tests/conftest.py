"""A generator whose seed a failing test prints, and memory in which whatever a kernel leaves out is seen."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKEND = "torch-triton" if DEVICE == "cuda" else "torch-triton-interpreter"


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with a new seed each run; torch's own generator is seeded with it, too."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")  # shown by pytest where the test fails
    torch.manual_seed(seed)
    return np.random.default_rng(seed)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.empty returns holds 0xFF bytes, NaN in every floating dtype."""
    real = torch.empty

    def empty(*size: Any, **options: Any) -> Tensor:
        made: Tensor = real(*size, **options)
        if type(made) is Tensor and made.device.type != "meta" and made.numel():
            made.view(-1).view(torch.uint8).fill_(0xFF)
        return made

    monkeypatch.setattr(torch, "empty", empty)


@pytest.fixture
def device() -> str:
    """Where the kernels run."""
    return DEVICE


@pytest.fixture
def backend() -> str:
    """The backend that serves there."""
    return BACKEND
