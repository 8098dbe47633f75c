"""FSDP2 beside experts over ranks: two replicas of experts that two ranks share, on four processes."""

from __future__ import annotations

import secrets

import pytest
from ranks import Ranks
from sharded_experts_work import sharded


def fresh() -> int:
    seed = secrets.randbits(24)
    print(f"seed {seed}")
    return seed


@pytest.mark.parametrize(("name", "dim"), [("mxfp8", 0), ("fp8-block", 1), ("fp8-current", 2), ("nvfp4", 0)])
def test_gradients_are_those_of_one_process(name: str, dim: int, ranks: Ranks) -> None:
    """Parameters are gathered over their replicas, and experts' tokens come from the ranks that share them, one of
    which has none: y, dx and experts' gradients bit for bit, the router's add up over the ranks."""
    for found, _ in ranks(sharded, fresh(), name, dim, False):
        assert not found, found


@pytest.mark.parametrize(("name", "dim"), [("mxfp8", 0), ("fp8-current", 1)])
def test_weights_are_gathered_as_codes(name: str, dim: int, ranks: Ranks) -> None:
    """With quantize_before_gather, and the same bits."""
    for found, told in ranks(sharded, fresh(), name, dim, True):
        assert not found, found
        assert told.count("quantized, then gathered") == 2, told
