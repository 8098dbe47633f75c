"""Megatron's MoE layer as one layer of ours, over ranks: its router, shared experts, groups and configuration."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from megatron_work import ends, like_megatrons, otherwise, trains
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
    "parts of a sequence": (4, octavo.MXFP8(), {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "biases": (4, octavo.BlockScaling(), {"add_bias_linear": True}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process(case: str, ranks: Ranks) -> None:
    """What routed experts give, the gradients of their tokens, of their weights by the router and of their parameters
    bit for bit, in two steps; the router's and the shared expert's gradients add up."""
    ep, recipe, changes = CASES[case]
    assert ranks(trains, fresh(), ep, {"recipe": recipe}, changes) == [[]] * WORLD


@pytest.mark.parametrize("changes", ["swiglu", "biases", "gpt-oss", "relu2"])
def test_it_computes_what_megatrons_layer_does(changes: str, ranks: Ranks) -> None:
    """Without quantization, from the same parameters: y, dx and every gradient, in fp32."""
    for answer in ranks(like_megatrons, fresh(), changes):
        assert max(answer) <= 2.0**-12, answer


GRACE = 0.5
"""Seconds for which ranks wait for one another's word."""


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    """Two processes that may end, and are then started anew."""
    two = Ranks(2)
    yield two
    two.stop()


def test_ranks_that_have_another_layer(alone: Ranks) -> None:
    """Each names the other, and what differs, at once (faults.md 54, 55)."""
    for rank, answers in enumerate(alone(otherwise)):
        for what, error, seconds in answers:
            assert f"rank {rank} of 2: rank {1 - rank} calls this layer otherwise" in error, (what, error)
            assert what in error, (what, error)
            assert seconds < 5


def test_a_rank_that_ends_is_named(alone: Ranks) -> None:
    """By the other one, in its backward, and not after torch's half hour."""
    (error, seconds), ended = alone.survivors(ends, GRACE)
    assert ended is None
    assert "no answer from rank 1:" in error, error
    assert seconds < GRACE + 3
