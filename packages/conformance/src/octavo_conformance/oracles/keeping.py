"""What a call is given belongs to the caller: copies before a call, and the comparison after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from octavo_conformance.oracles.checks import assert_same_bits
from octavo_conformance.problems.case import Case
from octavo_conformance.problems.inputs import Array
from octavo_registry.contract.frameworks import PLANES


def copies(case: Case, given: Mapping[str, Any]) -> dict[str, Array]:
    """Copies of the framework's arrays, those of a GroupedTensor by plane; nothing of what is no array."""
    found = {}
    for name, value in given.items():
        planes = {f"{name}.{plane}": getattr(value, plane) for plane in PLANES} if hasattr(value, PLANES[0]) else {}
        for label, array in (planes or {name: value}).items():
            if hasattr(array, "dtype"):
                found[label] = np.array(case.numpy(array))
    return found


def assert_kept(case: Case, given: Mapping[str, Any], before: Mapping[str, Array], op: str) -> None:
    """Every array has the bits of its copy."""
    for name, array in copies(case, given).items():
        assert_same_bits(array, before[name], f"{name}, which {op} was given and may not write,")


def keeping(case: Case, op: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, after which every array that it was given has to have the bits that it had."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        given = {f"argument {number}": value for number, value in enumerate(arguments, 1)} | keywords
        before = copies(case, given)
        result = run(*arguments, **keywords)
        assert_kept(case, given, before, op)
        return result

    return call
