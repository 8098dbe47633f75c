"""What ranks have to agree on, sent along with the sizes of every call in one message whose own size never changes.

So a rank that was called otherwise is found before a collective gets buffers that do not fit, which gloo answers by
ending the process and NCCL by waiting.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from octavo import Recipe
from octavo_torch.arrays.dtypes import DTYPE_NAMES
from octavo_torch.compiler.status import ExchangeError
from octavo_torch.memo import Bounded
from octavo_torch.moe.parallel.group import ExpertGroup
from octavo_torch.moe.parallel.options import ROUTES
from octavo_torch.moe.parallel.transports.transport import Transport

_DTYPES = tuple(DTYPE_NAMES)
_NONE = -1


class Signature(NamedTuple):
    """A call, as integers.

    experts      G, of each rank
    dtype        of the tokens
    recipe, payload   their fingerprints
    route        the one that is asked for; -1 where none is
    rows, pair_rows, tokens   of static buffers; -1 where sizes are read
    gradients    see gradient_bits
    """

    in_features: int
    hidden_features: int
    out_features: int
    experts: int
    choices: int
    dtype: int
    recipe: int
    payload: int
    returns: int
    route: int
    rows: int
    pair_rows: int
    tokens: int
    gradients: int

    def shown(self, field: str) -> str:
        """The value of a field as a reader knows it."""
        value = getattr(self, field)
        if field == "dtype":
            return DTYPE_NAMES[_DTYPES[value]]
        if field in ("recipe", "payload"):
            return "None" if value == _NONE else f"{value + (1 << 63):016x}"
        if field == "returns":
            return "'sums'" if value else "'rows'"
        if field == "route" and value != _NONE:
            return repr(ROUTES[value])
        if field == "gradients":
            names = [name for bit, name in enumerate(("x", "weights", "any")) if value >> bit & 1]
            return f"of {', '.join(names)}" if names else "of nothing"
        return "None" if value == _NONE else str(value)


HEADER = len(Signature._fields) + 2
"""int64 numbers of the message in which a rank tells another its signature, and how many tokens and rows it sends."""


class Agreed(NamedTuple):
    """What the ranks of a group have agreed on for a static exchange.

    header    int64 [N, HEADER], the signature as each rank is sent it: a captured graph copies nothing from the host
    transport   what carries its rows
    """

    header: Tensor
    transport: Transport


_agreed: WeakKeyDictionary[dist.ProcessGroup, dict[Signature, Agreed]] = WeakKeyDictionary()


def agreements(group: ExpertGroup) -> dict[Signature, Agreed]:
    """Of a group: each signature is read on the host once."""
    return _agreed.setdefault(group.group, Bounded())


def fingerprint(recipe: Recipe | None) -> int:
    """A recipe's fingerprint as an int64."""
    return _NONE if recipe is None else int(recipe.fingerprint, 16) - (1 << 63)


def dtype_number(dtype: torch.dtype) -> int:
    """Of the dtypes of tokens."""
    return _DTYPES.index(dtype)


def gradient_bits(*, x: bool, weights: bool, any_input: bool) -> int:
    """Which gradients a call takes: 1 for x's, 2 for those of the choices' weights, 4 for any at all."""
    return x + 2 * weights + 4 * any_input


def number_or_none(value: int | None) -> int:
    """-1 for None."""
    return _NONE if value is None else value


def check_agreement(group: ExpertGroup, own: Signature, received: list[list[int]]) -> None:
    """ExchangeError where a rank's signature differs from this rank's; every rank finds the same difference."""
    for rank, values in enumerate(received):
        other = Signature(*values)
        if other == own:
            continue
        fields = [name for name in Signature._fields if getattr(other, name) != getattr(own, name)]
        differences = "; ".join(f"{name} {other.shown(name)} there and {own.shown(name)} here" for name in fields)
        here, there = group.named(group.rank), group.named(rank)
        raise ExchangeError(
            f"{here} of {group.ranks}: {there} calls this layer otherwise: {differences}. "
            "Call it alike on every rank" + (", with as many tokens for Exchange(rows=)" if "tokens" in fields else "")
        )
