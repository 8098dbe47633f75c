"""Fresh random inputs from a seed that a failing test prints, and the one way to compare with the definition."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from ranks import Ranks, made


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with a new seed each run; torch's own generator is seeded with it, too."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")  # shown by pytest where the test fails
    torch.manual_seed(seed)
    return np.random.default_rng(seed)


@pytest.fixture(params=["cpu", "cuda"])
def backend(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """Who serves a test on each device, where new tensors then are: the reference on a CPU, the one chosen on a GPU."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    with torch.device(request.param):
        yield "torch-reference" if request.param == "cpu" else None


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Small tensors: threads cost more than they bring."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes of one group, started where a test first uses them."""
    yield from made()
