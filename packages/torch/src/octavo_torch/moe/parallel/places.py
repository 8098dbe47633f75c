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

    kept           bool [T, k], the choices that are sent to a rank
    first          bool [T, k], of these the first choice of its token at its rank
    slot           int64 [T, k], where the choice's token is in the message to all ranks
    row            int64 [T, k], where the choice's row is in the message that comes back; None where results come back
                   as sums and static buffers hold all choices
    token_counts   int64 [N], tokens for each rank
    row_counts     int64 [N], rows for each rank; None where there is no `row`
    senders        int64, for each place of the message the number of its token; 0 where it has none
    filled         bool, whether a place has a token; None: the first places do, as many as `token_counts` has in all
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
    """Where choices [T, k] go, of `experts` experts on each of `ranks` ranks. Choices past bounds.pairs stay at home.

    rows   whether rows come back one by one, so that `Leaving.row` is needed
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
    """Which rows this rank's experts send back.

    choices   int64, for each place of the message the number of the arrived choice whose row is there
    filled    bool, whether a place has a row; None: all have
    """

    choices: Tensor
    filled: Tensor | None


def returning(local: Tensor, experts: int, ranks: int, bounds: Bounds | None, rows: int) -> Returning:
    """The rows of those of the choices `local` [S, k] that are of this rank's experts.

    rows   how many these are, where there are no bounds
    """
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
    """What `route` returned, cut to `rows` rows and a spare one; and how many choices found no room, int64 [1] or None.

    The last rows of the highest experts are left out. Choices of no expert here have rows past the sum of the sizes;
    those for which `rows` rows are too few share the spare one with what was left out.
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
    """Places for the true elements of `real`, bool [N, n]: int64 [N, n], counted row after row; and how many true
    elements each row has, int64 [N].

    capacity   places that each row of `real` gets; None: as many as it has true elements
    """
    runs, length = real.shape
    # one running count over all: that of a few long rows is many times slower
    counted = real.view(-1).cumsum(0).view(runs, length)
    ends = counted[:, -1] if length else counted.new_zeros(runs)
    starts = torch.nn.functional.pad(ends[:-1], (1, 0))
    if capacity is None:
        return counted - 1, ends - starts
    offsets = torch.arange(runs, device=real.device) * capacity - 1 - starts
    return counted + offsets[:, None], ends - starts


def _filled(counts: Tensor, capacity: int) -> Tensor:
    """bool [N * capacity]: true for the first places of each rank, as many as `counts` says."""
    return (torch.arange(capacity, device=counts.device) < counts[:, None]).view(-1)


def _placed(values: Tensor, places: Tensor, real: Tensor, count: int) -> Tensor:
    """int64 [count]: each value at its place where `real` is true; 0 at places without one."""
    table = values.new_zeros(count + 1)
    return table.scatter_(0, torch.where(real, places, count).view(-1), values.reshape(-1))[:count]
