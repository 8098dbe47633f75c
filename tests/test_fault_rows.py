"""Faults that users of other grouped GEMMs met: native packages and front ends have tests of their own."""

from __future__ import annotations

import pytest
from workspace import tracked

from octavo_conformance.faults import named_by_tests

FOLDERS = (
    "native/tests", "packages/torch-native/tests", "packages/torch-cudagraph/tests", "packages/jax-native/tests",
)  # fmt: skip
FRONT_ENDS = {4, 8, 9, 10, 11, 12, 14, 36, 40, 41, 42, 43, 45, 47, 48, 50, 54, 55, 61}  # whichever the framework
EMPTY, TAILS, SHAPES = {1, 2, 3, 4, 5, 6, 7}, {8, 12}, {13, 15, 16, 17, 19, 20, 21, 24, 25}
REPEATS, OVERFLOW = {22, 30, 32, 33}, {26, 27, 28, 29}
STREAMS, GRAPHS, STRIDES, BOUNDS = {34}, {35, 36}, {58, 59}, {61}


def test_kernels_are_tested_for_every_fault_of_grouped_gemms() -> None:
    """On a device: empty groups, tails, small and odd sizes, equal bits, 2^31 elements, streams, replays, strides."""
    named = named_by_tests(tracked(*(f"{folder}/**/test_cuda*.py" for folder in FOLDERS)))
    wanted = EMPTY | TAILS | SHAPES | REPEATS | OVERFLOW | STREAMS | GRAPHS | STRIDES | BOUNDS
    assert wanted <= set(named), f"no test_cuda*.py of {', '.join(FOLDERS)} names rows {sorted(wanted - set(named))}"


@pytest.mark.parametrize(
    ("package", "more"),
    [
        # leaks, closed preferences, libraries around it, steps in a row
        ("jax", {52, 53, 57, 63, 65}),
        # weights of a graph, absent gradients, strides, fake kernels, sharded and loaded weights, results in place
        ("torch", {37, 38, 44, 46, 49, 51, 58}),
    ],
)
def test_front_ends_are_tested_for_every_fault_of_training(package: str, more: set[int]) -> None:
    """Empty groups, tails, changed sizes, seeds, recomputation, gradients of one value, state, codes that are saved,
    ranks without tokens, bad indices, and what its framework adds: each row has a test of the front end's own."""
    named = named_by_tests(tracked(f"packages/{package}/tests/**/test_*.py"))
    wanted = FRONT_ENDS | more
    assert wanted <= set(named), f"no test of packages/{package}/tests names rows {sorted(wanted - set(named))}"
