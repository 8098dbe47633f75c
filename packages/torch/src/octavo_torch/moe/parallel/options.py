"""Exchange: how tokens reach the experts of other ranks and come back, as callers say it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from octavo import Recipe
from octavo.payload import payload_spec
from octavo_torch.arrays.checks import brief, check_count
from octavo_torch.dispatch.recipes import recipe_of

Returns = Literal["rows", "sums"]
RETURNS: tuple[Returns, ...] = get_args(Returns)
RouteName = Literal["collective", "peer"]
ROUTES: tuple[RouteName, ...] = get_args(RouteName)


class Bounds(NamedTuple):
    """The sizes of buffers that no routing changes.

    tokens   C, of one rank to one other
    pairs    Q, rows (choices) of one rank at one other
    rows     R, rows of one rank's experts
    """

    tokens: int
    pairs: int
    rows: int


@dataclass(frozen=True, eq=False)
class Exchange:
    """How tokens reach the experts of other ranks, and come back.

    payload     RowScaling, BlockScaling or MXFP8, or the name of one: tokens on their way to the experts, and the
                gradients of the sums on theirs, travel as its codes and scales and are decoded on arrival. None: as
                they are. What comes back travels as it is
    returns     "rows": every choice's row comes back and is summed at home in fp32 in the order of the choices, so bits
                are those of one process. "sums": each rank returns one partial sum per token, in fp32 rounded once;
                home adds these in fp32. octavo_numerics.partial_sums_bound bounds what that costs
    rows        R, rows of each rank's experts. With it buffers are static and nothing is read on the host, so that a
                CUDA graph may hold the layer; every rank then has as many tokens. None: sizes are read on the host
                in each forward, and buffers hold what is there
    pair_rows   with `rows`, the rows that one rank may have at one other; None: as many as there can be
    route       "collective": torch.distributed's all_to_all_single. "peer": the ranks' own stores into one another's
                memory, in static buffers; they share a host, and reach one another's GPUs. None: the latter where it
                can be had, see `explain_exchange`. Results are the same bits
    left_out    int64 [1] on the tokens' device, to which each forward adds the choices that found no room: of this
                rank's tokens for `pair_rows`, of its experts' rows for `rows`; one that activation checkpointing runs
                again, once more. They also set the flag that `check_errors` reads

    Raises ValueError for what does not fit.
    """

    payload: Recipe | str | None = None
    returns: Returns = "rows"
    rows: int | None = None
    pair_rows: int | None = None
    left_out: Tensor | None = None
    route: RouteName | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.returns, str) or self.returns not in RETURNS:
            raise ValueError(f'returns is {brief(self.returns)}; give "rows" or "sums"')
        for name in ("rows", "pair_rows"):
            value = getattr(self, name)
            if value is not None:
                check_count(name, value)
        if self.pair_rows is not None and self.rows is None:
            raise ValueError("pair_rows bounds static buffers, which rows asks for; give both, or rows alone")
        if self.route is not None and (not isinstance(self.route, str) or self.route not in ROUTES):
            raise ValueError(f'route is {brief(self.route)}; give "collective" or "peer", or None for what can be had')
        if self.route == "peer" and self.rows is None:
            raise ValueError(
                'route is "peer", whose memory is of a fixed size; give rows, the most of a rank\'s experts'
            )
        if self.payload is not None:
            if not isinstance(self.payload, Recipe | str):
                raise ValueError(f"payload is {brief(self.payload)}; give a Recipe or the name of one, or None")
            payload = recipe_of(self.payload)
            object.__setattr__(self, "payload", payload)
            payload_spec(payload, "x")
            payload_spec(payload, "dy")
        left_out = self.left_out
        if left_out is not None and (
            not isinstance(left_out, Tensor) or left_out.dtype is not torch.int64 or left_out.shape != (1,)
        ):
            raise ValueError(f"left_out is {brief(left_out)}; give int64 [1] on the tokens' device")

    @property
    def travels_as(self) -> Recipe | None:
        """The recipe of `payload`."""
        assert not isinstance(self.payload, str)  # __post_init__ has looked it up
        return self.payload

    def bounds(self, tokens: int, choices: int, ranks: int) -> Bounds | None:
        """The static buffers of `tokens` with that many choices each; None where sizes are read."""
        if self.rows is None:
            return None
        rows = min(self.rows, ranks * tokens * choices)
        pairs = min(tokens * choices, rows if self.pair_rows is None else self.pair_rows)
        return Bounds(min(tokens, pairs), pairs, min(rows, ranks * pairs))


DEFAULT_EXCHANGE = Exchange()


def check_exchange(exchange: object) -> Exchange:
    """`exchange`, or the default for None; ValueError for anything else."""
    if exchange is None:
        return DEFAULT_EXCHANGE
    if not isinstance(exchange, Exchange):
        raise ValueError(f"exchange is {brief(exchange)}; give an octavo_torch.Exchange")
    return exchange
