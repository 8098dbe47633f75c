"""Where ranks run, and whether they may write into one another's memory."""

from __future__ import annotations

import pytest

from octavo_torch import Exchange, explain_exchange
from octavo_torch.moe.parallel.transports.routes import Seat, obstacle_of


def seats(*changes: tuple[int, str, object]) -> list[Seat]:
    """Four GPUs of one host that reach one another, but for what is said of a rank."""
    alike = [Seat("one", "", rank, tuple(other for other in range(4) if other != rank)) for rank in range(4)]
    for rank, field, value in changes:
        alike[rank] = alike[rank]._replace(**{field: value})
    return alike


def test_ranks_that_reach_one_another() -> None:
    """GPUs of one host in any order, and processes on one host's CPUs."""
    assert obstacle_of(seats()) is None
    assert obstacle_of(seats()[::-1]) is None
    assert obstacle_of([Seat("one", "", -1, ())] * 3) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([(2, "host", "two")], "the host of rank 0 is not that of rank 2,"),
        ([(1, "host", "two"), (3, "host", "two")], "the host of rank 0 is not that of ranks 1, 3,"),
        ([(3, "visible", "3")], "rank 3 sees other GPUs (CUDA_VISIBLE_DEVICES='3') than rank 0 ('')"),
        ([(1, "reaches", (0, 2))], "the GPU of rank 1 does not reach the memory of rank 3"),
        ([(3, "device", 2)], "ranks 2, 3 share GPUs"),
    ],
)
def test_why_ranks_do_not(changes: list[tuple[int, str, object]], said: str) -> None:
    """Memory of another host, of another process's numbering, past a link that is missing, or of a shared GPU, where
    ranks that wait for each other on the device might never run at once: named with the ranks."""
    assert said in (obstacle_of(seats(*changes)) or "")


def test_what_is_asked_for_needs_no_ranks() -> None:
    """Before there is a group, explain_exchange says what a route is up to."""
    asked = explain_exchange("bf16", 4, Exchange(route="collective"))
    assert 'Exchange(route="collective") asks for it' in asked.reason
    peer = explain_exchange("bf16", 4, Exchange(route="peer", rows=64))
    assert "if each of 4 ranks reaches that of the others; give ep to know" in peer.reason
