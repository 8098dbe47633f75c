"""TokenExchange: what carries a MoE layer's tokens to the experts of other ranks and back, in one forward and backward.

Forward:   signature and sizes | choices and weights | tokens, or codes and scales  ->  experts  ->  rows or sums
Backward:  dy, or codes and scales  ->  experts  ->  rows or sums of dx | gradients of the weights
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from octavo_torch.arrays.checks import BackendNames
from octavo_torch.compiler.graphs import GraphUnsafeError, is_capturing
from octavo_torch.compiler.status import ExchangeError, disagreement_word, flag_disagreement, flag_left_out
from octavo_torch.moe.parallel.agreement import Agreed, Signature, agreements, check_agreement
from octavo_torch.moe.parallel.group import ExpertGroup
from octavo_torch.moe.parallel.options import Bounds, Exchange
from octavo_torch.moe.parallel.payload import encode
from octavo_torch.moe.parallel.places import Leaving, Returning, bounded, leaving, returning
from octavo_torch.moe.parallel.transports.collective import CollectiveTransport
from octavo_torch.moe.parallel.transports.routes import route_of, transport_for
from octavo_torch.moe.parallel.transports.transport import EQUAL, MadeRows, Rows, Shares, Transport
from octavo_torch.moe.rows.derivatives import Places
from octavo_torch.moe.rows.moves import Moves


class Underway(NamedTuple):
    """S tokens of all ranks, in the ranks' order, on their way to this rank's experts.

    `choices` is called once, and then `tokens` once.

    choices   waits for int64 [S, k], numbers of this rank's experts, -1 for choices of other ranks and in places
              without a token; and for weights, fp32 [S, k]
    tokens    waits for x [S, K]
    """

    choices: Callable[[], tuple[Tensor, Tensor]]
    tokens: Callable[[], Tensor]


class TokenExchange:
    """Every rank calls the same methods in the same order, once each: messages meet there.

    With `bounds` every buffer has its full size, and nothing is read on the host but the signatures of a first call;
    without, the first message is read and the others hold what there is.

    rows   that this rank's experts have at most, from `dispatch` on; buffers hold one more, which is nobody's
    """

    def __init__(self, group: ExpertGroup, exchange: Exchange, signature: Signature, backend: BackendNames) -> None:
        self._group, self._exchange, self._signature, self._backend = group, exchange, signature, backend
        self._tokens = self._pair_rows = EQUAL
        self._header: Tensor | None = None
        self._counted = False
        self.rows = 0
        # set by `dispatch`
        self._bounds: Bounds | None = None
        self._leaving: Leaving
        self._transport: Transport
        self._own: Tensor  # the header that this rank has sent, or would have
        self._returning: Returning  # where rows come back one by one

    def dispatch(self, x: Tensor, weights: Tensor, choices: Tensor, /) -> Underway:
        """Starts sending tokens x [T, K], weights [T, k] and choices [T, k], numbers among all experts, to the experts'
        ranks. Choices go ahead, so that rows have their places before the tokens arrive."""
        group, k = self._group, choices.shape[1]
        self._bounds = self._exchange.bounds(x.shape[0], k, group.ranks)
        by_row = self._exchange.returns == "rows"
        self._leaving = leaving(choices, self._signature.experts, group.ranks, self._bounds, by_row)
        header = self._agree(x.device)
        encoded = encode(x, self._exchange.travels_as, "x", self._backend)
        ahead = [*header, Rows(self._choices_that_leave(choices, weights))]
        keep = encoded.spec is None and self._signature.gradients  # backward reads them
        message = [*ahead, *(Rows(plane, self._leaving.senders, bool(keep)) for plane in encoded.planes)]
        try:
            delivery = self._transport.send("tokens", "dispatch", message, self._tokens, len(ahead))
        except ExchangeError:
            self._explain_failure()
            raise

        def choices_there() -> tuple[Tensor, Tensor]:
            *headers, landed = delivery.ahead()
            for each in headers:
                self._compare(each)
            experts = self._signature.experts
            local = landed[:, :k].to(torch.int64).sub_(group.rank * experts)
            if by_row:
                self._returning = returning(local, experts, group.ranks, self._bounds, self.rows)
            return local, landed[:, k:].contiguous().view(torch.float32)

        def tokens_there() -> Tensor:
            return encoded.decode(delivery.rest(), self._backend)

        return Underway(choices_there, tokens_there)

    def bound(self, sizes: Tensor, places: Places, /) -> tuple[Tensor, Places]:
        """Sizes and places of the arrived choices, in `rows` rows."""
        sizes, order, position, routed, left_out = bounded(sizes, *places, self.rows)
        if not self._counted:
            self._count_left_out(left_out)
            self._counted = True
        return sizes, Places(order, position, routed)

    def combine(self, moves: Moves, rows: Tensor, places: Places, /) -> Callable[[], Tensor]:
        """Starts sending the experts' rows [M, N] back. The function that is returned waits for those of this rank's
        tokens, and gives their sums [T, N]."""
        leaves = self._leaving
        if self._exchange.returns == "sums":
            sums = MadeRows(
                len(places.position),
                rows,
                lambda part: moves.combine_rows(rows, places.position[part], places.routed[part], None),
            )
            delivery = self._transport.send("partial sums", "combine", [sums], self._tokens.back())
            return lambda: moves.combine_rows(_one_or_more(*delivery.rest()), leaves.slot, leaves.first, None)
        assert leaves.row is not None  # because rows come back
        back, row = self._returning, leaves.row
        place = places.position.view(-1)[back.choices][:, None]
        live = places.routed.view(-1)[back.choices][:, None]
        if back.filled is not None:
            live = live & back.filled[:, None]
        one_each = MadeRows(len(place), rows, lambda part: moves.combine_rows(rows, place[part], live[part], None))
        delivery = self._transport.send("rows", "combine", [one_each], self._pair_rows.back())
        return lambda: moves.combine_rows(_one_or_more(*delivery.rest()), row, leaves.kept, None)

    def dispatch_gradient(self, dy: Tensor, /) -> Callable[[], Tensor]:
        """Starts sending dy [T, N] to the ranks that have the tokens' experts. The function that is returned waits for
        what arrives here, [S, N], which the caller has to read before the next message."""
        encoded = encode(dy, self._exchange.travels_as, "dy", self._backend)
        message = [Rows(plane, self._leaving.senders) for plane in encoded.planes]
        delivery = self._transport.send("gradients", "dispatch", message, self._tokens)
        return lambda: encoded.decode(delivery.rest(), self._backend)

    def combine_weights(self, dweights: Tensor, /) -> Tensor:
        """Sends the gradient of the arrived choices' weights, fp32 [S, k], back; returns this rank's, [T, k]."""
        message = [Rows(dweights)]
        (arrived,) = self._transport.send("the weights' gradients", "dispatch", message, self._tokens.back()).rest()
        k = dweights.shape[1]
        index = self._leaving.slot * k + torch.arange(k, device=arrived.device)
        return torch.where(self._leaving.kept, _one_or_more(arrived).view(-1)[index], 0)

    # ---- what ranks agree on

    def _agree(self, device: torch.device) -> list[Rows]:
        """Sets this call's transport and shares; unless they are known, it reads on the host what other ranks sent.

        Returns the header where it has not been sent yet and travels with the tokens.
        """
        group, signature, bounds, leaves = self._group, self._signature, self._bounds, self._leaving
        known = agreements(group)
        agreed = None if bounds is None else known.get(signature)
        if agreed is None and is_capturing() and device.type == "cuda":
            raise GraphUnsafeError(_CAPTURED[bounds is None])
        own = agreed.header if agreed is not None else self._header_of(leaves, device)
        self._own = own
        if bounds is not None:
            self.rows = bounds.rows
        if agreed is not None and agreed.transport.lends:
            self._transport = agreed.transport
            return [Rows(own)]
        header = self._header = group.all_to_all("signatures", own)
        if agreed is not None:
            self._transport = agreed.transport
            self._compare(header)
        elif bounds is not None:
            disagreement_word(device)
            check_agreement(group, signature, header[:, :-2].tolist())
            route = route_of(group, self._exchange.route, True, device)
            self._transport = transport_for(group, route.name, device)
            known[signature] = Agreed(own, self._transport)
        else:
            self._transport = CollectiveTransport(group)
            self._read_sizes(header, own)
        return []

    def _header_of(self, leaves: Leaving, device: torch.device) -> Tensor:
        """int64 [N, HEADER]: the signature, and of sizes that are read those of each rank."""
        numbers = torch.tensor(self._signature, dtype=torch.int64, device=device).expand(self._group.ranks, -1)
        if self._bounds is not None:
            return torch.nn.functional.pad(numbers, (0, 2), value=-1)
        assert leaves.row_counts is not None  # of sizes that are read
        return torch.cat((numbers, leaves.token_counts[:, None], leaves.row_counts[:, None]), 1)

    def _read_sizes(self, header: Tensor, own: Tensor) -> None:
        """The shares of the header that came, beside that which was sent."""
        received, sent = torch.stack((header, own)).tolist()
        check_agreement(self._group, self._signature, [row[:-2] for row in received])
        self._tokens = Shares([row[-2] for row in received], [row[-2] for row in sent])
        self._pair_rows = Shares([row[-1] for row in received], [row[-1] for row in sent])
        self.rows = sum(row[-1] for row in received)
        # choices that go nowhere are past the others
        leaves = self._leaving
        self._leaving = leaves._replace(senders=leaves.senders[: sum(row[-2] for row in sent)])

    def _compare(self, header: Tensor) -> None:
        """Sets the flag that check_errors reads where the header that came is of another call than this rank's: both
        calls had been agreed on before, so no rank reads headers on the host."""
        flag_disagreement((header != self._own).any(1))

    def _explain_failure(self) -> None:
        """ExchangeError with the arguments that differ between ranks, where that is why a message did not arrive."""
        if self._header is not None and not is_capturing():
            check_agreement(self._group, self._signature, self._header[:, :-2].tolist())

    # ---- choices

    def _choices_that_leave(self, choices: Tensor, weights: Tensor) -> Tensor:
        """int32 [n, 2 k]: the choices of each token that is sent, and the bits of their weights as fp32."""
        leaves = self._leaving
        kept = torch.where(leaves.kept, choices.to(torch.int32), -1)  # uint8 has no -1
        both = torch.cat((kept, weights.float().view(torch.int32)), 1)[leaves.senders]
        # an empty place has the token of another one, and nobody's choices
        return both if leaves.filled is None else both.masked_fill_(~leaves.filled[:, None], -1)

    # ---- what finds no room

    def _may_leave_out(self) -> bool:
        """Whether more rows of a pair of ranks are possible than there is room for."""
        tokens, k = self._leaving.kept.shape
        return self._bounds is not None and self._bounds.pairs < tokens * k

    def _count_left_out(self, of_rows: Tensor | None) -> None:
        """Sets the flag and adds to the counter of choices that found no room.

        of_rows   int64 [1], how many of them at this rank's experts; None where all had room there
        """
        count = None if self._bounds is None else of_rows
        if self._bounds is not None and self._may_leave_out():
            assert self._leaving.row_counts is not None  # because it is bounded
            of_pairs = (self._leaving.row_counts - self._bounds.pairs).clamp_min(0).sum()[None]
            count = of_pairs if count is None else count + of_pairs
        if count is None:
            return
        flag_left_out(count[0] > 0)
        if self._exchange.left_out is not None:
            self._exchange.left_out.add_(count)


_CAPTURED = (
    "the ranks of ep= have not agreed on this call yet, and a CUDA graph is being captured; run the function once "
    "before the capture, as octavo_torch_cudagraph.capture does",
    "ep= without static buffers reads sizes on the host, and a CUDA graph is being captured; give "
    "exchange=octavo_torch.Exchange(rows=...)",
)


def _one_or_more(rows: Tensor) -> Tensor:
    """`rows`, or one of zeros: places that are nobody's still have a number."""
    return rows if rows.shape[0] else rows.new_zeros((1, rows.shape[1]))
