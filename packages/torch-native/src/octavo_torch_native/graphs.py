"""How torch.compile takes this package's functions: as one call whose inside is traced below dynamo."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from octavo import GroupedTensorSpec
from octavo_torch.arrays.grouped_tensor import PLANES, GroupedTensor
from octavo_torch_native.arrays.rows import RowPlan
from octavo_torch_native.quantizers.quantized import EXTRAS, Quantized

_is_compiling = torch.compiler.is_compiling

P = ParamSpec("P")
R = TypeVar("R")

# What stands around a result's tensors, in what dynamo takes for constants: the result's kind, which tensor is in each
# place (-1: none), a number: of the spec in _specs, or of a plan's rows. Specs it reads from a global alone.
Structure = tuple[str, tuple[int, ...], int]

_last = threading.local()
_specs = SimpleNamespace()
_numbers: dict[GroupedTensorSpec, int] = {}
_numbering = threading.Lock()


def _number_of(spec: GroupedTensorSpec) -> int:
    with _numbering:
        number = _numbers.setdefault(spec, len(_numbers))
        setattr(_specs, f"spec_{number}", spec)
    return number


def taken_apart(result: Any) -> tuple[list[Tensor], Structure]:
    """The tensors of what a function of this package returns, and the rest of it."""
    if isinstance(result, Tensor):
        return [result], ("tensor", (), 0)
    if isinstance(result, RowPlan):
        return [result.words, result.group_sizes], ("plan", (), result.rows)
    codes, extras = result, []
    if isinstance(result, Quantized):
        codes, extras = result.codes, [getattr(result, name) for name in EXTRAS]
    leaves: list[Tensor] = []
    places = []
    for value in (codes.group_sizes, *(getattr(codes, name) for name in PLANES), *extras):
        places.append(-1 if value is None else len(leaves))
        if value is not None:
            leaves.append(value)
    return leaves, ("quantized" if extras else "codes", tuple(places), _number_of(codes.spec))


def put_together(leaves: Sequence[Tensor], structure: Structure) -> Any:
    """What `taken_apart` was given."""
    kind, places, number = structure
    if kind == "tensor":
        return leaves[0]
    if kind == "plan":
        return RowPlan(leaves[0], leaves[1], number)
    values = [None if place < 0 else leaves[place] for place in places]
    # an attribute, because dynamo looks at a dictionary once and misses what a second call in the graph has added
    codes = GroupedTensor(getattr(_specs, f"spec_{number}"), *values[: 1 + len(PLANES)])
    return Quantized(codes, *values[1 + len(PLANES) :]) if kind == "quantized" else codes


def _of_last() -> Structure:
    """The structure of the call that was traced last, which is the one that asks."""
    structure: Structure = _last.structure
    return structure


_structure_of_last: Callable[[], Structure] = torch.compiler.assume_constant_result(_of_last)  # type: ignore[no-untyped-call]


def in_graph(function: Callable[P, R]) -> Callable[P, R]:
    """`function` without autograd, which under torch.compile becomes part of the one graph: its caches and checks are
    plain Python there. Positional parameters that have a default have the default None.
    """
    code = function.__code__
    names: tuple[str, ...] = code.co_varnames[: code.co_argcount]
    eager = torch.no_grad()(function)
    by_name: Callable[..., R] = eager

    def leaves_of(**given: Any) -> list[Tensor]:
        leaves, _last.structure = taken_apart(by_name(**dict.fromkeys(names) | given))
        return leaves

    traced: Any = torch._dynamo.nonstrict_trace(leaves_of)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _is_compiling():
            return eager(*args, **kwargs)
        # a call out of traced code takes no None
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        leaves = traced(**{name: value for name, value in given.items() if value is not None})
        result: R = put_together(leaves, _structure_of_last())
        return result

    return call
