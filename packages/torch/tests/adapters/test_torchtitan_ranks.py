"""torchtitan's routed experts as one moe_mlp over ranks: its layers, its meshes, its FSDP."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from rank_work.titan import ends, otherwise, trains, trains_sharded
from ranks import WORLD, Ranks

pytestmark = [
    pytest.mark.skipif(
        find_spec("torchtitan") is None, reason="torchtitan is not installed; `nox -s adapters` installs it"
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch's own, which torchtitan imports
]


def fresh() -> int:
    seed = secrets.randbits(24)
    print(f"seed {seed}")
    return seed


@pytest.mark.parametrize("spmd_backend", ["partial_dtensor", "spmd_types"])
@pytest.mark.parametrize("kind", [{"shared": True}, {"gpt_oss": True}], ids=["shared expert", "gpt-oss"])
def test_gradients_are_those_of_one_process(spmd_backend: str, kind: dict[str, Any], ranks: Ranks) -> None:
    """torchtitan's layer over four ranks, with its own sharding of parameters: what routed experts give, their tokens',
    scores' and weights' gradients bit for bit; the router's and shared expert's add up."""
    assert ranks(trains, fresh(), {"recipe": "mxfp8"}, spmd_backend, kind) == [[]] * WORLD


def test_sequences_of_tensor_parallelism(ranks: Ranks) -> None:
    """Two ranks share each sequence, and experts are on all four: tokens leave from where their part of it is."""
    arguments = {"recipe": "fp8-block", "form": "recompute", "weight_codes": "remake"}
    assert ranks(trains, fresh(), arguments, "partial_dtensor", {"shared": True}, 2) == [[]] * WORLD


def test_fsdp_beside_it(ranks: Ranks) -> None:
    """torchtitan's fully_shard of a block, two replicas of experts on two ranks each: a quarter of the experts lies on
    each rank between steps, and gradients are those of one process."""
    assert ranks(trains_sharded, fresh(), {"recipe": "mxfp8"}) == [[]] * WORLD


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
