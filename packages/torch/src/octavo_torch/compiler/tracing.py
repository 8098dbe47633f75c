"""How torch.compile treats Octavo's objects: recipes and specs are constants, and no tensor's values are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from hashlib import sha256
from types import SimpleNamespace
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from octavo import GroupedTensorSpec, QuantizerSpec, Recipe

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
C = TypeVar("C")

_is_compiling = torch.compiler.is_compiling
_registered: set[type] = set()
_named = SimpleNamespace()


def register_constants() -> None:
    """Make every recipe class that exists by now, and the specs, pytree constants.

    dynamo looks a class up when it first meets one of its objects, before any code of ours runs. So this runs at
    import, and again wherever a recipe is first used in a module or eagerly: a plugin may define its class later.
    """
    values: list[type] = [QuantizerSpec, GroupedTensorSpec, *Recipe._kinds.values()]
    for known in values:
        if known not in _registered:
            pytree.register_constant(known)
            _registered.add(known)


def is_plain(tensor: Tensor) -> bool:
    """False for a tensor that stands for another: a fake or functional one of a compiler, a wrapper subclass.

    Asked instead of torch.compiler.is_compiling(), which some stages of some torch versions answer with no.
    """
    kind = type(tensor)
    return kind is Tensor or kind is torch.nn.Parameter


def one_call(function: Callable[P, R]) -> Callable[P, R]:
    """`function` as one call in dynamo's graph. Its inside is traced below dynamo, where autograd is plain Python.

    Arguments are tensors and constants, results are tensors. An argument may be None if that is its default, and if it
    is given by keyword or no other value follows it.
    """
    traced = one_node(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _is_compiling():
            return function(*args, **kwargs)
        # such a call in a graph takes no None
        count = len(args)
        while count and args[count - 1] is None:
            count -= 1
        return traced(*args[:count], **in_graph(args[0], kwargs))  # type: ignore[arg-type]

    return call


def one_node(function: Callable[P, R]) -> Callable[P, R]:
    """`function` as one node of dynamo's graph, below which it is traced.

    A number that has changed since dynamo compiled is a symbol there. It is read, so that dynamo compiles again where
    it is another one; but operators take a symbol as group_offset.
    """

    @wraps(function)
    def with_numbers(*args: P.args, **kwargs: P.kwargs) -> R:
        numbers = {name: value if name == "group_offset" else _read(value) for name, value in kwargs.items()}
        return function(*map(_read, args), **numbers)  # type: ignore[arg-type]

    traced: Callable[P, R] = torch._dynamo.nonstrict_trace(with_numbers)
    return traced


def _read(value: object) -> object:
    """`value`, with numbers in place of symbols, also of those in a tuple."""
    if isinstance(value, torch.SymInt):
        return int(value)
    if isinstance(value, torch.SymFloat):
        return float(value)
    return tuple(map(_read, value)) if type(value) is tuple else value


def in_graph(x: object, options: Mapping[str, object]) -> dict[str, object]:
    """The options of a call on `x` in dynamo's graph: those that are not None, a seed as a tensor.

    So one graph serves all seeds, whereas a number that the call reads would be compiled in.
    """
    present = {name: value for name, value in options.items() if value is not None}
    seed = present.get("seed")
    if type(seed) is int:
        if not -(1 << 63) <= seed < 1 << 63:  # no symbol, which has 64 bits
            seed = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
        first = x[0] if isinstance(x, list | tuple) else getattr(x, "x", x)
        present["seed"] = torch.full((), seed, dtype=torch.int64, device=getattr(first, "device", None))
    return present


def register_tree(
    kind: type[T],
    flatten: Callable[[T], tuple[list[Tensor], C]],
    unflatten: Callable[[Iterable[Tensor], C], T],
    names: tuple[str, ...],
    written: tuple[Callable[[C], str], Callable[[str], C]] | None = None,
) -> None:
    """Make objects of `kind` pytrees, which torch.export takes as arguments, too: it wants the names of their leaves.

    flatten, unflatten   an object as leaves and context, and back
    written              a context as text, and back, for torch.export.save; None: it writes the context as it is
    """

    def with_keys(value: T) -> tuple[list[tuple[pytree.KeyEntry, Tensor]], C]:
        leaves, context = flatten(value)
        return [(pytree.GetAttrKey(name), leaf) for name, leaf in zip(names, leaves, strict=True)], context

    serialized = f"octavo_torch.{kind.__name__}"
    write, read = written or (None, None)
    pytree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=serialized,
        to_dumpable_context=write,
        from_dumpable_context=read,
        flatten_with_keys_fn=with_keys,
    )


def name_of(spec: GroupedTensorSpec) -> str:
    """A name that stands for `spec` in results that a compiler traces, which may be text but not a spec.

    `spec_of` finds the spec again. It is kept for good, because a compiled graph may be, too.
    """
    name = _name(spec)
    setattr(_named, name, spec)
    return name


def _name(spec: GroupedTensorSpec) -> str:
    return f"spec_{sha256(spec.model_dump_json().encode()).hexdigest()}"


def known_by(spec: GroupedTensorSpec) -> GroupedTensorSpec | str:
    """The name of `spec` if `name_of` has given it one, else `spec`: what eager calls give a program to compare with
    what it has kept."""
    if _is_compiling():
        return spec
    name = _name(spec)
    return name if hasattr(_named, name) else spec


def spec_of(name: str) -> GroupedTensorSpec:
    """The spec for which `name_of` returned this name."""
    spec: GroupedTensorSpec = getattr(_named, name)
    return spec


register_constants()
