"""Planes that a quantizer writes as values (octavo_native.values), which GEMMs read in the place of codes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar, cast

from octavo.quantizer import Direction
from octavo_native.layouts import VALUES
from octavo_native.values import valued
from octavo_registry.contract import PlanesRequest

Layouts = tuple[str, str]
"""Of row data and of column data."""

Answer = TypeVar("Answer")


def valued_directions(request: PlanesRequest, *, of_array: bool) -> tuple[Direction, ...]:
    """The planes of the request that GEMMs can read as values; `of_array` as in `octavo_native.values`."""
    directions = valued(request.quantizer, request.layouts, request.in_dtype, request.device, of_array=of_array)
    return cast("tuple[Direction, ...]", directions)


def layouts_with_values(request: PlanesRequest, directions: Collection[Direction], *, of_array: bool) -> Layouts:
    """The request's layouts, but of planes of these directions that of values, where kernels write them so."""
    written = {direction for direction in valued_directions(request, of_array=of_array) if direction in directions}
    row, column = request.layouts
    return VALUES if "rowwise" in written else row, VALUES if "columnwise" in written else column


def if_valued(
    request: PlanesRequest, answer: Callable[[frozenset[Direction]], Answer], *, of_array: bool
) -> Callable[[frozenset[Direction]], Answer] | None:
    """`answer` where kernels write a plane of the request as values, else None: `multiplied` of a bound quantizer."""
    return answer if valued_directions(request, of_array=of_array) else None
