"""Where tokens and rows stand on their way: at home, in the buffers that travel, and at the experts.

A token goes to a rank once, however many of its choices are there. Tokens and rows travel in the order of the ranks
and, for one rank, in the order of the choices, so an expert has its rows in the order that one process gives them.
Places are running counts, one run for each rank: nothing is sorted, and nothing is read on the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo_torch.moe.parallel.options import Bounds


class Leaving(NamedTuple):
    """What this rank's tokens send; T tokens with k choices, N ranks.

    kept           bool [T, k], the choices that go to some rank
    first          bool [T, k], of these the first of a token at its rank
    slot           int64 [T, k], the token's place at the choice's rank, among all that this rank sends
    row            int64 [T, k], likewise the place of the choice's row; None where rows are neither sent nor bounded
    token_counts   int64 [N], tokens for each rank
    row_counts     int64 [N], rows for each rank; None where there is no `row`
    senders        int64, the tokens that are sent in their order, and any others after them or in empty places
    filled         bool, whether a place is; None: all are but the last ones
    """

    kept: Tensor
    first: Tensor
    slot: Tensor
    row: Tensor | None
    token_counts: Tensor
    row_counts: Tensor | None
    senders: Tensor
    filled: Tensor | None


def leaving(choices: Tensor, experts: int, ranks: int, bounds: Bounds | None, rows: bool = True) -> Leaving:
    """Where choices [T, k] of `ranks` times `experts` experts go. Choices past bounds.pairs stay at home.

    rows   places of rows are needed, because rows come back one by one
    """
    tokens, k = choices.shape
    owner = choices.to(torch.int64).div(experts, rounding_mode="floor")
    at_rank = owner.clamp(0, ranks - 1)
    number = torch.arange(ranks, device=choices.device)
    goes = owner == number[:, None, None]  # [N, T, k]
    row = row_counts = None
    if bounds is None or rows or bounds.pairs < tokens * k:
        capacity = None if bounds is None else bounds.pairs
        place, row_counts = _places(goes.view(ranks, -1), capacity)
        row = place.gather(0, at_rank.view(1, -1)).view(tokens, k)
        if capacity is not None and capacity < tokens * k:
            goes &= (place < (capacity * (number + 1))[:, None]).view(goes.shape)
    kept = goes.any(0)
    sent = goes.any(2)
    capacity = None if bounds is None else bounds.tokens
    place, token_counts = _places(sent, capacity)
    count = ranks * (tokens if capacity is None else capacity)
    senders = _placed(torch.arange(tokens, device=choices.device).expand(ranks, -1), place, sent, count)
    leader = goes.view(torch.int8).argmax(2).t().gather(1, at_rank)
    return Leaving(
        kept, kept & (leader == torch.arange(k, device=choices.device)),
        torch.where(kept, place.t().gather(1, at_rank), 0), None if row is None else torch.where(kept, row, 0),
        token_counts, row_counts, senders, None if capacity is None else _filled(token_counts, capacity),
    )  # fmt: skip


class Returning(NamedTuple):
    """Which rows this rank's experts send back: numbers of the arrived choices, and whether there is one at a place."""

    choices: Tensor
    filled: Tensor | None


def returning(local: Tensor, experts: int, ranks: int, bounds: Bounds | None, rows: int) -> Returning:
    """Rows of the choices `local` [S, k] that are of this rank's experts; without bounds there are `rows` of them."""
    here = (local >= 0) & (local < experts)
    numbers = torch.arange(local.numel(), device=local.device)
    if bounds is None:
        here, capacity, count = here.view(1, -1), None, rows
    else:
        here, capacity, count = here.view(ranks, -1), bounds.pairs, ranks * bounds.pairs
    place, counts = _places(here, capacity)
    table = _placed(numbers, place, here, count)
    return Returning(table, None if capacity is None else _filled(counts, capacity))


def bounded(
    sizes: Tensor, order: Tensor, position: Tensor, routed: Tensor, rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """What a route returned for `rows` rows and a spare one; and how many choices found no room, int64 [1], or None.

    The last rows of the highest experts are left out. Choices that are nowhere have rows past the sum of the sizes, of
    which the spare one is that of many.
    """
    if order.shape[0] <= rows:
        return sizes, order, position, routed, None
    ends = sizes.cumsum(0)
    starts = ends - sizes
    position = position.clamp(max=rows)
    return (
        ends.clamp(max=rows) - starts.clamp(max=rows), order[: rows + 1], position, routed & (position < rows),
        (ends[-1:] - rows).clamp_min(0),
    )  # fmt: skip


def _places(real: Tensor, capacity: int | None) -> tuple[Tensor, Tensor]:
    """int64 [N, n]: of each real one of bool [N, n] its place, run after run, and [N], how many each run has.

    capacity   places of each run; None: as many as it has
    """
    runs, length = real.shape
    # one running count over all: that of a few long rows is many times slower
    counted = real.view(-1).cumsum(0).view(runs, length)
    ends = counted[:, -1] if length else counted.new_zeros(runs)
    starts = torch.nn.functional.pad(ends[:-1], (1, 0))
    if capacity is None:
        return counted - 1, ends - starts
    offsets = torch.arange(-1, runs * capacity - 1, capacity, device=real.device) - starts
    return counted + offsets[:, None], ends - starts


def _filled(counts: Tensor, capacity: int) -> Tensor:
    """bool [N * capacity]: each rank's first places, as many as its count says."""
    return (torch.arange(capacity, device=counts.device) < counts[:, None]).view(-1)


def _placed(values: Tensor, places: Tensor, real: Tensor, count: int) -> Tensor:
    """int64 [count]: the values at their places where they are real, 0 elsewhere."""
    table = values.new_zeros(count + 1)
    return table.scatter_(0, torch.where(real, places, count).view(-1), values.reshape(-1))[:count]
