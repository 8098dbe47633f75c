"""Quantized operands in two forms: codes, and what the GEMMs of a backend multiply that emulates the recipe.

A GEMM of the pass that quantizes an operand reads the second form. Codes are what is kept for the backward pass, or
named for a policy of `jax.checkpoint`. Of each plane a compiled program computes the form that it reads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from octavo.quantizer import Direction, Operand
from octavo_jax.arrays.grouped_tensor import GroupedTensor
from octavo_jax.dispatch.layer import Layer
from octavo_jax.remat.checkpoint_names import DIRECTIONS, FIELDS, name_planes, names_of_plane
from octavo_jax.remat.read_at_once import read_at_once
from octavo_registry.contract.quantize import TwoForms

Quantized = GroupedTensor | TwoForms[GroupedTensor]

Other = TypeVar("Other")


def kept_form(q: Quantized | Other) -> GroupedTensor | Other:
    """The codes of a quantized operand: what may be kept; anything else as it is."""
    return q.codes if isinstance(q, TwoForms) else q


def read_form(q: Quantized | Other) -> GroupedTensor | Other:
    """What the GEMMs of this pass read of a quantized operand; anything else as it is."""
    return q.multiplied if isinstance(q, TwoForms) else q


def name_operand(layer: Layer, q: Any, operand: Operand) -> Any:
    """q with its planes named; call this before they are used. dy gets no name, because nothing recomputes it."""
    if operand == "dy":
        return q
    name = layer.options.checkpoint_name
    if not isinstance(q, TwoForms):
        return name_planes(q, name)
    codes = name_planes(q.codes, name)
    # an array that both forms have is read by its name, too
    planes: dict[str, Any] = {field: getattr(codes, field) for fields in FIELDS.values() for field in fields}
    multiplied, spec = q.multiplied, q.codes.spec
    layouts = zip(
        DIRECTIONS,
        (spec.rowwise_layout, spec.columnwise_layout),
        (multiplied.spec.rowwise_layout, multiplied.spec.columnwise_layout),
        strict=True,
    )
    for direction, layout, multiplied_layout in layouts:
        if layout != multiplied_layout:
            names = names_of_plane(codes, direction, name)
            plane, payload = one_plane(codes, direction), getattr(multiplied, direction)
            planes[direction] = read_at_once(payload, plane, q.multiply, direction, names)
            planes[f"{direction}_scale"] = None
    return q._replace(codes=codes, multiplied=replace(multiplied, **planes))


def one_plane(q: GroupedTensor, direction: Direction) -> GroupedTensor:
    """The tensor with only the plane of this direction; ValueError unless it has been computed."""
    if getattr(q, direction) is None:
        q.plane(direction)
    others: dict[str, Any] = {field: None for other in DIRECTIONS if other != direction for field in FIELDS[other]}
    return replace(q, **others)
