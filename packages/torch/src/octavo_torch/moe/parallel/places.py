"""Where tokens and rows stand on their way: at home, in the buffers that travel, and at the experts.

A token goes to a rank once, however many of its choices are there. Tokens and rows travel in the order of the ranks
and, for one rank, in the order of the choices, so an expert has its rows in the order that one process gives them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo_registry.contract.moves import Route
from octavo_torch.moe.parallel.options import Bounds


class Leaving(NamedTuple):
    """What this rank's tokens send; T tokens with k choices, N ranks.

    kept           bool [T, k], the choices that go to some rank
    first          bool [T, k], of these the first of a token at its rank
    slot           int64 [T, k], the token's place at the choice's rank, among all that this rank sends
    row            int64 [T, k], likewise the place of the choice's row
    token_counts   int64 [N], tokens for each rank
    row_counts     int64 [N], rows for each rank
    senders        int64, the tokens that are sent in their order; in static buffers with others in empty places
    filled         bool, whether a place is; None: all are
    """

    kept: Tensor
    first: Tensor
    slot: Tensor
    row: Tensor
    token_counts: Tensor
    row_counts: Tensor
    senders: Tensor
    filled: Tensor | None


def leaving(choices: Tensor, experts: int, ranks: int, bounds: Bounds | None, route: Route[Tensor]) -> Leaving:
    """Where choices [T, k] of `ranks` times `experts` experts go. Choices past bounds.pairs stay at home."""
    k = choices.shape[1]
    choices = choices.to(torch.int64)
    known = (choices >= 0) & (choices < ranks * experts)
    owner = torch.where(known, choices // experts, -1)
    row_counts, _, position, kept = route(owner, ranks)
    within = position - _starts(row_counts, owner)
    if bounds is None:
        row = position
    else:
        kept = kept & (within < bounds.pairs)
        row = owner * bounds.pairs + within
    owner = torch.where(kept, owner, -1)
    # [T, k, k]: whether an earlier choice of the token has the same rank
    same = owner[:, :, None] == owner[:, None, :]
    leader = same.to(torch.int8).argmax(2)
    first = kept & (leader == torch.arange(k, device=owner.device))
    token_counts, order, position, _ = route(torch.where(first, owner, -1), ranks)
    if bounds is None:
        senders, filled, slot = order // k, None, position
    else:
        place, filled = _table(token_counts, bounds.tokens, order)
        senders = place // k
        slot = owner * bounds.tokens + position - _starts(token_counts, owner)
    slot = slot.gather(1, leader)
    return Leaving(
        kept, first, torch.where(kept, slot, 0), torch.where(kept, row, 0), token_counts, row_counts, senders, filled
    )


class Returning(NamedTuple):
    """Which rows this rank's experts send back: numbers of the arrived choices, and whether there is one at a place."""

    choices: Tensor
    filled: Tensor | None


def returning(local: Tensor, source: Tensor, ranks: int, bounds: Bounds | None, route: Route[Tensor]) -> Returning:
    """Rows of the choices `local` [S, k], -1 for those of other ranks; source int64 [S] is where a token came from."""
    counts, order, _, _ = route(torch.where(local >= 0, source[:, None], -1), ranks)
    return Returning(order, None) if bounds is None else Returning(*_table(counts, bounds.pairs, order))


def bounded(
    sizes: Tensor, order: Tensor, position: Tensor, routed: Tensor, rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What a route returned for `rows` rows and a spare one; and how many choices found no room, int64 [1].

    The last rows of the highest experts are left out. The row of every choice that is nowhere is the spare one, which
    comes after the sum of the sizes.
    """
    ends = sizes.cumsum(0)
    left_out = (ends[-1:] - rows).clamp_min(0)
    if order.shape[0] <= rows:
        order = torch.nn.functional.pad(order, (0, rows + 1 - order.shape[0]))
    ends = ends.clamp(max=rows)
    routed = routed & (position < rows)
    return (
        torch.diff(ends, prepend=ends.new_zeros(1)), order[: rows + 1], torch.where(routed, position, rows), routed,
        left_out,
    )  # fmt: skip


def _starts(counts: Tensor, owner: Tensor) -> Tensor:
    """Where each owner's run begins, for every choice; of nobody's anything."""
    return (counts.cumsum(0) - counts)[owner.clamp_min(0)]


def _table(counts: Tensor, capacity: int, order: Tensor) -> tuple[Tensor, Tensor]:
    """[N * capacity]: of each run of `order` the first `capacity`, and whether there is one."""
    numbers = torch.arange(capacity, device=counts.device)
    place = (counts.cumsum(0) - counts)[:, None] + numbers
    filled = numbers < counts[:, None]
    last = max(order.shape[0] - 1, 0)
    return order[place.clamp(max=last).view(-1)], filled.view(-1)
