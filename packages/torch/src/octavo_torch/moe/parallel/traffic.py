"""bytes_exchanged: what a MoE layer over several ranks hands to its collectives, to the byte."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.quantizer import Operand
from octavo_torch.arrays.checks import brief, check_count, check_dtype
from octavo_torch.moe.arguments import check_choices
from octavo_torch.moe.bytes_kept import MoeShape
from octavo_torch.moe.parallel.agreement import HEADER
from octavo_torch.moe.parallel.options import Exchange, check_exchange
from octavo_torch.moe.parallel.payload import encode
from octavo_torch.moe.parallel.places import leaving

PerRank = tuple[int, ...]


@dataclass(frozen=True)
class ExchangedBytes:
    """Bytes between one rank's tokens and each rank's experts, in a forward and a backward of everything.

    away   by name, to each rank: signatures, tokens, choices and their weights, and the gradients of the results
    back   by name, from each rank: results, gradients of the tokens, gradients of the weights

    The bytes of a rank to itself are among them: they are in the buffers, and never travel.
    """

    away: Mapping[str, PerRank]
    back: Mapping[str, PerRank]

    @property
    def total(self) -> int:
        """Of all buffers."""
        return sum(map(sum, (*self.away.values(), *self.back.values())))

    def travelling(self, rank: int) -> int:
        """What leaves `rank` and comes to it, where these are its tokens."""
        everything = (*self.away.values(), *self.back.values())
        return self.total - sum(each[rank] for each in everything)


def bytes_exchanged(
    shape: MoeShape,
    ranks: int,
    exchange: Exchange | None = None,
    *,
    choices: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> ExchangedBytes:
    """What `moe_mlp(..., ep=, exchange=)` exchanges for one rank's tokens, where x and weights take gradients.

    shape     tokens and k of the rank, experts of all ranks
    ranks     of the group
    choices   [T, k] of the rank's tokens; needed where the exchange has no static buffers
    dtype     of x, w1 and w2, and of the result

    Nothing is sent. Raises ValueError for arguments that do not fit.
    """
    if not isinstance(shape, MoeShape):
        raise ValueError(f"shape is {brief(shape)}; give an octavo_torch.MoeShape")
    shape.check()
    check_count("ranks", ranks)
    check_dtype(dtype)
    if shape.experts % ranks:
        raise ValueError(f"shape has {shape.experts} experts for {ranks} ranks; give a multiple of {ranks}")
    options = check_exchange(exchange)
    bounds = options.bounds(shape.tokens, shape.k, ranks)
    if bounds is not None:
        tokens, rows = [bounds.tokens] * ranks, [bounds.pairs] * ranks
    else:
        if choices is None:
            raise ValueError("the exchange has no static buffers, so what travels is up to the routing; give choices")
        like = torch.empty(shape.tokens, 1)
        check_choices("choices", choices, like.to(choices.device) if isinstance(choices, Tensor) else like)
        if choices.is_meta:
            raise ValueError("choices is on meta and has no values to count; give them on a device")
        if choices.shape[1] != shape.k:
            raise ValueError(f"choices has {choices.shape[1]} per token and shape {shape.k}; give them alike")
        leaves = leaving(choices, shape.experts // ranks, ranks, None)
        assert leaves.row_counts is not None  # of sizes that are read
        tokens, rows = leaves.token_counts.tolist(), leaves.row_counts.tolist()
    out_features = shape.out_features or shape.in_features
    returned = rows if options.returns == "rows" else tokens

    def coded(columns: int, operand: Operand) -> int:
        planes = encode(torch.zeros(1, columns, dtype=dtype), options.travels_as, operand, None).planes
        return sum(plane.nbytes for plane in planes)

    def of(counts: list[int], each: int) -> PerRank:
        return tuple(count * each for count in counts)

    away = {
        "signatures": of([HEADER] * ranks, 8),
        "tokens": of(tokens, coded(shape.in_features, "x")),
        "choices": of(tokens, 8 * shape.k),
        "dy": of(tokens, coded(out_features, "dy")),
    }
    back = {
        "y": of(returned, out_features * dtype.itemsize),
        "dx": of(returned, shape.in_features * dtype.itemsize),
        "dweights": of(tokens, 4 * shape.k),
    }
    return ExchangedBytes(away, back)
