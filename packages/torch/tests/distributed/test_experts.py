"""Experts that are spread over ranks: the bits of one process, the bytes that travel, and what fails when."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from experts_work.bits import equal_to_one_process, strides_of_few_tokens, sums_and_their_bound, travels_as_codes
from experts_work.faults import agreed_before, changes_alone, does_not_come, ends, left_out, otherwise
from experts_work.modules import layers_share_memory, shares_an_expert, trains, trains_in_autocast
from experts_work.overlap import calls_beside_messages
from experts_work.traffic import bytes_on_the_wire, reads_on_the_host
from moe_layers import RECIPES
from ranks import WORLD, Ranks

from octavo_torch import Exchange, MoE, explain_exchange
from octavo_torch.moe.parallel.options import Bounds
from octavo_torch.moe.parallel.places import leaving
from octavo_torch.moe.parallel.token_exchange import TokenExchange
from octavo_torch.moe.parallel.transports.peer import _Message, _pieces


def fresh() -> int:
    seed = secrets.randbits(24)
    print(f"seed {seed}")
    return seed


@pytest.mark.parametrize(("size", "recipes"), [(2, ["fp8-block", "fp8-current", "nvfp4"]), (4, [*RECIPES])])
def test_bits_are_those_of_one_process(size: int, recipes: list[str], ranks: Ranks) -> None:
    """y and every gradient, in each recipe and form: ranks without tokens, unequal ones, experts without tokens, all
    tokens on one expert, choices that go nowhere."""
    assert ranks(equal_to_one_process, size, recipes, fresh()) == [[]] * WORLD


def test_static_buffers_read_nothing_on_the_host(ranks: Ranks) -> None:
    """Forward and backward after the first call; without static buffers sizes are read, and the watch sees it."""
    for reading, *static in ranks(reads_on_the_host, 2, fresh()):
        assert reading > 0
        assert static == [0, 0, 0]


@pytest.mark.parametrize("route", ["collective", "peer"])
def test_static_buffers_hold_what_there_is(route: str, ranks: Ranks) -> None:
    """The same bits, with buffers that are as small as the routing allows, by collectives and in memory into which all
    ranks write."""
    recipes = ["fp8-block", "nvfp4", "fp8-delayed"]
    for size in (2, 4):
        assert ranks(equal_to_one_process, size, recipes, fresh(), "static", route) == [[]] * WORLD


@pytest.mark.parametrize("postpones", [False, True])
@pytest.mark.parametrize("recipes", [("mxfp8", "fp8-row-wgrad-high-precision"), ("bf16", "bf16")], ids="-".join)
def test_layers_share_peer_memory(recipes: tuple[str, str], postpones: bool, ranks: Ranks) -> None:
    """Layers of other sides write into the same memory, which grows, in whatever order forwards and backwards come: the
    bits of collectives, which have buffers of their own, in weight gradients that are postponed, too."""
    assert ranks(layers_share_memory, fresh(), recipes, postpones) == [[]] * WORLD


@pytest.mark.parametrize("recipe", ["bf16", "fp8-block"])
def test_what_needs_no_message_does_not_wait_for_it(recipe: str, ranks: Ranks) -> None:
    """While tokens travel, weights are quantized and rows get their places; while dy does, rows get their places again
    and the activation is made again; while dx does, w1's gradient is computed. A GPU has them side by side."""
    forward = ["tokens", "weights' codes", "choices have come", "places", "it has come", "partial sums", "it has come"]
    backward = ["gradients", "places", "activation", "it has come", "dw", "partial sums", "dw", "it has come"]
    of_weights = ["the weights' gradients", "it has come"]
    assert ranks(calls_beside_messages, 2, recipe, fresh()) == [[*forward, *backward, *of_weights]] * WORLD


def test_a_message_that_nobody_asks_for_is_waited_for() -> None:
    """A caller that raises drops it: its stream waits before what is sent becomes somebody else's memory. One that was
    asked for is waited for once."""
    waits: list[object] = []

    class Lane:
        def join(self, mark: object = None) -> None:
            waits.append(mark)

    def message(mark: object) -> _Message:
        made = _Message(cast("Any", Lane()), 0)
        made.mark = cast("Any", mark)
        return made

    dropped = message(None)
    assert waits == []
    del dropped
    assert waits == [None]
    read = message("mark")
    read.ahead()
    assert waits == [None, "mark"]
    read.rest()
    del read
    assert waits == [None, "mark", None]


