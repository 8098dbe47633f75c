"""The operations, their functions, requests and optional parts as tables, from `octavo_registry.contract` itself."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator

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


TABLES = {table.__name__: table for table in (operations, arguments, optional, requests, extras, conditions)}


def markdown(name: str) -> str:
    """One table by the name of its function; KeyError where there is none."""
    return "\n".join(TABLES[name]()) + "\n"
