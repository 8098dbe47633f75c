"""A seed that a failing test prints, and errors of the device that no test leaves behind."""

from __future__ import annotations

import gc
import secrets
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from octavo_torch import check_errors


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with a new seed each run; torch's own generator is seeded with it, too."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")  # shown by pytest where the test fails
    torch.manual_seed(seed)
    return np.random.default_rng(seed)


@pytest.fixture(autouse=True)
def no_flag_is_left() -> Iterator[None]:
    """Sizes that fit set no flag; no graph of an earlier test dies while torch captures one, which would break off."""
    if not torch.cuda.is_available():
        yield
        return
    gc.collect()
    check_errors()
    yield
    check_errors()
