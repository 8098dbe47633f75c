"""The route over `all_to_all_single`, of any process group: NCCL's on GPUs, gloo's on CPUs.

Forward:   signature and sizes | tokens, or codes and scales | choices and weights  ->  experts  ->  rows or sums
Backward:  dy, or codes and scales  ->  experts  ->  rows or sums of dx | gradients of the weights
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.quantizer import Operand
from octavo_registry.contract.moves import Route
from octavo_torch.compiler.graphs import GraphUnsafeError, is_capturing
from octavo_torch.compiler.status import flag_left_out, status_word
from octavo_torch.moe.moves import Moves
from octavo_torch.moe.parallel.agreement import Signature, check_agreement
from octavo_torch.moe.parallel.group import ExchangeError, ExpertGroup
from octavo_torch.moe.parallel.journey import Arrived
from octavo_torch.moe.parallel.options import Bounds, Exchange
from octavo_torch.moe.parallel.payload import encode
from octavo_torch.moe.parallel.places import bounded, leaving, returning
from octavo_torch.moe.permutation_autograd import Places
from octavo_torch.quantizers.plans import Names

HEADER = len(Signature._fields) + 2
"""int64 numbers of the first message from a rank to another: the signature, tokens and rows."""

Shares = tuple[list[int] | None, list[int] | None]
"""Rows from each rank and to each rank; None for equal shares."""

_agreed: WeakKeyDictionary[dist.ProcessGroup, dict[Signature, Tensor]] = WeakKeyDictionary()
"""The signatures that all ranks of a group have had in a static exchange, which reads each of them once; and as it is
sent, because a captured graph copies nothing from the host."""


class CollectiveJourney:
    """A `Journey` by collectives.

    With `bounds` every buffer has its full size, and nothing is read on the host but the signatures of a first call;
    without, the first message is read and the others hold what there is.
    """

    def __init__(
        self, group: ExpertGroup, exchange: Exchange, signature: Signature, route: Route[Tensor], backend: Names
    ) -> None:
        """route: sorts choices by rank, and is given the number of ranks as that of groups."""
        self._group, self._exchange, self._signature = group, exchange, signature
        self._route, self._backend = route, backend
        self._bounds: Bounds | None = None
        self._tokens: Shares = (None, None)
        self._pair_rows: Shares = (None, None)
        self._counted = False
        self.rows = 0

    def away(self, x: Tensor, weights: Tensor, choices: Tensor, /) -> Arrived:
        """See Journey."""
        group, signature = self._group, self._signature
        experts, k = signature.experts, choices.shape[1]
        self._bounds = self._exchange.bounds(x.shape[0], k, group.ranks)
        self._leaving = leaving(choices, experts, group.ranks, self._bounds, self._route)
        self._set_shares(x.device)
        try:
            values = self._send("tokens", x, "x")
            kept = torch.where(self._leaving.kept, choices, -1).to(torch.int32)
            # an empty place has the token of another one, and nobody's choices
            both = torch.cat((kept, weights.float().view(torch.int32)), 1)[self._leaving.senders]
            if self._leaving.filled is not None:
                both.masked_fill_(~self._leaving.filled[:, None], -1)
            landed = group.all_to_all("choices", both, *self._tokens)
        except ExchangeError:
            self._explain_failure()
            raise
        local = landed[:, :k].to(torch.int64) - group.rank * experts
        local = torch.where((landed[:, :k] >= 0) & (local >= 0) & (local < experts), local, -1)
        back = returning(local, self._source(x.device), group.ranks, self._bounds, self._route)
        self._returning = back if self._bounds is not None else back._replace(choices=back.choices[: self.rows])
        self._count_left_out(((self._leaving.row_counts - self._pairs()).clamp_min(0)).sum()[None])
        return Arrived(values, landed[:, k:].contiguous().view(torch.float32), local)

    def bound(self, sizes: Tensor, places: Places, /) -> tuple[Tensor, Places]:
        """See Journey."""
        sizes, order, position, routed, left_out = bounded(sizes, *places, self.rows)
        if not self._counted:
            self._count_left_out(left_out)
            self._counted = True
        return sizes, Places(order, position, routed)

    def home(self, moves: Moves, rows: Tensor, places: Places, /) -> Tensor:
        """See Journey."""
        leaves, back = self._leaving, self._returning
        if self._exchange.returns == "sums":
            sums = moves.combine_rows(rows, places.position, places.routed, None)
            arrived = self._group.all_to_all("partial sums", sums, *_back(self._tokens))
            return moves.combine_rows(_one_or_more(arrived), leaves.slot, leaves.first, None)
        place = places.position.view(-1)[back.choices][:, None]
        live = places.routed.view(-1)[back.choices][:, None]
        if back.filled is not None:
            live = live & back.filled[:, None]
        one_each = moves.combine_rows(rows, place, live, None)
        arrived = self._group.all_to_all("rows", one_each, *_back(self._pair_rows))
        return moves.combine_rows(_one_or_more(arrived), leaves.row, leaves.kept, None)

    def away_gradient(self, dy: Tensor, /) -> Tensor:
        """See Journey."""
        return self._send("gradients", dy, "dy")

    def home_weights(self, dweights: Tensor, /) -> Tensor:
        """See Journey."""
        arrived = self._group.all_to_all("the weights' gradients", dweights, *_back(self._tokens))
        k = dweights.shape[1]
        index = self._leaving.slot * k + torch.arange(k, device=arrived.device)
        return torch.where(self._leaving.kept, _one_or_more(arrived).view(-1)[index], 0)

    # ---- what is sent

    def _send(self, what: str, tokens: Tensor, operand: Operand) -> Tensor:
        encoded = encode(tokens, self._exchange.travels_as, operand, self._backend)
        senders = self._leaving.senders
        moved = [self._group.all_to_all(what, _picked(plane, senders), *self._tokens) for plane in encoded.planes]
        return encoded.decode(moved, self._backend)

    def _set_shares(self, device: torch.device) -> None:
        """Sends the signature and the sizes, and reads what came where buffers or agreement depend on it."""
        group, signature, bounds, leaves = self._group, self._signature, self._bounds, self._leaving
        agreed = _agreed.setdefault(group.group, {})
        numbers = agreed.get(signature)
        is_new = numbers is None
        if numbers is None:
            if is_capturing() and device.type == "cuda":
                raise GraphUnsafeError(
                    "the ranks of ep= have not agreed on this call yet, and a CUDA graph is being captured; run the "
                    "function once before the capture, as octavo_torch_cudagraph.capture does"
                )
            numbers = torch.tensor(signature, dtype=torch.int64, device=device)
        own = torch.cat((numbers.expand(group.ranks, -1), leaves.token_counts[:, None], leaves.row_counts[:, None]), 1)
        self._header = group.all_to_all("signatures", own)
        if bounds is not None:
            self.rows = bounds.rows
            if is_new:
                status_word(device)
                check_agreement(group, signature, self._header[:, :-2].tolist())
                agreed[signature] = numbers
            return
        if is_capturing() and device.type == "cuda":
            raise GraphUnsafeError(
                "ep= without static buffers reads sizes on the host, and a CUDA graph is being captured; give "
                "exchange=octavo_torch.Exchange(rows=...)"
            )
        received, sent = torch.stack((self._header, own)).tolist()
        check_agreement(group, signature, [row[:-2] for row in received])
        self._tokens = [row[-2] for row in received], [row[-2] for row in sent]
        self._pair_rows = [row[-1] for row in received], [row[-1] for row in sent]
        self.rows = sum(row[-1] for row in received)
        # choices that go nowhere are past the others
        self._leaving = leaves._replace(senders=leaves.senders[: sum(row[-2] for row in sent)])

    def _explain_failure(self) -> None:
        """ExchangeError with what a rank was called otherwise, where that is why the others' buffers did not come."""
        if not is_capturing():
            check_agreement(self._group, self._signature, self._header[:, :-2].tolist())

    def _source(self, device: torch.device) -> Tensor:
        """The rank of each arrived token."""
        ranks = torch.arange(self._group.ranks, device=device)
        if self._bounds is not None:
            return ranks.repeat_interleave(self._bounds.tokens)
        received = self._tokens[0]
        assert received is not None  # of sizes that are read
        return torch.repeat_interleave(ranks, torch.tensor(received, device=device), output_size=sum(received))

    # ---- what finds no room

    def _pairs(self) -> int:
        return (1 << 62) if self._bounds is None else self._bounds.pairs

    def _count_left_out(self, count: Tensor) -> None:
        if self._bounds is None:
            return
        flag_left_out(count[0] > 0)
        if self._exchange.left_out is not None:
            self._exchange.left_out.add_(count)


def _back(shares: Shares) -> Shares:
    return shares[1], shares[0]


def _picked(plane: Tensor, places: Tensor) -> Tensor:
    """Rows of a tensor of any dtype: not every device indexes 8-bit floats."""
    plane = plane.contiguous()
    return plane.view(torch.uint8).index_select(0, places).view(plane.dtype)


def _one_or_more(rows: Tensor) -> Tensor:
    """`rows`, or one of zeros: places that are nobody's still have a number."""
    return rows if rows.shape[0] else rows.new_zeros((1, rows.shape[1]))