@pytest.mark.parametrize(("rows", "width", "pieces"), [(0, 8, 0), (7, 8, 1), (1023, 1 << 14, 1), (3001, 1 << 14, 4)])
def test_a_message_goes_in_few_pieces(rows: int, width: int, pieces: int) -> None:
    """One for a few bytes and at most four for many, as each is a launch or two: together all rows, once."""
    cut = _pieces(rows, width)
    assert len(cut) == pieces
    assert [row for piece in cut for row in range(rows)[piece]] == list(range(rows))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_a_choice_without_room_is_nobodys(dtype: torch.dtype) -> None:
    """Of 256 experts, whose numbers uint8 holds: a choice that is left out must not come to expert 255."""
    torch.manual_seed(fresh())
    tokens, k, ranks, experts = 12, 3, 2, 128
    choices = torch.randint(256, (tokens, k)).to(dtype)
    bounds = Bounds(tokens, 4, 8)
    exchange = TokenExchange(*cast("Any", (None, None, None, None)))
    exchange._leaving = leaves = leaving(choices, experts, ranks, bounds)
    assert leaves.filled is not None
    assert not leaves.kept.all()
    sent = exchange._choices_that_leave(choices, torch.rand(tokens, k))[leaves.filled, :k]
    kept = leaves.kept[leaves.senders[leaves.filled]]
    assert not kept.all()
    assert torch.equal(sent[~kept], torch.full_like(sent[~kept], -1))
    assert torch.equal(sent[kept].long(), choices.long()[leaves.senders[leaves.filled]][kept])


def test_few_tokens_have_any_strides(ranks: Ranks) -> None:
    """torch calls a tensor of no row, or of one, contiguous whatever its strides are, such as those of a sum's dy, and
    cannot view it as integers."""
    assert ranks(strides_of_few_tokens, fresh()) == [[]] * WORLD


def test_tokens_travel_as_codes(ranks: Ranks) -> None:
    """y, dx and the router's gradient are those of one process; weights' gradients those of what codes stand for."""
    for size in (2, 4):
        assert ranks(travels_as_codes, size, fresh()) == [[]] * WORLD


def test_partial_sums_are_within_their_bound(ranks: Ranks) -> None:
    """One sum per rank is rounded once more than every choice's row, and within octavo_numerics.partial_sums_bound."""
    answers = [answer for size in (2, 4) for answer in ranks(sums_and_their_bound, size, fresh())]
    assert max(max(answer) for answer in answers) <= 1, answers
    assert max(answer[0] for answer in answers) > 0.1


def test_a_module_trains_over_ranks(ranks: Ranks) -> None:
    """Two steps with delayed scaling, over a DeviceMesh's axis and after a deep copy: results, experts' gradients and
    scales are those of one module; the router's gradients add up to its."""
    for size in (2, 4):
        assert ranks(trains, size) == [[]] * WORLD


def test_a_module_trains_in_autocast_over_ranks(ranks: Ranks) -> None:
    """fp32 parameters with main_grad, and codes made once: the bits of one process, as within one."""
    for size in (2, 4):
        assert ranks(trains_in_autocast, size, fresh()) == [[]] * WORLD


def test_a_shared_expert_stays_with_the_tokens(ranks: Ranks) -> None:
    """Beside experts over ranks it is a layer of its own on each rank's tokens: routed experts keep one process's bits,
    and its gradients add up over the ranks as the router's do."""
    for size in (2, 4):
        assert ranks(shares_an_expert, size, fresh()) == [[]] * WORLD


def test_what_an_exchange_refuses() -> None:
    """Experts that ranks do not divide, axes of a mesh, recipes whose scales span rows, and bounds without buffers."""
    group = dist.ProcessGroup(0, 4)
    with pytest.raises(ValueError, match="num_experts is 6 and ep has 4 ranks; give a multiple of 4"):
        MoE(6, 16, 32, 2, recipe=None, ep=group)
    with pytest.raises(ValueError, match="ep is None; give both"):
        MoE(4, 16, 32, 2, recipe=None, exchange=Exchange())
    for recipe in ("fp8-current", "nvfp4", "bf16"):
        with pytest.raises(ValueError, match="has no scales of single rows; give RowScaling, BlockScaling or MXFP8"):
            Exchange(payload=recipe)
    with pytest.raises(ValueError, match="pair_rows bounds static buffers"):
        Exchange(pair_rows=4)
    with pytest.raises(ValueError, match='route is "peer", whose memory is of a fixed size; give rows'):
        Exchange(route="peer")
    with pytest.raises(ValueError, match='route is \'nvlink\'; give "collective" or "peer"'):
        Exchange(route="nvlink", rows=4)  # type: ignore[arg-type]


