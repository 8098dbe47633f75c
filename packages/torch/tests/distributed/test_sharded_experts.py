"""Beside experts over ranks: FSDP2, where two replicas of experts have two ranks each; and adapters of the experts."""

from __future__ import annotations

import secrets

import pytest
from rank_work.sharded_experts import adapted, chosen_apart, sharded
from ranks import WORLD, Ranks

from octavo_torch import Exchange


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


def test_choose_by_itself(ranks: Ranks) -> None:
    """As the guide has it for losses: torch's own words were "got mixed torch.Tensor and DTensor"."""
    for told, equal in ranks(chosen_apart, fresh()):
        assert 'register_fsdp_forward_method(module, "choose")' in told
        assert all(equal), equal


@pytest.mark.parametrize(
    ("name", "form", "rows"),
    [
        ("mxfp8", "standard", None),
        ("bf16", "recompute", None),
        ("nvfp4", "standard", 80),
        ("fp8-delayed", "lean", None),
    ],
)
def test_adapters_of_experts(name: str, form: str, rows: int | None, ranks: Ranks) -> None:
    """Each rank trains its own experts' A and B beside frozen weights, with tokens of all ranks: the bits of one
    process, with sizes that are read and with static buffers."""
    exchange = None if rows is None else Exchange(rows=rows)
    assert ranks(adapted, fresh(), name, form, exchange) == [[]] * WORLD
