"""Megatron's MoE layer as one layer of ours, over ranks: its router, shared experts, groups and configuration."""

from __future__ import annotations

import secrets
from importlib.util import find_spec

import pytest
from megatron_work import trains
from ranks import WORLD, Ranks

import octavo

pytestmark = [
    pytest.mark.skipif(
        find_spec("megatron") is None, reason="megatron-core is not installed; `nox -s adapters` installs it"
    ),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def fresh() -> int:
    seed = secrets.randbits(24)
    print(f"seed {seed}")
    return seed


CASES = {
    "shared expert": (4, octavo.MXFP8(), {"moe_shared_expert_intermediate_size": 32}),
    "replicas, delayed scaling, postponed gradients": (
        2, octavo.DelayedScaling(history=3), {"later": {"delay_wgrad_compute": True}},
    ),
    "biases": (4, octavo.BlockScaling(), {"add_bias_linear": True}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process(case: str, ranks: Ranks) -> None:
    """What routed experts give, the gradients of their tokens, of their weights by the router and of their parameters
    bit for bit, in two steps; the router's and the shared expert's gradients add up."""
    ep, recipe, changes = CASES[case]
    assert ranks(trains, fresh(), ep, {"recipe": recipe}, changes) == [[]] * WORLD
