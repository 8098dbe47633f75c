"""Experts that are spread over GPUs, over NCCL and over peer memory: skipped where there are fewer than two."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
import torch
from rank_work.cuda_experts import equal_to_one_gpu, explained, replays, waits_in_vain
from ranks import Ranks

RECIPES = ["bf16", "fp8-block", "mxfp8", "fp8-current", "fp8-row", "nvfp4"]


def fresh() -> int:
    seed = secrets.randbits(24)
    print(f"seed {seed}")
    return seed


@pytest.fixture(scope="module")
def gpus() -> Iterator[Ranks]:
    """A rank a GPU, of all that there are."""
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"needs 2 GPUs, there are {count}")
    ranks = Ranks(count, "cpu:gloo,cuda:nccl")
    yield ranks
    ranks.stop()


@pytest.mark.parametrize(("static", "route"), [(False, None), (True, "collective"), (True, "peer")])
def test_bits_are_those_of_one_gpu(static: bool, route: str | None, gpus: Ranks) -> None:
    """y and every gradient in each recipe: with sizes that are read, and in static buffers by both routes."""
    assert gpus(equal_to_one_gpu, RECIPES, fresh(), route, static) == [[]] * gpus.world


@pytest.mark.parametrize("returns", ["rows", "sums"])
@pytest.mark.parametrize("payload", [None, "fp8-block"])
@pytest.mark.parametrize("route", ["collective", "peer"])
def test_a_cuda_graph_holds_a_step(route: str, payload: str | None, returns: str, gpus: Ranks) -> None:
    """Forward and backward in one graph, replayed with other tokens, routings and weights, and between replays the same
    step without a graph: equal bits, nothing read on the host."""
    assert gpus(replays, "fp8-block", fresh(), route, returns, payload, 30) == [[]] * gpus.world


@pytest.mark.slow
@pytest.mark.parametrize("route", ["collective", "peer"])
def test_a_thousand_replays(route: str, gpus: Ranks) -> None:
    """Each with another routing."""
    assert gpus(replays, "bf16", fresh(), route, "rows", None, 1000) == [[]] * gpus.world


def test_a_rank_that_does_not_come() -> None:
    """CUDA fails in those that wait for its stores, when the group's timeout is over: there is no hang without end."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, there are {torch.cuda.device_count()}")
    pair = Ranks(2, "cpu:gloo,cuda:nccl")
    try:
        (error, seconds), absent = pair(waits_in_vain, 3.0)
    finally:
        pair.stop()
    assert absent == ("", 0.0)
    assert "CUDA error" in error
    assert 2 < seconds < 20


def test_ranks_that_reach_one_another_take_peer_memory(gpus: Ranks) -> None:
    """Where GPUs of one host are linked, without being asked."""
    routes = gpus(explained)
    assert {route for route, _ in routes} == {"peer"}, routes
