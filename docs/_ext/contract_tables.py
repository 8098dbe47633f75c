"""The operations, their functions, requests and optional parts as tables, from `octavo_registry.contract` itself."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator

from octavo import MXFP8, NVFP4, BlockScaling, CurrentScaling, GroupedTensorSpec, Recipe, RowScaling, block_bound
from octavo_registry.contract import OPERATIONS, REQUESTS, Bound, Capability, Extras, Request

_ENTRY = re.compile(r"^(\w+(?:, \w+)*) {2,}(\S.*)$")


def entries(owner: object) -> dict[str, str]:
    """What the columns of a docstring say, by name; names that share a line share the text."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in (inspect.getdoc(owner) or "").splitlines():
        entry = _ENTRY.match(line)
        if entry:
            names = entry[1].split(", ")
            found.update(dict.fromkeys(names, entry[2]))
        elif names and line.startswith("  "):
            found.update({name: f"{found[name]} {line.strip()}" for name in names})
        else:
            names = []
    return found


def summary(owner: object) -> str:
    """The first paragraph of a docstring, in one line."""
    return " ".join((inspect.getdoc(owner) or "").split("\n\n")[0].split())


def call(protocol: type) -> str:
    """The arguments of a protocol's function, as somebody would write the call."""
    parameters = list(inspect.signature(protocol.__call__).parameters.values())[1:]
    positional = [part.name for part in parameters if part.kind is part.POSITIONAL_ONLY]
    keywords = [f"{part.name}=" for part in parameters if part.kind is part.KEYWORD_ONLY]
    return ", ".join([*positional, *(["*"] if keywords else []), *keywords])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _table(header: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield "|---" * len(header) + "|"
    for row in rows:
        yield f"| {' | '.join(map(_cell, row))} |"
    yield ""


def operations() -> Iterator[str]:
    """Each operation: the function, what it computes and returns, the classes of its request and its answer."""

    def rows() -> Iterator[tuple[str, ...]]:
        for op, part in OPERATIONS.items():
            yield (
                f"`{op}({call(part.run)})`",
                f"{summary(part.run)} {summary(part.run.__call__)}",
                f"`{part.request.__name__}`",
                f"`{part.bound.__name__}`",
            )

    yield from _table(("function", "computes and returns", "request", "answer"), rows())


def arguments() -> Iterator[str]:
    """The arguments of each function, where the contract says more than their names do."""

    def rows() -> Iterator[tuple[str, ...]]:
        for op, part in OPERATIONS.items():
            for name, text in entries(part.run.__call__).items():
                yield f"`{op}`", f"`{name}`", text

    yield from _table(("operation", "argument or result", "what it is"), rows())


def optional() -> Iterator[str]:
    """What every answer has, and what one may have beside its function."""

    def rows() -> Iterator[tuple[str, ...]]:
        common = {field.name for field in dataclasses.fields(Bound)}
        for name, text in entries(Bound).items():
            yield "every answer", f"`{name}`", text
        for part in OPERATIONS.values():
            said = entries(part.bound)
            for field in dataclasses.fields(part.bound):
                if field.name not in common:
                    yield f"`{part.bound.__name__}`", f"`{field.name}`", said[field.name]

    yield from _table(("answer", "part", "what it is, and what happens without it"), rows())


def requests() -> Iterator[str]:
    """What every request says, and what those of an operation add."""

    def rows() -> Iterator[tuple[str, ...]]:
        for name, text in entries(Request).items():
            yield "every request", f"`{name}`", text
        for kind in dict.fromkeys(REQUESTS.values()):
            added = {name: text for base in reversed(kind.__mro__[:-2]) for name, text in entries(base).items()}
            for field in dataclasses.fields(kind):
                if field.name in added:
                    yield f"`{kind.__name__}`", f"`{field.name}`", added[field.name]

    yield from _table(("request", "field", "what it says"), rows())


def extras() -> Iterator[str]:
    """The fields of what a fused quantizer returns beside codes and scales."""

    def rows() -> Iterator[tuple[str, ...]]:
        for name, field in vars(Extras).items():
            if isinstance(field, property):
                yield f"`{name}`", " ".join((inspect.getdoc(field) or "").split())

    yield from _table(("field", "what it is"), rows())


def conditions() -> Iterator[str]:
    """The conditions of a capability row."""
    yield from _table(("field", "condition"), ((f"`{name}`", text) for name, text in entries(Capability).items()))


_SIDES = {"G": 7, "M": 2560, "K": 1280, "N": 1792}
_PLANES = {
    "fprop": (("x", "rowwise"), ("w", "rowwise")),
    "dgrad": (("dy", "rowwise"), ("w", "columnwise")),
    "wgrad": (("dy", "columnwise"), ("x", "columnwise")),
}


def _symbols(block: int | None) -> dict[int, str]:
    """What a side of these sizes is called; P is the number of blocks along ragged rows."""
    named = {value: name for name, value in _SIDES.items()}
    if block is not None:
        named |= {-(-_SIDES[name] // block): f"{name}/{block}" for name in ("K", "N")}
        named[block_bound(_SIDES["M"], _SIDES["G"], block)] = "P"
    return named


def _plane(recipe: Recipe, operand: str, direction: str) -> str:
    """Payload and scales of one plane, by `GroupedTensorSpec`."""
    quantizer = recipe.quantizer(operand)  # type: ignore[arg-type]
    assert quantizer is not None
    groups, rows, k, n = _SIDES.values()
    ragged = operand != "w"
    shape = {"x": (rows, k), "dy": (rows, n), "w": (groups, n, k)}[operand]
    spec = GroupedTensorSpec(shape=shape, groups=groups, quantizer=quantizer, ragged_axis=0 if ragged else None)
    symbols = _symbols(quantizer.block_size)
    sides = ", ".join(symbols[side] for side in shape)
    scales = ", ".join(symbols[side] for side in spec.scale_shape(direction))  # type: ignore[arg-type]
    return f"`{operand}.{direction}` {quantizer.format} [{sides}], scales {quantizer.scale_format} [{scales}]"


def planes() -> Iterator[str]:
    """The arrays that each GEMM reads, recipe by recipe."""

    def rows() -> Iterator[tuple[str, ...]]:
        for recipe in (CurrentScaling(), RowScaling(), BlockScaling(), MXFP8(), NVFP4(hadamard=False)):
            for gemm, read in _PLANES.items():
                yield recipe.kind, gemm, *(_plane(recipe, operand, direction) for operand, direction in read)

    yield from _table(("recipe", "GEMM", "first operand", "second operand"), rows())
    yield "K/128 is rounded up. P is `octavo.block_bound(M, G, B)`: blocks of B rows, which restart at each group."
    yield "NVFP4 has a second factor per group beside each plane, `rowwise_global` and `columnwise_global` [G]."
    yield ""


TABLES = {table.__name__: table for table in (planes, operations, arguments, optional, requests, extras, conditions)}


def markdown(name: str) -> str:
    """One table by the name of its function; KeyError where there is none."""
    return "\n".join(TABLES[name]()) + "\n"
