"""Level 4's Request: one class for all operations."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, get_args

from octavo import QuantizerSpec, Recipe
from octavo.formats import DType
from octavo.grouped_tensor import PLAIN
from octavo_registry.contract.cards import Activation, Norm, Op, Weight
from octavo_registry.contract.request import GemmRequest, Layouts, Request


@dataclass(frozen=True, slots=True)
class FlatRequest(Request):
    """What a backend of API level 4 is asked: every field for every operation, None where it means nothing.

    sharding  empty: no front end ever set it
    """

    ops: ClassVar[frozenset[Op]] = frozenset(get_args(Op))

    recipe: Recipe | None = field(default=None, kw_only=True)
    quantizer: QuantizerSpec | None = field(default=None, kw_only=True)
    stacked: bool = field(default=False, kw_only=True)
    sharding: frozenset[str] = field(default=frozenset(), kw_only=True)
    layouts: Layouts = field(default=(PLAIN, PLAIN), kw_only=True)
    other_dtype: DType | None = field(default=None, kw_only=True)
    weight: Weight = field(default="nk", kw_only=True)
    activation: Activation | None = field(default=None, kw_only=True)
    norm: Norm | None = field(default=None, kw_only=True)

    @property
    def kind(self) -> str:
        """The recipe kind that a capability row is matched with."""
        if self.recipe is not None:
            return self.recipe.computed_as.kind
        return self.quantizer.scaling if self.quantizer is not None else "high_precision"


def flat(request: Request) -> FlatRequest:
    """The same request as level 4 has it."""
    of_all = [part.name for part in fields(FlatRequest) if part.name not in ("sharding", "other_dtype")]
    values: dict[str, Any] = {name: getattr(request, name) for name in of_all}
    return FlatRequest(**values, other_dtype=request.other_dtype if isinstance(request, GemmRequest) else None)
