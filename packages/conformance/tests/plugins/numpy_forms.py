"""The numpy backend's planes as its GEMMs multiply them: fp32, beside the codes that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from typing import Any

import numpy as np

from octavo.quantizer import Direction
from octavo_numerics import QuantizedArray
from octavo_registry.contract import BoundNormQuantize, BoundQuantize, TwoForms

Values = Callable[[QuantizedArray, Direction], Any]


@dataclass(frozen=True, eq=False)
class Multiplied(QuantizedArray):
    """Codes, and the `values` of their planes."""

    values: Mapping[Direction, Any] = field(kw_only=True)


def with_two_forms(fault: str | None, values: Values, bound: Any) -> Any:
    """The answer to a quantizer, alone or fused, with `in_two_forms` and `multiplied`."""
    multiply = partial(_multiply, fault, values)

    def run(*operands: Any, **how: Any) -> Any:
        made = bound.run(*operands, **how)
        q, *extras = made if isinstance(made, tuple) else (made,)
        codes = replace(q, rowwise=q.rowwise[::-1]) if fault == "other-codes" and q.rowwise is not None else q
        forms = TwoForms(codes, multiply(q, of_fused=bool(extras)), multiply)
        return (forms, *extras) if extras else forms

    def of_tokens(x: Any, sizes: Any, order: Any, position: Any, routed: Any, /, **how: Any) -> Any:
        choices = 1 if fault == "tokens-for-choices" else position.shape[1]
        return run(x[order // choices % len(x)], sizes, **how), None

    parts = {"of_tokens": of_tokens} if isinstance(bound, BoundQuantize) else {}
    forms = replace(bound, in_two_forms=cache(lambda: type(bound)(run, **parts)))
    if isinstance(bound, BoundNormQuantize):
        return forms
    return replace(forms, multiplied=partial(_multiplied, fault, forms))


def _multiplied(fault: str | None, forms: Any, directions: frozenset[Direction]) -> Any:
    """The answer whose planes of these directions are values, without their codes; the fault loses the codes beside."""
    two = forms.in_two_forms()

    def alone(made: Any) -> Any:
        forms, *extras = (made,) if isinstance(made, TwoForms) else made
        q = forms.multiplied
        lost = [name for name in q.values if (name in directions) != (fault == "loses-codes-beside")]
        codes = {name: np.zeros_like(getattr(q, name)) for name in lost}
        q = replace(q, **codes, values={name: q.values[name] for name in directions})
        return (q, *extras) if extras else q

    parts = {}
    if isinstance(two, BoundQuantize):
        parts["of_tokens"] = lambda *operands, **how: alone(two.of_tokens(*operands, **how))
    return type(forms)(lambda *operands, **how: alone(two.run(*operands, **how)), **parts)


def _multiply(fault: str | None, values: Values, q: QuantizedArray, of_fused: bool = False) -> Multiplied:
    """The second form; a fault loses bits of the values, or a plane that is alone."""
    directions = q.spec.quantizer.directions
    planes = {direction: values(q, direction) for direction in directions if getattr(q, direction) is not None}
    if fault == "truncated-values" or (fault == "truncated-when-fused" and of_fused):
        planes = {name: _truncated(plane) for name, plane in planes.items()}
    if fault == "needs-both-planes" and len(planes) < len(directions):
        planes = {name: np.zeros_like(plane) for name, plane in planes.items()}
    return Multiplied(**{each.name: getattr(q, each.name) for each in fields(QuantizedArray)}, values=planes)


def _truncated(plane: Any) -> Any:
    """To one bit behind the first."""
    return (plane.view(np.uint32) & np.uint32(0xFFC00000)).view(np.float32)
