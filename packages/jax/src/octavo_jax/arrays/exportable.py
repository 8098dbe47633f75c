"""Pytrees of arrays in programs that `jax.export` writes: it writes the types that were registered, no others."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from jax import export

from octavo.schema import Schema

T = TypeVar("T")
Fields = TypeVar("Fields", bound=tuple[Any, ...])
Static = tuple[Hashable, ...]
"""The static fields of a dataclass that is a pytree."""


def _nothing(_: Static) -> bytes:
    return b""


def _no_fields(_: bytes) -> Static:
    return ()


def exportable(
    kind: type[T], write: Callable[[Static], bytes] = _nothing, read: Callable[[bytes], Static] = _no_fields
) -> type[T]:
    """`kind`, a pytree, as one that `jax.export` writes and reads.

    write, read   its static fields as bytes, and back; without them it has none
    """
    name = f"octavo_jax.{kind.__name__}"
    registered: type[T] = export.register_pytree_node_serialization(
        kind, serialized_name=name, serialize_auxdata=write, deserialize_auxdata=read
    )
    return registered


def in_json(kind: type[Schema]) -> tuple[Callable[[Static], bytes], Callable[[bytes], Static]]:
    """`write` and `read` for `exportable`, of a dataclass whose one static field is a `kind`."""

    def write(static: Static) -> bytes:
        (one,) = static
        assert isinstance(one, Schema)
        return one.model_dump_json().encode()

    return write, lambda text: (kind.model_validate_json(text),)


def exportable_tuple(kind: type[Fields]) -> type[Fields]:
    """`kind`, a NamedTuple, as one that `jax.export` writes and reads."""
    registered: type[Fields] = export.register_namedtuple_serialization(
        kind, serialized_name=f"octavo_jax.{kind.__name__}"
    )
    return registered
