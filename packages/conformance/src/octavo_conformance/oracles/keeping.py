"""What a call is given belongs to the caller: copies before a call, and the comparison after it.

So does what lies around an array that a call may write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

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


_MARGIN = 1 << 18
"""Bytes before and behind an array that may be written: a tile of 128 rows of fp32, as wide as any here."""

_UNWRITTEN = 0xA5
"""Each of these bytes. As a number they are tiny and finite, so that what is added to them shows, too."""


class Surrounded:
    """Makes arrays that a call may write, each as a part of a larger one of which the call may write nothing else.

    A framework whose arrays cannot be written gets arrays that stand alone.
    """

    def __init__(self, case: Case) -> None:
        self._case = case
        self._wholes: list[tuple[Any, int]] = []

    def array(self, values: Array) -> Any:
        """An array of the framework with these values, contiguous and aligned as one that stands alone."""
        if not self._case.writes_arrays:
            return self._case.array(values)
        margin = _MARGIN // values.dtype.itemsize
        around = np.full(_MARGIN, _UNWRITTEN, np.uint8).view(values.dtype)
        whole = self._case.array(np.concatenate([around, values.ravel(), around]))
        self._wholes.append((whole, margin))
        return whole[margin : margin + values.size].reshape(values.shape)

    def tensor(self, tensor: Any) -> Any:
        """A GroupedTensor with copies of the planes of `tensor`: one copy of two planes that are one array."""
        planes = {name: plane for name in PLANES if (plane := getattr(tensor, name)) is not None}
        copies = {id(plane): self.array(self._case.numpy(plane)) for plane in planes.values()}
        held = {name: copies[id(plane)] for name, plane in planes.items()}
        return self._case.bridge.grouped_tensor(tensor.spec, tensor.group_sizes, held)

    def assert_unwritten(self, op: str) -> None:
        """Everything around each of the arrays is as it was."""
        for whole, margin in self._wholes:
            values = self._case.numpy(whole)
            for where, part in ("before", values[:margin]), ("behind", values[-margin:]):
                wrong = np.flatnonzero(part.view(np.uint8) != _UNWRITTEN)
                if len(wrong):
                    nearest = _MARGIN - wrong[-1] if where == "before" else wrong[0] + 1
                    pytest.fail(
                        f"{op} wrote {len(wrong)} bytes {where} an array that it was given to write, the nearest "
                        f"{nearest} bytes from it; what is around it belongs to the caller"
                    )
