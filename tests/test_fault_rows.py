"""Faults that users of other grouped GEMMs met: the native packages have a test of their own for each."""

from __future__ import annotations

from workspace import ROOT

from octavo_conformance.faults import named_by_tests

FOLDERS = (
    "native/tests", "packages/torch-native/tests", "packages/torch-cudagraph/tests", "packages/jax-native/tests",
)  # fmt: skip
EMPTY, TAILS, SHAPES = {1, 2, 3, 4, 5, 6, 7}, {8, 12}, {13, 15, 16, 17, 19, 20, 21, 24, 25}
REPEATS, OVERFLOW = {22, 30, 32, 33}, {26, 27, 28, 29}
STREAMS, GRAPHS, STRIDES, BOUNDS = {34}, {35, 36}, {58, 59}, {61}


def test_kernels_are_tested_for_every_fault_of_grouped_gemms() -> None:
    """On a device: empty groups, tails, small and odd sizes, equal bits, 2^31 elements, streams, replays, strides."""
    named = named_by_tests(file for folder in FOLDERS for file in sorted((ROOT / folder).glob("test_cuda*.py")))
    wanted = EMPTY | TAILS | SHAPES | REPEATS | OVERFLOW | STREAMS | GRAPHS | STRIDES | BOUNDS
    assert wanted <= set(named), f"no test_cuda*.py of {', '.join(FOLDERS)} names rows {sorted(wanted - set(named))}"


def test_the_jax_front_end_is_tested_for_every_fault_of_training() -> None:
    """ragged_dot's gradient, tails, changed sizes, seeds, recomputation, state, leaks, closed preferences, other
    libraries around it, steps in a row: each row has a test of octavo-jax's own."""
    tails, remat, delayed = set(range(8, 13)) | {14}, {42, 43}, {47, 48, 54, 55}
    wanted = {4, 36, 40, 41, 45, 50, 52, 53, 57, 61, 63, 65} | tails | remat | delayed
    named = named_by_tests(sorted((ROOT / "packages/jax/tests").glob("test_*.py")))
    assert wanted <= set(named), f"no test of packages/jax/tests names rows {sorted(wanted - set(named))}"
