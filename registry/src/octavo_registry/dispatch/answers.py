"""What a backend answers, checked before anybody relies on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any, cast

from octavo import OctavoError
from octavo.quantizer import Operand
from octavo.recipe_base import READERS
from octavo_registry.contract.backend import Backend, KernelChoice, Refused
from octavo_registry.contract.bound import Bound
from octavo_registry.contract.operations import OPERATIONS
from octavo_registry.contract.quantize import AnyBoundQuantize
from octavo_registry.contract.request import AnyRequest, GemmRequest, QuantizeRequest, Request
from octavo_registry.discovery.guard import Fault, guard
from octavo_registry.level4 import adapter
from octavo_registry.level4 import bound as level4

_NOT_LOOKED_AT = ("workspace_bytes",)
_OPERANDS = tuple(READERS)
_RAGGED: tuple[Operand, ...] = ("x", "dy")
_FINDS_PROGRAMS = frozenset({"jax"})
"""Frameworks that keep a compiled program by the functions in it."""

_HASHED = (
    "a function with a hash, by which JAX finds its programs: a class that defines __eq__ needs __hash__, too, and a "
    "dataclass eq=False or frozen=True"
)


def ask_bound(backend: Backend, request: Request) -> Bound[Any]:
    """The backend's answer to `request`, in the class of its operation.

    Raises `Fault`. It is caused by `Refused` if the backend refuses, in `refuses` or in `bind`; otherwise it says what
    is wrong with the answer.
    """
    return _checked(guard(_bind, backend, request), request, "bind")


def ask_round_first(bound: AnyBoundQuantize, request: QuantizeRequest) -> Bound[Any] | None:
    """The answer to a request that rounds to MXFP4 first, checked as `ask_bound` does; None if the backend has none."""
    answer = None if bound.round_first is None else guard(bound.round_first, request)
    return None if answer is None else _checked(answer, request, "round_first")


def _checked(answer: Any, request: Request, function: str) -> Bound[Any]:
    """`answer` in the class of the operation; `Fault` says what is wrong with what `function` returned."""
    wanted = OPERATIONS[request.op].bound
    if not isinstance(answer, (wanted, level4.Bound)):
        raise Fault(
            f"{function} returned a {type(answer).__name__}; it returns a {wanted.__name__} with `run` and `layouts`"
        )
    for part in fields(answer):
        value = getattr(answer, part.name)
        needed = _needed(part.name, value, request.op)
        if not needed and callable(value) and request.framework in _FINDS_PROGRAMS and not _has_hash(value):
            needed = _HASHED
        if needed:
            is_what = f"is {value!r}" if isinstance(value, tuple | Mapping) else f"is of type {type(value).__name__}"
            raise Fault(f"{function} returned a {type(answer).__name__} whose `{part.name}` {is_what}; give {needed}")
    answer = adapter.adapted(answer, request.op) if isinstance(answer, level4.Bound) else answer
    return replace(answer, layouts=MappingProxyType(dict(answer.layouts)))


def _needed(part: str, value: object, op: str) -> str:
    """What this part of an answer has to be; "" if it is right."""
    if part == "layouts":
        known = isinstance(value, Mapping) and all(
            operand in _OPERANDS and isinstance(layout, str) for operand, layout in value.items()
        )
        return "" if known else f"a mapping of operands in {_OPERANDS} to names of layouts"
    if part == "note":
        return "" if value is None or isinstance(value, str) else 'a text, or ""'
    if part == "run":
        return "" if callable(value) else "a function"
    if part == "takes_tokens":
        rows = tuple(operand for operand in _RAGGED if op in READERS[operand])
        known = isinstance(value, tuple) and all(operand in rows for operand in value)
        return "" if known else f"a tuple of operands in {rows}, or ()"
    return "" if part in _NOT_LOOKED_AT or value is None or callable(value) else "a function or None"


def _has_hash(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _bind(backend: Backend, request: Request) -> object:
    concrete = cast("AnyRequest", request)  # the base has no instances
    reason = _sentence(backend.refuses(concrete), "refuses")
    if reason is not None:
        raise Refused(reason)
    return backend.bind(concrete)


def _sentence(reason: object, function: str) -> str | None:
    """A backend's reason to refuse, or None; `Fault` for what tells nobody why, such as False for "does not"."""
    if reason is None or (isinstance(reason, str) and reason.strip()):
        return reason
    what = "an empty text" if isinstance(reason, str) else f"a {type(reason).__name__}"
    raise Fault(
        f"{function} returned {what}; it returns None where it serves the request, or else says why it does not"
    )


def ask_everywhere(backend: Backend, request: Request) -> str | None:
    """Why the backend serves `request` on no machine, or None; `Fault` if it cannot say, as a backend that raises."""
    return _sentence(guard(backend.refuses_everywhere, cast("AnyRequest", request)), "refuses_everywhere")


def ask_kernels(backend: Backend, name: str, request: GemmRequest, rows: int) -> tuple[KernelChoice, ...] | None:
    """What `backend` answers; None where it has no model. OctavoError where it breaks or answers in another type."""
    try:
        answer = guard(backend.kernels, request, rows)
        choices = None if answer is None else guard(tuple, answer)
    except Fault as fault:
        raise OctavoError(f"{name} cannot say which kernels it has: {fault}") from fault
    strange = next((choice for choice in choices or () if not isinstance(choice, KernelChoice)), None)
    if strange is not None:
        raise OctavoError(
            f"{name} lists a {type(strange).__name__} among its kernels; it lists octavo_registry.KernelChoice"
        )
    return choices
