"""`interleaved` of a quantizer's answer: interleaved gate and up rows have the bits of the two halves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from octavo_conformance.cards import selections
from octavo_conformance.cards.needs import needs
from octavo_conformance.oracles.checks import assert_same_tensor
from octavo_conformance.oracles.keeping import Surrounded
from octavo_conformance.oracles.quantizing import arguments_for, as_given
from octavo_conformance.problems.case import Case
from octavo_conformance.problems.inputs import NORMAL_CLASSES, Array, Rng, draw
from octavo_conformance.problems.interleaving import blocks_and_rows, check_none, interleaved
from octavo_numerics import QuantizedArray, quantize
from octavo_registry.contract.cards import Weight
from octavo_registry.contract.quantize import AnyBoundQuantize

GROUPS, COLUMNS = 3, 272
ORDERS: tuple[Weight, ...] = ("nk", "kn")


@dataclass(frozen=True)
class Served:
    """A block that is served in one order: the answer, a call's arguments, and where the 2 F rows are."""

    case: Case
    answer: AnyBoundQuantize
    block: int
    weight: Weight
    shape: tuple[int, int, int]
    arguments: dict[str, Any]

    @property
    def what(self) -> str:
        """What a failure says first."""
        return f"interleaved in blocks of {self.block} in {self.weight}: "

    def draw(self, rng: Rng, classes: tuple[str, ...] = NORMAL_CLASSES) -> tuple[Any, QuantizedArray, Array]:
        """Interleaved matrices as the framework's, the definition's codes of their halves, and their amax."""
        case, spec = self.case, self.case.spec
        names = rng.choice(classes, GROUPS)
        halves = np.stack([draw(rng, self.shape[1:], case.dtype, str(name), spec.format) for name in names])
        rows = interleaved(halves, self.block, 1 if self.weight == "nk" else 2)
        amax = np.abs(halves.astype(np.float32)).max((1, 2))
        return case.array(rows), quantize(halves, spec, None, **self.arguments), amax

    @property
    def given(self) -> dict[str, Any]:
        """The arguments as the framework's."""
        return as_given(self.case, self.arguments)

    def assert_codes(self, codes: Any, expected: QuantizedArray, how: str) -> None:
        """Every plane has the definition's bits."""
        assert_same_tensor(self.case, codes, expected, f"{self.what}{how}: ")

    def assert_amax(self, amax: Any, expected: Array) -> None:
        """fp32 [G]; NaN is NaN, whatever its bits."""
        measured = self.case.numpy(amax)
        assert measured.dtype == np.float32, f"{self.what}amax is {measured.dtype}; it is float32"
        np.testing.assert_array_equal(measured, expected, f"{self.what}amax")


def _served(case: Case, rng: Rng) -> Iterator[Served]:
    for block, rows in blocks_and_rows(rng):
        for weight in ORDERS:
            shape = (GROUPS, rows, COLUMNS) if weight == "nk" else (GROUPS, COLUMNS, rows)
            bound: Any = case.plan("quantize", quantizer=case.spec, k=shape[2], n=shape[1], groups=GROUPS).bound
            if bound.interleaved is None:
                pytest.skip("the answer has no interleaved: front ends take weights apart first")
            answer = bound.interleaved(block, weight)
            if not check_none(answer, block):
                yield Served(case, answer, block, weight, shape, arguments_for(case.spec, rng, GROUPS))


@needs("quantize", selections.stacked)
def test_codes_of_interleaved_rows(case: Case, rng: Rng) -> None:
    """Blocks of one row, of a few, of many, and of a number that divides no tile, along either axis of a matrix:
    scales of blocks, too, are those of the halves. NaN and Inf poison the units that they are in there."""
    for served in _served(case, rng):
        for classes in (NORMAL_CLASSES, ("gauss", "nonfinite")):
            rows, expected, _ = served.draw(rng, classes)
            served.assert_codes(served.answer.run(rows, None, **served.given), expected, "run")


@needs("quantize", selections.stacked)
def test_amax_of_interleaved_rows(case: Case, rng: Rng) -> None:
    """`with_amax`, where the answer for a block has it: the same codes, and the largest magnitude of each group."""
    tried = 0
    for served in _served(case, rng):
        if served.answer.with_amax is not None:
            rows, expected, amax = served.draw(rng, ("gauss", "wide", "nonfinite"))
            codes, measured = served.answer.with_amax(rows, None, **served.given)
            served.assert_codes(codes, expected, "with_amax")
            served.assert_amax(measured, amax)
            tried += 1
    if not tried:
        pytest.skip("no answer for interleaved rows has with_amax: front ends take weights apart first")


@needs("quantize", selections.stacked)
def test_codes_of_interleaved_rows_are_written_again(case: Case, rng: Rng) -> None:
    """`into`, where the answer for a block has it, over another weight's codes and an amax of NaN: nothing is left of
    these, everything around them, and all where `unchanged` is not 0."""
    tried = 0
    for served in _served(case, rng):
        if served.answer.into is None:
            continue
        (others, before, _), (rows, expected, amax) = served.draw(rng), served.draw(rng)
        memory = Surrounded(case)
        out = memory.tensor(served.answer.run(others, None, **served.given))
        poison = np.full(GROUPS, np.nan, np.float32)
        measured = None if served.answer.with_amax is None else memory.array(poison)
        for unchanged in (1, 0):
            flag = case.array(np.full(1, unchanged, np.int32))
            served.answer.into(rows, None, out=out, amax=measured, unchanged=flag, **served.given)
            served.assert_codes(out, before if unchanged else expected, f"into with unchanged={unchanged}")
            if measured is not None:
                served.assert_amax(measured, poison if unchanged else amax)
        served.answer.into(others, None, out=out, **served.given)
        served.assert_codes(out, before, "into")
        memory.assert_unwritten("into")
        tried += 1
    if not tried:
        pytest.skip(
            "no answer for interleaved rows has into: front ends quantize them anew, or take weights apart first"
        )
