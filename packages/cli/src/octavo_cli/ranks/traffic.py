"""How many bytes a MoE layer sends over ranks, on average of a routing that is even."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Returns = Literal["rows", "sums"]
Bytes = Mapping[str, float]

SIGNATURE_BYTES = 128
"""Of the message of fixed size from one rank to another that goes ahead of a forward."""

CODE_BYTES: Mapping[str, tuple[int, int, int]] = {
    "bf16": (2, 0, 1),
    "fp8-row": (1, 4, 0),
    "fp8-block": (1, 4, 128),
    "mxfp8": (1, 1, 32),
}
"""Bytes of a value and of a scale, and values that share one: 0 for a whole row. "bf16": tokens as they are."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A MoE layer, and one rank's tokens.

    experts    E, of all ranks
    features   K, of tokens and results
    hidden     F, between fc1 and fc2
    tokens     T, of each rank
    choices    k, of each token, all different
    """

    experts: int
    features: int
    hidden: int
    tokens: int
    choices: int


@dataclass(frozen=True, slots=True)
class Wire:
    """What travels: tokens and dy as a `payload` of CODE_BYTES, results as octavo_torch.Exchange(returns=) has them."""

    payload: str = "bf16"
    returns: Returns = "rows"

    @property
    def keeps_bits(self) -> bool:
        """Whether results are those of one process for certain, whatever the recipe."""
        return self.payload == "bf16" and self.returns == "rows"


@dataclass(frozen=True, slots=True)
class Spread:
    """Experts over `ranks`, of which `per_host` share a host and its links."""

    ranks: int
    per_host: int

    @property
    def within(self) -> int:
        """Ranks of one host."""
        return min(self.ranks, self.per_host)

    @property
    def hosts(self) -> int:
        """Hosts, of which the last may have fewer ranks."""
        return math.ceil(self.ranks / self.per_host)


def reached(layer: Layer, places: int) -> float:
    """Of `places` that share the experts evenly, how many a token's choices reach: p (1 - C(E - E/p, k) / C(E, k))."""
    elsewhere = layer.experts - layer.experts / places
    missed = math.prod(max(0.0, elsewhere - i) / (layer.experts - i) for i in range(layer.choices))
    return places * (1 - missed)


def row_bytes(columns: int, payload: str) -> int:
    """Bytes of one token's codes and scales."""
    value, scale, block = CODE_BYTES[payload]
    return columns * value + scale * (math.ceil(columns / block) if block else 1)


def bytes_by_phase(layer: Layer, wire: Wire, tokens: float, rows: float) -> Bytes:
    """What `tokens` copies of tokens with `rows` choices among them cost, by the exchanges of forward and backward.

    The sum is `octavo_torch.bytes_exchanged` of as many tokens and rows, without its signatures.
    """
    coded, results = row_bytes(layer.features, wire.payload), 2 * layer.features
    returned = results * (rows if wire.returns == "rows" else tokens)
    return {
        "tokens": tokens * (coded + 8 * layer.choices),
        "results": returned,
        "dy": tokens * coded,
        "dx": returned + 4 * layer.choices * tokens,
    }


def collectives(wire: Wire) -> Mapping[str, int]:
    """How many collectives each exchange is: codes and scales travel apart, as do choices and gradients of weights."""
    planes = 1 if wire.payload == "bf16" else 2
    return {"tokens": planes + 2, "results": 1, "dy": planes, "dx": 2}