def test_what_is_exchanged_is_explained() -> None:
    """The route with its reason; codes, bounds and sums as they are asked for; and the bits that come of it."""
    plan = explain_exchange("mxfp8", 4)
    lines = dict(plan.lines)
    assert plan.route == "collective"
    assert "give Exchange(rows=)" in plan.reason
    assert lines["ranks"] == "4"
    assert lines["sizes"].startswith("read on the host")
    assert lines["bits"] == "those of one process"
    assert all(text in str(plan) for pair in plan.lines for text in pair)
    for exchange, overlap in (None, "NCCL"), (Exchange(route="peer", rows=100), "tokens are on their way"):
        of_cpu, of_gpu = (dict(explain_exchange("mxfp8", 4, exchange, device=on).lines) for on in ("cpu", "cuda"))
        # a CPU has no kernels of NCCL's, its messages wait for one another, and CUDA fails in no rank of it
        assert of_cpu["overlap"].startswith("none: on a CPU the ranks wait for each message")
        assert "at the latest" in of_cpu["faults"]
        assert "CUDA" not in of_cpu["faults"]
        assert overlap in of_gpu["overlap"]
    small = Exchange(payload="fp8-block", returns="sums", rows=100, pair_rows=9)
    lines = dict(explain_exchange("fp8-block", 4, small).lines)
    assert "100 rows of each rank's experts, 9 rows of one rank" in lines["sizes"]
    assert "as block codes (e4m3) and scales" in lines["tokens"]
    assert "one partial sum per rank" in lines["results, dx"]
    assert "y, dx and the router's gradient without fc2's bias are those of one process" in lines["bits"]
    assert "partial_sums_bound" in lines["bits"]
    for recipe, payload in (("bf16", "mxfp8"), ("mxfp8", "fp8-block"), ("fp8-block-fp32-scales",) * 2):
        assert "router" not in dict(explain_exchange(recipe, 4, Exchange(payload=payload)).lines)["bits"]


def test_every_byte_is_counted(ranks: Ranks) -> None:
    """What is handed to the collective is what bytes_exchanged says, to and from each rank, in every form."""
    for size in (2, 4):
        assert ranks(bytes_on_the_wire, size, fresh()) == [[]] * WORLD


def test_what_finds_no_room_is_told(ranks: Ranks) -> None:
    """Choices past the buffers are left out as if they went nowhere, are counted, and set the flag that check_errors
    reads once; the next call with room sets none."""
    some_lost = False
    for size in (2, 4):
        for *found, after, again, lost in ranks(left_out, size, fresh()):
            assert not found, found
            assert ("found no room" in after) == lost
            assert again == "fine"
            some_lost |= lost
    assert some_lost


TIMEOUT, GRACE = 1.0, 0.5
"""Seconds: of the groups in which a rank does not come, and for which ranks then wait for one another's word."""


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    """Three processes that may end, and are then started anew by the next test."""
    three = Ranks(3)
    yield three
    three.stop()


def test_ranks_that_call_otherwise(alone: Ranks) -> None:
    """Each rank names the other and both values, at once, and the group works afterwards (faults.md 54, 55)."""
    for rank, answers in enumerate(alone(otherwise)):
        for what, error, seconds in answers:
            other = 0 if rank == 1 else 1
            assert f"rank {rank} of 3: rank {other} calls this layer otherwise" in error, (what, error)
            assert what in error, (what, error)
            assert seconds < 5


@pytest.mark.parametrize("route", ["collective", "peer"])
def test_a_call_that_was_agreed_on_before_is_told(route: str, alone: Ranks) -> None:
    """Static exchanges read nothing on the host, so a rank that makes another of the calls that all know is noticed on
    the device: check_errors names it, and says nothing of calls after that."""
    for rank, said in enumerate(alone(agreed_before, route)):
        assert f"rank {0 if rank == 1 else 1} (on cpu) made another call" in said, said


PEER = Exchange(rows=60, route="peer")


@pytest.mark.parametrize("exchange", [None, PEER], ids=["collective", "peer"])
def test_a_rank_that_does_not_come_is_named(exchange: Exchange | None, alone: Ranks) -> None:
    """After the group's timeout and the grace, in forward and in backward."""
    for backward in (False, True):
        for rank, (error, seconds) in enumerate(alone(does_not_come, TIMEOUT, GRACE, backward, exchange)):
            if rank != 1:
                assert "no answer from rank 1:" in error, error
                assert seconds < TIMEOUT + GRACE + 3


def test_a_rank_that_changes_alone_is_named(alone: Ranks) -> None:
    """In a static exchange that was agreed on before, by the others when the time is up; by collectives the changed
    rank knows at once, and in peer memory when its time is up."""
    within = TIMEOUT + GRACE + 3
    for rank, (error, seconds) in enumerate(alone(changes_alone, TIMEOUT, GRACE, "collective")):
        there, here = (4, 3) if rank == 1 else (3, 4)
        assert f"tokens {there} there and {here} here" in error, error
        assert seconds < (1 if rank == 1 else within)
    for rank, (error, seconds) in enumerate(alone(changes_alone, TIMEOUT, GRACE, "peer")):
        assert f"rank {rank} of 3: the exchange of {'signatures' if rank == 1 else 'tokens'} failed" in error, error
        assert seconds < within


@pytest.mark.parametrize("exchange", [None, PEER], ids=["collective", "peer"])
@pytest.mark.parametrize("backward", [False, True])
def test_a_rank_that_ends_is_named(backward: bool, exchange: Exchange | None, alone: Ranks) -> None:
    """At once, and not after the half hour that is torch's timeout."""
    *survivors, ended = alone.survivors(ends, GRACE, backward, exchange)
    assert ended is None
    for error, seconds in survivors:
        assert "no answer from rank 2:" in error, error
        assert seconds < GRACE + 3
