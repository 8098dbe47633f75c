"""Quantizers whose two passes are one launch, in which tiles of codes wait for amaxes (docs/decisions/0064), against
the CPU's, which test_cpu_calls.py compares with the definition.

Only an x that the L2 cache does not hold takes these kernels, 32 MB and more; that is more tiles than a device holds at
once. Sizes differ so that the order of turns has gaps to close.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from devices import needs_device

torch = pytest.importorskip("torch", reason="torch holds the memory of the device")

from problems import CPU, CUDA, NATIVE_LAYOUT, SPECS, Extras, Shape, assert_same, quantize  # noqa: E402  it imports torch

pytestmark = needs_device

TWO_PASSES = [
    spec
    for spec in SPECS
    if spec["scaling"] in ("current", "row") or (spec.get("square") and spec["scaling"] == "nvfp4")
]
NAMES = ["-".join(str(value) for value in spec.values()) for spec in TWO_PASSES]
WAYS = (tuple(NATIVE_LAYOUT), ("rowwise",), ("columnwise",))


def skewed(rng: np.random.Generator, groups: int, rows: int) -> tuple[int, ...]:
    """Sizes that fall off like 1 / n, in random order, every fourth one 0."""
    shares = rng.permutation(1.0 / np.arange(1, groups + 1)) * (np.arange(groups) % 4 != 0)
    return tuple(int(size) for size in rows * shares / shares.sum())


def compare(rng: np.random.Generator, spec: dict[str, Any], shape: Shape, ways: tuple[str, ...]) -> None:
    """One call on the device beside one on the CPU; a NaN stands in one row, so that its group alone is poisoned."""
    x = torch.from_numpy(rng.standard_normal((shape.rows, shape.cols), dtype=np.float32)).bfloat16()
    x *= torch.exp2(torch.from_numpy(rng.integers(-20, 10, (shape.rows, 1))).bfloat16())
    x[int(rng.integers(shape.rows)), int(rng.integers(shape.cols))] = float("nan")
    planes = {way: NATIVE_LAYOUT[way] for way in ways}
    extras = Extras(wanted=("amax",) if spec["scaling"] == "current" else ())
    ours, extra = quantize(spec, shape, x.to("cuda"), "bfloat16", planes, CUDA, extras)
    theirs, other = quantize(spec, shape, x, "bfloat16", planes, CPU, extras)
    assert_same(spec, shape, ours, theirs, f"{shape.sizes} x {shape.cols}")
    for name, one in extra.items():
        assert (one.cpu().numpy() == other[name].numpy()).all(), name


@pytest.mark.parametrize("spec", TWO_PASSES, ids=NAMES)
def test_more_tiles_than_a_device_holds_have_the_bits_of_the_cpu(
    rng: np.random.Generator, spec: dict[str, Any]
) -> None:
    """A tile that waits does not keep those from running that it waits for (faults.md 16): 4 000 tiles and more."""
    for ways in WAYS:
        compare(rng, spec, Shape(skewed(rng, 200, 17_000), 1040), ways)


@pytest.mark.parametrize("spec", TWO_PASSES, ids=NAMES)
def test_matrices_have_the_bits_of_the_cpu(rng: np.random.Generator, spec: dict[str, Any]) -> None:
    """Groups that need no plan, with a panel that is not full in each of them."""
    compare(rng, spec, Shape((0,) * 80, 1040, matrix_rows=210 + int(rng.integers(100))), WAYS[0])


@pytest.mark.parametrize("spec", TWO_PASSES, ids=NAMES)
def test_one_large_group_among_small_ones_has_the_bits_of_the_cpu(
    rng: np.random.Generator, spec: dict[str, Any]
) -> None:
    """A group past what stays in the L2 cache, whose codes begin with its last panel, and those around it."""
    sizes = (300, 0, 16_000, 1, 129, 128, 77, 0, 500)
    compare(rng, spec, Shape(sizes, 1024), WAYS[0])
