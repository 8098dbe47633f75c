"""What ranks have to agree on, sent along with the sizes of every call in one message whose own size never changes.

So a rank that was called otherwise is found before a collective gets buffers that do not fit, which gloo answers by
ending the process and NCCL by waiting.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from octavo import Recipe
from octavo_torch.arrays.dtypes import DTYPE_NAMES
from octavo_torch.moe.parallel.group import ExchangeError, ExpertGroup

_DTYPES = tuple(DTYPE_NAMES)
_NONE = -1


class Signature(NamedTuple):
    """A call, as integers.

    experts      G, of each rank
    dtype        of the tokens
    recipe, payload   their fingerprints
    rows, pair_rows, tokens   of static buffers; -1 where sizes are read
    gradients    1 where x takes one, 2 where the choices' weights do, 4 where anything does
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
        if field == "gradients":
            names = [name for bit, name in enumerate(("x", "weights", "any")) if value >> bit & 1]
            return f"of {', '.join(names)}" if names else "of nothing"
        return "None" if value == _NONE else str(value)


def fingerprint(recipe: Recipe | None) -> int:
    """A recipe's fingerprint as an int64."""
    return _NONE if recipe is None else int(recipe.fingerprint, 16) - (1 << 63)


def dtype_number(dtype: torch.dtype) -> int:
    """Of the dtypes of tokens."""
    return _DTYPES.index(dtype)


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
        raise ExchangeError(
            f"rank {group.rank} of {group.ranks}: rank {rank} calls this layer otherwise: {differences}. Call it alike "
            "on every rank" + (", with as many tokens for Exchange(rows=)" if "tokens" in fields else "")
        )
