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
        within = goes.view(ranks, -1).cumsum(1)
        row_counts = _last(within)
        starts = row_counts.cumsum(0) - row_counts if bounds is None else number * bounds.pairs
        row = (within + (starts - 1)[:, None]).gather(0, at_rank.view(1, -1)).view(tokens, k)
        if bounds is not None and bounds.pairs < tokens * k:
            goes &= (within <= bounds.pairs).view(goes.shape)
    kept = goes.any(0)
    sent = goes.any(2)
    within = sent.cumsum(1)
    token_counts = _last(within)
    if bounds is None:
        starts, places, filled = token_counts.cumsum(0) - token_counts, ranks * tokens, None
    else:
        starts, places = number * bounds.tokens, ranks * bounds.tokens
        filled = _filled(token_counts, bounds.tokens)
    slot = within + (starts - 1)[:, None]
    senders = _placed(torch.arange(tokens, device=choices.device).expand(ranks, -1), slot, sent, places)
    return Leaving(
        kept, (goes & (goes.cumsum(2) == 1)).any(0), torch.where(kept, slot.t().gather(1, at_rank), 0),
        None if row is None else torch.where(kept, row, 0), token_counts, row_counts, senders, filled,
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
        flat = here.view(-1)
        return Returning(_placed(numbers, flat.cumsum(0) - 1, flat, rows), None)
    here, numbers = here.view(ranks, -1), numbers.view(ranks, -1)
    within = here.cumsum(1)
    starts = torch.arange(-1, ranks * bounds.pairs - 1, bounds.pairs, device=local.device)
    table = _placed(numbers, within + starts[:, None], here, ranks * bounds.pairs)
    return Returning(table, _filled(_last(within), bounds.pairs))


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


def _last(counts: Tensor) -> Tensor:
    """[N] of running counts [N, n]: how many there are in all."""
    return counts[:, -1] if counts.shape[1] else counts.new_zeros(counts.shape[0])


def _filled(counts: Tensor, capacity: int) -> Tensor:
    """bool [N * capacity]: each rank's first places, as many as its count says."""
    return (torch.arange(capacity, device=counts.device) < counts[:, None]).view(-1)


def _placed(values: Tensor, places: Tensor, real: Tensor, count: int) -> Tensor:
    """int64 [count]: the values at their places where they are real, 0 elsewhere."""
    table = values.new_zeros(count + 1)
    return table.scatter_(0, torch.where(real, places, count).view(-1), values.reshape(-1))[:count]
